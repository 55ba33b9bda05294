"""Work tiles of CUDA kernels, as scheduler.cuh takes them."""

from __future__ import annotations

import ctypes

from torch import Tensor

from sagebwd.kernels.cuda.arguments import CSegments
from sagebwd.kernels.layout import Axis


class CAxes(ctypes.Structure):
    """``Axes`` of scheduler.cuh."""

    _fields_ = [
        ("work", CSegments),
        ("q", CSegments),
        ("kv", CSegments),
        ("tile_counter", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("n_q", "n_kv", "d", "heads", "group")),
        *((name, ctypes.c_int) for name in ("work_heads", "work_blocks", "q_blocks", "kv_blocks")),
    ]

    @classmethod
    def of(
        cls, x: Tensor, q_axis: Axis, kv_axis: Axis, *, work_axis: Axis, group: int, tile_counter: int | None
    ) -> CAxes:
        """The work tiles: blocks of ``work_axis`` in each head of ``x``, which is q or k.

        Args:
            group: query heads that share a key head.
            tile_counter: address of an int32 that is zero.
        """
        axes = cls(
            CSegments.of(work_axis.segments), CSegments.of(q_axis.segments), CSegments.of(kv_axis.segments),
            tile_counter, q_axis.n, kv_axis.n, x.shape[3], x.shape[1], group,
            x.shape[0] * x.shape[1], work_axis.blocks, q_axis.blocks, kv_axis.blocks,
        )  # fmt: skip
        axes.work_axis = work_axis  # keeps the memory alive that the structure points to
        return axes

    @property
    def work_tiles(self) -> int:
        """Their number, over all heads."""
        return self.work_heads * self.work_blocks
