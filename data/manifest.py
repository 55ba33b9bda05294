"""What a prepared dataset is made from (the recipe) and consists of (the manifest, stored with it)."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data import sources
from data.files import checksums, identified_whole, read_json, write_json
from data.ids import description as described
from data.ids import id_dtype
from data.settings import VOCABULARY_SIZES, DataSettings, tokenizer_identity, vocabulary_size
from data.shards import SPLITS, Shard
from data.sources import Source

FORMAT = 1  # raise it whenever the same text would give different shards
FILE = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the bytes of a prepared dataset, and its folder."""

    source: Source
    tokenizer: str
    description: dict  # JSON; recipes with equal descriptions give the same bytes
    folder: Path

    @property
    def ids(self) -> np.dtype:
        """The dtype of the shards. Raises what `vocabulary_size` raises."""
        return id_dtype(vocabulary_size(self.tokenizer))

    @property
    def fingerprint(self) -> str:
        text = json.dumps(self.description, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def recipe(settings: DataSettings) -> Recipe:
    """The recipe of these settings. Raises ValueError for input that is missing or unreadable."""
    source = sources.load(settings)
    description = {
        "format": FORMAT,
        "source": settings.source,
        "identity": source.identity,
        "tokenizer": tokenizer_identity(settings.tokenizer),
        "held_out": source.val_fraction,
        "units": len(source.units),
    }
    made = Recipe(source, settings.tokenizer, description, Path(settings.root))
    name = settings.name or f"{_stem(settings)}-{_label(settings.tokenizer)}-{made.fingerprint[:10]}"
    return Recipe(source, settings.tokenizer, description, Path(settings.root) / name)


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a prepared dataset."""

    fingerprint: str
    recipe: dict
    vocab_size: int
    shards: dict[str, list[Shard]]  # by split, in order
    source_files: list[dict]  # data.files.checksums of what was read; none if the recipe has them

    @staticmethod
    def read(folder: Path) -> "Manifest | None":
        """The manifest of a folder, or None if its preparation has not finished."""
        content = read_json(folder / FILE)
        if content is None:
            return None
        try:
            shards = {
                split: [Shard.from_json(shard) for shard in content["splits"][split]["shards"]]
                for split in SPLITS
            }
            made = (content["fingerprint"], content["recipe"], content["vocab_size"], shards)
            manifest = Manifest(*made, content.get("source_files", []))  # which older manifests do not have
            manifest.check_ids(content["ids"])
            return manifest
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / FILE} was not written by this version of data.prepare ({error!r}); delete the "
                "folder and prepare it again"
            ) from None

    def write(self, folder: Path) -> None:
        splits = {
            split: {
                "tokens": self.tokens(split),
                "documents": self.documents(split),
                "shards": [asdict(shard) for shard in self.shards[split]],
            }
            for split in SPLITS
        }
        content = {
            "fingerprint": self.fingerprint,
            "recipe": self.recipe,
            "vocab_size": self.vocab_size,
            "ids": described(self.ids),
            "splits": splits,
            "source_files": self.source_files,
        }
        write_json(folder / FILE, content)

    @property
    def ids(self) -> np.dtype:
        """The dtype of the shards."""
        return id_dtype(self.vocab_size)

    def check_ids(self, recorded: str) -> None:
        """Raise ValueError if the shards are not recorded to have the dtype of this vocabulary."""
        if recorded != described(self.ids):
            raise ValueError(
                f"its ids are {recorded}, and a vocabulary of {self.vocab_size} has {described(self.ids)}"
            )

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards[split])

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards[split])

    def intact_in(self, folder: Path) -> bool:
        """Whether every shard exists with its full size."""
        return all(shard.intact_in(folder, self.ids) for shards in self.shards.values() for shard in shards)


def manifest_of(made: Recipe, shards: dict[str, list[Shard]]) -> Manifest:
    """The manifest of a finished preparation. Reads source files that the recipe does not identify whole."""
    files = [] if identified_whole(made.source.files) else checksums(made.source.files)
    return Manifest(made.fingerprint, made.description, vocabulary_size(made.tokenizer), shards, files)


def _stem(settings: DataSettings) -> str:
    """A readable beginning for the folder's name."""
    path = settings.path or settings.val_path
    return (_plain(Path(path).stem) if path else "") or settings.source


def _label(tokenizer: str) -> str:
    """A tokenizer's name, or that of its file, for a folder's name."""
    if tokenizer in VOCABULARY_SIZES:
        return tokenizer
    path = Path(tokenizer).resolve()
    return _plain(path.parent.name if path.name == "tokenizer.json" else path.stem) or "tokenizer"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40]
