"""The public operator: attention with INT8 matrix products, forward and backward."""

from __future__ import annotations

from torch import Tensor

from sagebwd import reference
from sagebwd.config import DEFAULT_CONFIG, SageConfig


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
    config: SageConfig = DEFAULT_CONFIG,
) -> Tensor:
    """Trainable INT8 attention, SageBwd (arXiv 2603.02170), called as ``scaled_dot_product_attention`` is.

    Under autocast the inputs are cast to its dtype. A NaN or Inf in the inputs gives NaN, never a plausible
    number. Scales of whole blocks and the mean of K make an output depend slightly on tokens that the causal
    mask hides from it.

    Args:
        q: (B, H, N_q, D) fp16, bf16 or fp32, any strides.
        k, v: (B, H_kv, N_kv, D) as q.
        attn_mask, dropout_p: not supported; they keep the argument order of torch's operator.
        is_causal: query i sees keys 0 … i, counted from the first of each, as in torch's operator.
        scale: factor of the logits; 1/√D by default.
        enable_gqa: allow H to be a multiple of H_kv; consecutive query heads then share keys and values.
        config: what is quantized, and how.

    Returns:
        (B, H, N_q, D), of the dtype of the inputs.

    Raises:
        ValueError: an argument is not supported, or the arguments do not fit together.
        NotImplementedError: the tensors are not on the CPU, or a second derivative is asked for.
    """
    if q.device.type != "cpu":
        raise NotImplementedError(
            f"this version of sagebwd has no kernels for {q.device.type.upper()} tensors yet; call "
            "sagebwd.reference.sage_attention, which has the same signature and runs, slowly, on any device"
        )
    return reference.sage_attention(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, config=config
    )
