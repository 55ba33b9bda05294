"""Parquet files: a document per row, the text in one column. A unit is some neighbouring row groups.

Checksums of pages are verified where the file has them (pyarrow's `write_page_checksum=True`). Without them a
flipped byte often gives other text, and nothing tells.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.settings import DataSettings
from data.sources import BATCH_BYTES, Batch, Source, Unit, check_column, units_of, usable


class RowGroup(NamedTuple):
    """One row group of a file."""

    file: Path
    index: int
    first_row: int  # its first row's number in the file, from 0
    rows: int
    size: int  # bytes of the text column, uncompressed


@dataclass(frozen=True, kw_only=True)
class ParquetUnit(Unit):
    pieces: tuple[RowGroup, ...]
    column: str

    def batches(self) -> Iterator[Batch]:
        rows_at_once = max(
            1, BATCH_BYTES * sum(group.rows for group in self.pieces) // max(1, self.text_bytes)
        )
        for file, groups in itertools.groupby(self.pieces, key=lambda group: group.file):
            groups = list(groups)
            row = groups[0].first_row
            for column in self._read(file, [group.index for group in groups], rows_at_once):
                yield Batch(usable(column, str(file), row))
                row += len(column)
            missing = groups[0].first_row + sum(group.rows for group in groups) - row
            if missing:  # no checksum covers the number of values in the header of a page
                raise unreadable(file, f"{missing} rows are missing before row {row + missing}")

    def _read(self, file: Path, row_groups: list[int], rows_at_once: int) -> Iterator[pa.Array]:
        try:
            parquet = pq.ParquetFile(file, memory_map=True, page_checksum_verification=True)
            # One thread each: units are what runs in parallel.
            for batch in parquet.iter_batches(
                rows_at_once, row_groups=row_groups, columns=[self.column], use_threads=False
            ):
                yield batch.column(0)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file, error) from error


def units(files: list[Path], settings: DataSettings, split: str | None = None) -> list[Unit]:
    """The units of some files. Reads only the files' metadata."""
    row_groups = [group for file in files for group in _row_groups(file, settings.column)]
    return units_of(ParquetUnit, row_groups, split, column=settings.column)


SOURCE = Source(units, suffixes=(".parquet",), settings=("column",))


def _row_groups(file: Path, column: str) -> Iterator[RowGroup]:
    try:
        metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file, error) from error
    check_column(schema, str(file), column)
    column_index = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    first_row = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if group.num_rows:
            yield RowGroup(
                file, index, first_row, group.num_rows, group.column(column_index).total_uncompressed_size
            )
        first_row += group.num_rows


def unreadable(file: Path, error: Exception | str) -> ValueError:
    return ValueError(f"{file} cannot be read as parquet ({error}); is it complete? Fetch it again")
