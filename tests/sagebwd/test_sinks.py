"""Attention sinks in parts of torch. Their values, in every kernel set: kernels/test_lse.py."""

import functools

import pytest
import torch

from sagebwd import SageConfig, sage_attention
from sagebwd.metrics import relative_l2

SINKS = torch.tensor([-1.0, 2.0])


@pytest.fixture
def leaves(draw):
    """q, k, v of 40 tokens and two heads, and their sinks."""
    return [x.requires_grad_() for x in (*draw(40, kv_heads=1)[:3], SINKS.clone())]


def attend(q, k, v, sinks, **settings):
    return sage_attention(q, k, v, sinks=sinks, is_causal=True, enable_gqa=True, **settings)


def test_no_sink_is_a_sink_that_nothing_reaches(leaves):
    q, k, v, _ = leaves
    assert torch.equal(attend(q, k, v, torch.full((2,), -torch.inf)), attend(q, k, v, None))
    none = torch.full((2,), -torch.inf, requires_grad=True)
    out = attend(q, k, v, none, window_size=(5, 0), key_padding_mask=torch.arange(40)[None].expand(2, -1) < 9)
    assert not out[:, :, 9:].any()  # queries without keys
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v, none)))
    out, lse = attend(q, k, v, torch.full((2,), 1e30), return_lse=True)
    assert not out.any()
    assert (lse == 1e30).all()


def test_sinks_alone_have_a_gradient(leaves):
    q, k, v, sinks = leaves
    (wanted,) = torch.autograd.grad(attend(*leaves).sum(), sinks)
    q, k, v = (x.detach() for x in (q, k, v))
    for found in (
        torch.autograd.grad(attend(q, k, v, sinks).sum(), sinks)[0],
        torch.func.grad(lambda x: attend(q, k, v, x).sum())(sinks),
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_without_a_break(leaves, compiled, device):
    dtype, backend = (torch.float32, "aot_eager") if device == "cpu" else (torch.bfloat16, "inductor")
    leaves = [x.detach().to(device, dtype).requires_grad_() for x in leaves]
    # Without INT8: when compiled, sinks are an epilogue, before which P and dO are rounded.
    kernels = "reference" if device == "cpu" else "triton"
    function = functools.partial(attend, config=SageConfig(int8_matmuls=()), kernels=kernels)
    wanted = torch.autograd.grad(function(*leaves).sum(), leaves)
    found = torch.autograd.grad(compiled(function, backend)(*leaves).sum(), leaves)
    for x, y in zip(found, wanted, strict=True):
        assert relative_l2(x, y) < (1e-6 if device == "cpu" else 8e-3)  # two steps of bf16


def test_vmap(leaves):
    """Over batches that have sinks of their own."""
    q, k, v, sinks = (x.detach() for x in leaves)
    sinks = torch.stack([sinks, sinks + 1])
    found = torch.vmap(attend)(q[:, None], k[:, None], v[:, None], sinks)
    for n in range(2):
        torch.testing.assert_close(found[n], attend(q[n : n + 1], k[n : n + 1], v[n : n + 1], sinks[n]))


@pytest.mark.parametrize("wanted", [0, 3])
def test_a_second_derivative_is_refused(leaves, wanted):
    (dk,) = torch.autograd.grad(attend(*leaves).sum(), leaves[1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dk.sum(), leaves[wanted])


def test_without_keys(leaves):
    q, k, v, sinks = leaves
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks[:, None].expand_as(lse))
    dq, dsinks = torch.autograd.grad(out.sum() + lse.sum(), (q, sinks))
    assert not dq.any()
    assert torch.equal(dsinks, torch.tensor([80.0, 80.0]))
