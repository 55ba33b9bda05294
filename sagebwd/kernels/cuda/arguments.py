"""Arguments of CUDA kernels: structures as C lays them out, and results to fill."""

from __future__ import annotations

import ctypes

from torch import Tensor

from sagebwd.kernels.cuda.plan import Operand
from sagebwd.kernels.layout import Axes, Axis, Segments
from sagebwd.window import Window

#: For kernels, no limit of a window: more than all tokens, so that sums with it do not overflow.
NO_LIMIT = 2**30


def pointers(*names: str) -> list[tuple[str, type]]:
    """Fields of a structure that are pointers."""
    return [(name, ctypes.c_void_p) for name in names]


def addresses(*operands: Operand | None) -> list[int]:
    """Pointers to these, null for None."""
    return [0 if x is None else x.data_ptr() for x in operands]


class CTokenTensor(ctypes.Structure):
    """``TokenTensor`` of layout.cuh: a tensor (B, H, N, D), its strides in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride_b", ctypes.c_int64),
        ("stride_h", ctypes.c_int64),
        ("stride_n", ctypes.c_int64),
        ("stride_d", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, x: Operand | Tensor) -> CTokenTensor:
        """``x`` as kernels take it. Holds no reference: ``x`` must outlive the launch."""
        return cls(x.data_ptr(), *x.stride())


class CSegments(ctypes.Structure):
    """``Segments`` of layout.cuh: where packed documents lie; null pointers without packing."""

    _fields_ = pointers("document", "start", "first_block")

    @classmethod
    def of(cls, segments: Segments | None) -> CSegments:
        """``segments`` as kernels take them. Holds no reference: they must outlive the launch."""
        return cls() if segments is None else cls(*(x.data_ptr() for x in segments))


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


class CWindow(ctypes.Structure):
    """``Window`` of window.cuh."""

    _fields_ = [("left", ctypes.c_int), ("right", ctypes.c_int)]

    @classmethod
    def of(cls, window: Window) -> CWindow:
        """``window`` with :data:`NO_LIMIT` for −1."""
        return cls(*(NO_LIMIT if limit < 0 else min(limit, NO_LIMIT) for limit in window))


class Result:
    """A tensor for kernels to fill, laid out as ``x``; (B, N, H, D) in memory if x is a stand-in.

    Kernels write contiguous channels. Where x has another layout they fill a buffer, which is then copied.
    Tokens that belong to no document are not visited, and so are zero from the start, or all with
    ``is_zeroed``.
    """

    def __init__(self, x: Operand, axis: Axis, *, is_zeroed: bool = False) -> None:
        self.tensor = filled = x.new_result()
        if filled.stride(3) != 1:
            filled = x.new_empty(x.shape)
            self.tensor.copy_(filled)
        if is_zeroed or axis.segments is not None:
            filled.fill_(0)
        self.target = CTokenTensor.of(filled)
