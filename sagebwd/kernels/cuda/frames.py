"""How the arguments of a plan's launches lie in memory, as the driver reads them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple


class Layout(NamedTuple):
    """How arguments of some types lie one after another, each from a multiple of 8 bytes on.

    struct: packs them.
    sizes, offsets: of the arguments, in bytes.
    addresses: position and type of what is an address, or is made of one.
    """

    struct: struct.Struct
    sizes: list[int]
    offsets: list[int]
    addresses: list[tuple[int, type]]


class Launch(NamedTuple):
    """begin: position of its arguments among those of all launches."""

    load: Callable[[], Any]
    grid: int
    threads: int
    begin: int
    layout: Layout


class Frame:
    """Memory for the arguments of all launches, and the arrays of pointers to them that the driver reads.

    To make one waits for the kernels.
    """

    def __init__(self, values: bytes, launches: Sequence[Launch]) -> None:
        self.values = bytearray(values or bytes(8))
        self.words = memoryview(self.values).cast("Q")
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.values))
        self.launches, self._arrays = [], []
        for load, grid, threads, begin, layout in launches:
            kernel = load()
            if kernel.parameters not in (None, layout.sizes):
                has = f"{kernel.name} has parameters of {kernel.parameters} bytes"
                raise TypeError(f"{has}, the arguments {layout.sizes}")
            pointers = [base + begin + offset for offset in layout.offsets]
            array = (ctypes.c_void_p * len(pointers))(*pointers)
            self._arrays.append(array)
            self.launches.append((kernel.start, grid, threads, ctypes.addressof(array)))


def packable(x: Any) -> Any:
    """An argument as its :class:`Layout` packs it."""
    if hasattr(x, "data_ptr"):
        return x.data_ptr()
    if x is None:
        return 0
    return bytes(x) if isinstance(x, ctypes.Structure) else x


@functools.cache
def layout_of(kinds: tuple[type, ...]) -> Layout:
    """Of arguments of these types: tensors or operands, None, int, float, and ctypes structures.

    Raises:
        TypeError: one is of another type.
    """
    codes = [_code_of(kind) for kind in kinds]
    sizes = [struct.calcsize(f"={code}") for code in codes]
    offsets = [0, *accumulate(size + -size % 8 for size in sizes)]
    padded = [f"{code}{-size % 8}x" for code, size in zip(codes, sizes, strict=True)]
    addresses = [
        (offset + inner, own)
        for offset, kind in zip(offsets, kinds, strict=False)
        for inner, own in _addresses_in(kind)
    ]
    return Layout(struct.Struct("=" + "".join(padded)), sizes, offsets[:-1], addresses)


def _code_of(kind: type) -> str:
    """Of the module ``struct``."""
    if kind is type(None) or hasattr(kind, "data_ptr"):
        return "Q"
    if issubclass(kind, (int, float)):
        return "i" if issubclass(kind, int) else "f"
    if issubclass(kind, ctypes.Structure):
        return f"{ctypes.sizeof(kind)}s"
    raise TypeError(f"kernels take tensors, None, int, float and ctypes structures, not {kind.__name__}")


def _addresses_in(kind: type) -> list[tuple[int, type]]:
    """Offset and type of the pointers, and of what is made of an address, in an argument of this type."""
    if not issubclass(kind, ctypes.Structure):
        return [] if issubclass(kind, (int, float)) else [(0, ctypes.c_void_p)]
    if hasattr(kind, "describe"):
        return [(0, kind)]
    found = []
    for name, field in kind._fields_:
        offset = getattr(kind, name).offset
        if field is ctypes.c_void_p:
            found.append((offset, field))
        elif issubclass(field, ctypes.Structure):
            found += [(offset + inner, own) for inner, own in _addresses_in(field)]
    return found
