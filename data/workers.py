"""Runs write_unit in several processes, and reports their progress."""

import functools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from data import tokenizers
from data.shards import Report, write_unit
from data.sources import Unit


@dataclass(frozen=True)
class Task:
    """One call of write_unit."""

    folder: Path
    index: int
    unit: Unit
    tokenizer: str
    fraction: float
    fingerprint: str

    def run(self, report: Report) -> None:
        write_unit(
            self.folder,
            self.index,
            self.unit,
            tokenizer=_tokenizer(self.tokenizer),
            fraction=self.fraction,
            fingerprint=self.fingerprint,
            report=report,
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
        running = {pool.submit(_run_reporting, task) for task in tasks}
        try:
            while running:
                done, running = wait(running, timeout=0.1, return_when=FIRST_EXCEPTION)
                while not reports.empty():
                    report(*reports.get())
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


def _run_reporting(task: Task) -> None:
    task.run(_send_report)


def _send_report(documents: int, tokens: int, text_bytes: int) -> None:
    if _stop.is_set():
        raise _Stopped
    _reports.put((documents, tokens, text_bytes))


@functools.cache
def _tokenizer(name: str) -> tokenizers.Tokenizer:
    return tokenizers.load(name)
