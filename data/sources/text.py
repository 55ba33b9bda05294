"""Plain text: a document per file.

Large files are read in parts, so that a book of any size fits in memory.

A file is only cut in front of a single space or newline that is followed by something else. GPT-2's pre-
tokenizer splits there in any case, so the ids do not depend on where, or whether, a file is cut.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.settings import DataSettings
from data.sources import (
    BATCH_BYTES,
    UNIT_BYTES,
    Batch,
    Part,
    Source,
    Unit,
    batches_of,
    effective_fraction,
    line_number,
    units_of,
)

# The byte behind is one that no white space begins with: U+0085, U+00A0, U+1680, U+2000 …, U+3000 begin with
# C2, E1, E2, E3.
CUT = re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])")
CUT_WINDOW = 1 << 20  # bytes searched for a place to cut; text without any is cut between two characters


@dataclass(frozen=True, kw_only=True)
class TextUnit(Unit):
    pieces: tuple[Part, ...]

    def batches(self) -> Iterator[Batch]:
        return batches_of(text for part in self.pieces for text in _read(part))


def units(files: list[Path], settings: DataSettings, split: str | None = None) -> list[Unit]:
    """The units of some files. If they are both, the end of all text is validation text.

    It is the end, not a choice by documents, because a text is often a single document.
    """
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    to_train = {"train": total, "val": 0}.get(split)
    if to_train is None:
        to_train = total - int(effective_fraction(settings.val_fraction, total) * total)
    train: list[Part] = []
    val: list[Part] = []
    for file, size in zip(files, sizes, strict=True):
        boundary = _place_to_cut(file, to_train) if 0 < to_train < size else min(max(to_train, 0), size)
        train += _parts(file, 0, boundary)
        val += _parts(file, boundary, size)
        train += [] if size else [Part(file, 0, 0, ends_document=True)]
        to_train -= size
    return units_of(TextUnit, train, "train") + units_of(TextUnit, val, "val")


def _parts(file: Path, start: int, stop: int) -> Iterator[Part]:
    """A stretch of a file in parts of about UNIT_BYTES; the last one ends the document."""
    while start < stop:
        end = stop if start + UNIT_BYTES >= stop else min(_place_to_cut(file, start + UNIT_BYTES), stop)
        yield Part(file, start, end, ends_document=end == stop)
        start = end


def _read(part: Part) -> Iterator[tuple[str, bool]]:
    """The text of a part, in pieces, each with whether it ends the document."""
    if not part.size:
        yield "", True  # which is counted
    start = part.start
    while start < part.stop:
        wanted = start + BATCH_BYTES
        end = part.stop if wanted >= part.stop else min(_place_to_cut(part.file, wanted), part.stop)
        with part.file.open("rb") as handle:
            handle.seek(start)
            data = handle.read(end - start)
        try:
            yield data.decode("utf-8"), part.ends_document and end == part.stop
        except UnicodeDecodeError as error:
            line = line_number(part.file, start + error.start)
            raise ValueError(
                f"{part.file}, line {line} is not valid UTF-8; convert the file to UTF-8"
            ) from None
        start = end


def _place_to_cut(file: Path, offset: int) -> int:
    """The first place at or behind `offset` where the file can be cut; its end if there is none."""
    with file.open("rb") as handle:
        handle.seek(offset)
        window = handle.read(CUT_WINDOW)
    if found := CUT.search(window):
        return offset + found.start()
    if len(window) < CUT_WINDOW:
        return offset + len(window)
    inside_character = len(window) - len(window.lstrip(bytes(range(0x80, 0xC0))))
    return offset + inside_character


SOURCE = Source(units, suffixes=(".txt",))
