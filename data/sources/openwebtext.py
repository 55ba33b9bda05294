"""OpenWebText, streamed from the Hugging Face Hub: unit i is the i-th of its 80 parquet files."""

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from data.sources.base import Batch, Unit, usable

FILES = 80
DOWNLOAD_BYTES = 24_200_000_000  # compressed
TEXT_BYTES = 39_770_000_000
ROWS_AT_ONCE = 1000  # about 5 MB of text
RETRY_SECONDS = (2, 8, 30)  # waits before each retry; any progress resets the count

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenWebTextUnit(Unit):
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
        for column in self._with_retries():
            yield Batch(usable(column, self.label, row))
            row += len(column)

    def _with_retries(self) -> Iterator[pa.Array]:
        delivered = 0
        waits = iter(RETRY_SECONDS)
        while True:
            try:
                for column in itertools.islice(self._stream(), delivered, None):
                    yield column
                    delivered += 1
                    waits = iter(RETRY_SECONDS)
                return
            except Exception as error:  # of several libraries, without a common base class
                if _is_offline():
                    raise OSError(
                        f"{self.label} cannot be read: HF_HUB_OFFLINE is set; unset it, or use text of your "
                        "own, data=parquet data.path=…"
                    ) from error
                wait = next(waits, None)
                if wait is None:
                    raise OSError(
                        f"{self.label} could not be read ({type(error).__name__}: {error}). Finished units "
                        "are kept: run the same command again to continue"
                    ) from error
                log.warning("%s: %s; trying again in %d s", self.label, error, wait)
                time.sleep(wait)

    def _stream(self) -> Iterator[pa.Array]:
        import datasets  # slow to import, and no other source needs it

        dataset = datasets.load_dataset(
            self.repository, self.config, revision=self.revision, split="train", streaming=True
        )
        one_file = dataset.select_columns([self.column]).shard(self.of, self.index)
        for table in one_file.with_format("arrow").iter(ROWS_AT_ONCE):
            yield table.column(self.column).combine_chunks()


def _is_offline() -> bool:
    """Whether huggingface_hub was told to make no connection, which no retry changes."""
    from huggingface_hub import constants  # comes with datasets

    return constants.HF_HUB_OFFLINE


def units(*, repository: str, config: str, revision: str, column: str) -> list[Unit]:
    """One unit per file of the dataset."""
    return [
        OpenWebTextUnit(
            text_bytes=TEXT_BYTES // FILES,
            repository=repository,
            config=config,
            revision=revision,
            column=column,
            index=index,
            of=FILES,
        )
        for index in range(FILES)
    ]
