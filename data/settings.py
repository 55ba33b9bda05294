"""The settings of the data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIXTURE = "mixture"  # the source that is several others, in data.sources

#: What options of `data=` set; the modules of data/sources/ are further ones, which set the source alone.
PRESETS: dict[str, dict[str, Any]] = {
    "csv": {"source": "huggingface", "name": "csv"},  # as any format that `datasets` reads
    # 4 MB of text that comes with Python, the standard library's sources: needs no network and no files. Each
    # Python version ships different text, so compare losses only between runs on the same one.
    "embedded": {"source": "stdlib", "tokenizer": "bytes", "val_fraction": 0.05},
    MIXTURE: {"source": MIXTURE},
    # The paper's text: 9,040,017,095 GPT-2 tokens (18 GB on disk).
    "openwebtext": {
        "source": "openwebtext",
        "name": "Skylion007/openwebtext",
        "config": "plain_text",
        "revision": "79d93d786212f7344586290adb811d4ae6a1762c",
        "documents": 8_013_769,  # any other number is an error: part of the text is missing
    },
}


@dataclass
class DataSettings:
    """Which text, how it becomes tokens, and where the tokens are stored."""

    source: str = "openwebtext"  # a module of data/sources/, or MIXTURE
    path: str | None = None  # a file, a folder or a glob; huggingface: also s3://, hf:// and the like
    val_path: str | None = None  # validation text in files of its own; null: split from `path`
    column: str = "text"  # parquet column, JSON key or the like that holds the text
    tokenizer: str = "gpt2"  # gpt2, bytes, a tokenizer.json, or a folder with one
    mask_documents: bool = False  # in a sequence with several, each attends to itself only; positions restart
    # Validation part of the text, not published by the paper: nanoGPT's choice; more of a small text.
    val_fraction: float = 0.0005
    # Further validation sets by name: a path, or its source, path, column, … See data/recipe.py.
    validation: dict[str, Any] = field(default_factory=dict)
    # mixture: its sources by name, each with a weight and what else is not as in the mixture.
    sources: dict[str, Any] = field(default_factory=dict)

    # huggingface: a dataset of the Hub, a folder like one, or with `path` a format (csv, json, parquet, …).
    name: str | None = None
    config: str | None = None  # of the dataset; null: its only one
    split: str | None = "train"
    val_split: str | None = None  # validation text in a split of its own; null: split from `split`
    revision: str | None = None  # commit of the dataset, so that its text cannot change
    streaming: bool = True  # false: download it first, to Hugging Face's cache
    documents: int | None = None  # number of documents the source must have; null: any number

    root: str = "tokens"  # prepared datasets live in <root>/<folder>
    folder: str | None = None  # null: named after the source, its contents and the tokenizer
    processes: int | None = None  # that tokenize; null: one per core. Does not change the result

    def __post_init__(self) -> None:
        """A shell leaves the ~ of data.path=~/x.txt as it is."""
        for key in ("path", "val_path", "tokenizer", "name", "root"):
            if str(value := getattr(self, key)).startswith("~"):
                setattr(self, key, str(Path(value).expanduser()))


def sources() -> list[str]:
    """The kinds of text: the modules of data/sources/."""
    return sorted(file.stem for file in (Path(__file__).parent / "sources").glob("[!_]*.py"))


def options() -> list[str]:
    """What `data=` can be: a source, or one of PRESETS."""
    return sorted({*sources(), *PRESETS})


def values_of(option: str) -> dict[str, Any]:
    """The settings that `data=option` sets."""
    return PRESETS.get(option, {"source": option})


def register_options(schema: Any) -> None:
    """Tell Hydra of the options of `data`, and that data.validation.NAME and data.sources.NAME may be set.

    schema: OmegaConf's, of the settings that have DataSettings as `data`.
    """
    from hydra.core.config_store import ConfigStore  # here: tokenizing needs none
    from omegaconf import OmegaConf

    for group in (schema.data.validation, schema.data.sources):
        OmegaConf.set_struct(group, False)
    for option in options():
        ConfigStore.instance().store(group="data", name=option, node=values_of(option))
