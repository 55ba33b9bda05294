"""SageBwd in plain PyTorch, on any device: the executable specification that kernels are tested against.

:mod:`sagebwd.reference.algorithm` holds the algorithm. Here are :func:`attention`, which returns every
intermediate, and the passes that ``sage_attention(..., kernels="reference")`` runs. Exact attention in
float64 is :func:`sagebwd.reference.exact.exact_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.reference import documents
from sagebwd.reference.algorithm import SoftmaxGradientTiles
from sagebwd.reference.documents import Document
from sagebwd.reference.exact import exact_attention
from sagebwd.reference.result import AttentionResult
from sagebwd.validation import (
    check_arguments,
    check_documents,
    check_grad_out,
    check_not_empty,
    check_window,
)
from sagebwd.window import Window

__all__ = ["AttentionResult", "attention", "backward", "exact_attention", "forward", "k_mean"]


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
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
) -> AttentionResult:
    """Forward and, with ``grad_out``, backward, with every intermediate: for tests and measurements.

    Outside autograd; ignores autocast; quadratic in memory when ``grad_out`` is given.

    Args:
        q: (B, H, N_q, D) fp16, bf16 or fp32, any strides.
        k, v: (B, H_kv, N_kv, D) as q.
        grad_out: the gradient of the output, shaped and typed as q.
        is_causal, scale, enable_gqa: as in torch's ``scaled_dot_product_attention``.
        window_size, cu_seqlens, cu_seqlens_kv: as of :func:`sagebwd.sage_attention`.
        config: what is quantized, and how.

    Returns:
        Everything that was computed. p, dp and ds are those of the backward before they are quantized for
        the products that take them; lse is that of the logits with the smoothed K.

    Raises:
        ValueError: the arguments do not fit together; the message says how to fix it.
    """
    check_arguments(q, k, v, scale=scale, enable_gqa=enable_gqa, config=config)
    check_not_empty(q, k)
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    check_window(window_size)
    boundaries = (cu_seqlens, cu_seqlens_kv)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    settings = {"window": Window.of(is_causal, window_size), "scale": scale, "config": config}
    out, lse, out_residual = forward(q, k, v, *boundaries, **settings)
    if grad_out is None:
        return AttentionResult(out, lse)
    check_grad_out(grad_out, q)
    saved = (grad_out, q, k, v, out, lse, out_residual)
    with torch.autocast(q.device.type, enabled=False):
        intermediates = _p_dp_ds_delta(*saved, documents.locate(q, k, *boundaries), **settings)
    return AttentionResult(out, lse, *intermediates, *backward(*saved, *boundaries, **settings))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse (B, H, N_q) fp32 and the residual of out, or None: see :mod:`sagebwd.reference.algorithm`.

    Reads ``cu_seqlens``, which waits for the device. Raises ValueError for boundaries out of order or range.
    """
    packed = documents.locate(q, k, cu_seqlens, cu_seqlens_kv)
    with torch.autocast(q.device.type, enabled=False):
        return documents.forward(q, k, v, packed, window=window, scale=scale, config=config)


def k_mean(
    k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None, *, config: SageConfig
) -> Tensor:
    """What :func:`forward` subtracted from K: (B, H_kv, documents · D) fp32, no columns without smoothing."""
    if not config.smooths_k:
        return k.new_empty((*k.shape[:2], 0), dtype=torch.float32)
    boundaries = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    return documents.token_means(k, boundaries).flatten(-2)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_residual: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k, v, from the results of :func:`forward`."""
    saved = (grad_out, q, k, v, out, lse, out_residual)
    packed = documents.locate(q, k, cu_seqlens, cu_seqlens_kv)
    with torch.autocast(q.device.type, enabled=False):
        return documents.backward(*saved, packed, window=window, scale=scale, config=config)


def _p_dp_ds_delta(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_residual: Tensor | None,
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
            None if out_residual is None else documents.cut(out_residual, rows),
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
