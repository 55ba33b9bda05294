"""The functions of SageAttention 2.x, trainable: SageAttention's own have no backward.

>>> from sagebwd.integrations import sageattention
>>> sageattention.install()  # first, then import the program that says `from sageattention import sageattn`

Names, layouts and defaults are SageAttention's. It swallows arguments that it does not know; here such an
argument is a TypeError, and one that SageBwd does not compute is refused.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.integrations import stand_in
from sagebwd.integrations.alignment import aligned_attention, check_layout, heads_first, window_of
from sagebwd.masks import can_read
from sagebwd.usage import counted_attention

__all__ = [
    "install",
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
    "uninstall",
]

#: In :data:`sagebwd.integrations.stand_in.LIBRARIES`.
NAME = "sageattention"

NO_RULE = (
    "for which SageAttention has no rule; use sagebwd.integrations.flash_attn.flash_attn_varlen_func (mask "
    "from the bottom right)"
)


#: Make ``import sageattention`` give this module: :func:`sagebwd.integrations.stand_in.install`.
install = functools.partial(stand_in.install, NAME)
uninstall = functools.partial(stand_in.uninstall, NAME)


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    smooth_k: bool | None = None,
    smooth_v: bool | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = True,
    quantization_backend: str = "triton",
    qk_quant_gran: str = "per_thread",
    pv_accum_dtype: str = "fp32",
    config: SageConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """SageBwd, called as ``sageattention.sageattn`` is. The other dense functions are this one.

    Args:
        q: (B, H, N_q, D) with the layout "HND", (B, N_q, H, D) with "NHD".
        k, v: (B, H_kv, N_kv, D) or (B, N_kv, H_kv, D), H a multiple of H_kv.
        tensor_layout: "HND" or "NHD", of inputs and output.
        is_causal: only where N_q = N_kv, as in SageAttention.
        sm_scale: factor of the logits; 1/√D by default.
        return_lse: return (output, lse), too: lse (B, H, N_q) fp32, the logsumexp of the logits to base e.
        smooth_k, smooth_v: as of :class:`~sagebwd.SageConfig`; by default as ``config`` says.
        attn_mask, dropout_p, scale, enable_gqa: what programs pass that put this function in the place of
            ``scaled_dot_product_attention``, and SageAttention drops. ``attn_mask`` and ``dropout_p`` are as
            of :func:`sagebwd.sage_attention`, ``scale`` is another name of ``sm_scale``.
        quantization_backend, qk_quant_gran, pv_accum_dtype: which of SageAttention's kernels to take. They
            change nothing: ``config`` says what SageBwd quantizes.
        config: what is quantized, and how; by default what :func:`install` was given.

    Returns:
        The output, of the shape and dtype of q; with ``return_lse`` the pair (output, lse).

    Raises:
        ValueError, NotImplementedError: an argument is not supported; the message names it.
    """
    if scale is not None and sm_scale is not None:
        raise ValueError(f"sm_scale is {sm_scale} and scale is {scale}; pass one of the two")
    if not isinstance(tensor_layout, str) or tensor_layout not in ("HND", "NHD"):
        raise ValueError(
            f"tensor_layout is {tensor_layout!r}; pass 'HND' or 'NHD'. In place of torch's "
            "scaled_dot_product_attention put sagebwd.sage_attention, which takes the same arguments"
        )
    is_nhd = tensor_layout == "NHD"
    if is_nhd:
        check_layout("(batch, tokens, heads, head size)", q=q, k=k, v=v)
        q, k, v = heads_first(q, k, v)
    n_q, n_kv = q.shape[-2], k.shape[-2]
    if is_causal and n_q != n_kv:
        raise ValueError(
            f"is_causal=True with {n_q} queries and {n_kv} keys, for which SageAttention has no rule; use "
            "sagebwd.sage_attention (mask from the top left) or "
            "sagebwd.integrations.flash_attn.flash_attn_func (from the bottom right)"
        )
    result = counted_attention(
        "sageattn", q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
        scale=sm_scale if scale is None else scale, enable_gqa=enable_gqa, return_lse=return_lse,
        config=_smoothing(config, smooth_k, smooth_v),
    )  # fmt: skip
    if not is_nhd:
        return result
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


#: SageAttention has one for each of its kernels. What follows ``tensor_layout`` goes by name: orders differ.
sageattn_qk_int8_pv_fp16_triton = sageattn
sageattn_qk_int8_pv_fp16_cuda = sageattn
sageattn_qk_int8_pv_fp8_cuda = sageattn
sageattn_qk_int8_pv_fp8_cuda_sm90 = sageattn


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool | None = None,
    *,
    tensor_layout: str = "NHD",
    config: SageConfig | None = None,
) -> Tensor:
    """SageBwd on packed sequences, called as ``sageattention.sageattn_varlen`` is.

    K is smoothed within each sequence; SageAttention subtracts one mean from all of them.

    Args:
        q: (T_q, H, D), sequences end to end.
        k, v: (T_kv, H_kv, D), H a multiple of H_kv.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 or int64, the boundaries in q, and in k and v.
        max_seqlen_q, max_seqlen_k: length of the longest sequence; not used.
        is_causal: only where each sequence has as many queries as keys, as in SageAttention. Boundaries on a
            GPU are not read: there the mask counts from the last query and key, as flash_attn's does, and
            costs less if both are one tensor.
        sm_scale, smooth_k, config: as of :func:`sageattn`.
        tensor_layout: axolotl passes "NHD", the only one.

    Returns:
        (T_q, H, D); zeros outside all sequences.

    Raises:
        ValueError, NotImplementedError: an argument is not supported; the message names it.
    """
    if tensor_layout != "NHD":
        raise ValueError(f"tensor_layout is {tensor_layout!r}; pass (tokens, heads, head size) and 'NHD'")
    if is_causal and q.shape[0] != k.shape[0]:
        raise ValueError(f"is_causal=True with {q.shape[0]} queries and {k.shape[0]} keys, {NO_RULE}")
    if is_causal and can_read(cu_seqlens_q) and can_read(cu_seqlens_k):
        lengths, lengths_kv = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        if lengths != lengths_kv:
            raise ValueError(
                f"is_causal=True with lengths {lengths} of queries and {lengths_kv} of keys, {NO_RULE}"
            )
    cuts, window = (cu_seqlens_q, cu_seqlens_k), window_of(is_causal, (-1, -1))
    config = _smoothing(config, smooth_k, None)
    return aligned_attention("sageattn_varlen", q, k, v, cuts, window, sm_scale, config, with_lse=False)[0]


def _smoothing(config: SageConfig | None, smooth_k: bool | None, smooth_v: bool | None) -> SageConfig:
    """``config`` with what a call says of smoothing."""
    config = stand_in.config_of(NAME) if config is None else config
    given = {"smooth_k": smooth_k, "smooth_v": smooth_v}
    changed = {name: x for name, x in given.items() if x is not None and x != getattr(config, name)}
    return replace(config, **changed) if changed else config
