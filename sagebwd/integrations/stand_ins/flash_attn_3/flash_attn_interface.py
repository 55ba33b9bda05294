"""The functions of FlashAttention-3, computed by SageBwd. See :mod:`sagebwd.integrations.flash_attn`.

As there since September 2025, they return the output alone, or (output, lse) with ``return_attn_probs``.
"""

from collections.abc import Sequence

from torch import Tensor

from sagebwd.integrations import flash_attn
from sagebwd.integrations.alignment import check_refused
from sagebwd.integrations.flash_attn import flash_attn_with_kvcache
from sagebwd.integrations.stand_in import config_of

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (B, N_q, H, D) to k and v (B, N_kv, H_kv, D).

    ``num_splits``, ``pack_gqa``, ``deterministic`` and ``sm_margin`` change nothing. What is not computed is
    refused.
    """
    check_refused(
        flash_attn.USE_FLASH_ATTN, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    return flash_attn.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        return_lse=return_attn_probs, config=config_of("flash_attn_3"),
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """The same in packed sequences, q (T_q, H, D)."""
    check_refused(
        flash_attn.USE_FLASH_ATTN, seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    return flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, return_lse=return_attn_probs,
        config=config_of("flash_attn_3"),
    )  # fmt: skip
