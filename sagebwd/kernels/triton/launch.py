"""How the attention kernels are launched: tokens that a CTA owns, warps and pipeline stages.

A table, not a search, so that two machines never differ by chance. The blocks that share a scale come from
the config; nothing here changes results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sagebwd.config import DEFAULT_CONFIG, PAPER_INT8_MATMULS, SageConfig
from sagebwd.interface import AttentionParams
from sagebwd.kernels.layout import padded_head_dim
from sagebwd.window import Window


class Launch(NamedTuple):
    """own: tokens that one CTA owns, at most a block of them."""

    own: int
    warps: int
    stages: int


#: By kernel and padded head size. Measured on an H200; elsewhere what registers and shared memory hold.
HOPPER = {
    "forward": {32: Launch(64, 4, 3), 64: Launch(64, 4, 3), 128: Launch(64, 4, 3), 256: Launch(64, 8, 2)},
    "dk_dv": {32: Launch(64, 4, 3), 64: Launch(64, 4, 3), 128: Launch(64, 4, 2), 256: Launch(32, 8, 2)},
    "dq": {32: Launch(64, 4, 3), 64: Launch(64, 4, 3), 128: Launch(64, 4, 3), 256: Launch(32, 8, 2)},
}
OTHERS = {
    "forward": {32: Launch(64, 4, 2), 64: Launch(64, 4, 2), 128: Launch(64, 4, 2), 256: Launch(64, 8, 2)},
    "dk_dv": {32: Launch(64, 4, 2), 64: Launch(64, 4, 2), 128: Launch(64, 8, 2), 256: Launch(32, 8, 1)},
    "dq": {32: Launch(64, 4, 2), 64: Launch(64, 4, 2), 128: Launch(64, 8, 2), 256: Launch(32, 8, 2)},
}


def launch_options(kernel: str, q: Tensor, config: SageConfig) -> tuple[int, dict[str, int]]:
    """The tokens that a CTA of ``kernel`` owns, and Triton's options.

    Args:
        kernel: ``"forward"`` or ``"dq"``, which own queries, or ``"dk_dv"``, which owns keys.
    """
    block_q, block_kv = config.tile(q.shape[-1])
    own_block, other_block = (block_kv, block_q) if kernel == "dk_dv" else (block_q, block_kv)
    table = HOPPER if is_hopper(q.device) else OTHERS
    own, warps, stages = table[kernel][padded_head_dim(q.shape[-1])]
    if config.granularity == "block" and own < own_block and kernel != "forward":
        own, warps, stages = own_block, 8, 1  # a scale belongs to the whole tile
    # A pipeline holds several tiles in shared memory. Tiles larger than the default's, 16-bit operands and
    # what Q-smoothing loads leave no room for that.
    default_block = DEFAULT_CONFIG.tile(q.shape[-1])[0 if kernel == "dk_dv" else 1]
    default_bytes = config.int8_matmuls == PAPER_INT8_MATMULS and not config.smooth_q
    fits = default_bytes and other_block <= default_block
    return min(own, own_block), {"num_warps": warps, "num_stages": stages if fits else 1}


def window_arguments(window: Window) -> dict[str, int | bool | None]:
    """The arguments of the attention kernels for a window; a limit that is None or zero takes no argument."""
    return {
        "left": None if window.left < 0 else window.left,
        "right": None if window.right <= 0 else window.right,
        "IS_CAUSAL": window.right == 0,
    }


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is such a GPU; the interpreter's CPU is none."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def with_the_fix(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a pass: where tiles need more shared memory or registers than there are, say what to set."""

    @functools.wraps(run)
    def running(x: Tensor, *arguments: Any, **named: Any) -> Any:
        try:
            return run(x, *arguments, **named)
        except OutOfResources as error:
            (config,) = (each.config for each in arguments if isinstance(each, AttentionParams))
            tile = " x ".join(map(str, config.tile(x.shape[-1])))
            raise ValueError(
                f"tiles of {tile} (block_q x block_kv) do not fit this GPU with head size {x.shape[-1]} and "
                f'this config ({error}); set smaller ones, or pass kernels="reference", which runs, slowly, '
                "anywhere"
            ) from error

    return running
