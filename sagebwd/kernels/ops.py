"""Attention as PyTorch operators, so that torch.compile, autograd and checkpoints know it.

``sagebwd::forward`` returns out and what the backward needs; its registered backward calls
``sagebwd::backward``, which refuses to be differentiated again. Which kernel set runs is an argument, chosen
by :mod:`sagebwd.dispatch` before: neither the operators nor their fakes ask which GPU there is. On a GPU
neither waits for the device.

Where nobody can tell the difference, :func:`attend` calls the kernel set without them: at short sequences the
host's time decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sagebwd._ops import add_op_namespace_prefix, ops
from sagebwd.interface import PARAMETERS, AttentionParams, ForwardResult, kernel_set, nothing_packed
from sagebwd.kernels.layout import (
    block_count,
    empty_result,
    is_virtual,
    packed_head_dim,
    padded_head_dim,
    stand_in,
)
from sagebwd.kernels.lse import add_sinks, finish_gradients, log_of_base, natural_lse, with_sinks
from sagebwd.kernels.on_import import when_imported
from sagebwd.validation import check_backward_mode

if TYPE_CHECKING:
    from sagebwd.kernels.cuda.plan import KeptResult

# --- The operators -----------------------------------------------------------------------------------------

#: The arguments of both that make an :class:`AttentionParams`.
_PARAMS = (
    "Tensor? cu_seqlens, Tensor? cu_seqlens_kv, SymInt window_left, SymInt window_right, float scale, "
    "str config, str kernels"
)
#: The fields of a :class:`ForwardResult`.
_RESULT = "Tensor out, Tensor lse, Tensor k_mean, Tensor out_residual, Tensor packed_q, Tensor packed_kv"
FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, {_PARAMS}, bool pack_for_backward=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    f"(Tensor grad_out, Tensor? q, Tensor? k, Tensor? v, SymInt kv_heads, SymInt kv_tokens, {_RESULT}, "
    f"{_PARAMS}, Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor)"
)


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> ForwardResult:
    """Out and what the backward needs; ``needed_by_backward`` of params tells what it needs of q, k and v."""
    check_backward_mode(q, k, v)  # for those who call the operator itself
    params = _narrowed(AttentionParams.unflatten(*arguments), q.shape[-2], k.shape[-2])
    return _on_device_of(q, kernel_set(params.kernels).forward, q, k, v, params)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> ForwardResult:
    params = AttentionParams.unflatten(*arguments)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    out_residual = empty_result(q, params) if params.config.compensate_o else q.new_empty(0)
    channels = (packed_head_dim if params.packs else padded_head_dim)(k.shape[-1])
    columns = params.documents * channels if params.config.smooths_k else 0
    k_mean = k.new_empty((*k.shape[:2], columns), dtype=torch.float32)
    packed = nothing_packed(q)
    if params.pack_for_backward and params.packs:
        packed = (q.new_empty(shape, dtype=torch.uint8) for shape in _packed_shapes(q, k, params))
    return ForwardResult(empty_result(q, params), lse, k_mean, out_residual, *packed)


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
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, laid out as q, k, v.

    ``packed_q`` can replace q, unless dK is in 16 bit; dq is then laid out as ``out``. ``packed_kv`` can
    replace k, unless dQ is in 16 bit, and, if it holds V, v; dk and dv are then laid out token by
    token. Raises ValueError if one is missing.

    The last of ``arguments`` may be ``grad_lse``, the gradient of ``lse``.
    """
    arguments, grad_lse = arguments[:PARAMETERS], (*arguments, None)[PARAMETERS]
    params = AttentionParams.unflatten(*arguments)
    has_q = q is not None or (packed_q.numel() and params.config.is_int8("dk"))
    has_k = k is not None or (packed_kv.numel() and params.config.is_int8("dq"))
    has_v = v is not None or (packed_kv.numel() and params.packs_v)
    if not (has_q and has_k and has_v):
        raise ValueError(
            "sagebwd::backward got no q, k or v, and not what replaces it; pass q, k and v, or what "
            "sagebwd::forward(pack_for_backward=True) of CUDA kernels returned"
        )
    tensors = (out, lse, k_mean, out_residual, packed_q, packed_kv, q, k, v, *params.boundaries)
    return _run_backward(_Saved(params, (kv_heads, kv_tokens), tensors), grad_out, grad_lse)


def _run_backward(saved: _Saved | KeptResult, grad_out: Tensor, grad_lse: Tensor | None) -> Sequence[Tensor]:
    """dq, dk, dv. ``grad_lse`` is that of the lse in ``saved``."""
    if grad_lse is not None:  # to base e, as kernel sets take it
        grad_lse = (grad_lse / log_of_base(saved.params)).contiguous()
    return _on_device_of(grad_out, saved.gradients, grad_out, grad_lse)


def _on_device_of(x: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, where the device of x, which may not be the current one, is."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return function(*arguments)
    with torch.cuda.device_of(x):
        return function(*arguments)


def _fake_backward(
    grad_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    kv_heads: int,
    kv_tokens: int,
    out: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    params = AttentionParams.unflatten(*others[5 : 5 + PARAMETERS])
    dq, dk, dv = (empty_result(x, params) for x in _with_stand_ins(q, k, v, kv_heads, kv_tokens, out))
    return dq, dk, dv


def _with_stand_ins(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, kv_heads: int, kv_tokens: int, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, or what has their shapes and dtypes."""
    q = out if q is None else q
    k = stand_in(q, kv_heads, kv_tokens) if k is None else k
    return q, k, stand_in(q, kv_heads, kv_tokens) if v is None else v


def _narrowed(params: AttentionParams, n_q: int, n_kv: int) -> AttentionParams:
    """Without limits of the window that hide nothing, which may be too large for the kernels' arithmetic."""
    return params._replace(window=params.window.narrowed(n_q, n_kv))


# --- What the backward needs -------------------------------------------------------------------------------


def _packed_shapes(q: Tensor, k: Tensor, params: AttentionParams) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of ``packed_q`` and ``packed_kv``."""
    from sagebwd.kernels.cuda.packing import PackedLayout

    layout = PackedLayout.of(params.config, k.shape[-1], packs_16bit=params.packs_v)
    q_blocks, kv_blocks = (
        block_count(x.shape[-2], block, params.documents)
        for x, block in zip((q, k), layout.tile, strict=True)
    )
    return layout.q_shape(q, q_blocks), layout.kv_shape(k, kv_blocks)


def token_mean(k: Tensor, params: AttentionParams) -> Tensor:
    """``ForwardResult.k_mean`` alone."""
    return _on_device_of(k, kernel_set(params.kernels).token_mean, k, params)


def load_ahead(q: Tensor, params: AttentionParams) -> None:
    """Begin to compile the kernels of a forward and its backward for the GPU, dtype and head size of q.

    Triton compiles its kernels when they are launched.
    """
    if not params.packs:
        return
    from sagebwd.kernels.cuda import plan

    has_documents = params.cu_seqlens is not None
    known = (q.device, q.dtype, q.shape[-1], params.with_documents(None, None), has_documents)
    _on_device_of(q, plan.load_ahead, *known)


# --- Autograd ----------------------------------------------------------------------------------------------


class _Saved:
    """What the backward needs, as a KeptResult has it, in tensors of their own."""

    def __init__(self, params: AttentionParams, kv_sizes: Sequence[int], tensors: Sequence[Any]) -> None:
        self.params, self.kv_sizes, self.tensors, self.out = params, kv_sizes, tensors, tensors[0]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, result: Sequence[Tensor], params: AttentionParams) -> _Saved:
        tensors = (*result, *params.needed_by_backward(q, k, v), *params.boundaries)
        return cls(params.with_documents(None, None), k.shape[1:3], tensors)

    @property
    def restore(self) -> Callable[[Sequence[Tensor | None]], _Saved]:
        """Makes the same of these tensors; holds none of them."""
        return functools.partial(_Saved, self.params, self.kv_sizes)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self.tensors)

    def gradients(self, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the kernels."""
        result, qkv, params = _parts(self)
        qkv = _with_stand_ins(*qkv, *self.kv_sizes, self.out)
        params = _narrowed(params, self.out.shape[2], self.kv_sizes[1])
        return kernel_set(params.kernels).backward(grad_out, *qkv, result, params, grad_lse)


def _parts(saved: _Saved | KeptResult) -> tuple[ForwardResult, Sequence[Any], AttentionParams]:
    """The forward's result, q, k, v, and the settings with boundaries."""
    *result, q, k, v, cu_seqlens, cu_seqlens_kv = saved
    return ForwardResult(*result), (q, k, v), saved.params.with_documents(cu_seqlens, cu_seqlens_kv)


def _save_for_backward(ctx: Any, saved: _Saved | KeptResult, *others: Tensor | None) -> None:
    """Checkpoints let what is saved be read once."""
    ctx.restore = saved.restore
    ctx.save_for_backward(*others, *saved.tensors)
    ctx.set_materialize_grads(False)


def _set_up_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *arguments = inputs
    _save_for_backward(ctx, _Saved.of(q, k, v, output, AttentionParams.unflatten(*arguments)))
    ctx.mark_non_differentiable(*output[2:])


def _gradients(
    saved: _Saved | KeptResult, grad_out: Tensor | None, grad_lse: Tensor | None = None
) -> Sequence[Tensor]:
    """dq, dk, dv; with create_graph the operator refuses to give more."""
    grad_out = torch.zeros_like(saved.out) if grad_out is None else grad_out
    own, others = ((), saved.tensors) if isinstance(saved, _Saved) else (saved.tensors, ())
    if not torch.is_grad_enabled() and not _is_watched(grad_out, grad_lse, *others, own=own):
        return _run_backward(saved, grad_out, grad_lse)
    result, qkv, params = _parts(saved)
    return ops.backward.default(grad_out, *qkv, *saved.kv_sizes, *result, *params.flatten(), grad_lse)


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    is_unused = grad_out is None and grad_lse is None
    gradients = (None,) * 3 if is_unused else _gradients(ctx.restore(ctx.saved_tensors), grad_out, grad_lse)
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


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = add_op_namespace_prefix(name)
    torch.library.define(name, schema)
    torch.library.impl(name, "default", run)  # on any device, where the reference runs
    torch.library.register_fake(name, fake)


_define("forward", FORWARD, _forward, _fake_forward)
_define("backward", BACKWARD, _backward, _fake_backward)
torch.library.register_autograd(
    add_op_namespace_prefix("forward"), _differentiate, setup_context=_set_up_context
)
torch.library.register_autograd(add_op_namespace_prefix("backward"), _refuse)
when_imported("torch.distributed.tensor", lambda: import_module(".sharding", __package__).register())


#: Tensors that stand for themselves.
PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None)}


def _is_watched(*tensors: Tensor | None, own: Sequence[Tensor] = ()) -> bool:
    """Whether someone would miss the operators: modes, tensor subclasses, tracers, profilers.

    Args:
        own: tensors that were looked at before; only a hook that saves tensors can have changed their types.
    """
    return (
        not PLAIN_TYPES.issuperset(map(type, (*tensors, *own)))
        or tensors[0].is_meta
        or any(map(is_virtual, tensors))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
    )


class _Attention(torch.autograd.Function):
    """The autograd of ``sagebwd::forward``, of lse and of sinks in one, without layers for tracing."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        params: AttentionParams,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        saved, lse = _forward_with_lse(q, k, v, sinks, params, with_lse)
        _save_for_backward(ctx, saved, lse, sinks)
        return saved.out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        lse, sinks, *tensors = ctx.saved_tensors
        saved, dsinks = ctx.restore(tensors), None
        if grad_lse is None and sinks is None:
            dq, dk, dv = _gradients(saved, grad_out)
        else:
            needs = any(ctx.needs_input_grad[:3])
            dq, dk, dv, dsinks = _gradients_with_lse(saved, grad_out, grad_lse, lse, sinks, needs)
        return dq, dk, dv, dsinks, None, None


#: ``_Attention.apply`` without its search for tensors that functorch wrapped, and left so.
_apply = super(torch.autograd.Function, _Attention).apply
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _forward_with_lse(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, params: AttentionParams, with_lse: bool
) -> tuple[_Saved | KeptResult, Tensor | None]:
    """The result with sinks, and the logsumexp to base e if it or sinks are asked for; outside autograd."""
    if _is_watched(q, k, v, *params.boundaries):
        result = ops.forward.default(q, k, v, *params.flatten(), params.pack_for_backward)
        saved = _Saved.of(q, k, v, result, params)
    else:
        forward = kernel_set(params.kernels).forward
        saved = _on_device_of(q, forward, q, k, v, params, *(True,) * params.packs)
        saved = saved if params.packs else _Saved.of(q, k, v, saved, params)
    if sinks is None and not with_lse:
        return saved, None
    result, _, _ = _parts(saved)
    lse = natural_lse(q, result.lse, result.k_mean, params)
    if sinks is not None:
        result, lse = add_sinks(result, lse, sinks, params)
        saved = _Saved.of(q, k, v, result, params)
    return saved, lse


def _gradients_with_lse(
    saved: _Saved | KeptResult,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    lse: Tensor | None,
    sinks: Tensor | None,
    needs_qkv: bool,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dsinks."""
    result, _, params = _parts(saved)
    grad_out = torch.zeros_like(result.out) if grad_out is None else grad_out
    of_result = grad_lse
    if grad_lse is not None:  # the lse of a query without keys is a constant
        of_result = torch.where(result.lse == -torch.inf, 0.0, grad_lse) * log_of_base(params)
    dq = dk = dv = None
    if needs_qkv:
        dq, dk, dv = _gradients(saved, grad_out, of_result)
    dq, dsinks = finish_gradients(dq, grad_out, grad_lse, result, lse, sinks, params)
    return dq, dk, dv, dsinks


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    *,
    with_lse: bool,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The attention output, and the logsumexp if it is asked for. Both are differentiable."""
    has_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    is_compiling = torch.compiler.is_compiling()
    is_transformed = torch._C._are_functorch_transforms_active()
    if has_gradient and is_transformed and not is_compiling:
        _refuse_torch_func()
    packs = has_gradient and type(k) is Tensor  # a DTensor cannot shard what is packed
    if packs != params.pack_for_backward:
        params = params._replace(pack_for_backward=packs)
    if is_compiling or is_transformed:  # by the gradients of the parts, which compilers fuse
        out, lse, k_mean, *_ = ops.forward.default(q, k, v, *params.flatten(), params.pack_for_backward)
        lse = natural_lse(q, lse, k_mean, params) if with_lse or sinks is not None else None
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    if torch.is_grad_enabled():
        is_plain = sinks is None and not any(map(_is_wrapped, (q, k, v)))
        return (_apply if is_plain else _Attention.apply)(q, k, v, sinks, params, with_lse)
    saved, lse = _forward_with_lse(q, k, v, sinks, params, with_lse)
    return saved.out, lse
