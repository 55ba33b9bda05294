"""The settings of the data, and the checks that need no data."""

from dataclasses import dataclass
from pathlib import Path

from data.files import matching

SOURCES = ("openwebtext", "parquet", "jsonl", "text", "stdlib")
FILE_SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl",),
    "text": (".txt",),
}  # sources that read data.path
VOCABULARY_SIZES = {"gpt2": 50257, "bytes": 257}


@dataclass
class DataSettings:
    """Which text, how it becomes tokens, and where the tokens are kept."""

    source: str = "openwebtext"  # one of SOURCES
    path: str | None = None  # parquet, jsonl, text: a file, a folder or a glob
    val_path: str | None = None  # held-out text in files of its own; null: a part of `path` is held out
    column: str = "text"  # parquet column or JSON key that holds the text
    tokenizer: str = "gpt2"  # one of VOCABULARY_SIZES
    val_fraction: float = 0.0005  # held-out part of the text; small texts hold out more, see data/split.py

    repository: str = "Skylion007/openwebtext"  # openwebtext: dataset on the Hugging Face Hub
    config: str = "plain_text"
    revision: str | None = None  # commit of that dataset, so that its text can not change
    documents: int | None = None  # how many documents the source must turn out to hold; null: any number

    root: str = "tokens"  # prepared datasets live in <root>/<name>
    name: str | None = None  # null: made from the source, its contents and the tokenizer
    processes: int | None = None  # that tokenize; null: one per core. Does not change the result
    prepare_on_first_use_mb: int = 200  # files up to this size in all are prepared when training starts


def check(settings: DataSettings) -> None:
    """Raise ValueError, naming the mend, for settings that can not work. Fast, and never uses the network."""
    if settings.source not in SOURCES:
        raise ValueError(f"data.source={settings.source} is unknown; choose one of {', '.join(SOURCES)}")
    vocabulary_size(settings.tokenizer)
    if not 0 < settings.val_fraction < 1:
        raise ValueError(
            f"data.val_fraction={settings.val_fraction} must lie between 0 and 1; 0.0005 is usual for large "
            "data"
        )
    if settings.processes is not None and settings.processes < 1:
        raise ValueError(f"data.processes={settings.processes} must be at least 1; null uses every core")
    if settings.prepare_on_first_use_mb < 0:
        raise ValueError(
            f"data.prepare_on_first_use_mb={settings.prepare_on_first_use_mb} must not be negative; 0 turns "
            "it off"
        )
    if settings.name is not None and (Path(settings.name).name != settings.name or settings.name == ".."):
        raise ValueError(
            f"data.name={settings.name!r} must be a plain folder name; data.root says where it lies"
        )
    if settings.source in FILE_SUFFIXES:
        _check_files(settings)
    else:
        _check_without_files(settings)


def vocabulary_size(tokenizer: str) -> int:
    """Number of token ids of a tokenizer, end-of-text included; known without loading it."""
    if tokenizer not in VOCABULARY_SIZES:
        raise ValueError(
            f"data.tokenizer={tokenizer} is unknown; choose one of {', '.join(VOCABULARY_SIZES)}"
        )
    return VOCABULARY_SIZES[tokenizer]


def named_folder(settings: DataSettings) -> Path | None:
    """The prepared dataset called data.name, if there is one; usable without the text it came from."""
    if settings.name is None:
        return None
    folder = Path(settings.root) / settings.name
    return folder if (folder / "manifest.json").is_file() else None


def _check_files(settings: DataSettings) -> None:
    source = settings.source
    if settings.path is None:
        raise ValueError(
            f"data={source} needs data.path=FILE (or a folder, or a quoted glob such as 'DIR/*')"
        )
    if named_folder(settings):
        return
    for key, pattern in (("path", settings.path), ("val_path", settings.val_path)):
        if pattern is None:
            continue
        try:
            files = matching(pattern, FILE_SUFFIXES[source])
        except ValueError as error:
            raise ValueError(f"data.{key}={pattern}: {error}") from None
        if source == "parquet":
            from data.sources.parquet import (
                check_column,
            )  # here: it imports pyarrow, which others need not wait for

            check_column(files[0], settings.column)


def _check_without_files(settings: DataSettings) -> None:
    for key, value in (("path", settings.path), ("val_path", settings.val_path)):
        if value is not None:
            raise ValueError(
                f"data.{key}={value} has no meaning for data.source={settings.source}; leave it out, or use "
                f"data={', data='.join(FILE_SUFFIXES)}"
            )
    if settings.source == "openwebtext" and not settings.revision:
        raise ValueError(
            "data.source=openwebtext needs data.revision=COMMIT, so that the text can not change between runs"
        )
