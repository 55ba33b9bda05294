"""The Triton kernel set as :mod:`sagebwd.interface` has it. It packs nothing."""

from __future__ import annotations

from torch import Tensor

from sagebwd.interface import AttentionParams
from sagebwd.kernels.layout import kv_axis
from sagebwd.kernels.triton.backward import backward
from sagebwd.kernels.triton.forward import forward
from sagebwd.kernels.triton.quantize import k_mean_of

__all__ = ["backward", "forward", "token_mean"]


def token_mean(k: Tensor, params: AttentionParams) -> Tensor:
    """See :mod:`sagebwd.interface`."""
    return k_mean_of(k, kv_axis(k, params), params.config)
