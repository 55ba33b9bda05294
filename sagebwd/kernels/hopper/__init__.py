"""CUDA C++ kernels for Hopper: wgmma, bulk copies, setmaxnreg."""

from sagebwd.interface import AttentionParams


def packs_v(params: AttentionParams) -> bool:
    """See :mod:`sagebwd.interface`. Bulk copies read V where it is, unless documents are packed."""
    return params.cu_seqlens is not None
