"""Attention as PyTorch operators, so that torch.compile, autograd and checkpoints know it.

``sagebwd::forward`` returns out and what the backward needs; its registered backward calls
``sagebwd::backward``, which refuses to be differentiated again. Which kernel set runs is an argument, chosen
by :mod:`sagebwd.dispatch` before: neither the operators nor their fakes ask which GPU there is. On a GPU
neither waits for the device.

They are defined by parts of torch.library instead of ``custom_op``, and :func:`attend` takes a shorter way
where nothing is traced. That saves a sixth of the host's time, which decides at short sequences.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sagebwd import reference
from sagebwd._ops import add_op_namespace_prefix, ops
from sagebwd.config import SageConfig, decode
from sagebwd.kernels.layout import (
    Axis,
    ForwardResult,
    block_count,
    empty_result,
    nothing_packed,
    padded_head_dim,
    stand_in,
    whole_axis,
)
from sagebwd.kernels.lse import natural_lse, smoothed_lse
from sagebwd.kernels.on_import import when_imported
from sagebwd.validation import check_backward_mode
from sagebwd.window import Window


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    window_left: int,
    window_right: int,
    scale: float,
    config: str,
    kernels: str,
    pack_for_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a :class:`ForwardResult`: out and what the backward needs.

    Args:
        window_left, window_right: query i sees keys i − left … i + right; −1 is no limit. A causal mask is
            (−1, 0).
        config: settings, from :func:`sagebwd.config.encode`, because operators take no objects.
        kernels: the kernel set, from :func:`sagebwd.dispatch.choose`.
        pack_for_backward: return Q, K and V packed, where ``kernels`` can; :func:`needed_by_backward` says
            what the backward then still needs.
    """
    check_backward_mode(q, k, v)  # for those who call the operator itself
    settings = decode(config)
    options = {"window": _window(q, k, window_left, window_right), "scale": scale, "config": settings}
    if kernels == "reference":
        out, lse, out_residual = reference.forward(q, k, v, cu_seqlens, cu_seqlens_kv, **options)
        out_residual = q.new_empty(0) if out_residual is None else out_residual
        k_mean = reference.k_mean(k, cu_seqlens, cu_seqlens_kv, config=settings)
        return ForwardResult(out, lse, k_mean, out_residual, *nothing_packed(q))
    q_axis, kv_axis = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
    with torch.cuda.device_of(q):  # which may not be the current one
        out, lse, k_mean, *others = _kernel_set(kernels).forward(
            q, k, v, q_axis, kv_axis, pack_for_backward=pack_for_backward, **options
        )
    k_mean = k_mean.view(*k.shape[:2], kv_axis.documents * k_mean.shape[1])
    return ForwardResult(out, lse.view(q.shape[:-1]), k_mean, *others)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    window_left: int,
    window_right: int,
    scale: float,
    config: str,
    kernels: str,
    pack_for_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = decode(config)
    boundaries = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    documents = 1 if boundaries is None else boundaries.shape[0] - 1
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    out_residual = torch.empty_like(q) if settings.compensate_o else q.new_empty(0)
    channels = k.shape[-1] if kernels == "reference" else padded_head_dim(k.shape[-1])
    channels = channels if settings.smooths_k else 0
    k_mean = k.new_empty((*k.shape[:2], documents * channels), dtype=torch.float32)
    packed_q, packed_kv = nothing_packed(q)
    if kernels in ("hopper", "ampere") and pack_for_backward:
        has_v = packs_v(kernels, has_documents=boundaries is not None)
        shapes = _packed_shapes(q, k, documents, settings, packs_v=has_v)
        packed_q, packed_kv = (q.new_empty(shape, dtype=torch.uint8) for shape in shapes)
    return ForwardResult(torch.empty_like(q), lse, k_mean, out_residual, packed_q, packed_kv)


def _backward(
    grad_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    kv_heads: int,
    kv_tokens: int,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    out_residual: Tensor,
    packed_q: Tensor,
    packed_kv: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    window_left: int,
    window_right: int,
    scale: float,
    config: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, laid out as q, k, v.

    ``packed_q`` can replace q, unless dK is in 16 bit; dq is then laid out as ``out``. ``packed_kv`` can
    replace k and, where :func:`packs_v`, v; dk and dv are then laid out token by token. Raises ValueError if
    one is missing.
    """
    settings = decode(config)
    if q is None:
        if not packed_q.numel() or not settings.is_int8("dk"):
            raise ValueError(
                "sagebwd::backward got no q; pass it: only CUDA kernels can do without, with the packed_q of "
                "sagebwd::forward(pack_for_backward=True) and an INT8 dK"
            )
        q = out  # its shape and dtype
    has_v = v is not None or (packed_kv.numel() and packs_v(kernels, has_documents=cu_seqlens is not None))
    if not has_v or (k is None and not packed_kv.numel()):
        raise ValueError(
            "sagebwd::backward got neither k and v nor packed_kv; pass k and v, as sagebwd::forward packs "
            "them only with pack_for_backward=True and CUDA kernels, v for packed documents on Hopper alone"
        )
    k = stand_in(q, kv_heads, kv_tokens) if k is None else k
    v = stand_in(q, kv_heads, kv_tokens) if v is None else v
    options = {"window": _window(q, k, window_left, window_right), "scale": scale, "config": settings}
    if kernels == "reference":
        residual = out_residual if settings.compensate_o else None
        boundaries = (cu_seqlens, cu_seqlens_kv)
        return reference.backward(grad_out, q, k, v, out, lse, residual, *boundaries, **options)
    axes = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
    saved = (out, lse, k_mean, out_residual, packed_q, packed_kv)
    with torch.cuda.device_of(q):
        return _kernel_set(kernels).backward(grad_out, q, k, v, *saved, *axes, **options)


def _fake_backward(
    grad_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    kv_heads: int,
    kv_tokens: int,
    out: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if q is None:
        q = out
    k = stand_in(q, kv_heads, kv_tokens) if k is None else k
    v = stand_in(q, kv_heads, kv_tokens) if v is None else v
    return torch.empty_like(q), empty_result(k), empty_result(v)


# --- The kernel sets ---------------------------------------------------------------------------------------


@functools.cache
def _kernel_set(kernels: str) -> ModuleType:
    """The module ``attention`` of a kernel set, imported at its first use: none needs the others."""
    return _module(f"{kernels}.attention")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def _window(q: Tensor, k: Tensor, left: int, right: int) -> Window:
    """The window without limits that hide nothing, which may be too large for the arithmetic of kernels."""
    return Window(left, right).narrowed(q.shape[-2], k.shape[-2])


def packs_v(kernels: str, *, has_documents: bool) -> bool:
    """Whether ``packed_kv`` holds V: only for packed documents on Hopper. Else kernels read V itself."""
    return kernels == "hopper" and has_documents


def _packed_shapes(
    q: Tensor, k: Tensor, documents: int, config: SageConfig, *, packs_v: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of ``packed_q`` and ``packed_kv``."""
    from sagebwd.kernels.cuda.packing import packed_kv_shape, packed_q_shape

    block_q, block_kv = config.tile(k.shape[-1])
    token_scales, s_16bit = config.operand_scales == "token", not config.is_int8("s_fwd")
    q_blocks, kv_blocks = (
        block_count(x.shape[-2], block, documents) for x, block in ((q, block_q), (k, block_kv))
    )
    return (
        packed_q_shape(q, q_blocks, token_scales, block_q, s_16bit),
        packed_kv_shape(
            k, kv_blocks, token_scales, block_kv, s_16bit, not config.is_int8("dq"), packs_16bit=packs_v
        ),
    )


def _axes(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None, config: SageConfig
) -> tuple[Axis, Axis]:
    block_q, block_kv = config.tile(q.shape[-1])
    if cu_seqlens is None:
        return whole_axis(q.shape[-2], block_q), whole_axis(k.shape[-2], block_kv)
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens
    return Axis.of(q.shape[-2], block_q, cu_seqlens), Axis.of(k.shape[-2], block_kv, cu_seqlens_kv)


# --- Autograd ----------------------------------------------------------------------------------------------


def needed_by_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: tuple[Tensor, ...],
    config: str,
    kernels: str,
    *,
    has_documents: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """q, k, v as the backward needs them beside what the forward returned: None for what that packed."""
    *_, packed_q, packed_kv = output
    if packed_q.numel() and decode(config).is_int8("dk"):
        q = None
    if packed_kv.numel():
        k, v = None, None if packs_v(kernels, has_documents=has_documents) else v
    return q, k, v


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """If the forward packed Q and K, 4 bytes per element are saved instead of 6, 2 of them V itself."""
    q, k, v, *boundaries = inputs[:5]
    ctx.settings = inputs[5:10]  # all but pack_for_backward
    ctx.kv_sizes = k.shape[1:3]
    has_documents = boundaries[0] is not None
    needed = needed_by_backward(q, k, v, output, *ctx.settings[3:], has_documents=has_documents)
    ctx.save_for_backward(*needed, *output, *boundaries)


def _set_up_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_for_backward(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 11
    q, k, v, *saved = ctx.saved_tensors
    gradients = ops.backward.default(grad_out, q, k, v, *ctx.kv_sizes, *saved, *ctx.settings)
    return (*gradients, *(None,) * 8)


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "sage_attention has no second derivative; call backward without create_graph=True, "
        "or use torch.nn.functional.scaled_dot_product_attention"
    )


def _refuse_torch_func() -> None:
    """Raise NotImplementedError under torch.func.grad and its kin: torch's own message has no fix."""
    functorch = torch._C._functorch
    levels = functorch.get_interpreter_stack() or ()
    if any(level.key() == functorch.TransformType.Grad for level in levels):
        raise NotImplementedError(
            "sage_attention has no gradient under functorch transforms (torch.func.grad, vjp, jacrev, …); "
            "call backward or torch.autograd.grad, or use torch.nn.functional.scaled_dot_product_attention"
        )


def _define(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = add_op_namespace_prefix(name)
    torch.library.define(name, torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(name, "default", run)  # on any device, where the reference runs
    torch.library.register_fake(name, fake)


_define("forward", _forward, _fake_forward)
_define("backward", _backward, _fake_backward)
torch.library.register_autograd(
    add_op_namespace_prefix("forward"), _differentiate, setup_context=_set_up_context
)
torch.library.register_autograd(add_op_namespace_prefix("backward"), _refuse)
when_imported("torch.utils.flop_counter", lambda: _module("flops").register())
when_imported("torch.distributed.tensor", lambda: _module("sharding").register())


#: Skips the operators' own layer of autograd, in Python, which has nothing to do where no graph is recorded.
#: Dispatch modes, tensor subclasses and profilers still see the operators.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Attention(torch.autograd.Function):
    """What the autograd of ``sagebwd::forward`` does, with one output and without layers for tracing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with _below_autograd():
            output = ops.forward.default(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # create_graph: the operator refuses
            return _differentiate(ctx, grad_out)
        with _below_autograd():
            return _differentiate(ctx, grad_out)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    window_left: int,
    window_right: int,
    scale: float,
    config: str,
    kernels: str,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention output; differentiable. Other arguments are those of ``sagebwd::forward``.

    With ``return_lse`` also :func:`~sagebwd.kernels.lse.natural_lse`, which has no gradient.
    """
    has_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    is_compiling = torch.compiler.is_compiling()
    is_transformed = torch._C._are_functorch_transforms_active()
    if has_gradient and is_transformed and not is_compiling:
        _refuse_torch_func()
    window = (window_left, window_right)
    packs = has_gradient and type(k) is Tensor  # a DTensor cannot shard what is packed
    inputs = (q, k, v, cu_seqlens, cu_seqlens_kv, *window, scale, config, kernels, packs)
    if return_lse:
        out, lse, k_mean, *_ = ops.forward.default(*inputs)
        return out, natural_lse(q.detach(), lse, k_mean, cu_seqlens, scale=scale, kernels=kernels)
    if is_compiling or is_transformed or not torch.is_grad_enabled():
        return ops.forward.default(*inputs)[0]
    return _Attention.apply(*inputs)


def saved_for_backward(
    q: Tensor,
    k: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    scale: float,
    config: str,
    kernels: str,
) -> ForwardResult:
    """What ``sagebwd::backward`` needs, from ``out`` and the logsumexp of the plain logits alone.

    For operators that save nothing else. The mean of K is computed once more, to the same bits.

    Args:
        lse: (B, H, N_q) fp32, of the logits without smoothing, to base e.
        config: without ``compensate_o``; as all other arguments of ``sagebwd::forward``.
    """
    settings = decode(config)
    if kernels == "reference":
        k_mean = reference.k_mean(k, cu_seqlens, cu_seqlens_kv, config=settings)
    elif settings.smooths_k:
        _, kv_axis = _axes(q, k, cu_seqlens, cu_seqlens_kv, settings)
        with torch.cuda.device_of(q):
            k_mean = _kernel_set(kernels).token_mean(k, kv_axis, settings).view(*k.shape[:2], -1)
    else:
        k_mean = k.new_empty((*k.shape[:2], 0), dtype=torch.float32)
    lse = smoothed_lse(q, lse, k_mean, cu_seqlens, scale=scale, kernels=kernels)
    return ForwardResult(out, lse, k_mean, q.new_empty(0), *nothing_packed(q))
