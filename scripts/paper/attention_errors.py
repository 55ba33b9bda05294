"""Error of SageBwd's O, dQ, dK and dV against float64 attention, on Gaussian inputs."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

import torch
from torch import Tensor

from sagebwd import SageConfig, sage_attention
from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import exact_attention

TITLES = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
TENSORS = tuple(TITLES)

#: The settings that Table 1 of the paper is measured with.
VARIANTS = {
    "block": SageConfig.paper(),
    "row": replace(SageConfig.paper(), granularity="row"),
    "default": SageConfig(),
}


def measure(
    sigma: float, arguments: argparse.Namespace, variants: dict[str, SageConfig] = VARIANTS
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (cosine similarity, relative L2) of every tensor under every variant, on the same inputs."""
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = (arguments.batch, arguments.heads, arguments.tokens, arguments.head_dim)
    dtype = getattr(torch, arguments.dtype)
    q, k, v, grad_out = (
        (std * torch.randn(shape, generator=generator)).to(arguments.device, dtype)
        for std in (sigma, sigma, 1.0, 1.0)
    )
    exact = exact_attention(q, k, v, grad_out, is_causal=arguments.causal)
    errors = {}
    for variant, config in variants.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = sage_attention(*leaves, is_causal=arguments.causal, config=config)
        found = (out, *torch.autograd.grad(out, leaves, grad_out))
        errors[variant] = {
            name: compare(x, getattr(exact, name)) for name, x in zip(TENSORS, found, strict=True)
        }
    return errors


def compare(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    return cosine_similarity(actual, exact), relative_l2(actual, exact)


def settings_of(config: SageConfig, head_dim: int) -> dict:
    """Every setting, with the tile that this head size gets."""
    block_q, block_kv = config.tile(head_dim)
    return asdict(replace(config, block_q=block_q, block_kv=block_kv))
