"""scripts.bench.throttled: as many products as a slower tensor core takes time for, and what follows."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton

from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.ampere.shapes import backward_source, cta_shape
from sagebwd.kernels.cuda.compile import Sources, compile_source, why_no_compiler
from scripts.bench import throttled
from scripts.bench.registry import Shape

NEEDS_COMPILER = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
TILE = (64, 128)  # of the default settings


def products_of(which, folder, macros=()):
    """The tensor-core instructions of a kernel, each with its registers, in their order."""
    source = which if which == "forward" else backward_source(TILE, 64)
    cta = cta_shape(source, 64, TILE)
    defines = {
        "HEAD_DIM": 64, "IS_CAUSAL": 0, "IS_BF16": True, "UNPACKED_16BIT": True, "TILE_Q": TILE[0],
        "TILE_KV": TILE[1], "LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes,
        **dict.fromkeys(macros, True),
    }  # fmt: skip
    file = folder / "kernel.cubin"
    file.write_bytes(compile_source(ampere.sources_for("sm_90"), source, defines)[0])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\b([IH]MMA)\.[\w.]+ (\w+), [\w.]+, [\w.]+, (\w+)", text)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("which", "times", "macros"), [("forward", 2, ()), ("backward", 3, ()), ("backward", 3, ("DP_FP16",))]
)
def test_every_product_is_done_so_often(which, times, macros, tmp_path):
    """Further products are INT8 ones, also those for 16-bit products; half as many if sums are in fp16, as
    those of dP may be. The compiler deletes none.

    Hardly any continues the sum of the one before.
    """
    needed = Counter(kind for kind, _, _ in products_of(which, tmp_path, macros))
    with throttled.throttled(times):
        found = products_of(which, tmp_path, macros)
    kinds = Counter(kind for kind, _, _ in found)
    assert kinds["HMMA"] == needed["HMMA"]
    further = (times if macros else 2 * times) - 1
    assert kinds["IMMA"] == times * needed["IMMA"] + further * needed["HMMA"] > 0
    # Some true products do. If further products went to the sums of true ones, half of all would.
    waiting = sum(before[1] == after[2] for before, after in pairwise(found))
    assert waiting <= 0.05 * len(found)


def test_nothing_of_it_is_left_behind():
    before = ampere.sources_for
    with throttled.throttled(2):
        folder = ampere.sources_for("sm_90").folders[0]
        assert "mma.sync" in (folder / throttled.HEADER).read_text(encoding="utf-8")
    assert ampere.sources_for is before
    assert not folder.exists()


def test_every_product_of_the_sources_can_be_throttled(tmp_path):
    """A loop that is new to the sources fails here, and one that changed fails before."""
    copy = throttled.throttled_sources(ampere.sources_for("sm_90"), 2, tmp_path).folders[0]
    found = 0
    for file in (*copy.glob("*.cu"), *copy.glob("*.cuh")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if product := re.match(r"\W*(?:for .*\) )?\W*mma_(int8|16bit)\b[^;]*\);(.*)", line):
                assert product[2].strip().startswith(f"after_{product[1]}<"), line
                found += 1
    assert found == 13


def test_a_line_that_is_gone_is_named(tmp_path):
    sources = ampere.sources_for("sm_90")
    changed = tmp_path / "changed"
    shutil.copytree(sources.folders[0], changed)
    file = changed / "scores.cuh"
    line = "mma_16bit(dp + REGISTERS * j, v, "
    file.write_text(file.read_text().replace(f"{line}b)", f"{line}c)"))
    with pytest.raises(ValueError, match=r"scores\.cuh has the line .* 0 times"):
        throttled.throttled_sources(Sources("sm_90", (changed, sources.folders[1])), 2, tmp_path / "copies")


def test_the_prediction_is_linear_in_the_time_of_products():
    """Kernels bound by tensor cores alone: the RTX 4090 then reaches its rates, apart from packing."""
    shape = Shape(1, 16, 4096, 64, False)
    sms, clock = 132, 1.9
    # Multiply-adds of all tiles: S, O, S, dV, dK, dQ in INT8, dP in 16 bit.
    one = shape.heads * shape.tokens**2 * shape.head_dim
    cycles = {
        k: k * 6 * one / throttled.HOPPER_INT8 + 2 * k * one / throttled.HOPPER_16BIT for k in throttled.TIMES
    }
    times = {k: own / (sms * clock * 1e6) for k, own in cycles.items()}
    found = throttled.predicted_tflops(shape, times, clock, sms)
    kernels = (6 * one / 1024 + one / 256) / (128 * 2.52e9)
    packing = 18 * one / shape.tokens / (0.85 * 1008e9)
    assert found == pytest.approx(3.5 * shape.flops / (kernels + packing) / 1e12, rel=2e-3)


@pytest.mark.gpu
def test_on_an_h100_or_h200_results_keep_their_bits():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for an H100 or H200")
    row = throttled.measure(Shape(1, 4, 1024, 64, True), 3, clock_ghz=1.9)
    assert row.same_bits
    assert 0 < row.forward_ms[2] < row.forward_ms[3]
    assert 0 < row.backward_ms[2] < row.backward_ms[3]
