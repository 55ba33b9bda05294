"""What NVRTC makes of the sources for Hopper: spills, serialized products, types; needs no GPU."""

import re
from itertools import product

import pytest

from sagebwd.kernels.cuda.compile import compile_source, nvrtc_version
from sagebwd.kernels.hopper.attention import SOURCES
from sagebwd.kernels.hopper.shapes import CTA_SHAPES, tile_macros
from tests.sagebwd.kernels.machine_code import MachineCode

needs_nvrtc = pytest.mark.usefixtures("nvrtc")

#: Bytes that ptxas may spill, by source and head size. At 128 the consumers of backward.cu have 216 registers
#: and need 240, and those of dq_tile_scales.cu move 9 of their 240 out and in for each tile; the producers of
#: all have 24, in which the places of all that they copy do not fit, least of all with half blocks.
SPILLED_BYTES = {
    ("backward", 128): 200, ("dk_dv", 128): 188, ("dq_tile_scales", 128): 168,
    ("dk_dv", 256): 120, ("dq", 256): 168,
}  # fmt: skip
FEW_BYTES = 64
ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


def entries():
    """(source, entry) of all kernels."""
    for path in sorted(path for folder in SOURCES.folders for path in folder.glob("*.cu")):
        for name in ENTRY.findall(path.read_text(encoding="utf-8")):
            yield path.stem, name


#: Macros of the sources that know any; those together that can be.
MACROS = {
    "forward": (
        (), ("SMOOTH_V",), ("P_16BIT",), ("P_16BIT", "COMPENSATE_O"), ("TOKEN_SCALES",), ("IS_WINDOWED",),
        ("IS_WINDOWED", "TOKEN_SCALES"), ("UNSIGNED_P",), ("SCALES_OF_TILES",),
        ("IS_WINDOWED", "SCALES_OF_TILES", "UNSIGNED_P"),
    ),
    "dk_dv": (
        (), ("P_16BIT",), ("TOKEN_SCALES",), ("IS_WINDOWED",), ("IS_WINDOWED", "TOKEN_SCALES"),
        ("UNSIGNED_P",), ("SCALES_OF_TILES",), ("IS_WINDOWED", "SCALES_OF_TILES", "UNSIGNED_P"),
    ),
    "dq": ((), ("TOKEN_SCALES",), ("IS_WINDOWED",), ("IS_WINDOWED", "TOKEN_SCALES")),
    "dq_tile_scales": (("SCALES_OF_TILES",), ("IS_WINDOWED", "SCALES_OF_TILES")),
    "packing": ((), ("P_16BIT", "COMPENSATE_O"), ("TOKEN_SCALES",), ("SCALES_OF_TILES",)),
}  # fmt: skip


def with_values(macros, d):
    """Each macro defined, those with tiles of their own with the sizes of these, as 256 channels have."""
    of_tiles = [tile_macros(d, macro) for macro in ("", *macros)]
    return dict.fromkeys(macros, True) | {name: size for own in of_tiles for name, size in own.items()}


def exists(source, d, macros):
    """Whether there is such a kernel: with 256 channels not all settings have one."""
    return d < 256 or not (source in ("dq_tile_scales", "finish_dq") or "SCALES_OF_TILES" in macros)


#: Those of backward.cu, with the settings of the quick ones.
BACKWARD_MACROS = {
    (): (128, 1, True),
    ("P_16BIT",): None,
    ("P_16BIT", "DK_16BIT"): (64, 1, True),
    ("IS_WINDOWED",): None,
}
#: Kernels read 16 bits where they are, or, for documents, packed; the quick ones the former.
WHERE_16_BITS_ARE = (("UNPACKED_16BIT",), ())


def quick_shape(n, sizes, *, may_be_causal):
    """(channels, causal, bf16) at which set ``n`` of a source's macros is tried without a GPU, too."""
    return sizes[n % len(sizes)], int(may_be_causal and n % 2 == 0), n % 5 > 0


def variants():
    """Every source with every combination of its macros."""
    for source in sorted({source for source, _ in entries()} - {"backward"}):
        sets = [*enumerate(MACROS.get(source, ((),)))]
        settings = (64, 128, 256), (0, 1), (False, True), sets, WHERE_16_BITS_ARE
        for d, causal, bf16, (n, own_macros), where in product(*settings):
            if not exists(source, d, own_macros):
                continue
            macros = own_macros + where
            may_be_causal = source not in ("packing", "finish_dq") and "IS_WINDOWED" not in macros
            if causal and not may_be_causal:
                continue
            names = (source, str(d), "causal" if causal else "full", "bf16" if bf16 else "fp16", *macros)
            defines = {"HEAD_DIM": d, "IS_CAUSAL": causal, "IS_BF16": bf16} | with_values(macros, d)
            sizes = [size for size in (64, 128, 256) if exists(source, size, own_macros)]
            is_quick = where and n in (0, len(sets) - 1)  # the simplest and the most of them
            is_quick = is_quick and (d, causal, bf16) == quick_shape(n, sizes, may_be_causal=may_be_causal)
            marks = () if is_quick else pytest.mark.gpu
            yield pytest.param(source, defines, marks=marks, id="-".join(names))


@needs_nvrtc
@pytest.mark.parametrize(("source", "defines"), list(variants()))
def test_kernels_compile_without_spills(source, defines):
    """Also P, and nothing else, is unsigned in its products: in steps of 32 tokens for 64 channels each."""
    code = MachineCode(SOURCES, source, defines)
    for name in (name for file, name in entries() if file == source):
        assert f".text.{name}".encode() in code.cubin
        assert f"Compiling entry function '{name}'" in code.log
    d = defines["HEAD_DIM"]
    assert_runs_freely(code, source, d)
    tokens = 128 if source == "forward" and d < 256 and "SCALES_OF_TILES" not in defines else 64
    channels = min(d, 128) if source == "dk_dv" else d  # of a warpgroup
    assert code.int8_products()["U8", "S8"] == ("UNSIGNED_P" in defines) * channels // 64 * tokens // 32


SETS = [(source, macros) for source, sets in MACROS.items() for macros in sets]


@needs_nvrtc
@pytest.mark.parametrize(("source", "own_macros"), SETS, ids=str)
def test_every_set_of_macros_is_valid(source, own_macros):
    """Without code, which takes milliseconds: the quick tests above generate that of few."""
    for d in (size for size in (64, 128, 256) if exists(source, size, own_macros)):
        defines = {"HEAD_DIM": d, "IS_CAUSAL": 0, **with_values(own_macros, d), "UNPACKED_16BIT": True}
        compile_source(SOURCES, source, defines, ["--fdevice-syntax-only"])


def assert_runs_freely(code, source, d):
    """ptxas spilled hardly anything; it neither serialized wgmma nor ignored setmaxnreg, which it reports.

    With 256 channels and a scale per token NVRTC 13.0 spills 128 bytes of dk_dv.cu, 13.1 and 13.5 104.
    """
    is_worse = (source, d, nvrtc_version()) == ("dk_dv", 256, (13, 0))
    few_bytes = 128 if is_worse else SPILLED_BYTES.get((source, d), FEW_BYTES)
    assert code.spilled_bytes <= few_bytes, code.log
    assert "serialized" not in code.log, code.log
    assert "ignored" not in code.log, code.log


def backward_variants():
    """backward.cu with every combination of its macros."""
    settings = (64, 128), (0, 1), (False, True), BACKWARD_MACROS, WHERE_16_BITS_ARE
    for d, causal, bf16, macros, where in product(*settings):
        if causal and "IS_WINDOWED" in macros:
            continue
        is_quick = where and (d, causal, bf16) == BACKWARD_MACROS[macros]
        yield pytest.param(d, causal, bf16, macros + where, marks=() if is_quick else pytest.mark.gpu)


@needs_nvrtc
@pytest.mark.parametrize(("d", "causal", "bf16", "macros"), list(backward_variants()))
def test_one_backward_computes_s_and_dp_once(d, causal, bf16, macros):
    """Also registers, and shared memory with the barriers."""
    cta = CTA_SHAPES["backward", d, next((name for name in ("DK_16BIT", "P_16BIT") if name in macros), "")]
    defines = {"HEAD_DIM": d, "IS_CAUSAL": causal, "IS_BF16": bf16} | dict.fromkeys(macros, True)
    defines |= {"LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes}
    code = MachineCode(SOURCES, "backward", defines)
    assert_runs_freely(code, "backward", d)
    assert cta.shared_bytes + code.static_shared_bytes <= 232_448
    assert code.registers * cta.threads <= 65536

    of_s, of_dp, of_tokens = d // 32, d // 16, 64 // 32 * (d // 64)
    int8, in_16_bit = 2 * of_s, 2 * of_dp  # before the loop and in it
    of_dq, exponentials = 128 // 16, 2 * 64 * 64 // 128  # with a mask, and without
    if "DK_16BIT" in macros:  # at head size 128 by half blocks of queries
        parts = d // 64
        in_16_bit += 2 * 64 // 16 // parts  # dV and dK
        exponentials = 3 * 64 * 64 // 128 // parts  # before the loop, too, with a mask
    else:
        of_dv = (0, 64 // 16) if "P_16BIT" in macros else (of_tokens, 0)
        int8, in_16_bit = int8 + of_tokens + of_dv[0], in_16_bit + of_dv[1]
        of_dq *= d // 64  # at head size 128 by half blocks of queries
    in_16_bit += of_dq
    assert code.count(r"IGMMA\.") == int8
    assert code.count(r"HGMMA\.") == in_16_bit
    assert code.count(r"MUFU\.EX2") == exponentials
