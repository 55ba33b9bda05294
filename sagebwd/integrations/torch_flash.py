"""SageBwd behind ``torch.nn.functional.scaled_dot_product_attention``, in any model, without changing it.

>>> from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
>>> from sagebwd.integrations import torch_flash
>>> torch_flash.register()
>>> activate_flash_attention_impl("sagebwd")  # every call that torch gives to FlashAttention now runs SageBwd
>>> restore_flash_attention_impl()

Which calls these are is torch's rule: on a GPU, in fp16 or bf16, head sizes up to 256, without a mask, and as
many queries as keys under ``is_causal``. All others stay in full precision. With torch before 2.13, or on a
CPU, :func:`patch_sdpa` does the same from Python.

:func:`register` replaces torch's CUDA operators for FlashAttention, forward and backward. PyTorch's context
parallelism then runs SageBwd, too: its ring calls these operators with one part of the keys after another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn import functional as F

from sagebwd import _ops, dispatch, usage
from sagebwd.config import DEFAULT_CONFIG, SageConfig, encode
from sagebwd.integrations.alignment import (
    Alignment,
    align,
    check_refused,
    heads_first,
    tokens_first,
    window_of,
)
from sagebwd.integrations.sdpa import patch_sdpa
from sagebwd.interface import AttentionParams, ForwardResult, nothing_packed
from sagebwd.kernels import ops
from sagebwd.kernels.lse import natural_lse, smoothed_lse
from sagebwd.validation import check_config, check_name
from sagebwd.window import Window

__all__ = ["OPERATORS", "Override", "patch_sdpa", "register"]

#: What :func:`register` registered.
_names: set[str] = set()

# --- In torch's registry -----------------------------------------------------------------------------------


def register(name: str = "sagebwd", config: SageConfig = DEFAULT_CONFIG) -> None:
    """Let ``torch.nn.attention.activate_flash_attention_impl(name)`` run SageBwd with ``config``.

    While it is active, torch's cuDNN attention is off, which torch would choose before FlashAttention.

    Args:
        name: for ``activate_flash_attention_impl``; one name for each config that you activate in turn.
        config: what is quantized, and how.

    Raises:
        ValueError: the name is another implementation's; or ``config`` is not a SageConfig, or has
            ``compensate_o``: torch's operators have no place for the residual of O.
        ImportError: this torch has no such registry.
    """
    check_name(name)
    check_config(config)
    if config.compensate_o:
        raise ValueError(
            "compensate_o=True (as in consistent() and int8_scores()) saves the residual of O for the "
            "backward, for which torch's FlashAttention operators have no place; use "
            "torch_flash.patch_sdpa(config), or another config"
        )
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # the newest of what this needs
        raise ImportError(
            f"torch {torch.__version__} cannot replace its FlashAttention (2.13 can); use "
            "sagebwd.integrations.torch_flash.patch_sdpa(), which needs no support from torch"
        )
    if name not in _names and name in torch.nn.attention.list_flash_attention_impls():
        raise ValueError(f"{name!r} is registered by other code; choose another name")
    _names.add(name)
    torch.nn.attention.register_flash_attention_impl(name, register_fn=functools.partial(Override, config))


class Override:
    """SageBwd in the place of torch's FlashAttention operators, until :meth:`remove`."""

    def __init__(self, config: SageConfig, dispatch_key: str = "CUDA") -> None:
        """Replace the operators. ``dispatch_key`` is another than "CUDA" in tests only.

        Raises RuntimeError where torch is told never to call them.
        """
        if not torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError(
                "torch's FlashAttention is switched off, so that SageBwd would never run; call "
                "torch.backends.cuda.enable_flash_sdp(True) first"
            )
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", dispatch_key)
        for name, function in OPERATORS.items():
            self._library.impl(name, functools.partial(function, config), dispatch_key)
        self._had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        """Give torch its operators back, and cuDNN's attention if it was on.

        Warns, and says so in the report, if that is because other code activates another implementation.
        """
        self._library = None
        torch.backends.cuda.enable_cudnn_sdp(self._had_cudnn)
        activation = sys._getframe().f_back.f_back  # torch restores before it activates, and tells nothing
        if activation is not None and activation.f_code.co_name == "activate_flash_attention_impl":
            successor = activation.f_locals["impl"]
            if successor not in _names:
                usage.fall_back(NAME, f"other code activated {successor!r}", "sdpa")


# --- torch's operators, with the signatures of native_functions.yaml ---------------------------------------


def _sdpa_forward(
    config: SageConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``_scaled_dot_product_flash_attention``: tensors are (B, H, N, D)."""
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    lengths = (query.shape[2], key.shape[2])
    asked = (dropout_p, is_causal, return_debug_mask)
    out, lse, *state = _flash_forward(config, *tensors, None, None, *lengths, *asked, scale=scale)
    return out.transpose(1, 2), lse, None, None, *lengths, *state


def _sdpa_backward(
    config: SageConfig,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``_scaled_dot_product_flash_attention_backward``; ``others`` are those of :func:`_flash_backward`."""
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    return tuple(x.transpose(1, 2) for x in _flash_backward(config, *tensors, *others, scale=scale))


@torch.no_grad()  # torch's autograd wraps the operator
def _flash_forward(
    config: SageConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """``_flash_attention_forward``: (B, N, H, D), or (T, H, D) with boundaries of packed sequences."""
    check_refused(
        RESTORE, dropout_p=dropout_p, return_debug_mask=return_debug_mask, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits if num_splits != 1 else 0,
    )  # fmt: skip
    window = window_of(is_causal, (window_size_left, window_size_right))
    alignment = align(query.shape[-3], key.shape[-3], window, cum_seq_q, cum_seq_k)
    params = _params(query, value, alignment, scale, config)
    q, k, v = _widened(*heads_first(query, key, value))
    q, k, v = alignment.queries(q), alignment.keys(k), alignment.keys(v)
    out, lse, k_mean, *_ = _ops.ops.forward.default(q, k, v, *params.flatten())
    lse = natural_lse(q, lse, k_mean, params)
    usage.watch_logits(NAME, q, k, params.scale, config)
    usage.record(NAME, params.kernels)
    out, lse = alignment.put_back_queries(out), alignment.put_back_queries(lse, fill=float("-inf"))
    lse = lse if cum_seq_q is None else lse[0]
    return *tokens_first(query, out[..., : value.shape[-1]]), lse, *_state(k_mean), query.new_empty(0)


def _flash_forward_inplace(
    config: SageConfig, out: Tensor, query: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    """``_flash_attention_forward_no_dropout_inplace``: writes ``out``, returns the logsumexp."""
    result, lse, *_ = _flash_forward(config, query, *arguments, **options)
    out.copy_(result)
    return lse


@torch.no_grad()
def _flash_backward(
    config: SageConfig,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """``_flash_attention_backward``."""
    check_refused(RESTORE, dropout_p=dropout_p)
    window = window_of(is_causal, (window_size_left, window_size_right))
    alignment = align(query.shape[-3], key.shape[-3], window, cum_seq_q, cum_seq_k)
    lse = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    params = _params(query, value, alignment, scale, config)
    grad_out, q, k, v, out = _widened(*heads_first(grad_out, query, key, value, out))
    grad_out, q, out = (alignment.queries(x) for x in (grad_out, q, out))
    k, v = alignment.keys(k), alignment.keys(v)
    lse = alignment.queries(lse, fill=float("inf"))  # weights of zero for a query that is put among others
    k_mean = _mean_of(state, k, params)
    lse = smoothed_lse(q, lse, k_mean, params)
    saved = ForwardResult(out, lse, k_mean, q.new_empty(0), *nothing_packed(q))
    dq, dk, dv = _ops.ops.backward.default(grad_out, q, k, v, *k.shape[1:3], *saved, *params.flatten())
    dq, dk, dv = alignment.put_back_queries(dq), alignment.put_back_keys(dk), alignment.put_back_keys(dv)
    given = zip((dq, dk, dv), (query, key, value), strict=True)
    return tokens_first(query, *(x[..., : like.shape[-1]] for x, like in given))


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
}

#: In :func:`sagebwd.report`.
NAME = "torch FlashAttention"
RESTORE = "call torch.nn.attention.restore_flash_attention_impl(): torch's FlashAttention is SageBwd now"


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All with as many channels as the widest: zeros change no logit and no other channel of the results."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _params(
    query: Tensor, value: Tensor, alignment: Alignment, scale: float | None, config: SageConfig
) -> AttentionParams:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    head_dim = max(query.shape[-1], value.shape[-1])
    kernels = dispatch.choose(query.device, query.dtype, head_dim, scale, encode(config))
    boundaries = (alignment.cu_seqlens, alignment.cu_seqlens_kv)
    return AttentionParams(Window(*alignment.window), scale, config, kernels, *boundaries)


def _state(k_mean: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the random numbers and an unused tensor, which torch does not read.

    It hands the first on to the backward, and behind it, in the same storage, lies the mean of K. The ring of
    context parallelism hands the same one on with every part of the keys, and must: dQ leaves out rowsum(dS)
    times that mean, and rows of dS sum to zero over all parts together, not over one.
    """
    memory = torch.cat([k_mean.new_zeros(4), k_mean.flatten()])
    return memory[:4].view(torch.uint64), torch.empty((), dtype=torch.uint64, device=k_mean.device)


def _mean_of(state: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """The mean of K that lies behind ``state``."""
    if params.cu_seqlens is not None:  # varlen_attn hands on another state; documents are in no ring
        return ops.token_mean(k, params)
    memory = torch.empty(0, dtype=torch.float32, device=k.device).set_(state.untyped_storage())
    if memory.numel() == 4 and params.config.smooths_k:
        # It was copied, as torch.autograd.graph.save_on_cpu does. Without a mean dQ is right in a ring, too.
        return torch.zeros_like(ops.token_mean(k, params))
    return memory[4:].view(*k.shape[:2], -1)
