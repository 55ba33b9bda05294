"""Work tiles of CUDA kernels, as scheduler.cuh takes them."""

from __future__ import annotations

import ctypes

from sagebwd.kernels.cuda.arguments import CSegments
from sagebwd.kernels.cuda.plan import Operand
from sagebwd.kernels.layout import Axes


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
        cls, q: Operand, k: Operand, axes: Axes, *, of_keys: bool = False, tokens: int,
        tile_counter: int | None,
    ) -> CAxes:  # fmt: skip
        """The work tiles: blocks of so many ``tokens`` in each head of q, or of k.

        Args:
            tile_counter: address of an int32 that is zero.
        """
        x, axis = (k, axes.kv) if of_keys else (q, axes.q)
        work = axis.with_block(tokens)
        return cls(
            CSegments.of(work.segments), CSegments.of(axes.q.segments), CSegments.of(axes.kv.segments),
            tile_counter, axes.q.n, axes.kv.n, x.shape[3], x.shape[1], q.shape[1] // k.shape[1],
            x.shape[0] * x.shape[1], work.blocks, axes.q.blocks, axes.kv.blocks,
        )  # fmt: skip

    @property
    def work_tiles(self) -> int:
        """Their number, over all heads."""
        return self.work_heads * self.work_blocks
