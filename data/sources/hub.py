"""A dataset of the Hugging Face Hub, streamed: OpenWebText, a unit for each of its 80 parquet files.

`datasets` reads again what a lost connection cut off.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from data.settings import DataSettings
from data.sources import Batch, Source, Unit, usable

FILES = 80
TEXT_BYTES = 39_770_000_000  # a download of 24.2 GB
ROWS_AT_ONCE = 1000  # about 5 MB of text


@dataclass(frozen=True, kw_only=True)
class HubUnit(Unit):
    repository: str
    config: str
    revision: str
    column: str
    index: int
    of: int

    @property
    def label(self) -> str:
        return f"{self.repository}, file {self.index + 1} of {self.of}"

    def batches(self) -> Iterator[Batch]:
        row = 0
        try:
            for column in self._columns():
                yield Batch(usable(column, self.label, row))
                row += len(column)
        except ValueError:
            raise
        except Exception as error:  # of several libraries, without a common base class
            raise OSError(
                f"{self.label} could not be read ({type(error).__name__}: {error}). Finished units are kept: "
                "run the same command again to continue"
            ) from error

    def _columns(self) -> Iterator[pa.Array]:
        import datasets  # slow to import, and no other source needs it

        dataset = datasets.load_dataset(
            self.repository, self.config, revision=self.revision, split="train", streaming=True
        )
        one_file = dataset.select_columns([self.column]).shard(self.of, self.index)
        for table in one_file.with_format("arrow").iter(ROWS_AT_ONCE):
            yield table.column(self.column).combine_chunks()


def units(files: list[Path], settings: DataSettings, split: str | None = None) -> list[Unit]:
    """The units of the dataset. Raises ValueError unless a revision pins its text."""
    if not settings.revision:
        raise ValueError(
            f"{settings.repository} needs data.revision=COMMIT, so that the text cannot change between runs"
        )
    return [
        HubUnit(
            text_bytes=TEXT_BYTES // FILES,
            split=split,
            repository=settings.repository,
            config=settings.config,
            revision=settings.revision,
            column=settings.column,
            index=index,
            of=FILES,
        )
        for index in range(FILES)
    ]


OPENWEBTEXT = Source(units, settings=("repository", "config", "revision", "column"))
