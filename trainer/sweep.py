"""A table at the end of a sweep: which runs finished, which failed and why."""

import atexit
import io
import os
import shlex
import sys
from contextlib import redirect_stderr
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainer.run_directory import default_name
from trainer.sweep_directories import refuse_shared_directories


class SweepSummary(Callback):
    """Hydra callback; Hydra itself makes the sweep's exit code 1 when a run failed."""

    def __init__(self) -> None:
        self._jobs: list[JobReturn] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        self._jobs.append(job_return)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        refuse_shared_directories(config)
        overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        os.environ.setdefault("WANDB_RUN_GROUP", default_name(overrides))  # W&B's own; the runs inherit it
        atexit.register(self._report)  # Hydra calls on_multirun_end only when every run succeeded

    def _report(self) -> None:
        if not self._jobs:
            return  # a launcher that runs them elsewhere reports by itself
        failed = [job for job in self._jobs if job.status is JobStatus.FAILED]
        print(f"\n{len(self._jobs) - len(failed)} of {len(self._jobs)} runs finished", file=sys.stderr)
        for job in failed:
            command = shlex.join(["python", "train.py", *(job.overrides or [])])
            print(f"failed: {command}\n  {_error(job)}", file=sys.stderr)


def _error(job: JobReturn) -> str:
    """The error of a failed job. Reading the job's return value raises it, after printing a line."""
    try:
        with redirect_stderr(io.StringIO()):
            return str(job.return_value)
    except Exception as error:
        return str(error).replace("\n", "\n  ")
