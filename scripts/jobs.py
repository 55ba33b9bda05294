"""Run the commands of a script: many in parallel, distributed over GPUs, or one on the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import indent

from tqdm import tqdm

from trainer.errors import Interrupted
from trainer.interrupt import StopSignal
from trainer.run_queue import FAILED, FINISHED, POLL_S, Job, Outcome, run_all


def run_jobs(
    jobs: Sequence[Job],
    gpus: Sequence[str] = (),
    per_gpu: int = 1,
    on_success: Callable[[Job], None] = lambda job: None,
) -> dict[str, str]:
    """Run the jobs, each on one GPU; the reasons of those that failed, by name. Prints each as it fails.

    per_gpu: how many share a GPU at a time; without gpus, how many run at a time on what CUDA finds.
    Raises Interrupted upon a signal that asks to stop, when all have saved and ended.
    """
    failed = {}

    def note_end(job: Job, outcome: Outcome) -> None:
        if outcome.kind == FINISHED:
            on_success(job)
            return
        failed[job.name] = outcome.reason or outcome.kind
        if outcome.kind == FAILED:
            tqdm.write(indent(outcome.reason, "    "), file=sys.stderr)

    jobs = [replace(job, gpus=1 if gpus else 0) for job in jobs]
    places = [*gpus] * per_gpu
    if stopped_by := run_all(jobs, gpus=places, limit=len(places) or per_gpu, on_end=note_end):
        raise _interrupted(stopped_by)
    return failed


def run_here(command: Sequence[str], gpu: str | None) -> int:
    """Run one command with its output on the terminal; its exit code. gpu: None for what CUDA finds.

    Raises Interrupted upon a signal that asks to stop, when the command has ended.
    """
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    with StopSignal() as stop:
        process = subprocess.Popen(command, env={**os.environ, **visible}, start_new_session=True)
        while process.poll() is None and not stop.signal:
            time.sleep(POLL_S)
        if stop.signal:
            process.send_signal(signal.SIGINT)  # what the commands of scripts/ clean up upon
            process.wait()
            raise _interrupted(stop.signal)
    return process.returncode


def _interrupted(number: int) -> Interrupted:
    name = signal.Signals(number).name
    return Interrupted(f"stopped by {name}; the same command continues", number)
