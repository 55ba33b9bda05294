"""SageBwd in plain PyTorch, on any device: the executable specification that kernels are tested against.

:mod:`sagebwd.reference.algorithm` holds the algorithm itself; here are the two ways to call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.reference import documents
from sagebwd.reference.algorithm import SoftmaxGradientTiles
from sagebwd.reference.documents import Document
from sagebwd.validation import cast_to_autocast_dtype, check_arguments, check_documents, check_grad_out


@dataclass(frozen=True)
class AttentionResult:
    """What :func:`attention` computed; everything after ``lse`` is None without ``grad_out``.

    Attributes:
        out: (B, H, N_q, D), of the dtype of q.
        lse: (B, H, N_q) fp32, the logsumexp of the logits with the smoothed K. That of the plain logits is
            lse + scale · q·μ_K. −inf for a query that sees no key.
        p, dp, ds: (B, H, N_q, N_kv) fp32, P, dP and dS of the backward before they are quantized for the
            products that take them; zero where the causal mask hides a key, and between documents.
        delta: (B, H, N_q) fp32.
        dq, dk, dv: shaped and typed as q, k, v.
    """

    out: Tensor
    lse: Tensor
    p: Tensor | None = None
    dp: Tensor | None = None
    ds: Tensor | None = None
    delta: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
) -> AttentionResult:
    """Forward and, with ``grad_out``, backward, with every intermediate: for tests and measurements.

    Outside autograd, deaf to autocast, and quadratic in memory when ``grad_out`` is given.

    Args:
        q: (B, H, N_q, D) fp16, bf16 or fp32, any strides.
        k, v: (B, H_kv, N_kv, D) as q.
        grad_out: the gradient of the output, shaped and typed as q.
        is_causal, scale, enable_gqa: as in torch's ``scaled_dot_product_attention``.
        cu_seqlens, cu_seqlens_kv: as of :func:`sage_attention`.
        config: what is quantized, and how.

    Raises:
        ValueError: the arguments do not fit together; the message says how to mend it.
    """
    check_arguments(q, k, v, scale=scale, enable_gqa=enable_gqa, config=config)
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    packed = documents.locate(q, k, cu_seqlens, cu_seqlens_kv)
    settings = {"is_causal": is_causal, "scale": _resolve_scale(scale, q), "config": config}
    with torch.autocast(q.device.type, enabled=False):
        out, lse, rest = documents.forward(q, k, v, packed, **settings)
        if grad_out is None:
            return AttentionResult(out, lse)
        check_grad_out(grad_out, q)
        inside = _p_dp_ds_delta(grad_out, q, k, v, out, lse, rest, packed, **settings)
        gradients = documents.backward(grad_out, q, k, v, out, lse, rest, packed, **settings)
        return AttentionResult(out, lse, *inside, *gradients)


@torch.compiler.disable(reason="tracing would unroll every tile, and fusing would change the rounding")
def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
) -> Tensor:
    """:func:`sagebwd.sage_attention` on any device: same arguments, errors and gradients, but no kernels.

    ``cu_seqlens`` (documents + 1,), int32 or int64 on the device of q, makes of a batch of 1 a pack of
    documents: number n holds tokens cu_seqlens[n] … cu_seqlens[n + 1] − 1 of q and, by ``cu_seqlens_kv``, of
    k and v (the same by default). The result is that of a call on each document alone. Out and gradients
    are 0 for tokens of no document, and of one that has no queries or no keys.
    """
    check_arguments(
        q, k, v, scale=scale, enable_gqa=enable_gqa, config=config, attn_mask=attn_mask, dropout_p=dropout_p
    )
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    q, k, v = cast_to_autocast_dtype(q, k, v)
    packed = documents.locate(q, k, cu_seqlens, cu_seqlens_kv)
    return _ReferenceAttention.apply(q, k, v, packed, is_causal, _resolve_scale(scale, q), config)


class _ReferenceAttention(torch.autograd.Function):
    """Autograd over the reference; keeps its inputs, out, lse and the rest of out for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: list[Document],
        is_causal: bool,
        scale: float,
        config: SageConfig,
    ) -> Tensor:
        ctx.settings = {"documents": packed, "is_causal": is_causal, "scale": scale, "config": config}
        with torch.autocast(q.device.type, enabled=False):
            out, lse, rest = documents.forward(q, k, v, **ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse, rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are enabled here only with create_graph=True; going on would lose terms in silence.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "sage_attention has no second derivative; call backward without create_graph=True, "
                "or use torch.nn.functional.scaled_dot_product_attention"
            )
        with torch.autocast(grad_out.device.type, enabled=False):
            gradients = documents.backward(grad_out, *ctx.saved_tensors, **ctx.settings)
        return (*gradients, None, None, None, None)


def _resolve_scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _p_dp_ds_delta(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    packed: list[Document],
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, dP and dS (B, H, N_q, N_kv), and δ (B, H, N_q), of all documents put together."""
    p, dp, ds = lse.new_zeros((3, *lse.shape, k.shape[-2]))
    delta = torch.zeros_like(lse)
    for document in packed:
        rows, columns = document
        tiles = SoftmaxGradientTiles(
            documents.cut(grad_out, rows),
            *document.take(q, k, v),
            documents.cut(out, rows),
            lse[..., rows],
            None if rest is None else documents.cut(rest, rows),
            **settings,
        )
        delta[..., rows] = tiles.delta
        _fill(tiles, *(x[..., rows, columns] for x in (p, dp, ds)))
    return p, dp, ds, delta


def _fill(tiles: SoftmaxGradientTiles, p: Tensor, dp: Tensor, ds: Tensor) -> None:
    """Put the tiles of P, dP and dS into (B, H, rows, columns) tensors of zeros."""
    scores = tiles.scores
    for i in range(len(scores.q_blocks)):
        for j in scores.visible_columns(i):
            at = (..., scores.rows(i), scores.columns(j))
            p[at], dp[at], ds[at] = tiles.tile(i, j)
            dp[at].masked_fill_(~scores.mask(i, j), 0.0)
