"""SageBwd in plain PyTorch, on any device: the executable specification that kernels are tested against.

:mod:`sagebwd.algorithm` holds the algorithm itself; here are the two ways to call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sagebwd.algorithm import SoftmaxGradientTiles, backward, forward
from sagebwd.arguments import cast_to_autocast_dtype, check_arguments, check_grad_out
from sagebwd.config import DEFAULT_CONFIG, SageConfig


@dataclass(frozen=True)
class AttentionResult:
    """What :func:`attention` computed; everything after ``lse`` is None without ``grad_out``.

    Attributes:
        out: (B, H, N_q, D), of the dtype of q.
        lse: (B, H, N_q) fp32, the logsumexp of the logits with the smoothed K. That of the plain logits is
            lse + scale · q·μ_K.
        p, dp, ds: (B, H, N_q, N_kv) fp32, P, dP and dS of the backward before they are quantized for the
            products that take them; zero where the causal mask hides a key.
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
    config: SageConfig = DEFAULT_CONFIG,
) -> AttentionResult:
    """Forward and, with ``grad_out``, backward, with every intermediate: for tests and measurements.

    Outside autograd, deaf to autocast, and quadratic in memory when ``grad_out`` is given.

    Args:
        q: (B, H, N_q, D) fp16, bf16 or fp32, any strides.
        k, v: (B, H_kv, N_kv, D) as q.
        grad_out: the gradient of the output, shaped and typed as q.
        is_causal, scale, enable_gqa: as in torch's ``scaled_dot_product_attention``.
        config: what is quantized, and how.

    Raises:
        ValueError: the arguments do not fit together; the message says how to mend it.
    """
    check_arguments(q, k, v, scale=scale, enable_gqa=enable_gqa, config=config)
    settings = {"is_causal": is_causal, "scale": _resolve_scale(scale, q), "config": config}
    with torch.autocast(q.device.type, enabled=False):
        out, lse = forward(q, k, v, **settings)
        if grad_out is None:
            return AttentionResult(out, lse)
        check_grad_out(grad_out, q)
        tiles = SoftmaxGradientTiles(grad_out, q, k, v, out, lse, **settings)
        dq, dk, dv = backward(grad_out, q, k, v, out, lse, **settings)
        return AttentionResult(out, lse, *_whole_p_dp_ds(tiles, is_causal), tiles.delta, dq, dk, dv)


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
    config: SageConfig = DEFAULT_CONFIG,
) -> Tensor:
    """:func:`sagebwd.sage_attention` on any device: same arguments, errors and gradients, but no kernels."""
    check_arguments(
        q, k, v, scale=scale, enable_gqa=enable_gqa, config=config, attn_mask=attn_mask, dropout_p=dropout_p
    )
    q, k, v = cast_to_autocast_dtype(q, k, v)
    return _ReferenceAttention.apply(q, k, v, is_causal, _resolve_scale(scale, q), config)


class _ReferenceAttention(torch.autograd.Function):
    """Autograd over the reference; keeps q, k, v, out and lse for the backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, config: SageConfig
    ) -> Tensor:
        ctx.settings = {"is_causal": is_causal, "scale": scale, "config": config}
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward(q, k, v, **ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse)
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
            gradients = backward(grad_out, *ctx.saved_tensors, **ctx.settings)
        return (*gradients, None, None, None)


def _resolve_scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _whole_p_dp_ds(tiles: SoftmaxGradientTiles, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Put the tiles of P, dP and dS together, (B, H, N_q, N_kv) each."""
    scores = tiles.scores
    p, dp, ds = tiles.delta.new_zeros((3, *tiles.delta.shape, scores.n_kv))
    for i in range(len(scores.q_blocks)):
        for j in scores.visible_columns(i):
            at = (..., scores.rows(i), scores.columns(j))
            p[at], dp[at], ds[at] = tiles.tile(i, j)
    return p, dp.tril_() if is_causal else dp, ds
