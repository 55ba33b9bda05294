"""The functions of FlashAttention-4 (flash-attn-4 4.0 beta), computed by SageBwd.

They return (output, lse); lse is None unless ``return_lse``. See :mod:`sagebwd.integrations.flash_attn`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sagebwd.integrations import flash_attn as flash_attn_2
from sagebwd.integrations.alignment import check_refused

Result = tuple[Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Result:
    """Attention of q (B, N_q, H, D) to k and v (B, N_kv, H_kv, D).

    ``num_splits``, ``pack_gqa`` and ``deterministic`` change nothing. What is not computed is refused.
    """
    check_refused(
        flash_attn_2.USE_FLASH_ATTN, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    result = flash_attn_2.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        s_aux=learnable_sink, return_lse=return_lse,
    )  # fmt: skip
    return result if return_lse else (result, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Result:
    """Attention in packed sequences, q (T_q, H, D), or as :func:`flash_attn_func` without boundaries."""
    check_refused(
        flash_attn_2.USE_FLASH_ATTN, qv=qv, gather_kv_indices=gather_kv_indices, page_table=page_table,
        seqused_q=seqused_q, seqused_k=seqused_k, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    settings = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
        "return_lse": return_lse,
    }  # fmt: skip
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return flash_attn_func(q, k, v, learnable_sink=learnable_sink, **settings)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    result = flash_attn_2.flash_attn_varlen_func(q, k, v, *lengths, s_aux=learnable_sink, **settings)
    return result if return_lse else (result, None)
