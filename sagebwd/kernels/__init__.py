"""SageBwd as Triton kernels: ``sage_attention`` of this package is what CUDA tensors run."""

from __future__ import annotations

from torch import Tensor

from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.dispatch import check_supported
from sagebwd.kernels import ops
from sagebwd.validation import cast_to_autocast_dtype, check_arguments, check_documents


def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
) -> Tensor:
    """:func:`sagebwd.sage_attention` by its kernels: same arguments, errors and gradients.

    On a CPU it needs Triton's interpreter: set TRITON_INTERPRET=1 before anything imports Triton.
    """
    check_arguments(
        q, k, v, scale=scale, enable_gqa=enable_gqa, config=config, attn_mask=attn_mask, dropout_p=dropout_p
    )
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    q, k, v = cast_to_autocast_dtype(q, k, v)
    check_supported(q, scale, config)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return ops.attend(q, k, v, cu_seqlens, cu_seqlens_kv, is_causal, scale, config)
