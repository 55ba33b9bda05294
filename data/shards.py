"""Shards: files of token ids. A unit gives one shard per split, and a record that says they are complete."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from data.files import read_json, write_json
from data.ids import id_dtype
from data.sources import Unit
from data.split import in_validation
from data.tokenizers import Tokenized, Tokenizer

SPLITS = ("train", "val")

# Called with the number of documents, tokens and bytes of text just processed.
Report = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Shard:
    """A shard's entry in the manifest."""

    name: str
    tokens: int
    documents: int  # end-of-text tokens in it
    sha256: str

    @staticmethod
    def from_json(content: Any) -> "Shard":
        """What `asdict` gave. Raises ValueError for anything else, a name elsewhere included."""
        kinds = {field.name: field.type for field in fields(Shard)}
        if not (
            isinstance(content, dict)
            and content.keys() == kinds.keys()
            and all(type(content[name]) is kind for name, kind in kinds.items())
            and Path(content["name"]).name == content["name"]
        ):
            raise ValueError(f"it describes no shard: {content!r}")
        return Shard(**content)

    def intact_in(self, folder: Path, ids: np.dtype) -> bool:
        """Whether the file exists with its full size."""
        file = folder / self.name
        return file.is_file() and file.stat().st_size == self.tokens * ids.itemsize


@dataclass(frozen=True)
class UnitRecord:
    """The shards of a unit; its existence on disk means that they are complete."""

    fingerprint: str  # of the recipe it was made by
    shards: dict[str, Shard | None]  # by split; None where the unit has no token for it

    @staticmethod
    def read(folder: Path, index: int) -> "UnitRecord | None":
        """The record of a unit, or None when the unit is not finished. Raises ValueError if it is damaged."""
        file = _record_file(folder, index)
        content = read_json(file)
        if content is None:
            return None
        try:
            shards = {split: content["shards"][split] for split in SPLITS}
            described = {split: shard and Shard.from_json(shard) for split, shard in shards.items()}
            return UnitRecord(content["fingerprint"], described)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} is damaged ({error}); delete it and run data.prepare again, to make its unit anew"
            ) from None

    def write(self, folder: Path, index: int) -> None:
        write_json(_record_file(folder, index), asdict(self))

    def intact_in(self, folder: Path, ids: np.dtype) -> bool:
        return all(shard.intact_in(folder, ids) for shard in self.shards.values() if shard)


class ShardWriter:
    """Writes token ids under a temporary name; the shard appears under its own name when it is complete."""

    def __init__(self, folder: Path, name: str, ids: np.dtype):
        self.ids = ids
        self.file = folder / name
        self.temporary = folder / f"{name}.{os.getpid()}.tmp"
        self._handle = self.temporary.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._tokens = 0
        self._documents = 0

    def write(self, ids: np.ndarray, documents: int) -> None:
        """Append ids in which `documents` documents end. Raises TypeError if their dtype may not fit."""
        content = memoryview(np.ascontiguousarray(ids.astype(self.ids, casting="safe", copy=False))).cast("B")
        self._digest.update(content)
        while content:  # an unbuffered write may take only a part, at most 2 GiB
            content = content[self._handle.write(content) :]
        self._tokens += len(ids)
        self._documents += documents

    def finish(self) -> Shard | None:
        """Put the shard in place and describe it; None, and no file, if nothing was written."""
        os.fsync(self._handle.fileno())  # or a power failure could leave the name without the content
        self._handle.close()
        if self._tokens == 0:
            self.temporary.unlink()
            return None
        os.replace(self.temporary, self.file)
        return Shard(self.file.name, self._tokens, self._documents, self._digest.hexdigest())

    def discard(self) -> None:
        self._handle.close()
        self.temporary.unlink(missing_ok=True)


def write_unit(
    folder: Path,
    index: int,
    unit: Unit,
    *,
    tokenizer: Tokenizer,
    fraction: float,
    fingerprint: str,
    report: Report,
) -> None:
    """Tokenize a unit into its shards, then write the record that they are complete.

    Raises ValueError for unusable text and OSError for a failing or full disk; then the unit counts as not
    done.
    """
    writers: dict[str, ShardWriter] = {}
    try:
        for split in SPLITS:
            name = f"{split}_{index:05d}.bin"
            writers[split] = ShardWriter(folder, name, id_dtype(tokenizer.vocab_size))
        first = 0
        for batch in unit.batches():
            done = tokenizer.encode_documents(batch.texts)
            ended = len(done.lengths)
            if batch.continues:  # the document goes on: remove its end-of-text
                done = Tokenized(done.ids[:-1], np.append(done.lengths[:-1], done.lengths[-1] - 1))
                ended -= 1
            if unit.split is not None:
                writers[unit.split].write(done.ids, ended)
            else:
                _write_split(writers, done, in_validation(index, first, ended, fraction))
            first += ended
            report(ended, len(done.ids), batch.texts.nbytes)
        shards = {split: writer.finish() for split, writer in writers.items()}
        UnitRecord(fingerprint, shards).write(folder, index)
    except OSError as error:
        raise _disk_error(folder, error) from error
    finally:
        for writer in writers.values():
            writer.discard()


def remove_unfinished(folder: Path) -> None:
    """Delete incomplete files of an interrupted preparation."""
    for file in folder.glob("*.tmp"):
        file.unlink(missing_ok=True)


def _write_split(writers: dict[str, ShardWriter], done: Tokenized, to_val: np.ndarray) -> None:
    """Write each document to its split, consecutive documents of the same split at once."""
    changes = np.flatnonzero(np.diff(to_val)) + 1
    token_ends = np.cumsum(done.lengths)
    begin = token = 0
    for end in [*changes.tolist(), len(to_val)]:
        if begin == end:
            continue  # a batch without documents
        split = "val" if to_val[begin] else "train"
        writers[split].write(done.ids[token : token_ends[end - 1]], end - begin)
        begin, token = end, token_ends[end - 1]


def _record_file(folder: Path, index: int) -> Path:
    return folder / f"unit_{index:05d}.json"


def _disk_error(folder: Path, error: OSError) -> OSError:
    if error.filename is None and error.errno is None:
        return error  # a message of our own, from the source
    return OSError(
        f"{error.filename or folder}: {error.strerror or error}. Finished shards are kept: fix the cause "
        "(free space, or choose another data.root) and run the same command again"
    )
