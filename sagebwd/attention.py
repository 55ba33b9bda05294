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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    config: SageConfig = DEFAULT_CONFIG,
) -> Tensor:
    """Trainable INT8 attention, SageBwd (arXiv 2603.02170), called as ``scaled_dot_product_attention`` is.

    CUDA tensors run Triton kernels, CPU tensors the plain PyTorch reference. Under autocast the inputs are
    cast to its dtype. A NaN or Inf in the inputs gives NaN, never a plausible number. The backward has no
    atomics: the same inputs give the same bits.

    Under ``is_causal`` an output depends slightly, through scales and the mean of K, on tokens that the mask
    hides from it: see :class:`SageConfig`, and :meth:`SageConfig.strictly_causal` for a setting without that.

    Args:
        q: (B, H, N_q, D), any strides. fp16 or bf16, on a CPU also fp32. On a GPU D is a multiple of 8 up to
            256.
        k, v: (B, H_kv, N_kv, D) as q.
        attn_mask, dropout_p: not supported; they keep the argument order of torch's operator.
        is_causal: query i sees keys 0 … i, counted from the first of each, as in torch's operator.
        scale: factor of the logits; 1/√D by default.
        enable_gqa: allow H to be a multiple of H_kv; consecutive query heads then share keys and values.
        cu_seqlens: (documents + 1,) int32 or int64 on the device of q: documents laid end to end in a batch
            of 1. Document n holds tokens cu_seqlens[n] … cu_seqlens[n + 1] − 1, and attends to itself only.
            Tokens outside all documents get zeros. Must start at 0 or later, never decrease and end at N_q
            or earlier; on a GPU that is not checked, which would wait for the device, and boundaries that
            break it are moved to the nearest that do not.
        cu_seqlens_kv: the same for k and v; by default ``cu_seqlens``.
        config: what is quantized, and how.

    Returns:
        (B, H, N_q, D), of the dtype of the inputs.

    Raises:
        ValueError: an argument is not supported, or the arguments do not fit together.
        NotImplementedError: a setting without a kernel, another kind of device, or a second derivative.
    """
    arguments = (q, k, v, attn_mask, dropout_p, is_causal)
    options = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens_kv,
        "config": config,
    }
    if not isinstance(q, Tensor) or q.device.type == "cpu":
        return reference.sage_attention(*arguments, **options)
    if q.device.type != "cuda":
        raise NotImplementedError(
            f"sagebwd has no kernels for {q.device.type.upper()} tensors; call "
            "sagebwd.reference.sage_attention, which has the same signature and runs, slowly, on any device"
        )
    # Imported here because Triton exists only where there are GPUs it knows.
    from sagebwd import kernels

    return kernels.sage_attention(*arguments, **options)
