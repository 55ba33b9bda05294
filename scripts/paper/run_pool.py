"""Run commands in parallel, distributed over GPUs, each with its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from trainer.interrupt import SWEEP_PID, StopRequest

TAIL = 12  # lines of a failed command's output that are shown
POLL = 0.2  # seconds


class Stopped(Exception):
    """A signal asked to stop; the commands were asked, too, and have ended."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}; the same command continues")
        self.number = number


@dataclass(frozen=True)
class Job:
    """A command and where its output goes. ended_well: whether its exit code counts as success."""

    name: str
    command: list[str]
    log: Path
    ended_well: Callable[[int], bool] = lambda code: code == 0


def slots(gpus: Sequence[str], per_gpu: int) -> list[str | None]:
    """One entry for each command that may run at a time: its GPU, or None where there is none to choose."""
    return [gpu for _ in range(per_gpu) for gpu in gpus] or [None] * per_gpu


def run_here(command: list[str], place: str | None) -> int:
    """Run one command with its output on the terminal; its exit code.

    Raises Stopped upon a signal that asks to stop, when it has ended.
    """
    with _Signals() as asked:
        process = subprocess.Popen(command, env=seeing(place), start_new_session=True)
        told = False
        while process.poll() is None:
            if asked.number and not told:
                process.send_signal(signal.SIGINT)  # what these commands end themselves upon
                told = True
            time.sleep(POLL)
        if asked.number:
            raise Stopped(asked.number)
    return process.returncode


def seeing(place: str | None) -> dict[str, str]:
    """The environment of a command that is to use this GPU; None: what it finds."""
    return dict(os.environ) | ({} if place is None else {"CUDA_VISIBLE_DEVICES": place})


def run_all(
    jobs: Sequence[Job], places: Sequence[str | None], on_success: Callable[[Job], None] = lambda job: None
) -> list[Job]:
    """Run every job, one in each place at a time; the jobs that failed, each reported as it fails.

    Raises Stopped upon a signal that asks to stop, when all have saved and ended. If this process is killed,
    the jobs that call `interrupt.end_with_sweep`, as train.py does, end.
    """
    waiting, free, running, failed = list(jobs), list(places), [], []
    with _Signals() as asked, tqdm(total=len(jobs), unit="run", disable=None) as progress:
        while running or (waiting and not asked.number):
            while waiting and free and not asked.number:
                running.append(_Running(waiting.pop(0), free.pop(0)))
            if asked.number:
                for process in running:
                    process.ask_to_stop()
            time.sleep(POLL)
            for process in [process for process in running if process.has_ended()]:
                running.remove(process)
                free.append(process.place)
                progress.update()
                if process.job.ended_well(process.code):
                    on_success(process.job)
                elif not asked.number:
                    failed.append(process.job)
                    tqdm.write(process.failure(), file=sys.stderr)
        if asked.number:
            raise Stopped(asked.number)
    return failed


class _Running:
    """A job that was started in a place."""

    def __init__(self, job: Job, place: str | None):
        self.job, self.place, self.asked = job, place, False
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "w") as log:
            # In a session of its own, so that Ctrl-C reaches it once, through us.
            environment = {**seeing(place), SWEEP_PID: str(os.getpid())}
            self.process = subprocess.Popen(
                job.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def code(self) -> int:
        return self.process.returncode

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ask_to_stop(self) -> None:
        """Once: a second signal would tell train.py to stop without saving."""
        if not self.asked:
            self.process.send_signal(signal.SIGTERM)
            self.asked = True

    def failure(self) -> str:
        lines = self.job.log.read_text(errors="replace").splitlines()[-TAIL:]
        shown = "\n".join(f"    {line}" for line in lines)
        return f"{self.job.name} failed with exit code {self.code}; the end of {self.job.log}:\n{shown}"


class _Signals:
    """Remembers the first signal that asks to stop while it is entered."""

    number: int | None = None

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.signal(number, self._remember) for number in StopRequest.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
