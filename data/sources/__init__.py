"""Where text comes from.

A source is divided into units: independent pieces of work, always the same ones in the same order. A unit
yields its documents in batches that fit into memory. Units are pickled to the processes that work on them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from data.files import Known, identity, matching
from data.settings import FILE_SUFFIXES, DataSettings
from data.sources import jsonl, openwebtext, parquet, stdlib, text
from data.sources.base import Batch, Unit
from data.split import effective_fraction

__all__ = ["Batch", "Source", "Unit", "load"]


@dataclass(frozen=True)
class Source:
    """All text of a dataset, and what identifies it."""

    units: list[Unit]
    files: list[Path]  # that the text comes from, without those of a download
    identity: dict  # JSON; the same for the same text
    input_bytes: int  # size of the files, which may be compressed
    val_fraction: float  # validation part of the text; 0 if validation has files of its own


def load(settings: DataSettings) -> Source:
    """The source that the settings name. Reads metadata, and small inputs for their checksum; no network.

    Raises ValueError for input that is missing, empty or unreadable.
    """
    if settings.source == "openwebtext":
        pinned = {key: getattr(settings, key) for key in ("repository", "config", "revision", "column")}
        return Source(
            openwebtext.units(**pinned), [], pinned, openwebtext.DOWNLOAD_BYTES, settings.val_fraction
        )
    if settings.source == "stdlib":
        files, val_files = stdlib.files(), []
    else:
        suffixes = FILE_SUFFIXES[settings.source]
        files = matching(settings.path, suffixes) if settings.path else []
        val_files = matching(settings.val_path, suffixes) if settings.val_path else []
        _check_apart(files, val_files)

    units = _units(settings, files, settings.val_fraction if not val_files else None)
    if files and not any(unit.text_bytes for unit in units):
        raise ValueError(f"data.path={settings.path} has no text; choose other files")
    val_fraction = effective_fraction(settings.val_fraction, sum(unit.text_bytes for unit in units))
    if val_files:
        val_fraction = 0.0
        units = [replace(unit, split="train") for unit in units]
        units += [replace(unit, split="val") for unit in _units(settings, val_files, None)]
    found = {"files": identity(files), "val_files": identity(val_files)}
    if settings.source in ("parquet", "jsonl"):
        found["column"] = settings.column
    input_bytes = sum(file.stat().st_size for file in files + val_files)
    return Source(units, files + val_files, found, input_bytes, val_fraction)


def _check_apart(files: list[Path], val_files: list[Path]) -> None:
    """Raise ValueError if a file is both training and validation text."""
    train = Known(files)
    for file in val_files:
        if (same := train.find(file)) is not None:
            name = str(file) if file == same else f"{file}, the same text as {same},"
            raise ValueError(f"{name} matches both data.path and data.val_path; keep it out of one of them")


def _units(settings: DataSettings, files: list[Path], val_fraction: float | None) -> list[Unit]:
    if settings.source == "parquet":
        return parquet.units(files, settings.column)
    if settings.source == "jsonl":
        return jsonl.units(files, settings.column)
    return text.units(files, val_fraction)
