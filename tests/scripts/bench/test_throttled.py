"""scripts.bench.throttled: as many products as a slower tensor core takes time for, and what follows."""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import pairwise

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.cuda.compile import why_no_compiler
from scripts.bench import predict, throttled
from scripts.bench.attention_peers import Shape
from scripts.bench.sass import parse
from scripts.bench.sass_loops import Program

NEEDS_COMPILER = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


@NEEDS_COMPILER
@pytest.mark.parametrize("times", throttled.TIMES)
@pytest.mark.parametrize(("which", "head_dim"), [("forward", 64), ("backward", 64), ("backward", 128)])
def test_every_product_is_done_so_often(which, head_dim, times):
    """Further products are INT8 ones, also those for 16-bit products. The compiler deletes none.

    Hardly any continues the sum of the one before.
    """
    with throttled.throttled(times):
        text = predict.machine_code.__wrapped__(which, "default", head_dim, "full", "sm_90")
    source = predict.source_of(which, head_dim, SageConfig())
    program = Program(text, f"{source}_kernel", predict.warps_of(source))
    tile = [program.per_iteration(kind) for kind in range(len(program.warps))]
    found = predict.products_found(predict.of_all_warps(tile, program.warps))
    needed = predict.products_needed(which, head_dim, SageConfig())
    of_16bit = needed.get("HMMA", 0)
    assert found.get("HMMA", 0) == of_16bit
    assert found["IMMA"] == times * needed["IMMA"] + (2 * times - 1) * of_16bit

    code = parse(text, f"{source}_kernel")[0]
    products = [instruction.operands for instruction in code if instruction.base in ("IMMA", "HMMA")]
    waiting = sum(before[0] == after[3] for before, after in pairwise(products))
    # Some true products do. If further products went to the sums of true ones, half of all would.
    assert waiting <= 0.05 * len(products)


def test_nothing_of_it_is_left_behind():
    before = ampere.sources_for
    with throttled.throttled(2):
        folder = ampere.sources_for("sm_90").folders[0]
        assert "mma.sync" in (folder / throttled.HEADER).read_text(encoding="utf-8")
    assert ampere.sources_for is before
    assert not folder.exists()


def test_every_product_can_be_throttled():
    """The sources call the replaced header after each product."""
    folder = ampere.sources_for("sm_90").folders[0]
    sources = [*folder.glob("*.cu"), *folder.glob("*.cuh")]
    lines = [line.strip() for file in sources for line in file.read_text(encoding="utf-8").splitlines()]
    found = 0
    for line, after in pairwise(lines):
        if product := re.match(r"mma_(int8|16bit)\b.*;$", line):
            assert after.startswith(f"after_{product[1]}<"), line
            found += 1
    assert found == 13


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
    target = throttled.TARGET
    kernels = (6 * one / target.int8 + one / target.bits16) / (target.sms * target.clock_ghz * 1e9)
    packing = 18 * one / shape.tokens / (0.85 * target.bandwidth * 1e9)
    assert found == pytest.approx(3.5 * shape.flops / (kernels + packing) / 1e12, rel=2e-3)


def test_without_an_h100_or_h200_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        throttled.main([])
    assert "this needs an H100 or H200" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_an_h100_or_h200_results_keep_their_bits():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for an H100 or H200")
    row = throttled.measure(Shape(1, 4, 1024, 64, True), Namespace(repetitions=3), clock_ghz=1.9)
    assert row.same_bits
    assert 0 < row.forward_ms[2] < row.forward_ms[3]
    assert 0 < row.backward_ms[2] < row.backward_ms[3]
