"""Tensor maps: how Hopper's kernels read tensors where they are, with ``tensor_copy`` in ptx_sm90.cuh.

The hardware copies a box of 64 tokens and 64 channels to shared memory, in the order in which tensor cores
read it, and fills what lies outside the tensor with zeros. That is what packing would write, without the
copy. Of packed documents only K is read so, by a kernel that clears what lies past the end of one: there the
next begins.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from sagebwd.kernels.cuda.compile import checked
from sagebwd.kernels.cuda.launch import make_current
from sagebwd.kernels.cuda.packing import with_whole_pieces
from sagebwd.kernels.cuda.plan import Operand

#: Tokens and channels of a box.
BOX = 64
_BYTES = 128


class CTensorMap(ctypes.Structure):
    """``TensorMap`` of ptx_sm90.cuh; in a plan, the place of what it describes."""

    _fields_ = [("opaque", ctypes.c_uint64 * (_BYTES // 8))]

    @staticmethod
    def describe(x: Operand) -> Callable[[int], bytes]:
        """Makes the map of x, if it is at an address."""
        known = (x.shape, x.stride(), x.dtype == torch.bfloat16, x.device)
        return functools.partial(_remembered, lambda address: encode(address, *known))


class CTensorMaps(ctypes.Structure):
    """``TensorMaps`` of pipeline.cuh: of V, dO, Q and K; zeros for those that are packed or not read."""

    _fields_ = [(name, CTensorMap) for name in ("v", "grad", "q", "k")]


def mappable(x: Operand) -> Operand:
    """x (B, H, N, D), or a contiguous copy if the hardware cannot read it.

    It needs aligned tokens whose channels are contiguous, and no dimension that is expanded.
    """
    is_expanded = any(
        size > 1 and stride == 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    )
    return x.clone(memory_format=torch.contiguous_format) if is_expanded else with_whole_pieces(x)


def tensor_map(x: Operand) -> CTensorMap:
    """Of x (B, H, N, D) in 16 bits, from :func:`mappable`; zeros if x is empty."""
    return CTensorMap((ctypes.c_uint64 * (_BYTES // 8))(x.data_ptr())) if x.numel() else CTensorMap()


@functools.lru_cache(maxsize=1024)  # the driver takes longer than a launch, and training reuses its memory
def _remembered(describe: Callable[[int], bytes], address: int) -> bytes:
    return describe(address)


def encode(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], is_bf16: bool, device: torch.device
) -> bytes:
    """The map of a tensor in 16 bits.

    Raises:
        RuntimeError: with the name of CUDA's error.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bf16 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    batch, heads, tokens, channels = shape
    # Where there is one of something its stride is never used, but checked.
    in_bytes = [2 * stride if size > 1 else 16 for size, stride in zip(shape, strides, strict=True)]
    arguments = (
        kind,
        4,
        address,
        [driver.cuuint64_t(size) for size in (channels, tokens, heads, batch)],
        [driver.cuuint64_t(in_bytes[axis]) for axis in (2, 1, 0)],
        [driver.cuuint32_t(size) for size in (BOX, BOX, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    result = driver.cuTensorMapEncodeTiled(*arguments)
    if result[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        # This thread has not called CUDA before: autograd runs the backward in threads of its own.
        make_current(device.index)
        result = driver.cuTensorMapEncodeTiled(*arguments)
    return ctypes.string_at(checked(result).getPtr(), _BYTES)
