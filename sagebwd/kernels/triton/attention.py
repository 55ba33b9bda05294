"""The Triton kernel set as :mod:`sagebwd.kernels.ops` calls it."""

from __future__ import annotations

from torch import Tensor
from triton.runtime.errors import OutOfResources

from sagebwd.config import SageConfig
from sagebwd.kernels.layout import Axis, ForwardResult, nothing_packed
from sagebwd.kernels.triton import backward as _backward
from sagebwd.kernels.triton import forward as _forward
from sagebwd.kernels.triton import quantize as _quantize
from sagebwd.window import Window

__all__ = ["backward", "forward", "token_mean", "too_large"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
    pack_for_backward: bool,
) -> ForwardResult:
    """Algorithm 1. The backward reads Q, K and V themselves, so ``pack_for_backward`` has no effect.

    Raises:
        ValueError: the tiles of ``config`` are too large for this GPU.
    """
    options = {"window": window, "scale": scale, "config": config}
    try:
        results = _forward.forward(q, k, v, q_axis, kv_axis, **options)
    except OutOfResources as error:
        raise too_large(q, config, error) from error
    return ForwardResult(*results, *nothing_packed(q))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    out_residual: Tensor,
    packed_q: Tensor,
    packed_kv: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: dq, dk, dv, as q, k, v, from a :class:`ForwardResult`. Raises as :func:`forward`."""
    saved = (out, lse, k_mean, out_residual)
    options = {"window": window, "scale": scale, "config": config}
    try:
        return _backward.backward(grad_out, q, k, v, *saved, q_axis, kv_axis, **options)
    except OutOfResources as error:
        raise too_large(q, config, error) from error


def token_mean(k: Tensor, kv_axis: Axis, config: SageConfig) -> Tensor:
    """The ``k_mean`` of :func:`forward` with a ``config`` that smooths K, alone, to its bits."""
    return _quantize.token_mean(k, kv_axis)


def too_large(q: Tensor, config: SageConfig, error: OutOfResources) -> ValueError:
    """The error, with the fix, for a kernel that needs more shared memory or registers than there are."""
    tile = " x ".join(map(str, config.tile(q.shape[-1])))
    return ValueError(
        f"tiles of {tile} (block_q x block_kv) do not fit this GPU with head size {q.shape[-1]} and this "
        f'config ({error}); set smaller ones, or pass kernels="reference", which runs, slowly, anywhere'
    )
