"""Causal attention of whole matrices in float64, and inputs for it."""

import math

import torch


def draw(heads=4, kv_heads=2, length=37, sigma=1.0, seed=0):
    """q, k, v, dO of a batch of 2."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, n, length, 16) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for shape in shapes)
    return sigma * q, sigma * k, v, grad_out


def float64_attention(q, k, v, grad_out):
    """Causal attention of whole matrices: o, dq, dk, dv, p, dp, ds, s, all float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x[:, [head // group for head in range(q.shape[1])]] for x in (k, v))
    visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    s = torch.einsum("bhqd,bhkd->bhqk", q, keys) / math.sqrt(q.shape[3])
    p = torch.where(visible, s, -math.inf).softmax(-1)
    dp = torch.where(visible, torch.einsum("bhqd,bhkd->bhqk", grad_out.double(), values), 0)
    o = torch.einsum("bhqk,bhkd->bhqd", p, values)
    (ds,) = torch.autograd.grad(o, s, grad_out.double(), retain_graph=True)
    gradients = torch.autograd.grad(o, (q, k, v), grad_out.double())
    return (o, *gradients, p, dp, ds, s * visible)
