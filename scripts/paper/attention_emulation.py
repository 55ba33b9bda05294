"""One head's attention whose products take their operands in any chosen precision, for studies.

`emulate` runs the algorithms of SageBwd (arXiv 2603.02170) on whole N × N matrices in float32, so that a new
idea about a product is one small function instead of a kernel. Where `sagebwd.reference` has the same switch,
the two agree (tests/scripts/paper/test_attention_emulation.py), except for values next to a rounding tie.

A scheme has three kinds of parts:

    Rounding   x → what a product sees of x, such as INT8 with one scale per 64 × 1 entries (roundings.py)
    Product    (weights, tokens) → weights @ tokens, made of two roundings (products.py)
    Scheme     the five products, and how δ is computed

Shapes: N tokens, D channels. Weights are (N, N), one row for each row of the result; tokens are (N, D).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from scripts.paper.products import (
    Product,
    over_rounded_sums,
    product_of,
    row_sum,
    scores_of,
    smooth_q_scores,
    smooth_tokens,
    smooth_values,
    softmax_of,
    token_scaled,
    two_level_scores,
)
from scripts.paper.roundings import Rounding, exact, int8, to_dtype, uint8

#: Where δ comes from; see `Scheme.delta`.
DELTAS = ("output", "exact", "exact in dK", "projected")


class Head(NamedTuple):
    """Inputs of one head of causal attention: q, k, v and dO, each (N, D) float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class Result(NamedTuple):
    """Results, each (N, D) float32; dk and dv are this query head's own part."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Scheme:
    """How one attention computes its products. dP = dO·Vᵀ is always exact, as a product of 16-bit inputs.

    Attributes:
        scores: (q, k) → QKᵀ, the same in the forward and the backward.
        output: (P, V) → O.
        dv, dq, dk: (Pᵀ, dO) → dV, (dS, K) → dQ and (dSᵀ, Q) → dK.
        stored: what the backward reads of O.
        smooth_k: subtract the token mean of K before all.
        delta: δ in dS = P ∘ (dP − δ).
            "output": rowsum(dO ∘ O), as in the paper.
            "exact": rowsum(P ∘ dP) of the backward's own P and dP, so that rows of dS sum to 0.
            "exact in dK": dQ uses the first and dK the second. The dQ kernel computes the second anyway, as
            δ + rowsum(dS), and passes it on, so no further product is needed.
            "projected": the same, and dQ −= rowsum(dS) · (P K), which is what the wrong δ put into it. Costs
            one further product, that of `output` with K instead of V.
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


class Forward(NamedTuple):
    """P (N, N) and O (N, D) of a forward pass, float32."""

    p: Tensor
    out: Tensor


@torch.no_grad()
def emulate(head: Head, scheme: Scheme) -> Result:
    """Causal attention and its gradients as `scheme` computes them; the softmax scale is 1/√D."""
    return emulate_backward(head, scheme, emulate_forward(head.q, head.k, head.v, scheme))


@torch.no_grad()
def emulate_forward(q: Tensor, k: Tensor, v: Tensor, scheme: Scheme) -> Forward:
    """q, k, v: (N, D) float32."""
    p = probabilities(q, k, scheme)
    return Forward(p, scheme.output(p, v))


@torch.no_grad()
def emulate_backward(head: Head, scheme: Scheme, forward: Forward) -> Result:
    """The gradients, with δ from the O of the forward, which is passed through."""
    q, k, v, grad_out = head
    p, out = forward
    scale = q.shape[-1] ** -0.5
    k = smoothed(k, scheme)
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


@torch.no_grad()
def probabilities(q: Tensor, k: Tensor, scheme: Scheme) -> Tensor:
    """P (N, N) of queries and keys (N, D)."""
    return softmax_of(scheme.scores(q, smoothed(k, scheme)) * q.shape[-1] ** -0.5)


def smoothed(k: Tensor, scheme: Scheme) -> Tensor:
    return k - k.mean(0) if scheme.smooth_k else k


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
        ValueError: a switch without an emulation.
    """
    if config.add_mean_k_term or config.is_int8("dp") or config.is_int8("s_fwd") != config.is_int8("s_bwd"):
        raise ValueError(
            f"{config} has no emulation; leave add_mean_k_term off, leave dp out of int8_matmuls, and give "
            "both s_fwd and s_bwd or neither"
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
        smooth_k=config.smooths_k,
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
