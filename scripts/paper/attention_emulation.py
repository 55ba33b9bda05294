"""One head's attention whose products take their operands in a precision of one's choice, for studies.

`emulate` runs the algorithms of SageBwd (arXiv 2603.02170) on whole N × N matrices in float32, so that a new
idea about a product is one small function instead of a kernel. Where `sagebwd.reference` has the same switch,
the two agree (tests/scripts/paper/test_attention_emulation.py), but for numbers next to a tie between two
steps.

Three kinds of functions make a scheme:

    Rounding   x → what a product sees of x, such as INT8 with one scale per 64 × 1 entries
    Product    (weights, tokens) → weights @ tokens, made of two roundings by `product_of`
    Scheme     the five products, and how δ is taken

Shapes: N tokens, D channels. Weights are (N, N), one row for each row of the result; tokens are (N, D).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.reference.quantization import Operand, quantize, quantize_two_levels

Rounding = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]

#: Where δ comes from; see `Scheme.delta`.
DELTAS = ("output", "exact", "exact in dK", "projected")


class Head(NamedTuple):
    """What one head of a causal attention got: q, k, v and dO, each (N, D) float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class Result(NamedTuple):
    """What it gave, each (N, D) float32; dk and dv are this query head's own part."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Scheme:
    """How one attention computes its products. dP = dO·Vᵀ has none: it is exact, as 16-bit inputs make it.

    Attributes:
        scores: (q, k) → QKᵀ, the same in the forward and the backward.
        output: (P, V) → O.
        dv, dq, dk: (Pᵀ, dO) → dV, (dS, K) → dQ and (dSᵀ, Q) → dK.
        stored: what the backward reads of O.
        smooth_k: subtract the token mean of K before all.
        delta: δ in dS = P ∘ (dP − δ).
            "output": rowsum(dO ∘ O), as in the paper.
            "exact": rowsum(P ∘ dP) of the backward's own P and dP, so that rows of dS sum to 0.
            "exact in dK": dQ takes the first and dK the second. The dQ kernel finds the second on its way, as
            δ + rowsum(dS), and hands it on: no product more.
            "projected": the same, and dQ −= rowsum(dS) · (P K), which is what the wrong δ put into it. One
            product more, that of `output` with K in the place of V.
    """

    scores: Product
    output: Product
    dv: Product
    dq: Product
    dk: Product
    stored: Rounding
    smooth_k: bool = True
    delta: str = "output"

    def __post_init__(self) -> None:
        if self.delta not in DELTAS:
            raise ValueError(f"delta is {self.delta!r}; choose from {', '.join(map(repr, DELTAS))}")


@torch.no_grad()
def emulate(head: Head, scheme: Scheme) -> Result:
    """Causal attention and its gradients as `scheme` computes them; the softmax scale is 1/√D."""
    q, k, v, grad_out = head
    scale = q.shape[-1] ** -0.5
    if scheme.smooth_k:
        k = k - k.mean(0)
    p = softmax_of(scheme.scores(q, k) * scale)
    out = scheme.output(p, v)
    dp = grad_out @ v.mT
    delta = row_sum(p * dp) if scheme.delta == "exact" else row_sum(grad_out * scheme.stored(out))

    dv = scheme.dv(p.mT, grad_out)
    ds = p * (dp - delta)
    dq = scheme.dq(ds, k)
    if scheme.delta in ("exact in dK", "projected"):
        residual = row_sum(ds)  # 0 but for the error of δ, because rows of P sum to 1
        if scheme.delta == "projected":
            dq = dq - residual * scheme.output(p, k)
        ds = ds - residual * p
    dk = scheme.dk(ds.mT, q)
    return Result(out, dq * scale, dk * scale, dv)


def softmax_of(s: Tensor) -> Tensor:
    """P of the logits (N, N) under the causal mask, in place."""
    later = torch.ones_like(s, dtype=torch.bool).triu_(1)
    return s.masked_fill_(later, -torch.inf).softmax(-1)


def row_sum(x: Tensor) -> Tensor:
    """(rows, 1)"""
    return x.sum(-1, keepdim=True)


# --- Roundings ----------------------------------------------------------------------------------------------


def exact(x: Tensor) -> Tensor:
    return x


def to_dtype(dtype: torch.dtype) -> Rounding:
    """Rounded to a dtype of 16 bit."""
    return lambda x: x.to(dtype).float()


def int8(rows: int | None, columns: int | None, *, levels: int = 1) -> Rounding:
    """INT8 with one scale for each group of `rows` × `columns` entries; None: all of that axis.

    levels: 2 for INT8 high and low halves, of `sagebwd.reference.quantization.quantize_two_levels`.
    """

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        parts = quantize_two_levels(grouped, (1, 3)) if levels == 2 else [quantize(grouped, (1, 3))]
        return from_groups(sum(map(value_of, parts)), x)

    return rounding


def uint8(rows: int | None, columns: int | None) -> Rounding:
    """As `int8` for numbers that are never negative, such as P: 255 steps in the place of 127.

    Tensor cores take unsigned operands, or (integer − 128) where 128 times the other's sum is added.
    """

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        return from_groups(value_of(quantize(grouped, (1, 3), unsigned=True)), x)

    return rounding


def stochastic_int8(rows: int | None, columns: int | None) -> Rounding:
    """As `int8`, but rounded up with the probability of the fraction: right on average over draws."""

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        scale = quantize(grouped, (1, 3)).scale
        return from_groups((grouped * inverse(scale) + torch.rand_like(grouped)).floor_() * scale, x)

    return rounding


def float8(rows: int | None, columns: int | None) -> Rounding:
    """As `int8`, with 8-bit floating point (e4m3) in the place of integers."""
    largest = torch.finfo(torch.float8_e4m3fn).max

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        scale = grouped.abs().amax((1, 3), keepdim=True) / largest
        return from_groups((grouped * inverse(scale)).to(torch.float8_e4m3fn).float() * scale, x)

    return rounding


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and zero where the scale is zero or subnormal."""
    return torch.where(scale < torch.finfo(scale.dtype).tiny, 0.0, 1 / scale)


def value_of(operand: Operand) -> Tensor:
    return operand.values * operand.scale


def in_groups(x: Tensor, rows: int | None, columns: int | None) -> Tensor:
    """x (M, N) as (groups, rows, groups, columns), filled up with zeros to whole groups."""
    rows, columns = min(rows or x.shape[0], x.shape[0]), min(columns or x.shape[1], x.shape[1])
    padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def from_groups(grouped: Tensor, like: Tensor) -> Tensor:
    """Undo `in_groups`."""
    return grouped.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


# --- Roundings made of others -------------------------------------------------------------------------------


def per_channel(rounding: Rounding) -> Rounding:
    """`rounding` of x (N, D) with every channel divided by its largest entry.

    For a product that contracts tokens: the factor of a channel multiplies the finished result, once.
    """

    def rounded(x: Tensor) -> Tensor:
        largest = x.abs().amax(0, keepdim=True)
        return rounding(x * inverse(largest)) * largest

    return rounded


def rotated(rounding: Rounding) -> Rounding:
    """`rounding` of x (N, D) in the basis of `rotation`, where no channel stands out.

    Q and K turned alike leave QKᵀ as it is; where tokens are contracted the finished result is turned back.
    """

    def rounded(x: Tensor) -> Tensor:
        turn = rotation(x.shape[-1]).to(x)
        return rounding(x @ turn) @ turn.mT

    return rounded


def rotation(d: int) -> Tensor:
    """Orthogonal (d, d): random signs, then Hadamard matrices of the largest power of 2 that divides d."""
    size = d & -d
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(2, (d, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs * torch.block_diag(*[hadamard / math.sqrt(size)] * (d // size))


def but_channels(rounding: Rounding, share: float) -> Rounding:
    """`rounding` of x (N, D), but for the `share` of channels with the largest entries, which stay exact."""

    def rounded(x: Tensor) -> Tensor:
        largest = x.abs().amax(0).topk(math.ceil(share * x.shape[-1])).indices
        kept = torch.zeros_like(x)
        kept[:, largest] = x[:, largest]
        return kept + rounding(x - kept)

    return rounded


def but_hard_tiles(rounding: Rounding, rows: int, columns: int, share: float) -> Rounding:
    """`rounding` of weights (N, N), but for the `share` of tiles of rows × columns that it hurts most.

    Those are the tiles with the largest Σ (row's maximum)². A kernel has these maxima, and the squared error
    of INT8 with a scale per row is in proportion to their squares.
    """

    def rounded(x: Tensor) -> Tensor:
        tiles = in_groups(x, rows, columns)
        hardness = tiles.abs().amax(3, keepdim=True).square().sum(1, keepdim=True)
        chosen = hard_tiles(hardness, share)
        return torch.where(from_groups(chosen.expand_as(tiles), x), x, rounding(x))

    return rounded


def hard_tiles(hardness: Tensor, share: float) -> Tensor:
    """True for the `share` of tiles with the largest hardness > 0; tiles behind the mask have hardness 0."""
    count = round(share * int((hardness > 0).sum()))
    chosen = torch.zeros_like(hardness, dtype=torch.bool)
    chosen.view(-1)[hardness.flatten().topk(count).indices] = True
    return chosen


# --- Products -----------------------------------------------------------------------------------------------


def product_of(weights: Rounding, tokens: Rounding) -> Product:
    """The product of two operands that are rounded each for itself; for S tokens are queries and keys."""
    return lambda w, x: weights(w) @ tokens(x)


def scores_of(queries: Rounding, keys: Rounding) -> Product:
    """QKᵀ of queries and keys that are rounded each for itself."""
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

    Then no rounding of P touches what values have in common.
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
        rest, mean = split_mean(q, tokens)
        return scores(rest, k) + mean @ k.mT

    return product


def smooth_tokens(contraction: Product, tokens: int) -> Product:
    """`contraction` of tokens less the mean of their block, whose part of the result is exact."""

    def product(w: Tensor, x: Tensor) -> Tensor:
        rest, mean = split_mean(x, tokens)
        return contraction(w, rest) + w @ mean

    return product


def scores_but_hard_tiles(scores: Product, rows: int, columns: int, share: float) -> Product:
    """`scores`, but exact in the `share` of tiles that hold the most softmax.

    Whether a tile does is known to the forward alone; it would leave one bit a tile to the backward, which
    must compute the same S.
    """

    def product(q: Tensor, k: Tensor) -> Tensor:
        coarse = scores(q, k)
        tiles = in_groups(softmax_of(coarse * q.shape[-1] ** -0.5), rows, columns)
        chosen = hard_tiles(tiles.square().sum((1, 3), keepdim=True), share)
        return torch.where(from_groups(chosen.expand_as(tiles), coarse), q @ k.mT, coarse)

    return product


# --- Schemes ------------------------------------------------------------------------------------------------

EXACT = Scheme(
    scores=scores_of(exact, exact),
    output=product_of(exact, exact),
    dv=product_of(exact, exact),
    dq=product_of(exact, exact),
    dk=product_of(exact, exact),
    stored=exact,
    smooth_k=False,
)


def scheme_of(config: SageConfig, head_dim: int, dtype: torch.dtype) -> Scheme:
    """What `sagebwd.reference.attention` computes under `config` with inputs of `dtype`.

    Raises:
        ValueError: a switch that there is no emulation of.
    """
    if config.add_mean_k_term or config.is_int8("dp") or config.is_int8("s_fwd") != config.is_int8("s_bwd"):
        raise ValueError(
            f"{config} has no emulation; leave add_mean_k_term off, dP in 16 bit and S alike in both passes"
        )
    block_q, block_kv = config.tile(head_dim)
    scores = _scores_of(config, head_dim, dtype)
    output = _contraction_of(replace(config, granularity="row"), dtype, "o", block_q, block_kv)
    if config.compensate_o:
        output = over_rounded_sums(to_dtype(dtype), to_dtype(dtype))
    dv, dk = (_contraction_of(config, dtype, matmul, block_kv, block_q) for matmul in ("dv", "dk"))
    if config.smooth_q:
        scores, dk = smooth_q_scores(scores, block_q), smooth_tokens(dk, block_q)
    return Scheme(
        scores=scores,
        output=smooth_values(output) if config.smooth_v else output,
        dv=dv,
        dq=_contraction_of(config, dtype, "dq", block_q, block_kv),
        dk=dk,
        stored=exact if config.compensate_o else to_dtype(dtype),
        smooth_k=config.smooth_k,
        delta="exact" if config.exact_delta else "output",
    )


def _scores_of(config: SageConfig, head_dim: int, dtype: torch.dtype) -> Product:
    if not config.is_int8("s_fwd"):
        return scores_of(to_dtype(dtype), to_dtype(dtype))
    tokens = (1, 1) if config.operand_scales == "token" else config.tile(head_dim)
    if config.s_levels == 2:
        return two_level_scores(*tokens)
    return scores_of(*(int8(size, None) for size in tokens))


def _contraction_of(config: SageConfig, dtype: torch.dtype, matmul: str, rows: int, tokens: int) -> Product:
    """A product whose result has blocks of `rows`, and which contracts blocks of `tokens`."""
    if not config.is_int8(matmul):
        return product_of(to_dtype(dtype), to_dtype(dtype))
    rounding = uint8 if config.is_unsigned(matmul) else int8
    weights = rounding(1 if config.granularity == "row" else rows, tokens)
    if config.operand_scales == "token":
        return token_scaled(weights)
    return product_of(weights, int8(tokens, None))
