"""Whatever `datasets` reads: a dataset of the Hugging Face Hub, a folder like one, or files of a format.

A unit is a file of a stream, or some 64 MiB of a dataset that was downloaded. `datasets` reads again what a
lost connection cut off, and fsspec what is at hf://, s3://, …
"""

import glob
import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.files import matching
from data.settings import DataSettings
from data.sources import UNIT_BYTES, Batch, Source, Unit, check_column, usable

ROWS_AT_ONCE = 1000  # 5 MB of web pages, some hundred of books

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetUnit(Unit):
    """A part of a dataset. Which files of which commit it has was found once, for all units."""

    label: str
    column: str
    dataset: Any  # datasets.IterableDataset, which is pickled without its text

    def batches(self) -> Iterator[Batch]:
        row = 0
        for column in self._columns():
            yield Batch(usable(column, self.label, row))
            row += len(column)

    def _columns(self) -> Iterator[pa.Array]:
        try:
            for table in self.dataset.with_format("arrow").iter(ROWS_AT_ONCE):
                yield table.column(self.column).combine_chunks()
        except Exception as error:  # of several libraries, without a common base class
            raise OSError(
                f"{self.label} could not be read ({type(error).__name__}: {error}). Finished units are kept: "
                "run the same command again to continue"
            ) from error


def files(settings: DataSettings) -> tuple[list[Path], list[Path]]:
    """The files of training and of validation text that are on this machine; of what is elsewhere, none."""
    train = _files(settings, settings.path, settings.split)
    return train, _files(settings, *_validation(settings)) if _validation(settings) else []


def units(files: list[Path], settings: DataSettings, split: str | None = None) -> list[Unit]:
    """The units of the dataset. Looks up what it has, and reads its first row.

    Raises ValueError, as `datasets` words it, if that fails.
    """
    path, part = _validation(settings) if split == "val" else (settings.path, settings.split)
    if part is None:  # of a validation set, there is no training text
        return []
    label = f"{settings.name} {settings.config or ''}".strip() + (f" ({path})" if path else "")
    with _named(label):
        builder = _builder(settings, path)
        if settings.streaming:
            dataset = builder.as_streaming_dataset(split=part)
        else:
            builder.download_and_prepare()
            stored = builder.as_dataset(split=part)
            dataset = stored.to_iterable_dataset(num_shards=max(1, stored.data.nbytes // UNIT_BYTES))
        first = next(iter(dataset.with_format("arrow").iter(1)), None)
    if first is None:
        raise ValueError(f"{label} has no text in split {part}")
    check_column(first.schema, label, settings.column)
    dataset = dataset.select_columns([settings.column])
    parts = dataset.num_shards
    known = (builder.info.splits or {}).get(part)
    size = sum(file.stat().st_size for file in files) or (known.num_bytes if known else 0)
    version = "" if files or settings.revision else _version(builder)
    return [
        DatasetUnit(
            text_bytes=size // parts,
            split=split,
            version=version,
            label=f"{label}, file {index + 1} of {parts}",
            column=settings.column,
            dataset=dataset.shard(parts, index),
        )
        for index in range(parts)
    ]


SETTINGS = ("name", "path", "val_path", "config", "split", "val_split", "revision", "column", "streaming")
SOURCE = Source(units, settings=SETTINGS, files=files)


def _validation(settings: DataSettings) -> tuple[str | None, str] | None:
    """The path and the split of validation text that lies apart."""
    if settings.val_path is None and settings.val_split is None:
        return None
    return settings.val_path or settings.path, settings.val_split or "train"


def _files(settings: DataSettings, path: str | None, part: str | None) -> list[Path]:
    if part is None or _is_elsewhere(settings, path):
        return []
    if not Path(settings.name).is_dir():
        with _named(path or settings.name):
            return matching(path, ("",)) if path else []
    with _named(settings.name):
        found = _builder(settings, path).config.data_files
        if (split := part.split("[")[0]) not in found:
            raise ValueError(f"it has no split {split!r}; it has {', '.join(map(str, found))}")
        return [Path(file) for file in found[split]]


def _is_elsewhere(settings: DataSettings, path: str | None) -> bool:
    """Whether it is no folder and no file here: of a dataset of the Hub, `path` names files in it."""
    return "://" in (path or "") or ("/" in settings.name and not Path(settings.name).is_dir())


def _builder(settings: DataSettings, path: str | None) -> Any:
    import datasets  # slow to import, and no other source needs it

    if path is None and hasattr(datasets.packaged_modules, settings.name):
        raise ValueError("a format needs data.path=FILES")  # or it reads whatever is in the working folder
    if path and not _is_elsewhere(settings, path) and not Path(settings.name).is_dir():
        path = [glob.escape(str(file)) for file in matching(path, ("",))]
    of_csv = {"keep_default_na": False} if settings.name == "csv" else {}  # the word NA is text
    return datasets.load_dataset_builder(
        settings.name, settings.config, data_files=path, revision=settings.revision, **of_csv
    )


@contextmanager
def _named(label: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of several libraries, without a common base class
        raise ValueError(f"{label}: {str(error) or type(error).__name__}") from error


def _version(builder: Any) -> str:
    """What tells whether a dataset without a revision is still the one whose first units were read."""
    if re.fullmatch("[0-9a-f]{40}", builder.hash):
        log.info("%s is at data.revision=%s, which pins it", builder.repo_id, builder.hash)
    found = {split: [*files, files.origin_metadata] for split, files in builder.config.data_files.items()}
    return hashlib.sha256(repr(found).encode()).hexdigest()
