"""The Triton kernel set as :mod:`sagebwd.interface` has it. It packs nothing."""

from __future__ import annotations

from torch import Tensor
from triton.runtime.errors import OutOfResources

from sagebwd.config import SageConfig
from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.layout import kv_axis
from sagebwd.kernels.triton import backward as _backward
from sagebwd.kernels.triton import forward as _forward
from sagebwd.kernels.triton.quantize import k_mean_of

__all__ = ["backward", "forward", "token_mean", "too_large"]


def token_mean(k: Tensor, params: AttentionParams) -> Tensor:
    """See :mod:`sagebwd.interface`."""
    return k_mean_of(k, kv_axis(k, params), params.config)


def forward(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> ForwardResult:
    """Algorithm 1. Raises ValueError if the tiles of ``params`` are too large for this GPU."""
    try:
        return _forward.forward(q, k, v, params)
    except OutOfResources as error:
        raise too_large(q, params.config, error) from error


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: ForwardResult,
    params: AttentionParams,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2. Raises as :func:`forward`."""
    try:
        return _backward.backward(grad_out, q, k, v, saved, params, grad_lse)
    except OutOfResources as error:
        raise too_large(q, params.config, error) from error


def too_large(q: Tensor, config: SageConfig, error: OutOfResources) -> ValueError:
    """The error, with the fix, for a kernel that needs more shared memory or registers than there are."""
    tile = " x ".join(map(str, config.tile(q.shape[-1])))
    return ValueError(
        f"tiles of {tile} (block_q x block_kv) do not fit this GPU with head size {q.shape[-1]} and this "
        f'config ({error}); set smaller ones, or pass kernels="reference", which runs, slowly, anywhere'
    )
