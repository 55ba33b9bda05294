"""The kernels as PyTorch operators: torch.compile, autograd and memory formats know them.

``sagebwd::forward`` returns out and what the backward needs besides; its registered backward calls
``sagebwd::backward``, which refuses to be differentiated again. Neither waits for the device.

They are defined by parts of torch.library instead of ``custom_op``, and :func:`attend` takes a shorter way
where nothing is traced. That saves a sixth of the host's time, which decides at short sequences.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.dispatch import on_device_of
from sagebwd.kernels.cuda.packing import packed_kv_shape
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.layout import Axis, block_count, empty_result, padded_head_dim, stand_in
from sagebwd.kernels.triton.backward import backward
from sagebwd.kernels.triton.forward import forward
from sagebwd.validation import check_backward_mode

FIELDS = tuple(field.name for field in fields(SageConfig))


def encode(config: SageConfig) -> str:
    """The settings as text, written so that torch.compile can trace it."""
    return "{" + ", ".join([f"'{name}': {getattr(config, name)!r}" for name in FIELDS]) + "}"


@lru_cache
def decode(text: str) -> SageConfig:
    """The settings that :func:`encode` wrote."""
    return SageConfig(**ast.literal_eval(text))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: str,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the backward needs, first of all out.

    out: as q.
    lse: (B, H, N_q) fp32 to base 2, of the logits with the smoothed K.
    k_mean: over the tokens of each document, (B, H_kv, documents · D_PAD) fp32; empty without smoothing.
    rest: what rounding took from out, as q; empty without ``compensate_o``.
    kept: with ``keep``, what Hopper's kernels make of K and V for the backward, (blocks, bytes) uint8, which
        then needs neither; else, and for the portable kernels, empty.

    ``config`` comes from :func:`encode`, because operators take no objects.
    """
    check_backward_mode(q, k, v)  # for those who call the operator itself
    settings = decode(config)
    axes = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
    with on_device_of(q, settings):
        options = {"is_causal": is_causal, "scale": scale, "config": settings}
        if hopper.is_used(q, settings):
            out, lse, k_mean, rest, kept = hopper.forward(
                q, k, v, *axes, pack_kv_for_backward=keep, **options
            )
        else:
            out, lse, k_mean, rest = forward(q, k, v, *axes, **options)
            kept = q.new_empty(0, dtype=torch.uint8)
    k_mean = k_mean.view(*k.shape[:2], axes[1].documents * k_mean.shape[1])
    return out, lse.view(q.shape[:-1]), k_mean, rest, kept


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: str,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = decode(config)
    boundaries = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    documents = 1 if boundaries is None else boundaries.shape[0] - 1
    numbers = documents * padded_head_dim(k.shape[-1]) if settings.smooth_k else 0
    k_mean = k.new_empty((*k.shape[:2], numbers), dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    rest = torch.empty_like(q) if settings.compensate_o else q.new_empty(0)
    kept: tuple[int, ...] = (0,)
    if keep and hopper.is_used(q, settings):
        blocks = block_count(k.shape[-2], settings.tile(k.shape[-1])[1], documents)
        kept = packed_kv_shape(k, blocks)
    return torch.empty_like(q), lse, k_mean, rest, q.new_empty(kept, dtype=torch.uint8)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_heads: int,
    kv_tokens: int,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    rest: Tensor,
    kept: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, as q, k, v; without k and v, which ``kept`` is there for, token by token.

    Raises ValueError if there are neither k and v nor ``kept``.
    """
    settings = decode(config)
    if k is None or v is None:
        if not kept.numel():
            raise ValueError(
                "sagebwd::backward got neither k and v nor anything kept of them; hand over k and v, "
                "as sagebwd::forward keeps something only with keep=True and Hopper's kernels"
            )
        k = v = stand_in(q, kv_heads, kv_tokens)
    axes = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
    saved = (q, k, v, out, lse, k_mean, rest)
    options = {"is_causal": is_causal, "scale": scale, "config": settings}
    with on_device_of(q, settings):
        if hopper.is_used(q, settings):
            return hopper.backward(grad_out, *saved, kept, *axes, **options)
        return backward(grad_out, *saved, *axes, **options)


def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_heads: int,
    kv_tokens: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if k is None or v is None:
        k = v = stand_in(q, kv_heads, kv_tokens)
    return torch.empty_like(q), empty_result(k), empty_result(v)


def _axes(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None, config: SageConfig
) -> tuple[Axis, Axis]:
    block_q, block_kv = config.tile(q.shape[-1])
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens
    return Axis.of(q.shape[-2], block_q, cu_seqlens), Axis.of(k.shape[-2], block_kv, cu_seqlens_kv)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What the backward needs: not K and V where something made of them is kept, 3 bytes a number for 4."""
    q, k, v, *boundaries = inputs[:5]
    *_, kept = output
    ctx.settings = inputs[5:8]  # without ``keep``
    ctx.kv_sizes = k.shape[1:3]
    if kept.numel():
        k = v = None
    ctx.save_for_backward(q, k, v, *output, *boundaries)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 9
    q, k, v, *saved = ctx.saved_tensors
    gradients = torch.ops.sagebwd.backward.default(grad_out, q, k, v, *ctx.kv_sizes, *saved, *ctx.settings)
    return (*gradients, *(None,) * 6)


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "sage_attention has no second derivative; call backward without create_graph=True, "
        "or use torch.nn.functional.scaled_dot_product_attention"
    )


def _define(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.define(name, torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(name, ("cpu", "cuda"), run)
    torch.library.register_fake(name, fake)


_define("sagebwd::forward", _forward, _fake_forward)
_define("sagebwd::backward", _backward, _fake_backward)
torch.library.register_autograd("sagebwd::forward", _differentiate, setup_context=_keep_for_backward)
torch.library.register_autograd("sagebwd::backward", _refuse)


class _Attention(torch.autograd.Function):
    """What the autograd of ``sagebwd::forward`` does, with one output and without layers for tracing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = torch.ops.sagebwd.forward.default(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad_out)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    scale: float,
    config: SageConfig,
) -> Tensor:
    """The attention output; differentiable."""
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    inputs = (q, k, v, cu_seqlens, cu_seqlens_kv, is_causal, scale, encode(config), keep)
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if is_traced or not torch.is_grad_enabled():
        return torch.ops.sagebwd.forward.default(*inputs)[0]
    return _Attention.apply(*inputs)
