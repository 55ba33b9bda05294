"""The public operator: torch's calling convention, autograd, and every refusal."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sagebwd import SageConfig, sage_attention
from sagebwd.interface import AttentionParams
from sagebwd.reference import attention, backward, forward
from sagebwd.window import Window
from tests.inputs import gradients

NO_INT8 = SageConfig(int8_matmuls=())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_runs_the_reference(draw, dtype):
    inputs = draw(100, dtype=dtype)
    result = attention(*inputs, is_causal=True)
    found = gradients(sage_attention, *inputs, is_causal=True)
    for x, name in zip(found, ("out", "dq", "dk", "dv"), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, getattr(result, name))


def test_saves_only_the_inputs_out_lse_and_the_mean_of_k(draw):
    q, k, v, _ = (x.requires_grad_() for x in draw(200))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        sage_attention(q, k, v)
    saved = [shape for shape in saved if shape.numel()]
    mean = (*k.shape[:2], 32)  # channels padded to a power of two
    assert saved == [q.shape, q.shape[:-1], mean, q.shape, k.shape, v.shape]


def test_autocast_casts_as_torch_does_and_the_diagnostic_call_ignores_it(draw):
    """Also a mix, as a rotary embedding may leave it. Gradients under it: kernels/test_torch.py."""
    q, k, v, grad_out = draw(60)
    plain = attention(q, k, v, grad_out)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sage_attention(q, k.bfloat16(), v)
        assert out.dtype == scaled_dot_product_attention(q, k.bfloat16(), v).dtype
        assert torch.equal(attention(q, k, v, grad_out).dq, plain.dq)
    assert torch.equal(out, sage_attention(*(x.bfloat16() for x in (q, k, v))))


def test_a_compiled_model_takes_another_scale(draw, compiled):
    """The tracer then has a symbol for it."""
    q, k, v, _ = draw(20)
    attend = compiled(sage_attention)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(attend(q, k, v, scale=scale), sage_attention(q, k, v, scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(draw, dtype):
    inputs, attend = draw(60, dtype=torch.bfloat16), functools.partial(sage_attention, return_lse=True)
    wanted = (*attend(*inputs[:3]), attention(*inputs).dq)
    torch.set_default_dtype(dtype)
    try:
        found = (*attend(*inputs[:3]), attention(*inputs).dq)
    finally:
        torch.set_default_dtype(torch.float32)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_memory_does_not_grow_with_the_square_of_the_sequence(draw):
    """No tensor in a whole forward and backward is larger than dK and dV together."""
    inputs = draw(256, head_dim=16, batch=1, heads=1)
    config = SageConfig(block_q=16, block_kv=16)

    class LargestTensor(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.largest = max([self.largest, *(x.numel() for x in tensors)])
            return result

    q, k, v, grad_out = inputs
    params = AttentionParams(Window.of(True), 0.25, config)
    with LargestTensor() as watch:  # which does not look inside of an operator
        backward(grad_out, q, k, v, forward(q, k, v, params), params)
    assert watch.largest == 2 * 256 * 16


X = torch.ones(2, 4, 8, 16)


def test_a_scale_of_minus_zero_is_zero_and_a_tensor_is_taken_for_its_number(draw):
    """To the bits: calls that look the same share what is known of them, and these do.

    A tensor without a gradient is a number; to refuse it would break calls that work.
    """
    inputs = draw(9, head_dim=16, dtype=torch.float32)
    found, wanted = (gradients(sage_attention, *inputs, scale=scale) for scale in (-0.0, 0.0))
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    scale = torch.full((1,), 0.25, requires_grad=True)
    wanted = sage_attention(X, X, X, scale=0.25)
    assert torch.equal(sage_attention(X, X, X, scale=scale.detach()), wanted)
    with torch.no_grad():
        assert torch.equal(sage_attention(X, X, X, scale=scale), wanted)


@pytest.mark.parametrize("kernels", [None, "reference"])
def test_meta_tensors(kernels):
    q, k, v = (torch.ones(2, heads, 8, 16, device="meta", requires_grad=True) for heads in (4, 2, 2))
    keys = torch.ones(2, 8, device="meta", dtype=torch.bool)
    for mask in (None, keys):
        out = sage_attention(q, k, v, enable_gqa=True, key_padding_mask=mask, kernels=kernels)
        assert out.shape == q.shape
        for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
            assert grad.shape == x.shape
            assert grad.is_meta


EMPTY = (
    {"batch": 0},
    {"n_q": 0},
    {"n_kv": 0},
    {"n_q": 0, "n_kv": 0},
    {"heads": 0, "kv_heads": 0},
    {"head_dim": 0},
)


@pytest.mark.parametrize("empty", EMPTY)
def test_empty_tensors_give_what_torch_gives(empty):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 5, "n_kv": 7, "head_dim": 8, **empty}
    q = torch.ones(size["batch"], size["heads"], size["n_q"], size["head_dim"])
    k = torch.ones(size["batch"], size["kv_heads"], size["n_kv"], size["head_dim"])
    shown = torch.ones(size["batch"], size["n_kv"], dtype=torch.bool)
    grad_out = torch.ones_like(q)
    torchs = gradients(scaled_dot_product_attention, q, k, k, grad_out, enable_gqa=True)
    for mask in (None, shown):
        found = gradients(sage_attention, q, k, k, grad_out, enable_gqa=True, key_padding_mask=mask)
        for x, y in zip(found, torchs, strict=True):
            assert x.shape == y.shape
            assert torch.equal(x, y)
            assert not x.any()
    lse = sage_attention(q, k, k, enable_gqa=True, return_lse=True)[1]
    assert torch.equal(lse, torch.full(q.shape[:-1], -torch.inf))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_program_for_a_gpu_is_exported_without_one():
    """Which kernels it gets: test_dispatch.py."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return sage_attention(q, k, v, is_causal=True)

    with FakeTensorMode():
        inputs = tuple(torch.ones(1, 2, 40, 64, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    program = torch.export.export(Attention(), inputs, strict=False)
    (node,) = (node for node in program.graph.nodes if node.target is torch.ops.sagebwd.forward.default)
    assert "triton" in node.args
