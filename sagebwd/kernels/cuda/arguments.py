"""Arguments of CUDA kernels: structures as C lays them out, results to fill, and values for the driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sagebwd.kernels.layout import Axis, Segments, empty_result
from sagebwd.window import Window

#: For kernels, no limit of a window: more than all tokens, so that sums with it do not overflow.
NO_LIMIT = 2**30


def pointers(*names: str) -> list[tuple[str, type]]:
    """Fields of a structure that are pointers."""
    return [(name, ctypes.c_void_p) for name in names]


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
    def of(cls, x: Tensor) -> CTokenTensor:
        """``x`` as kernels take it. Holds no reference: ``x`` must outlive the launch."""
        return cls(x.data_ptr(), *x.stride())


class CSegments(ctypes.Structure):
    """``Segments`` of layout.cuh: where packed documents lie; null pointers without packing."""

    _fields_ = pointers("document", "start", "first_block")

    @classmethod
    def of(cls, segments: Segments | None) -> CSegments:
        """``segments`` as kernels take them. Holds no reference: they must outlive the launch."""
        return cls() if segments is None else cls(*(x.data_ptr() for x in segments))


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

    def __init__(self, x: Tensor, axis: Axis, *, is_zeroed: bool = False) -> None:
        self._result = empty_result(x)
        self._buffer = self._result if self._result.stride(-1) == 1 else x.new_empty(x.shape)
        if is_zeroed or axis.segments is not None:
            self._buffer.zero_()
        self.target = CTokenTensor.of(self._buffer)

    def finish(self) -> Tensor:
        """The tensor; call it after the kernels that fill it were launched."""
        if self._buffer is not self._result:
            self._result.copy_(self._buffer)
        return self._result


def _null(_: None) -> int:
    return 0


def _format_of(kind: type) -> tuple[str, int, Callable[[Any], Any]]:
    """How an argument of this type is packed: format of :mod:`struct`, size in bytes, conversion."""
    if issubclass(kind, Tensor):
        return "Q", 8, Tensor.data_ptr
    if kind is type(None):
        return "Q", 8, _null
    if issubclass(kind, int):
        return "i", 4, int
    if issubclass(kind, float):
        return "f", 4, float
    if issubclass(kind, ctypes.Structure):
        size = ctypes.sizeof(kind)
        return f"{size}s", size, bytes
    raise TypeError(f"kernels take tensors, None, int, float and ctypes structures, not {kind.__name__}")


class Frame:
    """Memory for the arguments of one launch, and the array of pointers to them that the driver reads."""

    def __init__(self, offsets: Sequence[int], size: int) -> None:
        self.values = ctypes.create_string_buffer(size)
        base = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)


class Signature:
    """How arguments of these types are packed: computed once, used for every launch."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        formats, self.sizes, self._converters = [], [], []
        for kind in kinds:
            code, size, convert = _format_of(kind)
            formats.append(f"{code}{-size % 8}x")
            self.sizes.append(size)
            self._converters.append(convert)
        self._format = struct.Struct("=" + "".join(formats))
        padded = [size + -size % 8 for size in self.sizes]
        self._offsets = [sum(padded[:i]) for i in range(len(padded))]
        # Frames that no launch is using. Threads take and return them; list.pop and append are atomic.
        self._frames: list[Frame] = []

    def pack(self, arguments: tuple[Any, ...]) -> Frame:
        """The arguments in a frame; :meth:`release` it when the driver has read it."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self._offsets, max(1, self._format.size))
        values = [convert(x) for convert, x in zip(self._converters, arguments, strict=True)]
        self._format.pack_into(frame.values, 0, *values)
        return frame

    def release(self, frame: Frame) -> None:
        """Let another launch use the frame."""
        self._frames.append(frame)
