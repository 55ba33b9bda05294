"""The public operator: attention with INT8 matrix products, forward and backward."""

from __future__ import annotations

from torch import Tensor

from sagebwd import dispatch
from sagebwd.config import DEFAULT_CONFIG, SageConfig, encode
from sagebwd.kernels import ops
from sagebwd.validation import cast_to_autocast_dtype, check_arguments, check_documents


def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
    kernels: str | None = None,
) -> Tensor:
    """Trainable INT8 attention, SageBwd (arXiv 2603.02170), called as ``scaled_dot_product_attention`` is.

    CUDA tensors run the fastest kernels that can, CPU tensors the plain PyTorch reference;
    :func:`sagebwd.explain` tells which, and why. Under autocast the inputs are cast to its dtype. A NaN or
    Inf in the inputs gives NaN, never a plausible result. The backward has no atomics: the same inputs give
    the same bits.

    Under ``is_causal`` an output depends slightly, through scales and the mean of K, on tokens that the mask
    hides from it: see :class:`SageConfig`, and :meth:`SageConfig.strictly_causal` for a preset without that.

    Args:
        query: (B, H, N_q, D), any strides. fp16 or bf16, in the reference also fp32. For kernels D is a
            multiple of 8 up to 256.
        key, value: (B, H_kv, N_kv, D) as query.
        attn_mask, dropout_p: not supported; they keep the argument order of torch's operator.
        is_causal: query i sees keys 0 … i, counted from the first of each, as in torch's operator.
        scale: factor of the logits; 1/√D by default.
        enable_gqa: allow H to be a multiple of H_kv; consecutive query heads then share keys and values.
        cu_seqlens: (documents + 1,) int32 or int64 on the device of query: packed documents, end to end in a
            batch of 1. Document n holds tokens cu_seqlens[n] … cu_seqlens[n + 1] − 1, and attends to itself
            only. Tokens outside all documents get zeros, as does a document without queries or keys. Must
            start at 0 or later, never decrease and end at N_q or earlier. On a GPU that is not checked,
            because reading it would wait for the device; wrong boundaries are moved to the nearest valid.
        cu_seqlens_kv: the same for key and value; by default ``cu_seqlens``.
        config: what is quantized, and how.
        kernels: "hopper", "ampere", "triton" or "reference" runs that kernel set, or raises an error that
            says why it cannot. None: the fastest that can, on a CPU the reference.

    Returns:
        (B, H, N_q, D), of the dtype of the inputs.

    Raises:
        ValueError: an argument is not supported, or the arguments do not fit together.
        NotImplementedError: a setting, device or GPU without kernels, or a second derivative.
    """
    q, k, v = query, key, value
    check_arguments(
        q, k, v, scale=scale, enable_gqa=enable_gqa, config=config, attn_mask=attn_mask, dropout_p=dropout_p
    )
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    q, k, v = cast_to_autocast_dtype(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    settings = encode(config)
    chosen = dispatch.choose(q, scale, settings, kernels)
    return ops.attend(q, k, v, cu_seqlens, cu_seqlens_kv, is_causal, scale, settings, chosen)
