"""What NVRTC makes of the sources for GPUs since Ampere: registers, spills, shared memory; needs no GPU."""

from itertools import product

import pytest

from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.ampere.shapes import SHARED_LIMIT, cta_shape
from sagebwd.kernels.cuda.compile import compile_source
from tests.sagebwd.kernels.machine_code import MachineCode

needs_nvrtc = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
OF_BACKWARD = (
    (), ("UNSIGNED_P",), ("P_16BIT",), ("TOKEN_SCALES",), ("IS_WINDOWED",), ("DP_FP16",),
    ("DP_FP16", "IS_WINDOWED"),
)  # fmt: skip
#: Macros of each source and tile; those together that can be.
MACROS = {
    ("forward", (64, 128)): (
        (), ("SMOOTH_V", "UNSIGNED_P"), ("P_16BIT",), ("P_16BIT", "COMPENSATE_O"), ("TOKEN_SCALES",),
        ("IS_WINDOWED",), ("IS_WINDOWED", "TOKEN_SCALES"),
    ),
    ("forward", (128, 64)): ((), ("IS_WINDOWED",)),
    ("backward", (64, 128)): OF_BACKWARD,
    ("backward_dq_warps", (64, 128)): OF_BACKWARD,
    ("backward_64_keys", (128, 64)): (
        ("SCALES_OF_TILES",), ("SCALES_OF_TILES", "IS_WINDOWED"), (), ("DP_FP16", "SCALES_OF_TILES"),
    ),
    ("backward_64_keys_dq_warps", (128, 64)): (
        ("SCALES_OF_TILES",), ("SCALES_OF_TILES", "IS_WINDOWED"), (), ("UNSIGNED_P",), ("TOKEN_SCALES",),
        ("DP_FP16", "SCALES_OF_TILES"),
    ),
    ("forward", (64, 64)): ((), ("TOKEN_SCALES",)),
    ("backward_64_keys", (64, 64)): ((), ("TOKEN_SCALES",), ("DP_FP16",)),
    ("backward_64_keys_dq_warps", (64, 64)): ((), ("TOKEN_SCALES",)),
}  # fmt: skip
#: Bytes that ptxas may spill, by source and padded head size.
SPILLED_BYTES = {
    ("forward", 64): 140, ("forward", 128): 96, ("forward", 256): 360,
    ("backward", 64): 32, ("backward", 128): 288, ("backward_dq_warps", 64): 56,
    ("backward_64_keys", 128): 60, ("backward_64_keys", 256): 256,
}  # fmt: skip
#: From tile to tile memory keeps up to 26 of O's 64 registers, on 8.6 and 8.9, or up to 28 of dK's and dV's.
SPILLED_WITH = {
    ("forward", 128, ("IS_WINDOWED", "TOKEN_SCALES")): 272,
    ("backward_dq_warps", 64, ("P_16BIT",)): 272,
    ("backward_dq_warps", 64, ("TOKEN_SCALES",)): 144,
    ("backward_dq_warps", 64, ("IS_WINDOWED",)): 60,
    ("backward_dq_warps", 64, ("DP_FP16", "IS_WINDOWED")): 208,
}
#: Every source, tile, head size and architecture occurs in the quick ones.
QUICK = {
    ("forward", (64, 128), 64, "sm_120", ()),
    ("forward", (128, 64), 128, "sm_89", ()),
    ("forward", (64, 64), 256, "sm_89", ("TOKEN_SCALES",)),
    ("backward", (64, 128), 128, "sm_90", ("DP_FP16",)),
    ("backward_dq_warps", (64, 128), 64, "sm_100", ("UNSIGNED_P",)),
    ("backward_64_keys", (128, 64), 128, "sm_89", ("SCALES_OF_TILES",)),
    ("backward_64_keys", (64, 64), 256, "sm_86", ("TOKEN_SCALES",)),
    ("backward_64_keys_dq_warps", (128, 64), 64, "sm_80", ("TOKEN_SCALES",)),
    ("backward_64_keys_dq_warps", (64, 64), 64, "sm_86", ("TOKEN_SCALES",)),
}


def variants():
    for (source, tile), sets_of_macros in MACROS.items():
        head_dims = (64, 128, 256) if tile == (64, 64) else (64, 128)
        head_dims = (64,) if source.endswith("dq_warps") else head_dims
        for variant in product(head_dims, ARCHITECTURES, sets_of_macros):
            marks = () if (source, tile, *variant) in QUICK else pytest.mark.gpu
            yield pytest.param(source, tile, *variant, marks=marks)


@needs_nvrtc
@pytest.mark.parametrize(("source", "tile", "head_dim", "architecture", "macros"), list(variants()))
def test_kernels_fit_every_gpu(source, tile, head_dim, architecture, macros):
    """Also what Python launches is what the source is written for, and P alone is unsigned."""
    cta = cta_shape(source, head_dim, tile, **shape_settings(macros))
    is_causal = int("IS_WINDOWED" not in macros)
    defines = defines_of(cta, head_dim, tile, macros) | {"IS_CAUSAL": is_causal, "IS_BF16": True}
    code = MachineCode(ampere.sources_for(architecture), source, defines)
    allowed = SPILLED_WITH.get((source, head_dim, macros), SPILLED_BYTES.get((source, head_dim), 0))
    assert code.spilled_bytes <= allowed, code.log
    assert cta.shared_bytes + code.static_shared_bytes <= SHARED_LIMIT
    assert code.registers * cta.threads <= 65536
    products, tokens = code.int8_products(), tile[1] if source == "forward" else 64
    assert products["U8", "S8"] == (("UNSIGNED_P" in macros) and head_dim // 8 * tokens // 32)
    assert products["S8", "S8"] > 0
    assert bool(code.count(r"HMMA\.16816\.F16\b")) == ("DP_FP16" in macros)


def shape_settings(macros):
    """Those of :func:`cta_shape`."""
    return {name: name.upper() in macros for name in ("p_16bit", "token_scales")}


def defines_of(cta, head_dim, tile, macros):
    shape = {"LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes}
    sizes = {"HEAD_DIM": head_dim, "TILE_Q": tile[0], "TILE_KV": tile[1]}
    return {**sizes, **shape, "UNPACKED_16BIT": True, **dict.fromkeys(macros, True)}


def shapes():
    """(source, head size, tile, macros): all that differ in what :func:`cta_shape` depends on."""
    for param in variants():
        source, tile, head_dim, architecture, macros = param.values
        of_shape = {"P_16BIT", "TOKEN_SCALES"}
        if architecture == ARCHITECTURES[0] and of_shape.issuperset(macros):
            yield source, head_dim, tile, macros


@needs_nvrtc
@pytest.mark.parametrize(("source", "head_dim", "tile", "macros"), list(shapes()), ids=str)
def test_cta_shapes_are_checked(source, head_dim, tile, macros):
    """A source refuses another number of threads or bytes, at a static_assert: no code is generated."""
    cta = cta_shape(source, head_dim, tile, **shape_settings(macros))
    wrongs = ((32, 0), (0, 16)) if head_dim == 64 and not macros else ()
    for threads, shared_bytes in ((0, 0), *wrongs):
        wrong = cta._replace(threads=cta.threads + threads, shared_bytes=cta.shared_bytes + shared_bytes)
        defines = {**defines_of(wrong, head_dim, tile, macros), "IS_CAUSAL": 1}
        arguments = (ampere.sources_for("sm_80"), source, defines, ["--fdevice-syntax-only"])
        if threads == shared_bytes == 0:
            compile_source(*arguments)
        else:
            with pytest.raises(RuntimeError, match="static assertion failed"):
                compile_source(*arguments)
