"""Error of SageBwd's O, dQ, dK and dV against float64 attention, on Gaussian inputs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace

import torch
from torch import Tensor

from sagebwd import SageConfig, sage_attention
from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import exact_attention
from scripts.command_line import positive_int

TITLES = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
TENSORS = tuple(TITLES)

#: The settings that Table 1 of the paper is measured with.
VARIANTS = {
    "block": SageConfig.paper(),
    "row": replace(SageConfig.paper(), granularity="row"),
    "default": SageConfig(),
}


def measure(
    sigma: float, arguments: Namespace, variants: dict[str, SageConfig] = VARIANTS
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (cosine similarity, relative L2) of every tensor under every variant, on the same inputs."""
    shape = (arguments.batch, arguments.heads, arguments.tokens, arguments.head_dim)
    q, k, v, grad_out = draw_inputs(
        sigma, shape, getattr(torch, arguments.dtype), seed=arguments.seed, device=arguments.device
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


def draw_inputs(
    sigma: float, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int, device: str
) -> list[Tensor]:
    """Gaussian q, k, v and dO of one shape: standard deviation `sigma` for q and k, 1 for v and dO.

    Drawn on the CPU, so that every device gets the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = (std * torch.randn(shape, generator=generator) for std in (sigma, sigma, 1.0, 1.0))
    return [x.to(device, dtype) for x in draws]


def add_input_options(parser: ArgumentParser, *, tokens: int, heads: int) -> None:
    """Options for the inputs of one attention: sizes, with these defaults, dtype and seed."""
    add = parser.add_argument
    add("--tokens", type=positive_int, default=tokens, help="sequence length N (default %(default)s)")
    add("--head-dim", type=positive_int, default=64, help="head size D (default %(default)s)")
    add("--heads", type=positive_int, default=heads, help="heads (default %(default)s)")
    add(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        default="float16",
        help="dtype of the inputs, and of dP, which is not INT8 (default %(default)s; float32: CPU only)",
    )
    add("--seed", type=int, default=0, help="seed of the random inputs (default %(default)s)")


def compare(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    return cosine_similarity(actual, exact), relative_l2(actual, exact)


def settings_of(config: SageConfig, head_dim: int) -> dict:
    """Every setting, with the tile that this head size gets."""
    block_q, block_kv = config.tile(head_dim)
    return asdict(replace(config, block_q=block_q, block_kv=block_kv))
