"""scripts.bench.throttled: as many products as a slower tensor core takes time for, and what follows."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.cuda.compile import why_no_compiler
from scripts.bench import predict, throttled
from scripts.bench.attention_peers import Shape
from scripts.bench.sass_loops import Program


@pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
def test_every_product_is_done_so_often():
    """The backward has INT8 and 16-bit products. Nothing of it is left behind."""
    before = ampere.sources_for
    with throttled.throttled(2):
        text = predict.machine_code.__wrapped__("backward", "default", 64, "full", "sm_90")
        folder = ampere.sources_for("sm_90").folders[0]
    assert ampere.sources_for is before
    assert not folder.exists()
    program = Program(text, "backward_dq_warps_kernel", (8, 4))
    tile = [program.per_iteration(kind) for kind in range(2)]
    found = predict.products_found(predict.of_all_warps(tile, program.warps))
    needed = predict.products_needed("backward", 64, SageConfig())
    assert found == {"IMMA": 2 * needed["IMMA"], "HMMA": 4 * needed["HMMA"]}


def test_the_prediction_is_linear_in_the_time_of_products():
    """Kernels bound by tensor cores alone: the RTX 4090 then reaches its rates, apart from packing."""
    shape = Shape(1, 16, 4096, 64, False)
    sms, clock = 132, 1.9
    # Multiply-adds of all tiles: S, O, S, dV, dK, dQ in INT8, dP in 16 bit.
    one = shape.heads * shape.tokens**2 * shape.head_dim
    cycles = {
        k: k * 6 * one / throttled.H200_INT8 + 2 * k * one / throttled.H200_16BIT for k in throttled.TIMES
    }
    times = {k: own / (sms * clock * 1e6) for k, own in cycles.items()}
    found = throttled.predicted_tflops(shape, times, clock, sms)
    target = throttled.TARGET
    kernels = (6 * one / target.int8 + one / target.bits16) / (target.sms * target.clock_ghz * 1e9)
    packing = 27 * one / shape.tokens / (0.85 * target.bandwidth * 1e9)
    assert found == pytest.approx(3.5 * shape.flops / (kernels + packing) / 1e12, rel=2e-3)


def test_without_an_h200_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        throttled.main([])
    assert "this needs an H200" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_an_h200_results_keep_their_bits():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for an H200")
    row = throttled.measure(Shape(1, 4, 1024, 64, True), Namespace(repetitions=3), clock_ghz=1.9)
    assert row.same_bits
    assert 0 < row.kernel_ms[2] < row.kernel_ms[3]
