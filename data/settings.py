"""The settings of the data."""

from dataclasses import dataclass, field
from typing import Any

MIXTURE = "mixture"  # the source that is several others, in data.sources


@dataclass
class DataSettings:
    """Which text, how it becomes tokens, and where the tokens are stored."""

    source: str = "openwebtext"  # one of SOURCES in data/recipe.py, or MIXTURE
    path: str | None = None  # parquet, jsonl, text: a file, a folder or a glob
    val_path: str | None = None  # validation text in files of its own; null: split from `path`
    column: str = "text"  # parquet column or JSON key that holds the text
    tokenizer: str = "gpt2"  # gpt2, bytes, a tokenizer.json, or a folder with one
    mask_documents: bool = False  # in a sequence with several, each attends to itself only; positions restart
    val_fraction: float = 0.0005  # validation part of the text; more of a small text, see data/sources
    # Further validation sets by name: a path, or its source, path, column, … See data/recipe.py.
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
