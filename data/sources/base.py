"""What every source yields, and the checks they share."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import pyarrow as pa

# Approximate text per unit: large enough for a process, small enough to redo after a crash.
UNIT_BYTES = 64 << 20

BATCH_BYTES = 4 << 20  # approximate text per batch: bounds the memory of a process

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by suffix, as Arrow calls them

Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Batch:
    """Some documents of a unit, in order."""

    texts: pa.LargeStringArray  # valid UTF-8, without nulls
    continues: bool = False  # the last document goes on in the next batch or unit


@dataclass(frozen=True, kw_only=True)
class Unit:
    """An independent piece of work: part of a file, or several files."""

    text_bytes: int  # approximate amount of text, for the progress bar
    split: str | None = None  # "train" or "val"; None: each document by the rule of data/split.py

    def batches(self) -> Iterator[Batch]:
        """Read the unit from its start. Raises ValueError, naming file and row, for unusable text."""
        raise NotImplementedError


def grouped(pieces: list[Piece], size: Callable[[Piece], int]) -> list[tuple[Piece, ...]]:
    """Join consecutive pieces until they reach UNIT_BYTES."""
    groups: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    total = 0
    for piece in pieces:
        group.append(piece)
        total += size(piece)
        if total >= UNIT_BYTES:
            groups.append(tuple(group))
            group, total = [], 0
    if group:
        groups.append(tuple(group))
    return groups


def usable(column: pa.Array, where: str, first_row: int) -> pa.LargeStringArray:
    """A column of strings in the type of Batch.texts. Raises ValueError for nulls and invalid UTF-8."""
    if column.null_count:
        row = first_row + column.is_null().to_pylist().index(True)
        raise ValueError(
            f"{where}, row {row} has no text (null); drop such rows, or name another data.column"
        )
    texts = column.cast(pa.large_string(), safe=False)  # the check of its bytes comes next
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        row = first_row + _first_undecodable(texts)
        raise ValueError(f"{where}, row {row} is not valid UTF-8; convert it, or drop that row") from None
    return texts


def opened(file: Path) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz or .zst.

    Reading raises OSError if a compressed file is damaged or cut short.
    """
    if is_compressed(file):
        return io.BufferedReader(pa.input_stream(str(file), compression=COMPRESSIONS[file.suffix]))
    return file.open("rb")


def is_compressed(file: Path) -> bool:
    return file.suffix in COMPRESSIONS


def line_number(file: Path, offset: int) -> int:
    """The line, counted from 1, that the byte at `offset` of the decompressed file is in."""
    newlines, left = 0, offset
    with opened(file) as handle:
        while left > 0 and (chunk := handle.read(min(left, 1 << 20))):
            newlines += chunk.count(b"\n")
            left -= len(chunk)
    return newlines + 1


def _first_undecodable(texts: pa.LargeStringArray) -> int:
    for row, text in enumerate(texts.cast(pa.large_binary())):
        try:
            text.as_py().decode("utf-8")
        except UnicodeDecodeError:
            return row
    raise AssertionError("Arrow found invalid UTF-8 where Python finds none")
