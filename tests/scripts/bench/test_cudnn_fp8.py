"""scripts.bench.cudnn_fp8: its scales, with a stand-in for cuDNN that computes in PyTorch."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from scripts.bench import attention as bench
from scripts.bench import cudnn_fp8, timing
from scripts.bench.registry import BOUND_FP8, PEERS, Implementation, Shape
from tests.scripts.bench.cudnn_stand_in import make_module

SHAPE = Shape(batch=2, heads=2, tokens=96, head_dim=128, causal=True)
CPU = torch.device("cpu")


@pytest.fixture
def packages(monkeypatch):
    """cuDNN that runs on a CPU, and no compiler."""
    monkeypatch.setitem(sys.modules, "cudnn", make_module())
    monkeypatch.setattr(cudnn_fp8, "_fused", lambda function: function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    cudnn_fp8._handle.cache_clear()


def draw(seed=0, size=1.0):
    inputs = timing.draw_inputs(SHAPE, torch.bfloat16, CPU, seed)
    return timing.Inputs(
        *(x.detach().requires_grad_(x.requires_grad) for x in inputs[:3]), size * inputs.grad_out
    )


@pytest.mark.parametrize("name", ["cudnn_fp8", "cudnn_fp8_alone"])
@pytest.mark.parametrize("causal", [True, False])
def test_errors_are_those_of_fp8_whatever_the_size_of_the_gradient(packages, name, causal):
    shape = replace(SHAPE, causal=causal)
    for size in (1.0, 1e-5):
        attend = PEERS[name].load()(shape, CPU)
        inputs = draw(size=size)
        found = timing.run_both(attend, inputs)
        assert {x.dtype for x in found} == {torch.bfloat16}
        errors = timing.errors_of(found, shape, timing.exact_result(shape, inputs))
        assert all(0.03 < error < 0.09 for _, error in errors.values()), errors
        assert BOUND_FP8 > 0.09


def test_scales_follow_the_last_call(packages):
    """Larger inputs saturate once, and no longer."""
    attend = PEERS["cudnn_fp8"].load()(SHAPE, CPU)
    timing.run_both(attend, draw())
    larger = draw(1, size=50.0)

    def error(name):
        found = timing.errors_of(timing.run_both(attend, larger), SHAPE, exact)
        return found[name][1]

    exact = timing.exact_result(SHAPE, larger)
    assert error("dv") > 0.5
    assert error("dv") < 0.09
    assert error("dq") < 0.09


def test_a_backward_keeps_the_scale_of_its_forward(packages):
    """Another forward in between moves the scale of O."""
    attend = PEERS["cudnn_fp8"].load()(SHAPE, CPU)
    timing.run_both(attend, draw())
    inputs = draw(1)
    out = attend(*inputs[:3])
    attend(*(100 * x for x in draw(2)[:3]))
    attend(*(100 * x for x in draw(2)[:3]))
    grads = torch.autograd.grad(out, inputs[:3], inputs.grad_out)
    errors = timing.errors_of((out, *grads), SHAPE, timing.exact_result(SHAPE, inputs))
    assert all(error < 0.09 for _, error in errors.values()), errors


@pytest.mark.parametrize(("name", "quantized"), [("cudnn_fp8", 8), ("cudnn_fp8_alone", 4)])
def test_quantization_counts_or_does_not(packages, monkeypatch, name, quantized):
    calls = []
    original = cudnn_fp8.quantize
    monkeypatch.setattr(cudnn_fp8, "quantize", lambda x: calls.append(x) or original(x))
    attend, inputs = PEERS[name].load()(SHAPE, CPU), draw()
    first = timing.run_both(attend, inputs)
    again = timing.run_both(attend, inputs)
    assert len(calls) == quantized
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)


def test_it_is_measured_where_it_can_run(packages):
    arguments = bench.parse_arguments(["--device", "cpu", "--repetitions", "2"])
    peer = Implementation("cuDNN FP8", PEERS["cudnn_fp8"].load(), BOUND_FP8)
    rows = timing.measure_shape(SHAPE, [peer], arguments)
    assert {(row.status, row.reason) for row in rows} == {("passed", None)}
    assert [row.mode for row in rows] == ["both", "forward", "backward"]
    for wrong in ({"head_dim": 64}, {"left": 5}, {"layout": "packed"}):
        (reason,) = {row.reason for row in timing.measure_shape(replace(SHAPE, **wrong), [peer], arguments)}
        assert reason.startswith("ValueError: cuDNN's FP8 backward has D 128")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn_fp8", "cudnn_fp8_alone"])
def test_on_a_gpu(name):
    pytest.importorskip("cudnn", reason="pip install nvidia-cudnn-frontend")
    arguments = bench.parse_arguments(["--repetitions", "2", "--graphs"])
    peer = Implementation("cuDNN FP8", PEERS[name].load(), BOUND_FP8)
    for shape in (SHAPE, Shape(2, 4, 1000, 128, False)):
        rows = timing.measure_shape(shape, [peer], arguments)
        assert {(row.status, row.reason) for row in rows} == {("passed", None)}
