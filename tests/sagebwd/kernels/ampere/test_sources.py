"""What NVRTC makes of the sources for GPUs since Ampere: registers, spills, shared memory; needs no GPU."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import triton

from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.cuda.compile import compile_source
from sagebwd.kernels.cuda.forward import CForward
from sagebwd.kernels.cuda.packing import BLOCK_KV
from tests.sagebwd.kernels.hopper.test_launch import assert_same_fields

needs_nvrtc = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
#: Macros of each source; those together that can be.
MACROS = {
    "forward": (
        (),
        ("SMOOTH_V", "UNSIGNED_P"),
        ("P_16BIT",),
        ("P_16BIT", "COMPENSATE_O"),
        ("TOKEN_SCALES",),
        ("IS_WINDOWED",),
        ("IS_WINDOWED", "TOKEN_SCALES"),
    ),
    "backward": ((), ("UNSIGNED_P",), ("P_16BIT",), ("TOKEN_SCALES",), ("IS_WINDOWED",)),
}
#: Bytes that ptxas may spill, by source and padded head size.
SPILLED_BYTES = {("forward", 64): 112, ("forward", 128): 96, ("backward", 64): 16, ("backward", 128): 288}
#: Every source, head size and architecture occurs in the quick ones.
QUICK = {
    ("forward", 64, "sm_120", ()),
    ("forward", 128, "sm_80", ("P_16BIT", "COMPENSATE_O")),
    ("backward", 64, "sm_89", ("UNSIGNED_P",)),
    ("backward", 128, "sm_86", ()),
    ("backward", 64, "sm_100", ("P_16BIT",)),
    ("backward", 128, "sm_90", ("TOKEN_SCALES",)),
    ("backward", 64, "sm_86", ("IS_WINDOWED",)),
}


def variants():
    for source, sets_of_macros in MACROS.items():
        for variant in product((64, 128), ARCHITECTURES, sets_of_macros):
            marks = () if (source, *variant) in QUICK else pytest.mark.gpu
            yield pytest.param(source, *variant, marks=marks)


@needs_nvrtc
@pytest.mark.parametrize(("source", "head_dim", "architecture", "macros"), list(variants()))
def test_kernels_fit_every_gpu(source, head_dim, architecture, macros, tmp_path):
    """Also what Python launches is what the source is written for, and P alone is unsigned."""
    cta = ampere.CTA_SHAPES[source, head_dim, shape_macro(macros)]
    is_causal = int("IS_WINDOWED" not in macros)
    defines = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal, "IS_BF16": True, **dict.fromkeys(macros, True)}
    defines |= {"LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes}
    sources = ampere.sources_for(architecture)
    cubin, log = compile_source(sources, source, defines, ["--ptxas-options=-v"])
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    assert spilled, log
    assert max(spilled) <= SPILLED_BYTES[source, head_dim], log
    static = sum(int(count) for count in re.findall(r"(\d+) bytes smem", log))
    assert cta.shared_bytes + static <= ampere.SHARED_LIMIT
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", log))
    assert registers * cta.threads <= 65536

    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    found = Counter(re.findall(r"\bIMMA\.\w+\.(\w+)\.(\w+)", text))
    tokens = {"forward": BLOCK_KV, "backward": 64}[source]
    assert found.get(("U8", "S8"), 0) == ("UNSIGNED_P" in macros) * head_dim // 8 * tokens // 32
    assert found["S8", "S8"] > 0


def shape_macro(macros):
    """The macro of these that :data:`CTA_SHAPES` knows."""
    return next((macro for macro in macros if macro in ("P_16BIT", "TOKEN_SCALES")), "")


@needs_nvrtc
@pytest.mark.parametrize(("source", "head_dim", "macro"), ampere.CTA_SHAPES, ids=str)
def test_cta_shapes_are_checked(source, head_dim, macro):
    """Each source refuses another number of threads or bytes, at a static_assert: no code is generated."""
    cta = ampere.CTA_SHAPES[source, head_dim, macro]
    for threads, shared_bytes in ((0, 0), (32, 0), (0, 16)):
        defines = {"HEAD_DIM": head_dim, "IS_CAUSAL": 1} | ({macro: True} if macro else {})
        defines |= {"LAUNCH_THREADS": cta.threads + threads, "LAUNCH_BYTES": cta.shared_bytes + shared_bytes}
        arguments = (ampere.sources_for("sm_80"), source, defines, ["--fdevice-syntax-only"])
        if threads == shared_bytes == 0:
            compile_source(*arguments)
        else:
            with pytest.raises(RuntimeError, match="static assertion failed"):
                compile_source(*arguments)


def test_arguments_are_those_of_the_sources():
    """Names, order and types: the driver sees nothing but their size."""
    folders = ampere.sources_for("sm_80").folders
    headers = [folder / name for folder in folders for name in ("layout.cuh", "scheduler.cuh")]
    shared = "".join(path.read_text(encoding="utf-8") for path in headers if path.exists())
    for source, structure in (("forward", CForward), ("backward", ampere.CBackward)):
        text = ampere.sources_for("sm_80").path(source).read_text(encoding="utf-8")
        assert_same_fields(structure, "Arguments", shared + text)
