"""What happens in the middle of SageBwd: δ, P, dP and dS of the reference against exact attention (Table 2).

The paper does not say whether its P and dS are those before or after they are rounded to INT8 themselves.
Both are measured: "p" and "ds" have the errors that reach them from Q, K, V and O, "p_rounded" and
"ds_rounded" that of their own rounding as well, in the tiles and with the scales of dV and dQ.

Every matrix here has N × N entries for each head, so some heads are computed at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import sagebwd.reference
from sagebwd import SageConfig
from sagebwd.reference import exact_attention
from sagebwd.reference.exact import without_tf32
from sagebwd.reference.quantization import quantize
from trainer.probe import Captured

TITLES = {
    "delta": "δ",
    "p": "P",
    "p_rounded": "P, rounded",
    "dp": "dP",
    "ds": "dS",
    "ds_rounded": "dS, rounded",
    "o": "O",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
}

#: Fields of AttentionResult whose names differ.
FIELDS = {"o": "out"}

#: Tensors after their own rounding: {name: (that before it, the product whose operand it is)}.
ROUNDED = {"p_rounded": ("p", "dv"), "ds_rounded": ("ds", "dq")}

ENTRIES_AT_ONCE = 2**26  # of P (256 MiB in float32); some twelve such matrices are alive together


def products(a: Tensor, e: Tensor) -> Tensor:
    """⟨a, e⟩, ‖a‖², ‖e‖² and ‖a − e‖² of two tensors of one shape, in float64: those of parts add up."""
    a, e = a.double().flatten(), e.double().flatten()
    return torch.stack([a @ e, a @ a, e @ e, (a - e).square_().sum()])


def similarity(summed: Tensor) -> tuple[float, float]:
    """(cosine similarity, relative L2) from `products`; NaN where the exact tensor is zero."""
    dot, actual, exact, error = summed.tolist()
    if exact == 0:
        return math.nan, math.nan
    return dot / math.sqrt(actual * exact) if actual else 0.0, math.sqrt(error / exact)


def measure(captured: Captured, config: SageConfig) -> dict[str, tuple[float, float]]:
    """(cosine similarity, relative L2) of the tensors of TITLES over a layer's heads and sequences."""
    summed = dict.fromkeys(TITLES, 0.0)
    with without_tf32():
        for q, k, v, grad_out in parts(captured):
            is_gqa = q.shape[1] != k.shape[1]
            actual = sagebwd.reference.attention(
                q, k, v, grad_out, is_causal=True, enable_gqa=is_gqa, config=config
            )
            exact = exact_attention(q, k, v, grad_out, is_causal=True, matrices=True, dtype=torch.float32)
            for name in TITLES:
                field, product = ROUNDED.get(name, (FIELDS.get(name, name), None))
                found = getattr(actual, field)
                if product:
                    found = rounded(found, product, config, q.shape[-1])
                summed[name] += products(found, getattr(exact, field))
    return {name: similarity(own) for name, own in summed.items()}


def rounded(weights: Tensor, product: str, config: SageConfig, head_dim: int) -> Tensor:
    """P or dS (B, H, N_q, N_kv) quantized and dequantized in tiles, as the product of the backward takes it.

    dV contracts queries, so its scale per row is one per key and tile; that of dQ is one per query and tile.
    The scales per token of `operand_scales="token"` are left out.
    """
    if not config.is_int8(product):
        return weights
    block_q, block_kv = config.tile(head_dim)
    axis = -2 if product == "dv" else -1
    shared = (axis,) if config.granularity == "row" else (-2, -1)
    found = torch.empty_like(weights)
    for row in range(0, weights.shape[-2], block_q):
        for column in range(0, weights.shape[-1], block_kv):
            tile = (..., slice(row, row + block_q), slice(column, column + block_kv))
            values, scale = quantize(weights[tile], shared, unsigned=config.is_unsigned(product))
            found[tile] = values * scale
    return found


def rounded_too(printed: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The paper's numbers for the tensors of ROUNDED: it prints one of each, which may be either."""
    return {name: printed[before] for name, (before, _) in ROUNDED.items()}


def parts(captured: Captured) -> list[tuple[Tensor, ...]]:
    """q, k, v, dO of some heads of one sequence, as many as ENTRIES_AT_ONCE allows; groups stay together."""
    group = captured.q.shape[1] // captured.k.shape[1]
    keys_at_once = max(ENTRIES_AT_ONCE // (group * captured.q.shape[2] ** 2), 1)
    heads = (group * keys_at_once, keys_at_once, keys_at_once, group * keys_at_once)
    tensors = (captured.q, captured.k, captured.v, captured.grad_out)
    return [
        part
        for sequence in zip(*(x.split(1) for x in tensors), strict=True)
        for part in zip(*(x.split(n, dim=1) for x, n in zip(sequence, heads, strict=True)), strict=True)
    ]
