"""The work on units: text → token ids → shards, in several processes."""

import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data import tokenizers
from data.shards import COUNTS, SPLITS, Shard, UnitRecord, chunk_checksums
from data.sources import Batch, Unit, in_validation
from data.tokenizers import Tokenizer, id_dtype, utf8

DECODED_WHOLE = 16 << 20  # bytes of a unit, all texts of which are decoded again to compare; else every 64th

# Called with the bytes of text just processed.
Report = Callable[[int], None]


class ShardWriter:
    """Writes token ids under a temporary name; the shard appears under its own name when it is complete."""

    def __init__(self, folder: Path, name: str, ids: np.dtype):
        self.ids = ids
        self.file = folder / name
        self.temporary = folder / f"{name}.{os.getpid()}.tmp"
        self._handle = self.temporary.open("wb", buffering=0)
        self._tokens = 0
        self._documents = 0
        self._texts: list[str] = []

    def write(self, ids: np.ndarray, documents: int, texts: np.ndarray) -> None:
        """Append ids in which `documents` documents end. Raises TypeError if their dtype may not fit.

        texts: Shard.sizes of them; none where they are not needed.
        """
        self._texts.append(texts.astype(">u4").tobytes().hex())
        content = memoryview(np.ascontiguousarray(ids.astype(self.ids, casting="safe", copy=False))).cast("B")
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
        chunks = chunk_checksums(self.file)
        return Shard(self.file.name, self._tokens, self._documents, chunks, "".join(self._texts))

    def discard(self) -> None:
        self._handle.close()
        self.temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Task:
    """The work on one unit. Pickled to the process that does it."""

    folder: Path
    index: int
    unit: Unit
    tokenizer: str
    fraction: float  # of the documents, for validation, if the unit has no split of its own
    fingerprint: str

    def run(self, report: Report) -> None:
        """Tokenize the unit into its shards, then write the record that they are complete.

        Raises ValueError for unusable text, also if the tokenizer has no tokens for it, and OSError for a
        failing or full disk; then the unit counts as not done.
        """
        tokenizer = _tokenizer(self.tokenizer)
        writers: dict[str, ShardWriter] = {}
        try:
            for split in SPLITS:
                name = f"{split}_{self.index:05d}.bin"
                writers[split] = ShardWriter(self.folder, name, id_dtype(tokenizer.vocab_size))
            first, inside, counts = 0, False, Counter(dict.fromkeys(COUNTS, 0))
            for batch in self.unit.batches():
                texts = _with_text(batch, inside)
                ids, lengths = tokenizer.encode_documents(texts)
                counts["skipped"] += len(batch.texts) - len(texts)
                counts.update(self._lost(tokenizer, texts, ids, lengths, first))
                ended = len(lengths) - batch.continues
                if batch.continues:  # the document goes on: remove its end-of-text
                    ids = ids[:-1]
                    lengths[-1] -= 1
                to_val = self._to_validation(first, len(lengths))
                sizes = np.stack([lengths, np.diff(utf8(texts)[1])], axis=1)
                for split, chosen, described in (("train", ~to_val, []), ("val", to_val, to_val)):
                    documents = int(chosen[:ended].sum())
                    writers[split].write(ids[np.repeat(chosen, lengths)], documents, sizes[described])
                first, inside = first + ended, batch.continues
                report(batch.texts.nbytes)
            shards = {split: writer.finish() for split, writer in writers.items()}
            UnitRecord(self.fingerprint, shards, dict(counts)).write(self.folder, self.index)
        except OSError as error:
            raise _disk_error(self.folder, error) from error
        finally:
            for writer in writers.values():
                writer.discard()

    def _to_validation(self, first: int, count: int) -> np.ndarray:
        """Which of the documents from `first` on are validation text; bool, (count,)."""
        if self.unit.split is None:
            return in_validation(self.index, first, count, self.fraction)
        return np.full(count, self.unit.split == "val")

    def _lost(
        self, tokenizer: Tokenizer, texts: pa.Array, ids: np.ndarray, lengths: np.ndarray, first: int
    ) -> dict[str, int]:
        """What of some documents their ids do not have: COUNTS. first: the number of documents before.

        Raises ValueError for a text that has no tokens.
        """
        for empty in np.flatnonzero(lengths == 1):
            text = texts[empty].as_py()
            if any(character.isprintable() and not character.isspace() for character in text):
                raise ValueError(
                    f"{tokenizer.name} has no tokens for a text, which would be lost: {text[:40]!r}. Give "
                    "another data.tokenizer: gpt2 and bytes have tokens for any text"
                )
        step = 1 if 0 < self.unit.text_bytes <= DECODED_WHOLE else 64
        decoded, starts = range(-first % step, len(texts), step), np.cumsum(lengths) - lengths
        again = (tokenizer.decode(ids[starts[i] : starts[i] + lengths[i] - 1]) for i in decoded)
        changed = sum(text != texts[i].as_py() for i, text in zip(decoded, again, strict=True))
        unknown = int((ids == tokenizer.unknown).sum())
        return {"unknown": unknown, "decoded": len(decoded), "changed": changed}


def _with_text(batch: Batch, inside: bool) -> pa.LargeStringArray:
    """The texts of a batch without empty documents. inside: the first one began in the batch before."""
    keep = pc.fill_null(pc.greater(pc.binary_length(batch.texts), 0), False).to_numpy(zero_copy_only=False)
    keep[:1] |= inside
    keep[-1:] |= batch.continues
    return batch.texts.filter(pa.array(keep))


def _disk_error(folder: Path, error: OSError) -> OSError:
    if error.filename is None and error.errno is None:
        return error  # a message of our own, from the source
    return OSError(
        f"{error.filename or folder}: {error.strerror or error}. Finished shards are kept: fix the cause "
        "(free space, or choose another data.root) and run the same command again"
    )


def run(tasks: list[Task], processes: int, report: Report) -> None:
    """Run the tasks; report each batch in this process. Raises the first error and stops the others."""
    processes = min(processes, len(tasks))
    if processes <= 1:
        for task in tasks:
            task.run(report)
    else:
        _run_in_processes(tasks, processes, report)


def _run_in_processes(tasks: list[Task], processes: int, report: Report) -> None:
    # spawn: forking a process that has threads (torch, pyarrow) can deadlock the child.
    context = multiprocessing.get_context("spawn")
    reports, stop = context.SimpleQueue(), context.Event()
    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=(reports, stop)) as pool:
        running = {pool.submit(task.run, _send_report) for task in tasks}
        try:
            while running:
                done, running = wait(running, timeout=0.1, return_when=FIRST_EXCEPTION)
                while not reports.empty():
                    report(reports.get())
                for future in done:
                    future.result()
        except BrokenProcessPool as error:
            raise OSError(
                "a tokenizing process was killed, most likely because memory ran out. Finished units are "
                f"kept: run the same command again with data.processes={max(1, processes // 2)}"
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
    """The main process ended the work."""


def _start(reports, stop) -> None:
    """Set up a worker process."""
    global _reports, _stop
    _reports, _stop = reports, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the parent handles it
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End when the parent is killed, which can no longer ask this process to stop."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _send_report(text_bytes: int) -> None:
    if _stop.is_set():
        raise _Stopped
    _reports.put(text_bytes)


@functools.cache
def _tokenizer(name: str) -> tokenizers.Tokenizer:
    return tokenizers.load(name)
