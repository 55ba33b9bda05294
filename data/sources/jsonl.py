"""JSON Lines: a JSON object per line, the text under one key. A unit is some byte ranges of files.

A compressed file (.jsonl.gz, .jsonl.zst) is one range, because it can be read from its start only.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.settings import DataSettings
from data.sources import (
    UNIT_BYTES,
    Batch,
    Part,
    Source,
    Unit,
    batches_of,
    is_compressed,
    line_number,
    opened,
    units_of,
)

LONGEST_LINE = 256 << 20  # bytes; reading a line takes some ten times as much memory
TYPICAL_RATIO = 4  # of a compressed text: only its division into units depends on it


@dataclass(frozen=True, kw_only=True)
class JsonlUnit(Unit):
    pieces: tuple[Part, ...]  # the lines of a file that begin there; all lines of a compressed file
    key: str

    def batches(self) -> Iterator[Batch]:
        return batches_of(
            (self._text(part.file, offset, line), True)
            for part in self.pieces
            for offset, line in _lines(part)
            if not line.isspace()
        )

    def _text(self, file: Path, offset: int, line: bytes) -> str | None:
        try:
            # Of whole numbers only the type matters; Python refuses to read thousands of digits.
            document = json.loads(line, parse_int=lambda digits: 0)
        except (ValueError, RecursionError) as error:
            raise _wrong(file, offset, f"is not JSON ({error}); fix or drop that line") from None
        if not isinstance(document, dict):
            raise _wrong(
                file, offset, f"is no JSON object but {type(document).__name__}; fix or drop that line"
            )
        if self.key not in document:
            keys = ", ".join(map(repr, document)) or "none"
            raise _wrong(file, offset, f"has no key {self.key!r}; it has {keys}. Name one: data.column=…")
        text = document[self.key]
        if text is None:
            return None
        if not isinstance(text, str):
            kind = type(text).__name__
            raise _wrong(file, offset, f"holds {kind}, not text, under {self.key!r}; fix or drop it")
        # JSON can spell half a surrogate pair (backslash-u d800), which is not a character: U+FFFD, as
        # tiktoken does.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def units(files: list[Path], settings: DataSettings, split: str | None = None) -> list[Unit]:
    """The units of some files."""
    ranges = [part for file in files for part in _ranges(file, file.stat().st_size)]
    return units_of(JsonlUnit, ranges, split, key=settings.column)


SOURCE = Source(units, suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst"), settings=("column",))


def _ranges(file: Path, size: int) -> list[Part]:
    if is_compressed(file):
        return [Part(file, 0, size * TYPICAL_RATIO)] if size else []
    return [Part(file, start, min(start + UNIT_BYTES, size)) for start in range(0, size, UNIT_BYTES)]


def _lines(part: Part) -> Iterator[tuple[int, bytes]]:
    """The lines of a range with the offset each begins at."""
    all_of_it = is_compressed(part.file)
    try:
        with opened(part.file) as handle:
            offset = part.start
            if offset:  # a line that began earlier belongs to the previous range
                handle.seek(offset - 1)
                offset += len(_line(handle, part.file, offset)) - 1
            while (all_of_it or offset < part.stop) and (line := _line(handle, part.file, offset)):
                yield offset, line
                offset += len(line)
    except OSError as error:
        raise ValueError(f"{part.file} cannot be read ({error}); copy or download it again") from error


def _line(handle: BinaryIO, file: Path, offset: int) -> bytes:
    line = handle.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise _wrong(file, offset, f"has more than {LONGEST_LINE:,} bytes; make it several documents")
    return line


def _wrong(file: Path, offset: int, what: str) -> ValueError:
    return ValueError(f"{file}, line {line_number(file, offset)} {what}")
