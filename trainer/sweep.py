"""A table at the end of a sweep: which runs finished, failed and why, were interrupted, did not start."""

import atexit
import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig

from trainer.console import say
from trainer.interrupt import exit_on_signals
from trainer.overrides import command_of, unresolved
from trainer.run_directory import default_name
from trainer.sweep_checks import refuse_what_cannot_be_trained
from trainer.sweep_directories import make_sweep_directory, refuse_shared_directories, runs_of


class SweepSummary(Callback):
    """Hydra callback; Hydra itself makes the sweep's exit code 1 when a run failed.

    A run that started and has not ended is an interrupted one: a launcher calls `on_job_end` for no such run.
    """

    def __init__(self) -> None:
        self._planned = 0
        self._done = "finished"
        self._started: list[list[str]] = []  # the overrides of each
        self._ended: list[JobReturn] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        runs = runs_of(config)
        refuse_shared_directories(config)
        refuse_what_cannot_be_trained(config, runs)
        make_sweep_directory(Path(config.hydra.sweep.dir))
        self._planned = len(runs)
        group = default_name(unresolved(config.hydra.overrides.task))
        os.environ.setdefault("WANDB_RUN_GROUP", group)  # W&B's own; the runs inherit it
        exit_on_signals()  # between the runs, which have handlers of their own
        atexit.register(self._report)  # Hydra calls on_multirun_end only when every run succeeded

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        self._started.append(unresolved(config.hydra.overrides.task))
        if config.get("plan"):
            self._done = "estimated"

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        self._ended.append(job_return)

    def _report(self) -> None:
        if not self._started:
            return  # a launcher that runs them elsewhere reports by itself
        failed = [job for job in self._ended if job.status is JobStatus.FAILED]
        ended = [list(job.overrides or []) for job in self._ended]
        interrupted = [overrides for overrides in self._started if overrides not in ended]
        counts = {
            "failed": len(failed),
            "interrupted": len(interrupted),
            "not started": self._planned - len(self._started),
        }
        finished = f"\n{len(ended) - len(failed)} of {self._planned} runs {self._done}"
        say(", ".join([finished, *(f"{n} {what}" for what, n in counts.items() if n > 0)]))
        for job in failed:
            say(f"failed: {command_of(job.overrides or [])}\n  {_error(job)}")
        for overrides in interrupted:
            say(f"interrupted: {command_of(overrides)}")
        if interrupted or counts["not started"] > 0:
            say("The same command continues with what is not finished")


def _error(job: JobReturn) -> str:
    """The error of a failed job. Reading the job's return value raises it, after printing a line."""
    try:
        with redirect_stderr(io.StringIO()):
            return str(job.return_value)
    except Exception as error:
        return str(error).replace("\n", "\n  ")
