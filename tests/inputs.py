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
    """[out, dq, dk, dv], without the accumulation of backward()."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, *arguments, **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
