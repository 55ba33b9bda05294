"""Inputs for attention, and what is known of them."""

import torch


def draw(heads=4, kv_heads=2, length=37, sigma=1.0, seed=0):
    """q, k, v, dO of a batch of 2."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, n, length, 16) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for shape in shapes)
    return sigma * q, sigma * k, v, grad_out


def largest_logit(q, k):
    """The largest magnitude of QKᵀ/√D where the causal mask admits it, in float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.double() @ k.double().mT / q.shape[-1] ** 0.5).tril().abs().max().item()


def gradients(function, q, k, v, grad_out, *arguments, **settings):
    """[out, dq, dk, dv], and lse if the function returns it."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = function(*leaves, *arguments, **settings)
    out, *lse = result if isinstance(result, tuple) else (result,)
    assert out.requires_grad
    out.backward(grad_out)  # a reentrant checkpoint does not support torch.autograd.grad
    return [out.detach(), *(x.grad for x in leaves), *lse]


def assert_same(found, expected):
    """[out, dq, dk, dv] of the same dtypes and bits, and finite."""
    for name, x, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert x.dtype == wanted.dtype, name
        assert x.isfinite().all(), name
        assert torch.equal(x, wanted), name


def mask_of(n_q, n_kv, left, right):
    """(n_q, n_kv) bool, from the definition of a window, one query after another."""
    return torch.tensor(
        [
            [(left < 0 or i - left <= j) and (right < 0 or j <= i + right) for j in range(n_kv)]
            for i in range(n_q)
        ]
    )
