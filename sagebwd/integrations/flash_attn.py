"""The functions of flash_attn 2.x that train, computed by SageBwd.

>>> from sagebwd.integrations.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

or, for programs that import flash_attn themselves, such as fla-org's models and ring-flash-attn:

>>> from sagebwd.integrations import flash_attn
>>> flash_attn.install()  # first, then import the program

Names, argument order, shapes and defaults are those of flash_attn. As there, masks count from the last query
and key: with ``causal=True`` the last query sees all keys. Tensors are of any strides and any dtype that
:func:`sagebwd.sage_attention` takes.

Arguments that SageBwd does not compute are named in the signatures and refused, because callers such as
transformers drop in silence what a signature does not name. The backward is always deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.integrations import stand_in, torch_flash
from sagebwd.integrations.alignment import aligned_attention, check_layout, check_refused, window_of

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

#: In :data:`sagebwd.integrations.stand_in.LIBRARIES`.
NAME = "flash_attn"

USE_FLASH_ATTN = "leave it out, or use flash_attn itself (in `python -m sagebwd.run` name --sdpa alone)"


#: Make ``import flash_attn`` give this module's functions: :func:`sagebwd.integrations.stand_in.install`.
install = functools.partial(stand_in.install, NAME)
uninstall = functools.partial(stand_in.uninstall, NAME)

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    s_aux: Tensor | None = None,
    config: SageConfig | None = None,
) -> Result:
    """SageBwd, called as ``flash_attn.flash_attn_func`` is.

    Args:
        q: (B, N_q, H, D).
        k, v: (B, N_kv, H_kv, D), H a multiple of H_kv.
        softmax_scale: factor of the logits; 1/√D by default.
        causal: query i sees keys up to i + N_kv − N_q. Queries that see none give zeros.
        window_size: (left, right): query i sees keys i + N_kv − N_q − left … i + N_kv − N_q + right; −1 is no
            limit. ``causal`` sets right to 0.
        deterministic: the backward always is.
        return_attn_probs: return (output, lse, None): flash_attn has weights there only with dropout.
        return_lse: return (output, lse).
        dropout_p, softcap, alibi_slopes: refused where they ask for anything.
        s_aux: attention sinks, as ``sinks`` of :func:`sagebwd.sage_attention`.
        config: what is quantized, and how; by default what :func:`install` was given.

    Returns:
        The output (B, N_q, H, D), or a tuple that begins with it. lse is (B, H, N_q) fp32, the logsumexp of
        the logits to base e, −∞ for a query without keys (flash_attn gives +∞).

    Raises:
        NotImplementedError: an argument asks for what SageBwd does not compute.
        ValueError: the arguments do not fit together.
    """
    check_refused(USE_FLASH_ATTN, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    check_layout("(batch, tokens, heads, head size)", q=q, k=k, v=v)
    result = aligned_attention(
        "flash_attn_func", q, k, v, (), window_of(causal, window_size), softmax_scale,
        config or stand_in.config_of(NAME), with_lse=return_attn_probs or return_lse, sinks=s_aux,
    )  # fmt: skip
    return _as_asked(*result, return_attn_probs, return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    return_lse: bool = False,
    s_aux: Tensor | None = None,
    config: SageConfig | None = None,
) -> Result:
    """SageBwd on packed sequences, called as ``flash_attn.flash_attn_varlen_func`` is.

    Pass the same tensor as ``cu_seqlens_q`` and ``cu_seqlens_k`` if they are equal. With two tensors, a mask
    costs up to N_q + N_kv queries instead of N_q, because their values are not read: that would wait for the
    GPU.

    Args:
        q: (T_q, H, D), sequences end to end.
        k, v: (T_kv, H_kv, D), H a multiple of H_kv.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 or int64, the boundaries in q, and in k and v.
        max_seqlen_q, max_seqlen_k: length of the longest sequence; not used.
        causal, window_size: as of :func:`flash_attn_func`, in each sequence. A window without ``causal``
            needs the same tensor for both boundaries.
        block_table: refused.
        others: as of :func:`flash_attn_func`.

    Returns:
        The output (T_q, H, D), or a tuple as of :func:`flash_attn_func`, with lse (H, T_q).

    Raises:
        NotImplementedError, ValueError: as :func:`flash_attn_func`.
    """
    check_refused(
        USE_FLASH_ATTN, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes,
        block_table=block_table,
    )  # fmt: skip
    check_layout("(tokens, heads, head size)", q=q, k=k, v=v)
    cuts, window = (cu_seqlens_q, cu_seqlens_k), window_of(causal, window_size)
    result = aligned_attention(
        "flash_attn_varlen_func", q, k, v, cuts, window, softmax_scale, config or stand_in.config_of(NAME),
        with_lse=return_attn_probs or return_lse, sinks=s_aux,
    )  # fmt: skip
    return _as_asked(*result, return_attn_probs, return_lse)


def flash_attn_qkvpacked_func(qkv: Tensor, *others: Any, **settings: Any) -> Result:
    """:func:`flash_attn_func` of qkv (B, N, 3, H, D), and its others."""
    return flash_attn_func(*_unpack("(batch, tokens, 3, heads, head size)", 2, qkv=qkv), *others, **settings)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *others: Any, **settings: Any) -> Result:
    """:func:`flash_attn_func` of q (B, N_q, H, D) and kv (B, N_kv, 2, H_kv, D), and its others."""
    return flash_attn_func(q, *_unpack("(batch, tokens, 2, heads, head size)", 2, kv=kv), *others, **settings)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *others: Any, **settings: Any
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv (T, 3, H, D), and its others."""
    parts = _unpack("(tokens, 3, heads, head size)", 1, qkv=qkv)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*parts, *lengths, *others, **settings)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *others: Any, **settings: Any) -> Result:
    """:func:`flash_attn_varlen_func` of q (T_q, H, D) and kv (T_kv, 2, H_kv, D), and its others."""
    return flash_attn_varlen_func(q, *_unpack("(tokens, 2, heads, head size)", 1, kv=kv), *others, **settings)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> NoReturn:
    """Refused: it generates. transformers imports it together with the functions that train."""
    raise NotImplementedError("sagebwd does not compute attention to a cache; generate with flash_attn")


# --- What attention over several GPUs is built of ----------------------------------------------------------
#
# They have no autograd: callers join outputs by their lse, and add up gradients of parts. The backward of a
# part gets the output and lse of the whole. Rows of its dS do not sum to zero, so that a mean of K may not be
# subtracted: K is not smoothed here.


# fmt: off
@torch.no_grad()
def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False,
):
    """The output (B, N_q, H, D), lse (B, H, N_q), and nothing for dropout."""
    window = (window_size_left, window_size_right)
    asked = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return *flash_attn_func(q, k, v, *asked, return_lse=True, config=_config_of_parts()), None, None


@torch.no_grad()
def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None,
):
    """:func:`_flash_attn_forward` of packed sequences: the output (T_q, H, D) and lse (H, T_q)."""
    cuts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    asked = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    others = {"block_table": block_table, "return_lse": True, "config": _config_of_parts()}
    return *flash_attn_varlen_func(q, k, v, *cuts, *asked, **others), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):
    """Write the gradients into dq, dk and dv, where they are given."""
    cuts = (None, None, q.shape[1], k.shape[1])
    asked = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *cuts, *asked)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, deterministic=False, rng_state=None,
):
    """:func:`_flash_attn_backward` of packed sequences."""
    check_refused(USE_FLASH_ATTN, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    cuts, nothing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dout.new_empty(0)
    found = torch_flash._flash_backward(
        _config_of_parts(), dout, q, k, v, out, softmax_lse, *cuts, dropout_p, causal, nothing, nothing,
        scale=softmax_scale, **window,
    )
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        if into is not None:
            into.copy_(gradient)
# fmt: on


def _config_of_parts() -> SageConfig:
    config = stand_in.config_of(NAME)
    if config.compensate_o:
        raise NotImplementedError(
            "compensate_o=True (as in consistent() and int8_scores()) saves the residual of O for the "
            "backward, for which flash_attn's forward has no place; install() another config"
        )
    return replace(config, smooth_k=False)


def _unpack(layout: str, axis: int, **packed: Tensor) -> tuple[Tensor, ...]:
    """The tensors that lie side by side along ``axis`` of one, as many as ``layout`` says there."""
    check_layout(layout, **packed)
    ((name, x),) = packed.items()
    if str(x.shape[axis]) != layout.strip("()").split(", ")[axis]:
        raise ValueError(f"{name} is {tuple(x.shape)}; pass {layout}")
    return x.unbind(axis)


def _as_asked(out: Tensor, lse: Tensor | None, return_attn_probs: bool, return_lse: bool) -> Result:
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out
