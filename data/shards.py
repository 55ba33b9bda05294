"""A prepared text on disk: shards of token ids, a record for each unit, and a manifest of all."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_json, write_json
from data.tokenizers import id_dtype

SPLITS = ("train", "val")
FILE = "manifest.json"
CHUNK = 64 << 10  # bytes of a shard that have a checksum of their own
# What is counted besides: documents without text, which are skipped; unknown tokens; texts that were decoded
# again, and those of them that had changed. A text is a document, or a part of one that is read in parts.
COUNTS = ("skipped", "unknown", "decoded", "changed")


@dataclass(frozen=True)
class Shard:
    """A file of token ids: those that a unit gives to one split."""

    name: str
    tokens: int
    documents: int  # end-of-text tokens in it
    chunks: str  # `chunk_checksums`
    texts: str = ""  # of validation text: tokens and source bytes of each text, eight hexadecimal digits each

    @staticmethod
    def from_json(content: Any) -> "Shard":
        """What `asdict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        name = Path(content["name"]).name  # never a file elsewhere
        tokens, documents = index(content["tokens"]), index(content["documents"])
        shard = Shard(name, tokens, documents, str(content["chunks"]), str(content["texts"]))
        bytes.fromhex(shard.chunks)
        if shard.texts and shard.sizes[:, 0].sum() != tokens:
            raise ValueError(f"{name}: its texts do not have its {tokens} tokens")
        return shard

    @property
    def sizes(self) -> np.ndarray:
        """Tokens and source bytes of each text of validation, int64, (texts, 2)."""
        return np.frombuffer(bytes.fromhex(self.texts), ">u4").reshape(-1, 2).astype(np.int64)

    def is_intact_in(self, folder: Path, ids: np.dtype) -> bool:
        """Whether the file exists with its full size."""
        file = folder / self.name
        return file.is_file() and file.stat().st_size == self.tokens * ids.itemsize


@dataclass(frozen=True)
class UnitRecord:
    """The shards of a unit; its existence on disk means that they are complete."""

    fingerprint: str  # of the recipe it was made by
    shards: dict[str, Shard | None]  # by split; None where the unit has no token for it
    counts: dict[str, int]  # COUNTS

    @staticmethod
    def read(folder: Path, index: int) -> "UnitRecord | None":
        """The record of a unit, or None when the unit is not finished. Raises ValueError if it is damaged."""
        file = _record_file(folder, index)
        content = read_json(file)
        if content is None:
            return None
        try:
            shards = {split: content["shards"][split] for split in SPLITS}
            described = {split: one if one is None else Shard.from_json(one) for split, one in shards.items()}
            return UnitRecord(content["fingerprint"], described, _counts(content))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} is damaged ({error}); delete it and run data.prepare again, to make its unit anew"
            ) from None

    def write(self, folder: Path, index: int) -> None:
        write_json(_record_file(folder, index), asdict(self))


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a prepared text; its existence on disk means that all units are finished."""

    fingerprint: str
    recipe: dict  # Recipe.description
    vocab_size: int
    shards: dict[str, list[Shard]]  # by split, in order
    source_files: list[dict]  # common.files.checksums of what was read; none if the recipe has them
    counts: dict[str, int]  # COUNTS

    @staticmethod
    def read(folder: Path) -> "Manifest | None":
        """The manifest of a folder, or None if its preparation has not finished."""
        content = read_json(folder / FILE)
        if content is None:
            return None
        try:
            content["recipe"]["tokenizer"]
            return Manifest(
                content["fingerprint"],
                content["recipe"],
                index(content["vocab_size"]),
                {split: [*map(Shard.from_json, content["shards"][split])] for split in SPLITS},
                [*map(dict, content["source_files"])],
                _counts(content),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / FILE} was not written by this version of data.prepare ({error!r}); delete the "
                "folder and prepare it again"
            ) from None

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @property
    def ids(self) -> np.dtype:
        """The dtype of the shards."""
        return id_dtype(self.vocab_size)

    @property
    def checksum(self) -> str:
        """Of all tokens, by those of the shards."""
        sums = {split: [shard.chunks for shard in shards] for split, shards in self.shards.items()}
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards[split])

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards[split])

    def losses(self) -> Iterator[str]:
        """What of the source is not in the tokens, for people."""
        skipped, unknown, decoded, changed = (self.counts[name] for name in COUNTS)
        if skipped:
            yield f"{skipped:,} documents without text were skipped"
        if changed:
            share = changed / max(decoded, 1)
            yield f"{share:.2%} of the {decoded:,} texts looked at are not the same when they are decoded"
        if unknown:
            share = unknown / max(sum(map(self.tokens, SPLITS)), 1)
            yield f"{share:.2%} of the tokens are unknown ones"


def chunk_checksums(file: Path) -> str:
    """The CRC-32 of each CHUNK bytes of a file: eight hexadecimal digits each, one behind the other."""
    with file.open("rb") as handle:
        return "".join(f"{zlib.crc32(chunk):08x}" for chunk in iter(lambda: handle.read(CHUNK), b""))


def _counts(content: Any) -> dict[str, int]:
    return {name: index(content["counts"][name]) for name in COUNTS}


def _record_file(folder: Path, index: int) -> Path:
    return folder / f"unit_{index:05d}.json"
