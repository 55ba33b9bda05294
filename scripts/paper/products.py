"""The five products of attention with their operands rounded, for studies.

A Product is a function of (weights, tokens) that returns weights @ tokens. Weights are (N, N), one row for
each row of the result; tokens are (N, D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sagebwd.reference.quantization import quantize
from scripts.paper.roundings import Rounding, from_groups, hard_tiles, in_groups, int8

Product = Callable[[Tensor, Tensor], Tensor]


def softmax_of(s: Tensor) -> Tensor:
    """P of the logits (N, N) under the causal mask, in place."""
    later = torch.ones(s.shape, dtype=torch.bool, device=s.device).triu_(1)
    return s.masked_fill_(later, -torch.inf).softmax(-1)


def row_sum(x: Tensor) -> Tensor:
    """(rows, 1)"""
    return x.sum(-1, keepdim=True)


def product_of(weights: Rounding, tokens: Rounding) -> Product:
    """The product of two operands, each rounded independently; for S, tokens are queries and keys."""
    return lambda w, x: weights(w) @ tokens(x)


def scores_of(queries: Rounding, keys: Rounding) -> Product:
    """QKᵀ of queries and keys, each rounded independently."""
    return lambda q, k: queries(q) @ keys(k).mT


def token_scaled(rounding: Rounding) -> Product:
    """Tokens in INT8 with a scale each, which the weights take before their own `rounding`."""

    def product(w: Tensor, x: Tensor) -> Tensor:
        tokens = quantize(x, (-1,))
        return rounding(w * tokens.scale.mT) @ tokens.values

    return product


def split_mean(x: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """x (N, D) less the mean of each block of `tokens`, and that mean, (N, D) both."""
    mean = torch.cat([block.mean(0, keepdim=True).expand_as(block) for block in x.split(tokens)])
    return x - mean, mean


def over_rounded_sums(weights: Rounding, tokens: Rounding) -> Product:
    """`product_of` where each row is divided by the sum of P as it was rounded, not as it is.

    Rounding P then leaves the common part of the values exact.
    """

    def product(p: Tensor, v: Tensor) -> Tensor:
        rounded = weights(p)
        return rounded @ tokens(v) * (row_sum(p) / row_sum(rounded))

    return product


def smooth_values(output: Product) -> Product:
    """`output` of V less its token mean, which is added to O: rows of P sum to 1."""
    return lambda p, v: output(p, v - v.mean(0)) + v.mean(0)


def two_level_scores(query_tokens: int, key_tokens: int) -> Product:
    """QKᵀ of INT8 high and low halves without the product of the low ones: three INT8 products."""

    def product(q: Tensor, k: Tensor) -> Tensor:
        q_high, k_high = int8(query_tokens, None)(q), int8(key_tokens, None)(k)
        q_both, k_both = (int8(size, None, levels=2)(x) for size, x in ((query_tokens, q), (key_tokens, k)))
        return q_both @ k_high.mT + q_high @ (k_both - k_high).mT

    return product


def smooth_q_scores(scores: Product, tokens: int) -> Product:
    """`scores` of the queries less the mean of their block of `tokens`, whose part of S is exact."""

    def product(q: Tensor, k: Tensor) -> Tensor:
        centred, mean = split_mean(q, tokens)
        return scores(centred, k) + mean @ k.mT

    return product


def smooth_tokens(contraction: Product, tokens: int) -> Product:
    """`contraction` of tokens less the mean of their block, whose part of the result is exact."""

    def product(w: Tensor, x: Tensor) -> Tensor:
        centred, mean = split_mean(x, tokens)
        return contraction(w, centred) + w @ mean

    return product


def scores_but_hard_tiles(scores: Product, rows: int, columns: int, share: float) -> Product:
    """`scores`, but exact in the `share` of tiles that hold the most softmax.

    Only the forward knows these tiles; it would save one bit per tile for the backward, which must
    compute the same S.
    """

    def product(q: Tensor, k: Tensor) -> Tensor:
        coarse = scores(q, k)
        tiles = in_groups(softmax_of(coarse * q.shape[-1] ** -0.5), rows, columns)
        chosen = hard_tiles(tiles.square().sum((1, 3), keepdim=True), share)
        return torch.where(from_groups(chosen.expand_as(tiles), coarse), q @ k.mT, coarse)

    return product
