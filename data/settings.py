"""The settings of the data, and the checks of those that belong to one text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.files import matching

SOURCES = ("openwebtext", "parquet", "jsonl", "text", "stdlib")
MIXTURE = "mixture"  # of several of them
FILE_SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "text": (".txt",),
}  # sources that read data.path
VOCABULARY_SIZES = {"gpt2": 50257, "bytes": 257}  # of the tokenizers that have a name


@dataclass
class DataSettings:
    """Which text, how it becomes tokens, and where the tokens are stored."""

    source: str = "openwebtext"  # one of SOURCES, or MIXTURE
    path: str | None = None  # parquet, jsonl, text: a file, a folder or a glob
    val_path: str | None = None  # validation text in files of its own; null: split from `path`
    column: str = "text"  # parquet column or JSON key that holds the text
    tokenizer: str = "gpt2"  # one of VOCABULARY_SIZES, a tokenizer.json, or a folder with one
    val_fraction: float = 0.0005  # validation part of the text; more of a small text, see data/split.py
    # Further validation sets by name: a path, or its source, path, column and name. See data/texts.py.
    validation: dict[str, Any] = field(default_factory=dict)
    # mixture: its sources by name, each with a weight and what else is not as in the mixture.
    sources: dict[str, Any] = field(default_factory=dict)

    repository: str = "Skylion007/openwebtext"  # openwebtext: dataset on the Hugging Face Hub
    config: str = "plain_text"
    revision: str | None = None  # commit of that dataset, so that its text cannot change
    documents: int | None = None  # number of documents the source must have; null: any number

    root: str = "tokens"  # prepared datasets live in <root>/<name>
    name: str | None = None  # null: made from the source, its contents and the tokenizer
    processes: int | None = None  # that tokenize; null: one per core. Does not change the result
    prepare_on_first_use_mb: int = 200  # files up to this size in all are prepared when training starts


def allow_names(schema: Any) -> None:
    """Let the command line set data.validation.NAME and data.sources.NAME, which Hydra does not know.

    schema: OmegaConf's, of the settings that have DataSettings as `data`.
    """
    from omegaconf import OmegaConf  # here: tokenizing needs none

    for group in (schema.data.validation, schema.data.sources):
        OmegaConf.set_struct(group, False)


def problems_of_text(settings: DataSettings) -> Iterator[str]:
    """Of the settings that belong to one text."""
    if not 0 < settings.val_fraction < 1:
        yield (
            f"data.val_fraction={settings.val_fraction} must lie between 0 and 1; 0.0005 is usual for large "
            "data"
        )
    if settings.name is not None and (Path(settings.name).name != settings.name or settings.name == ".."):
        yield f"data.name={settings.name!r} must be a plain folder name; data.root is the folder it is in"
    if settings.source not in SOURCES:
        yield f"data.source={settings.source} is unknown; choose one of {', '.join((*SOURCES, MIXTURE))}"
    elif settings.source in FILE_SUFFIXES:
        yield from _problems_of_files(settings)
    else:
        yield from _problems_without_files(settings)


def unused(settings: DataSettings) -> dict[str, str]:
    """The settings that change nothing about one text: why, and what to do."""
    found = {}
    if settings.val_path is not None:
        found["val_fraction"] = f"has no effect with data.val_path={settings.val_path}; leave out one of them"
    if settings.source in ("stdlib", "text"):
        found["column"] = (
            f"has no effect with data.source={settings.source}, which has no columns; leave it out, or use "
            "data=parquet or data=jsonl"
        )
    if settings.source != "openwebtext":
        reason = f"has no effect with data.source={settings.source}; leave it out, or use data=openwebtext"
        found |= dict.fromkeys(("repository", "config", "revision"), reason)
    return found


def is_validation_only(settings: DataSettings) -> bool:
    """Whether the text is not for training: data.val_path alone is set."""
    return settings.path is None and settings.val_path is not None


def vocabulary_size(tokenizer: str) -> int:
    """Number of token ids of a tokenizer, end-of-text included.

    Raises ValueError if there is no tokenizer of that name, or its file cannot be used.
    """
    if tokenizer in VOCABULARY_SIZES:
        return VOCABULARY_SIZES[tokenizer]
    return _tokenizer_file(tokenizer).vocab_size


def tokenizer_identity(tokenizer: str) -> str | dict[str, str]:
    """What determines the ids of a text: a tokenizer's name, or the content of its file; JSON.

    Raises what `vocabulary_size` raises.
    """
    return tokenizer if tokenizer in VOCABULARY_SIZES else _tokenizer_file(tokenizer).identity


def _tokenizer_file(tokenizer: str):
    if not Path(tokenizer).exists():
        raise ValueError(
            f"data.tokenizer={tokenizer} is unknown; choose one of {', '.join(VOCABULARY_SIZES)}, or the "
            "path of a tokenizer.json or of a folder with one"
        )
    from data.huggingface_tokenizer import read  # here: only these need the library

    return read(Path(tokenizer))


def named_folder(settings: DataSettings) -> Path | None:
    """The prepared dataset called data.name, if there is one; usable without the text it came from."""
    if settings.name is None:
        return None
    folder = Path(settings.root) / settings.name
    return folder if (folder / "manifest.json").is_file() else None


def _problems_of_files(settings: DataSettings) -> Iterator[str]:
    source = settings.source
    if settings.path is None and settings.val_path is None:
        yield f"data={source} needs data.path=FILE (or a folder, or a quoted glob such as 'DIR/*')"
        return
    if named_folder(settings):
        return
    for key, pattern in (("path", settings.path), ("val_path", settings.val_path)):
        if pattern is None:
            continue
        try:
            files = matching(pattern, FILE_SUFFIXES[source])
        except ValueError as error:
            yield f"data.{key}={pattern}: {error}"
            continue
        if source == "text" and (other := _other_format(files[0])):  # it would be read as it is
            yield f"data.{key}={pattern}: {files[0].name} is not plain text; use data={other}"
            continue
        if source == "parquet":
            from data.sources.parquet import check_column  # imports pyarrow, which is slow

            try:
                check_column(files[0], settings.column)
            except ValueError as error:
                yield str(error)


def _other_format(file: Path) -> str | None:
    """The source that reads files with such a name, if it is not text."""
    formats = (name for name, suffixes in FILE_SUFFIXES.items() if file.name.endswith(suffixes))
    return next((name for name in formats if name != "text"), None)


def _problems_without_files(settings: DataSettings) -> Iterator[str]:
    for key, value in (("path", settings.path), ("val_path", settings.val_path)):
        if value is not None:
            yield (
                f"data.{key}={value} has no effect with data.source={settings.source}; leave it out, or use "
                f"data={', data='.join(FILE_SUFFIXES)}"
            )
    if settings.source == "openwebtext" and not settings.revision:
        yield (
            "data.source=openwebtext needs data.revision=COMMIT, so that the text cannot change between runs"
        )
