"""The public operator: attention with INT8 matrix products, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sagebwd import dispatch, masks
from sagebwd.config import DEFAULT_CONFIG, SageConfig, encode
from sagebwd.interface import AttentionParams
from sagebwd.kernels import ops
from sagebwd.kernels.lse import with_sinks
from sagebwd.validation import (
    autocast_dtype,
    cast_to_autocast_dtype,
    check_arguments,
    check_backward_mode,
    check_documents,
    check_sinks,
)
from sagebwd.window import FULL, Window


def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
    kernels: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Trainable INT8 attention, SageBwd (arXiv 2603.02170), called as ``scaled_dot_product_attention`` is.

    CUDA tensors run the fastest kernels that can, CPU tensors the plain PyTorch reference;
    :func:`sagebwd.explain` tells which, and why. Meta and fake tensors work, and any size may be 0. Under
    autocast the inputs are cast to its dtype. A NaN or Inf in the inputs gives NaN, never a plausible result.
    The backward adds in a fixed order: the same inputs give the same bits.

    Under ``is_causal`` an output depends slightly, through scales and the mean of K, on tokens that the mask
    hides from it: see :class:`SageConfig`, and :meth:`SageConfig.strictly_causal` for a preset without that.

    Args:
        query: (…, H, N_q, D), any strides. fp16 or bf16, in the reference also fp32. As many leading
            dimensions as there are, none too: B below stands for all of them, and H is 1 for (N_q, D).
        key: (…, H_kv, N_kv, D) as query.
        value: (…, H_kv, N_kv, D_v) as query. For kernels D and D_v are multiples of 8 up to 256. If they
            differ, the narrower are padded with zeros: that copies them and costs as much as the wider.
        attn_mask: a mask that only hides keys: bool (True shows a key) or additive (0 shows a key, −9,000 or
            less hides it), broadcastable to (B, H, N_q, N_kv) and the same for all heads and queries: of size
            1 there, or expanded from it. An additive mask with other values raises an error on a CPU, and
            gives NaN where reading it would wait for a GPU or break a compiled graph.
        dropout_p: not supported; it keeps the argument order of torch's operator.
        is_causal: query i sees keys 0 … i, counted from the first of each, as in torch's operator.
        scale: factor of the logits; 1/√D by default.
        enable_gqa: allow H to be a multiple of H_kv; consecutive query heads then share keys and values.
        window_size: (left, right): query i sees keys i − left … i + right, counted from the first of each and
            within each document; −1 is no limit. With ``is_causal`` right is 0. A query that sees no key
            gets zeros.
        key_padding_mask: (B, N_kv) bool, True for keys that take part (``nn.MultiheadAttention`` has it the
            other way round). Hidden keys influence nothing, whatever they hold, and their gradients are
            zero; a sequence without keys gets zeros. With ``is_causal`` or a window there must be as many
            queries as keys, and a hidden token is hidden as a query, too: its output is zero. With a window
            the keys that take part must lie side by side, padding before or after them; a mask with holes
            raises an error on a CPU, and gives NaN as an ``attn_mask`` that is a bias does. Not together with
            ``cu_seqlens``.
        cu_seqlens: (documents + 1,) int32 or int64 on the device of query: packed documents, end to end in a
            batch of 1. Document n holds tokens cu_seqlens[n] … cu_seqlens[n + 1] − 1, and attends to itself
            only. Tokens outside all documents get zeros, as does a document without queries or keys. Must
            start at 0 or later, never decrease and end at N_q or earlier. On a GPU that is not checked,
            because reading it would wait for the device; wrong boundaries are moved to the nearest valid.
        cu_seqlens_kv: the same for key and value; by default ``cu_seqlens``.
        return_lse: return the logsumexp of each query's logits, too.
        sinks: (H,) floating point, attention sinks: for each head the logit of one more key, which every
            query sees and whose value is zero. lse includes it. Sinks have a gradient. In fp16 a sink that
            takes all but 10⁻⁵ leaves P subnormal: dV loses its precision there, use bf16.
        config: what is quantized, and how.
        kernels: "hopper", "ampere", "triton" or "reference" runs that kernel set, or raises an error that
            says why it cannot. None: the fastest that can, on a CPU the reference.

    Returns:
        (…, H, N_q, D_v), of the dtype of the inputs. With ``return_lse`` (out, lse): lse is (…, H, N_q) fp32,
        log Σ exp(scale · q·k) over the keys that a query sees, −inf if it sees none. It is that of the plain
        logits, with or without smoothing, up to quantization. It is differentiable as out is.

    Raises:
        ValueError: an argument is not supported, or the arguments do not fit together.
        NotImplementedError: a setting, device or GPU without kernels, a second derivative, torch.func.grad.
    """
    settings = (is_causal, window_size, scale, enable_gqa, config, dropout_p, kernels)
    signature = _signature(query, key, value, settings)
    call = (signature and _calls.get(signature)) or _check(signature, query, key, value, settings)
    asked, params, is_cast, width = call
    check_backward_mode(query, key, value)
    check_sinks(sinks, query)
    mask = masks.find_key_mask(query, key, attn_mask, key_padding_mask)
    q, k, v = cast_to_autocast_dtype(query, key, value) if is_cast else (query, key, value)
    if width is not None:
        q, k, v = (_as_plain(x, width) for x in (q, k, v))
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    if mask is not None:
        has_documents = cu_seqlens is not None
        mask = masks.check_combination(mask, q, k, asked, params.window, has_documents=has_documents)
    if not params.kernels:
        out, lse = _nothing(q, k, v, sinks)
    elif mask is None:
        params = params.with_documents(cu_seqlens, cu_seqlens_kv)
        out, lse = ops.attend(q, k, v, params, with_lse=return_lse, sinks=sinks)
    else:
        tokens = masks.visible_tokens(mask, q.shape[2], hides_queries=asked != FULL)
        params = params.with_documents(tokens.cu_seqlens, tokens.cu_seqlens_kv)
        out, lse = ops.attend(*tokens.pack(q, k, v), params, with_lse=return_lse, sinks=sinks)
        out, lse = tokens.unpack(out), tokens.unpack(lse) if return_lse else None
    if width is not None:
        out = out[..., : value.shape[-1]].reshape(*query.shape[:-1], value.shape[-1])
        lse = lse.reshape(query.shape[:-1]) if return_lse else None
    return (out, lse) if return_lse else out


class _Call(NamedTuple):
    """What is worked out once for calls that look the same.

    asked: the window that is asked for; that of ``params`` has no limits that hide nothing.
    params: without documents. Without kernels if there is nothing to compute.
    is_cast: whether autocast is on.
    width: channels of q, k and v as (B, H, N, width); None if they are so.
    """

    asked: Window
    params: AttentionParams
    is_cast: bool
    width: int | None


_calls: dict[tuple[Any, ...], _Call] = {}
#: How many are remembered.
REMEMBERED = 8192
#: Settings of other types may change, or are wrong, and are looked at each time.
_HASHABLE = {bool, int, float, str, tuple, type(None), SageConfig}


def _signature(q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What :func:`_check` looks at; None if that may change from call to call."""
    window_size = settings[1]
    if (
        not (type(q) is type(k) is type(v) is Tensor and _HASHABLE.issuperset(map(type, settings)))
        or not (type(window_size) is tuple and {int}.issuperset(map(type, window_size)))
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # shapes are tensors
        or q.is_nested
        or k.is_nested
        or v.is_nested
    ):
        return None
    known = [(x.shape, x.dtype, x.device, x.layout) for x in (q, k, v)]
    return (*known, autocast_dtype(q.device.type), settings)


def _check(signature: Any, q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...]) -> _Call:
    """The call, remembered by its signature. Raises what is wrong."""
    is_causal, window_size, scale, enable_gqa, config, dropout_p, kernels = settings
    asked = Window.of(is_causal, window_size)
    check_arguments(q, k, v, scale=scale, enable_gqa=enable_gqa, config=config, dropout_p=dropout_p)
    head_dim, cast_to, chosen = q.shape[-1], autocast_dtype(q.device.type), ""
    width = max(head_dim, v.shape[-1])
    scale = (head_dim or 1) ** -0.5 if scale is None else float(scale) + 0.0  # no −0.0, which is equal
    if 0 not in (*q.shape[:-1], *k.shape[:-1], width):
        chosen = dispatch.choose(q.device, cast_to or q.dtype, width, scale, encode(config), kernels)
    window = asked.narrowed(q.shape[-2], k.shape[-2])
    params = AttentionParams(window, scale, config, chosen, pack_for_backward=True)
    is_plain = q.dim() == 4 and head_dim == v.shape[-1]
    call = _Call(asked, params, cast_to is not None, None if is_plain else width)
    if signature is not None:
        if len(_calls) >= REMEMBERED:
            _calls.clear()
        _calls[signature] = call
    return call


def _as_plain(x: Tensor, width: int) -> Tensor:
    """(…, H, N, D) or (N, D) as (B, H, N, width).

    Channels of zeros, in q and k or in v, change no logit and not the others of out.
    """
    x = x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _nothing(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of tensors without elements: what torch gives, empty or zeros, with such gradients."""
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
