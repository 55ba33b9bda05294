"""Where text comes from: what every source yields, and what sources share.

A source is divided into units: independent pieces of work, always the same ones in the same order. A unit
yields its documents in batches that fit into memory. Units are pickled to the processes that work on them.
To add a source, add a module here that has a SOURCE: its name is then an option, `data=NAME`.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from data.order import mix64
from data.settings import DataSettings

# Approximate text per unit: large enough for a process, small enough to redo after a crash.
UNIT_BYTES = 64 << 20

BATCH_BYTES = 4 << 20  # approximate text per batch: bounds the memory of a process

TEXT_TYPES = (
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by suffix, as Arrow calls them

# A fraction that suits gigabytes would leave a small text too little validation text for one sequence.
SMALLEST_VALIDATION = 256 << 10  # bytes of text
LARGEST_SHARE = 0.1  # of a small text, even if that is less than SMALLEST_VALIDATION


@dataclass(frozen=True)
class Batch:
    """Some documents of a unit, in order."""

    texts: pa.LargeStringArray  # valid UTF-8; what is null or empty is no document and is skipped
    continues: bool = False  # the last document goes on in the next batch or unit


@dataclass(frozen=True, kw_only=True)
class Unit:
    """An independent piece of work: part of a file, or several files."""

    text_bytes: int  # approximate amount of text, for the progress bar
    split: str | None = None  # "train" or "val"; None: each document by `in_validation`
    version: str = ""  # of text that the recipe does not identify: another version is tokenized anew

    def batches(self) -> Iterator[Batch]:
        """Read the unit from its start. Raises ValueError, naming file and row, for unusable text."""
        raise NotImplementedError


class Part(NamedTuple):
    """Bytes start … stop − 1 of a file."""

    file: Path
    start: int
    stop: int
    ends_document: bool = True

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Source:
    """A kind of text."""

    # Units of some files by the settings of a text. The last argument is Unit.split, None for text that is
    # both. Raises ValueError for files that cannot be read.
    units: Callable[[list[Path], DataSettings, str | None], list[Unit]]
    suffixes: tuple[str, ...] = ()  # of the files that data.path names; none: it has text of its own
    settings: tuple[str, ...] = ()  # that its text depends on, besides the files
    # The files of training and of validation text of a source that has text of its own. No network.
    files: Callable[[DataSettings], tuple[list[Path], list[Path]]] = lambda settings: ([], [])


def effective_fraction(val_fraction: float, text_bytes: int) -> float:
    """Validation part of a text of this size: `val_fraction`, or 256 KiB if more, but at most a tenth."""
    if text_bytes <= 0:
        return val_fraction
    return max(val_fraction, min(LARGEST_SHARE, SMALLEST_VALIDATION / text_bytes))


def in_validation(unit: int, first: int, count: int, fraction: float) -> np.ndarray:
    """Which of the documents first … first + count − 1 of a unit are validation text; bool, (count,).

    Each is with probability `fraction`, by a hash of its position: neither its content nor the number of
    processes matters. The very first document always is, so that no split is empty.
    """
    positions = np.arange(first, first + count, dtype=np.uint64)
    hashes = mix64(positions ^ mix64(np.uint64(unit) + np.uint64(1)))
    chosen = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if unit == 0 and first == 0 and count:
        chosen[0] = True
    return chosen


def units_of(kind: type[Unit], pieces: Iterable[Any], split: str | None, **fields: Any) -> list[Unit]:
    """Units of neighbouring pieces, each of about UNIT_BYTES by their `size`, with further fields."""
    groups: list[list[Any]] = []
    total = UNIT_BYTES
    for piece in pieces:
        if total >= UNIT_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(piece)
        total += piece.size
    return [
        kind(text_bytes=sum(piece.size for piece in group), split=split, pieces=tuple(group), **fields)
        for group in groups
    ]


def batches_of(texts: Iterable[tuple[str | None, bool]]) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES. texts: in order, each with whether it ends its document."""
    batch: list[str | None] = []
    size = 0
    for text, ends_document in texts:
        batch.append(text)
        size += len(text or "")
        if size >= BATCH_BYTES or not ends_document:
            yield Batch(pa.array(batch, pa.large_string()), continues=not ends_document)
            batch, size = [], 0
    if batch:
        yield Batch(pa.array(batch, pa.large_string()))


def check_column(schema: pa.Schema, where: str, column: str) -> None:
    """Raise ValueError unless a table has one column of that name, with text."""
    count = schema.names.count(column)
    if count != 1:
        found = f"{count} columns" if count else "no column"
        names = ", ".join(map(repr, schema.names))
        raise ValueError(f"{where} has {found} {column!r}; it has {names}. Name one: data.column=…")
    _check_type(schema.field(column).type, f"{where}: column {column!r}")


def usable(column: pa.Array, where: str, first_row: int) -> pa.LargeStringArray:
    """A column in the type of Batch.texts. Raises ValueError for what is no text and invalid UTF-8."""
    if column.null_count < len(column):  # or a reader may have taken it for numbers
        _check_type(column.type, f"{where}, row {first_row}")
    texts = column.cast(pa.large_string(), safe=False)  # the check of its bytes comes next
    if not _is_utf8(texts):
        row = first_row + next(row for row in range(len(texts)) if not _is_utf8(texts[row : row + 1]))
        raise ValueError(f"{where}, row {row} is not valid UTF-8; convert it, or drop that row")
    return texts


def _is_utf8(texts: pa.LargeStringArray) -> bool:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _check_type(kind: pa.DataType, where: str) -> None:
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if kind not in TEXT_TYPES:
        raise ValueError(f"{where} holds {kind}, not text. Name another: data.column=…")


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
