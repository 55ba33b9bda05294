"""The shards of one split as one long array of token ids, read as they are asked for."""

import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data.shards import CHUNK, Manifest, Shard

REBUILD = "delete it. The same data.prepare command rebuilds only this shard"
RESTORE = "restore the file, or run the same data.prepare command again, and start the run again"


class ShardFile:
    """The token ids of one shard; the chunks of what is sliced are read, and nothing else.

    A chunk is verified when it is read first: its checksum, and that its ids are in the vocabulary. Of a
    training text that happens in the thread that makes the next batch.

    Not memory-mapped: where a mapped file is cut short, or its disk fails, the process ends with SIGBUS and
    without a message.
    """

    def __init__(self, folder: Path, shard: Shard, manifest: Manifest):
        self.file, self.shard = folder / shard.name, shard
        self.ids, self.vocab_size = manifest.ids, manifest.vocab_size
        self._size = shard.tokens * self.ids.itemsize
        if not shard.is_intact_in(folder, self.ids):
            raise OSError(f"{self.file} is missing, or has not its {self._size} bytes; {REBUILD}")
        self._descriptor = os.open(self.file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._checksums = np.frombuffer(bytes.fromhex(shard.chunks), ">u4")
        self._unverified = np.ones(-(-self._size // CHUNK), bool)

    def __len__(self) -> int:
        return self.shard.tokens

    def __getitem__(self, tokens: slice) -> np.ndarray:
        """Ids as stored. Raises OSError if the file cannot be read, or is shorter or other than it was."""
        start, stop = (self.ids.itemsize * place for place in tokens.indices(len(self))[:2])
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            if self._unverified[chunk]:
                self._verify(chunk)
        return np.frombuffer(self._read(start, stop), self.ids)

    def verify(self) -> None:
        """Verify all of it now. Raises OSError."""
        for chunk in range(len(self._unverified)):
            self._verify(chunk)

    def _verify(self, chunk: int) -> None:
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, self._size)
        content = self._read(start, stop)
        if zlib.crc32(content) not in self._checksums[chunk : chunk + 1]:
            raise OSError(
                f"{self.file} has changed since it was written: the checksum of bytes {start} to {stop} "
                f"differs; {REBUILD}"
            )
        if (largest := np.frombuffer(content, self.ids).max()) >= self.vocab_size:
            raise OSError(
                f"{self.file} holds the id {largest}, and the vocabulary has {self.vocab_size}; {REBUILD}"
            )
        self._unverified[chunk] = False

    def _read(self, start: int, stop: int) -> bytes:
        """Bytes start … stop − 1; Linux gives no more than 2 GiB at a time."""
        parts, left = [], stop - start
        try:
            while left and (part := os.pread(self._descriptor, left, stop - left)):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise OSError(f"{self.file} cannot be read: {error.strerror}; {RESTORE}") from error
        if left:
            size = os.fstat(self._descriptor).st_size
            raise OSError(
                f"{self.file} was cut short while it was in use, from {self._size} to {size} bytes; {RESTORE}"
            )
        return b"".join(parts)


class TokenShards:
    """Read-only token ids of a split; only what is accessed is read from disk."""

    def __init__(
        self, arrays: Sequence[np.ndarray | ShardFile], name: str = "tokens", sizes: Sequence[np.ndarray] = ()
    ):
        """`arrays` are one-dimensional, in order; `name` appears in error messages. sizes: Shard.sizes."""
        self.name = name
        self._sizes = np.concatenate([np.zeros((1, 2), np.int64), *sizes])
        self._arrays = arrays
        self._starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)  # and the end

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, split: str, *, full: bool = False) -> "TokenShards":
        """Open a split, "train" or "val", of the prepared text in a folder.

        Each shard's size is compared with the manifest, its content when it is read; full: all of it now
        (some 2 GB/s). Raises OSError if a shard is missing or has changed.
        """
        files = [ShardFile(folder, shard, manifest) for shard in manifest.shards[split]]
        for file in files if full else ():
            file.verify()
        return cls(files, f"{folder} ({split})", [shard.sizes for shard in manifest.shards[split]])

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self._starts[-1])

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens start … start + length − 1, uint16 or uint32 as stored.

        Raises OSError if a shard cannot be read any more, or is damaged there.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {self.name}, which has {len(self)}")
        parts = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while length > 0:
            offset = start - int(self._starts[shard])
            parts.append(self._arrays[shard][offset : offset + length])
            start += len(parts[-1])
            length -= len(parts[-1])
            shard += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def source_bytes(self, stop: int, count_bytes: Callable[[np.ndarray], int]) -> float:
        """Bytes of source text that tokens 0 … stop − 1 of validation text stand for.

        Of a text that `stop` cuts, it is the part of the bytes that its tokens decode to.
        """
        ends, sizes = np.cumsum(self._sizes, axis=0).T
        text = int(np.searchsorted(ends, stop, side="right"))
        start, whole = int(ends[text - 1]), int(sizes[text - 1])
        if start == stop:
            return whole
        tokens, size = self._sizes[text].tolist()
        part, all_of_it = (count_bytes(self.window(start, length)) for length in (stop - start, tokens))
        return whole + (size * part / all_of_it if all_of_it else size * (stop - start) / tokens)


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
