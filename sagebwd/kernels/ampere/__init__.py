"""CUDA C++ kernels for GPUs since Ampere: mma.sync, ldmatrix, cp.async."""

from sagebwd.interface import AttentionParams


def packs_v(_: AttentionParams) -> bool:
    """See :mod:`sagebwd.interface`."""
    return False
