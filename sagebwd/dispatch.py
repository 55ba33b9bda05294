"""What the kernels cannot do, said before they are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sagebwd.config import SageConfig
from sagebwd.kernels.triton.device import IS_INTERPRETED
from sagebwd.kernels.triton.launch import compute_capability

REFERENCE = "call sagebwd.reference.sage_attention, which takes the same arguments and runs, slowly, anywhere"
LARGEST_HEAD_DIM = 256
OLDEST_COMPUTE_CAPABILITY = 80
#: INT8 tensor cores contract 32 tokens and more; tiles are powers of two.
BLOCK_SIZES = (32, 64, 128)


@contextmanager
def on_device_of(q: Tensor, config: SageConfig) -> Iterator[None]:
    """Launch on the GPU of q, which may not be the current one.

    Raises:
        NotImplementedError: a GPU without what the kernels need.
        ValueError: the tiles of ``config`` are too large for this GPU.
    """
    if q.is_cuda and (torch.version.hip or compute_capability(q) < OLDEST_COMPUTE_CAPABILITY):
        raise NotImplementedError(
            f"{torch.cuda.get_device_name(q.device)} has no kernels: they need an NVIDIA GPU of the Ampere "
            f"generation or later; {REFERENCE}"
        )
    try:
        with torch.cuda.device_of(q):
            yield
    except OutOfResources as error:
        tile = " x ".join(map(str, config.tile(q.shape[-1])))
        raise ValueError(
            f"tiles of {tile} (block_q x block_kv) do not fit this GPU with head size {q.shape[-1]} and this "
            f"config ({error}); set smaller ones, or {REFERENCE}"
        ) from error


def check_supported(q: Tensor, scale: float | None, config: SageConfig) -> None:
    """Raise unless the kernels can run this.

    Raises:
        ValueError: dtype, head size, scale or block size; the message says what to change.
        NotImplementedError: a setting that only the reference has.
    """
    if q.device.type == "cpu" and not IS_INTERPRETED:
        raise ValueError(f"the tensors are on the CPU; move them to a GPU, or {REFERENCE}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(q.dtype).removeprefix("torch.")
        raise ValueError(f"q, k, v are {dtype}; cast them to bfloat16 or float16, or {REFERENCE}")
    if q.shape[-1] % 8 or q.shape[-1] > LARGEST_HEAD_DIM:
        raise ValueError(
            f"the head size is {q.shape[-1]}; use a multiple of 8 up to {LARGEST_HEAD_DIM}, or {REFERENCE}"
        )
    if scale is not None and scale < 0:
        raise ValueError(f"scale is {scale}; pass one that is not negative and change the sign of q")
    for name, size in zip(("block_q", "block_kv"), config.tile(q.shape[-1]), strict=True):
        if size not in BLOCK_SIZES:
            raise ValueError(
                f"{name} is {size}; use one of {', '.join(map(str, BLOCK_SIZES))}, or {REFERENCE}"
            )
    if config.s_levels != 1:
        raise NotImplementedError(f"s_levels={config.s_levels} has no kernel; use s_levels=1, or {REFERENCE}")
