"""The shards of one split as one long array of token ids, read as they are asked for."""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.files import sha256
from data.shards import Manifest, Shard

RESTORE = "restore the file, or run the same data.prepare command again, and start the run again"


class ShardFile:
    """The token ids of one shard; what is sliced is read, and nothing else.

    Not memory-mapped: where a mapped file is cut short, or its disk fails, the process ends with SIGBUS and
    without a message.
    """

    def __init__(self, file: Path, ids: np.dtype):
        self.file = file
        self.ids = ids
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._tokens = os.fstat(self._descriptor).st_size // ids.itemsize

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, tokens: slice) -> np.ndarray:
        """Ids as stored. Raises OSError if the file cannot be read, or is shorter than when it was opened."""
        start, stop, _ = tokens.indices(self._tokens)
        size = self.ids.itemsize
        try:
            content = self._read(start * size, (stop - start) * size)
        except OSError as error:
            raise OSError(f"{self.file} cannot be read: {error.strerror}; {RESTORE}") from error
        if len(content) < (stop - start) * size:
            left = os.fstat(self._descriptor).st_size
            raise OSError(
                f"{self.file} was cut short while it was in use, from {self._tokens * size} to {left} bytes; "
                f"{RESTORE}"
            )
        return np.frombuffer(content, self.ids)

    def _read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; Linux gives no more than 2 GiB at a time."""
        parts, left = [], size
        while left and (part := os.pread(self._descriptor, left, offset + size - left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


class TokenShards:
    """Read-only token ids of a split; only what is accessed is read from disk."""

    def __init__(self, arrays: Sequence[np.ndarray | ShardFile], name: str = "tokens"):
        """`arrays` are one-dimensional, in order; `name` appears in error messages."""
        self.name = name
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, split: str, *, full: bool = False) -> "TokenShards":
        """Open a split, "train" or "val", of the prepared text in a folder.

        Each shard's size is compared with the manifest; full: its checksum, too (some 2 GB/s). Raises
        ValueError if a shard is missing or has changed.
        """
        for shard in manifest.shards[split]:
            _check(folder, shard, manifest.ids, full=full)
        files = [ShardFile(folder / shard.name, manifest.ids) for shard in manifest.shards[split]]
        return cls(files, name=f"{folder} ({split})")

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens start … start + length − 1, uint16 or uint32 as stored.

        Raises OSError if a shard cannot be read any more.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {self.name}, which has {len(self)}")
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while length > 0:
            array = self._arrays[shard]
            offset = start - (int(self._ends[shard]) - len(array))
            parts.append(array[offset : offset + length])
            start += len(parts[-1])
            length -= len(parts[-1])
            shard += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def count_sequences(tokens: TokenShards, context: int) -> int:
    """Number of sequences of `context` tokens in the data, each followed by one more token to predict.

    Raises ValueError when there is none.
    """
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ValueError(
            f"{tokens.name} has {len(tokens)} tokens, too few for one sequence of context={context} and the "
            f"token after it; use context={max(len(tokens) - 1, 1)} or less, or more text (for validation "
            "text: a greater data.val_fraction)"
        )
    return count


def _check(folder: Path, shard: Shard, ids: np.dtype, *, full: bool) -> None:
    file = folder / shard.name
    if not file.is_file():
        fault = "is missing"
    elif not shard.is_intact_in(folder, ids):
        fault = f"has {file.stat().st_size} bytes instead of {shard.tokens * ids.itemsize}; delete it"
    elif full and sha256(file) != shard.sha256:
        fault = "has changed since it was written: its checksum differs; delete it"
    else:
        return
    raise ValueError(f"{file} {fault}. The same data.prepare command rebuilds only this shard")
