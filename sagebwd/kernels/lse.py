"""The logsumexp of the plain logits, and attention sinks: what the operators leave to be done around them.

Formulas are in plain PyTorch here. On a GPU, outside autograd and tracers, Triton kernels compute the same
in one pass over each tensor.
"""

from __future__ import annotations

import functools
import math
from subprocess import CalledProcessError
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.layout import document_starts, is_virtual


def natural_lse(q: Tensor, lse: Tensor, k_mean: Tensor, params: AttentionParams) -> Tensor:
    """log Σ exp(scale · q·k) over the keys that a query sees, (B, H, N_q) fp32; −inf if it sees none.

    Smoothing subtracted the mean of K, μ, from the keys, and so scale · q·μ from the logits of a query.

    Autograd gives dQ the term of μ, which the backward leaves out because it multiplies dS with the smoothed
    K. dK needs none: whatever is subtracted from all keys, lse is the same.

    Args:
        q: (B, H, N_q, D).
        lse, k_mean: of :class:`~sagebwd.interface.ForwardResult`.
    """
    return _shifted(q, lse, k_mean, params, log_of_base(params), params.scale)


def smoothed_lse(q: Tensor, lse: Tensor, k_mean: Tensor, params: AttentionParams) -> Tensor:
    """The inverse of :func:`natural_lse`: the lse that ``sagebwd::backward`` takes."""
    base = log_of_base(params)
    return _shifted(q, lse.contiguous(), k_mean, params, 1 / base, -params.scale / base)


def log_of_base(params: AttentionParams) -> float:
    """The natural logarithm of the base of ``ForwardResult.lse``."""
    return 1.0 if params.kernels == "reference" else math.log(2)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Out (B, H, N_q, D_v) and lse (B, H, N_q) with one more key for all queries: ``sinks`` are its logits.

    Its value is zero, so it only takes its share of the softmax.
    """
    sinks = _as_logits(sinks)
    share = (lse - sinks).sigmoid()
    return (out * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)


def add_sinks(
    result: ForwardResult, lse: Tensor, sinks: Tensor, params: AttentionParams
) -> tuple[ForwardResult, Tensor]:
    """:func:`with_sinks`, outside autograd, and what the backward needs.

    With O and lse of the softmax over one key more, P = exp(S − lse), δ = rowsum(dO ∘ O) and all that follows
    are right as they are, up to what :func:`finish_gradients` adds.
    """
    if (kernels := _kernels(params, lse)) is not None:
        with torch.cuda.device_of(lse):
            return kernels.add_sinks(result, lse, sinks.contiguous(), params)
    has_residual = params.config.compensate_o
    exact = result.out.float() + result.out_residual.float() if has_residual else result.out
    exact, new_lse = with_sinks(exact, lse, sinks)
    out = exact.to(result.out.dtype)
    residual = (exact - out).to(out.dtype) if has_residual else result.out_residual
    growth = -logsigmoid(lse - _as_logits(sinks)) / log_of_base(params)
    saved = torch.where(result.lse == -torch.inf, result.lse, result.lse + growth)
    return result._replace(out=out, out_residual=residual, lse=saved), new_lse


def finish_gradients(
    dq: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: ForwardResult,
    lse: Tensor | None,
    sinks: Tensor | None,
    params: AttentionParams,
) -> tuple[Tensor | None, Tensor | None]:
    """dq with the term of μ that the backward leaves out, maybe in place, and the gradient of the sinks.

    A row of dS over all keys sums to grad_lse. The sink has −exp(sink − lse) · (δ − grad_lse) of that. Where
    the mean of K was subtracted, dq lacks scale · μ times what is left.

    Args:
        dq: of the operator, None if nobody wants it.
        grad_out, grad_lse: the gradients of what the attention returned.
        saved: what the operator got: of :func:`add_sinks`, if there are sinks.
        lse, sinks: what :func:`add_sinks` returned and took, None without sinks.
    """
    lacks_term = dq is not None and saved.k_mean.shape[-1] > 0
    if sinks is None and not lacks_term:
        return dq, None
    if (kernels := _kernels(params, saved.lse, grad_out, grad_lse)) is not None:
        tensors = [None if x is None else x.contiguous() for x in (grad_lse, sinks)]
        document = _document_of_queries(saved.lse.shape[-1], params)
        with torch.cuda.device_of(saved.lse):
            dsinks = kernels.finish_gradients(
                dq if lacks_term else None, grad_out, saved, lse, *tensors, document, params
            )
        return dq, dsinks
    total, dsinks = grad_lse, None
    if sinks is not None:
        out = saved.out.float() + saved.out_residual.float() if params.config.compensate_o else saved.out
        delta = (grad_out.float() * out).sum(-1)
        of_sink = (_as_logits(sinks) - lse).exp() * (delta if grad_lse is None else delta - grad_lse)
        total = of_sink if grad_lse is None else of_sink + grad_lse
        dsinks = -of_sink.sum((0, 2)).to(sinks.dtype)
    if lacks_term:
        total = total.masked_fill(saved.lse == -torch.inf, 0.0)
        # Neither unflatten nor flatten, which is_grads_batched of torch.autograd.grad does not know.
        total = total.view(total.shape[0], saved.k_mean.shape[1], -1, total.shape[2])
        term = params.scale * total.unsqueeze(-1) * _means_of_queries(dq, saved.k_mean, params)
        dq = (dq + term.view(dq.shape)).to(dq.dtype)
    return dq, dsinks


def _as_logits(sinks: Tensor) -> Tensor:
    """(H, 1) fp32, not −inf: minus the lse of a query without keys it would be NaN."""
    return sinks.float().clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)


def _shifted(
    q: Tensor, lse: Tensor, k_mean: Tensor, params: AttentionParams, lse_factor: float, shift_factor: float
) -> Tensor:
    """lse · lse_factor + q·μ · shift_factor, μ being the mean of K, if smoothed, in a query's document."""
    if k_mean.shape[-1] and (kernels := _kernels(params, lse, q)) is not None:
        document = _document_of_queries(lse.shape[-1], params)
        with torch.cuda.device_of(lse):
            return kernels.shifted(q, lse, k_mean, document, lse_factor, shift_factor, params.documents)
    new = lse * lse_factor
    if k_mean.shape[-1]:
        groups = q.float().unflatten(1, (k_mean.shape[1], -1))
        shift = (groups * _means_of_queries(q, k_mean, params)).sum(-1)
        new = new + shift.flatten(1, 2) * shift_factor
    # −inf stays, whatever q holds, and is a constant.
    return new.masked_fill(lse == -torch.inf, -torch.inf)


def _means_of_queries(q: Tensor, k_mean: Tensor, params: AttentionParams) -> Tensor:
    """The mean of K in each query's document, (B, H_kv, 1, N_q, D), without packing (B, H_kv, 1, 1, D)."""
    # NaN is the mean of keys that no query sees, or that make lse NaN by themselves.
    means = k_mean.nan_to_num(0.0, 0.0, 0.0)
    means = means.unflatten(-1, (params.documents, -1))[..., : q.shape[-1]]
    document = _document_of_queries(q.shape[-2], params)
    return (means if document is None else means[:, :, document]).unsqueeze(2)


def _document_of_queries(n: int, params: AttentionParams) -> Tensor | None:
    """The document (n,) of each query, any for one of no document; None without packing."""
    if params.cu_seqlens is None:
        return None
    if hasattr(params.cu_seqlens, "device_mesh"):
        raise NotImplementedError(
            "DTensors have no lse and no sinks with documents or a mask; call sage_attention with to_local() "
            "of each, as torch.distributed.tensor.experimental.local_map does"
        )
    ends = document_starts(params.cu_seqlens, n)[1:].contiguous()
    tokens = torch.arange(n, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, tokens, right=True).clamp(max=params.documents - 1)


def _kernels(params: AttentionParams, x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The Triton kernels, where these can be given to them and nobody looks for PyTorch's operators."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor:
        return None
    is_transformed = torch._C._are_functorch_transforms_active()
    is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    runs_triton = params.kernels == "triton" or (params.kernels != "reference" and x.is_cuda)
    if is_transformed or is_traced or x.is_meta or any(map(is_virtual, others)):
        return None
    return _triton_kernels() if runs_triton else None


@functools.cache
def _triton_kernels() -> ModuleType | None:
    """None where Triton is missing, or the C compiler that it needs, which kernels in CUDA do not."""
    try:
        from triton.runtime import driver

        from sagebwd.kernels.triton import lse

        if not lse.device.IS_INTERPRETED:
            _ = driver.active.utils
    except (ImportError, RuntimeError, CalledProcessError):
        return None
    return lse
