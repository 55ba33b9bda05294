"""SageBwd in plain PyTorch, on any device: the executable specification that kernels are tested against.

:mod:`sagebwd.reference.algorithm` holds the algorithm. Here are :func:`attention`, which returns every
intermediate, and the passes that ``sage_attention(..., kernels="reference")`` runs. Exact attention in
float64 is :func:`sagebwd.reference.exact.exact_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.interface import AttentionParams, ForwardResult, no_mean, nothing_packed
from sagebwd.kernels.layout import padded_head_dim
from sagebwd.reference import algorithm
from sagebwd.reference.algorithm import SoftmaxGradientTiles
from sagebwd.reference.documents import locate, token_means
from sagebwd.reference.exact import AttentionResult, exact_attention
from sagebwd.validation import check_arguments, check_documents, check_grad_out
from sagebwd.window import Window

__all__ = ["AttentionResult", "attention", "backward", "exact_attention", "forward", "token_mean"]


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
    if q.dim() != 4 or q.shape[-1] != v.shape[-1] or 0 in (*q.shape, *k.shape):
        sizes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"got {sizes}; pass (B, H, N, D) with one head size for all, and no size of zero")
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    window = Window.of(is_causal, window_size)
    params = AttentionParams(window, scale, config, "reference", cu_seqlens, cu_seqlens_kv)
    saved = forward(q, k, v, params)
    if grad_out is None:
        return AttentionResult(saved.out, saved.lse)
    check_grad_out(grad_out, q)
    inputs = (grad_out, q, k, v, saved, params)
    return AttentionResult(saved.out, saved.lse, *_p_dp_ds_delta(*inputs), *backward(*inputs))


def forward(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> ForwardResult:
    """As :mod:`sagebwd.interface` has it; packs nothing. Tokens of no document get out 0 and lse −inf.

    Reads ``cu_seqlens``, which waits for the device. Raises ValueError for boundaries out of order or range.
    """
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    residual = torch.zeros_like(q) if params.config.compensate_o else q.new_empty(0)
    with torch.autocast(q.device.type, enabled=False):
        for document in locate(q, k, *params.boundaries):
            rows, own = document.queries, algorithm.forward(*document.take(q, k, v), params)
            out[..., rows, :], lse[..., rows] = own.out, own.lse
            if own.residual is not None:
                residual[..., rows, :] = own.residual
    return ForwardResult(out, lse, token_mean(k, params), residual, *nothing_packed(q))


def token_mean(k: Tensor, params: AttentionParams) -> Tensor:
    """The ``k_mean`` of :func:`forward`."""
    if not params.config.smooths_k:
        return no_mean(k)
    means = token_means(k, params.kv_boundaries)
    return pad(means, (0, padded_head_dim(k.shape[-1]) - k.shape[-1])).flatten(-2)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: ForwardResult,
    params: AttentionParams,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k, v, from the results of :func:`forward`; 0 for tokens of no document."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        for document in locate(q, k, *params.boundaries):
            rows, columns, _ = document
            inputs = document.take_for_backward(grad_out, q, k, v, saved)
            own = None if grad_lse is None else grad_lse[..., rows]
            gradients = algorithm.backward(*inputs, params, own)
            dq[..., rows, :], dk[..., columns, :], dv[..., columns, :] = gradients
    return dq, dk, dv


def _p_dp_ds_delta(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: ForwardResult, params: AttentionParams
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, dP and dS (B, H, N_q, N_kv), and δ (B, H, N_q), of all documents put together."""
    lse = saved.lse
    p, dp, ds = lse.new_zeros((3, *lse.shape, k.shape[-2]))
    delta = torch.zeros_like(lse)
    with torch.autocast(q.device.type, enabled=False):
        for document in locate(q, k, *params.boundaries):
            rows, columns, _ = document
            tiles = SoftmaxGradientTiles(*document.take_for_backward(grad_out, q, k, v, saved), params)
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
