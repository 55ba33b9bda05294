"""The kernels as PyTorch operators: torch.compile, autograd and memory formats know them.

``sagebwd::forward`` returns out, the logsumexp and the mean of K; its registered backward calls
``sagebwd::backward``, which refuses to be differentiated again. Neither waits for the device.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sagebwd.arguments import check_backward_mode
from sagebwd.config import SageConfig
from sagebwd.kernels.backward import backward
from sagebwd.kernels.forward import forward
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.operands import Axis, padded_head_dim
from sagebwd.kernels.support import on_device_of

FIELDS = tuple(field.name for field in fields(SageConfig))


def encode(config: SageConfig) -> str:
    """The settings as text, written so that torch.compile can trace it."""
    return "{" + ", ".join([f"'{name}': {getattr(config, name)!r}" for name in FIELDS]) + "}"


@lru_cache
def decode(text: str) -> SageConfig:
    """The settings that :func:`encode` wrote."""
    return SageConfig(**ast.literal_eval(text))


@torch.library.custom_op("sagebwd::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, as q; lse (B, H, N_q) fp32 to base 2, of the logits with the smoothed K; the mean of K.

    The mean over the tokens of each document is (B, H_kv, documents · D_PAD) fp32; empty without smoothing.
    ``config`` comes from :func:`encode`, because operators take no objects.
    """
    check_backward_mode(q, k, v)  # for those who call the operator itself
    settings = decode(config)
    axes = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
    with on_device_of(q, settings):
        run = hopper.forward if hopper.is_used(q, settings) else forward
        out, lse, k_mean = run(q, k, v, *axes, is_causal=is_causal, scale=scale, config=settings)
    return out, lse.view(q.shape[:-1]), k_mean.view(*k.shape[:2], axes[1].documents * k_mean.shape[1])


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    boundaries = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    documents = 1 if boundaries is None else boundaries.shape[0] - 1
    numbers = documents * padded_head_dim(k.shape[-1]) if decode(config).smooth_k else 0
    k_mean = k.new_empty((*k.shape[:2], numbers), dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return torch.empty_like(q), lse, k_mean


@torch.library.custom_op("sagebwd::backward", mutates_args=())
def backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, as q, k, v."""
    settings = decode(config)
    axes = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
    with on_device_of(q, settings):
        run = hopper.backward if hopper.is_used(q, settings) else backward
        return run(
            grad_out, q, k, v, out, lse, k_mean, *axes, is_causal=is_causal, scale=scale, config=settings
        )


@backward_op.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _axes(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None, config: SageConfig
) -> tuple[Axis, Axis]:
    block_q, block_kv = config.tile(q.shape[-1])
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens
    return Axis.of(q.shape[-2], block_q, cu_seqlens), Axis.of(k.shape[-2], block_kv, cu_seqlens_kv)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_kv, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, cu_seqlens_kv)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    gradients = torch.ops.sagebwd.backward(grad_out, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, None, None, None, None)


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "sage_attention has no second derivative; call backward without create_graph=True, "
        "or use torch.nn.functional.scaled_dot_product_attention"
    )


forward_op.register_autograd(_differentiate, setup_context=_keep_for_backward)
backward_op.register_autograd(_refuse)
