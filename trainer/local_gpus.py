"""Hydra launcher `hydra/launcher=local_gpus`: the GPUs of this machine work through a sweep side by side.

Each run is a `python train.py …` of its own that sees only its GPUs. Hydra's launchers for one machine do not
do that: submitit_local starts all runs at once on the same GPUs, and joblib knows no GPUs.
"""

import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer import distributed
from trainer.forecast import describe
from trainer.overrides import unresolved
from trainer.run_directory import is_finished
from trainer.run_queue import FAILED, FINISHED, INTERRUPTED, Job, Outcome, run_all
from trainer.settings import Settings

NAME = "hydra_plugins.sagebwd.LocalGpus"  # Hydra takes launchers from the package hydra_plugins only
PROGRAM = [sys.executable, str(Path(__file__).parents[1] / "train.py")]
OUTPUT = "output.txt"  # in the run's directory
#: Overrides of the sweep as a whole, which mean nothing to one of its runs.
OF_THE_SWEEP = (
    "hydra/launcher=",
    "hydra.launcher.",
    "hydra/sweeper=",
    "hydra.sweeper.",
    "hydra.sweep.",
    "hydra.mode=",
)


def register() -> None:
    """Make the launcher known to Hydra."""
    Plugins.instance().class_name_to_class[NAME] = LocalGpus


class LocalGpus(Launcher):
    """jobs: at most this many runs at a time; None: as many as have GPUs, and one at a time without GPUs."""

    def __init__(self, jobs: int | None = None):
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        if self.jobs is not None and (type(self.jobs) is not int or self.jobs < 1):
            raise CompactHydraException(
                f"hydra.launcher.jobs={self.jobs} must be the number of runs at a time, 1 or more; leave it "
                "out for one per GPU"
            )
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; their results. If a signal asks to stop, exits when the running ones have saved."""
        if distributed.under_torchrun():
            raise CompactHydraException(
                "a sweep starts its own processes: use hardware.devices=N, not torchrun"
            )
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        gpus = visible_gpus()
        limit = self.jobs or max(1, len(gpus))
        place = f"on GPU {','.join(gpus)}" if gpus else "without GPUs"
        print(
            f"{len(job_overrides)} runs {place}, {limit} at a time; each prints to {OUTPUT} in its directory"
        )
        runs = [self._prepare(list(job), initial_job_idx + i, limit) for i, job in enumerate(job_overrides)]

        def run_of(job: Job) -> _Run:
            return next(run for run in runs if run.job is job)

        stopped_by = run_all(
            [run.job for run in runs if run.job],
            gpus=gpus,
            limit=limit,
            on_start=lambda job: self._note_start(run_of(job)),
            on_end=lambda job, outcome: self._note_end(run_of(job), outcome),
        )
        if stopped_by:
            sys.exit(128 + stopped_by)
        return [run.result for run in runs]

    def _prepare(self, overrides: list[str], index: int, limit: int) -> "_Run":
        """The run of these overrides; without a job if it is finished, or its settings cannot be trained."""
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        run = _Run(config, JobReturn(overrides=unresolved(config.hydra.overrides.task)))
        try:
            settings, finished = _check(config)
        except Exception as error:  # in a setting; the other runs go on, as with Hydra's own launcher
            outcome = Outcome(FAILED, str(error))
        else:
            if not finished:
                run.job = _job(settings, config, limit)
                return run
            outcome = Outcome(FINISHED)
            if not settings.plan:
                print(f"{settings.run_dir} is finished; rerun_finished=true trains it again")
        self._note_start(run)
        self._note_end(run, outcome)
        return run

    def _note_start(self, run: "_Run") -> None:
        self.context.callbacks.on_job_start(config=run.config, task_function=self.task)

    def _note_end(self, run: "_Run", outcome: Outcome) -> None:
        """Take the outcome as Hydra's result. An interrupted run has not ended for the callbacks."""
        if outcome.kind == FINISHED:
            run.result.status, run.result.return_value = JobStatus.COMPLETED, None
        else:
            run.result.status = JobStatus.FAILED  # makes the exit code of the sweep 1
            run.result.return_value = CompactHydraException(outcome.reason or "interrupted")
        if outcome.kind != INTERRUPTED:
            self.context.callbacks.on_job_end(config=run.config, job_return=run.result)


@dataclass
class _Run:
    config: DictConfig
    result: JobReturn
    job: Job | None = None


def visible_gpus() -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        list(map(str, range(count))) if named is None else [gpu.strip() for gpu in named.split(",")][:count]
    )


def _check(config: DictConfig) -> tuple[Settings, bool]:
    """The settings of a run, and whether nothing is left to do.

    Raises what OmegaConf does, and TrainingError.
    """
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)  # ${hydra:…} in a setting refers to it
    try:
        own = copy.deepcopy(config)
        with open_dict(own):
            del own["hydra"]
        settings = OmegaConf.to_object(own)
        ranks = settings.hardware.devices
        if settings.plan:  # here, as the output of a run goes to its directory
            print(describe(settings, ranks))
            return settings, True
        return settings, is_finished(settings, ranks, unresolved(config.hydra.overrides.task))
    finally:
        HydraConfig.instance().cfg = before


def _job(settings: Settings, config: DictConfig, limit: int) -> Job:
    environment = {
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",  # tracebacks that end with the error
    }
    on_gpus = settings.hardware.device == "cuda"
    if not on_gpus and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // limit))
    return Job(
        name=settings.run_dir,
        command=_command(config),
        output=Path(settings.run_dir) / OUTPUT,
        gpus=settings.hardware.devices if on_gpus else 0,
        environment=environment,
    )


def _command(config: DictConfig) -> list[str]:
    """The command that trains this run alone."""
    hydra = config.hydra
    folders = [one.path for one in hydra.runtime.config_sources if one.provider == "command-line"]
    flags = [f"--config-name={hydra.job.config_name}", *(f"--config-dir={folder}" for folder in folders)]
    given = OmegaConf.to_container(hydra.overrides)  # as typed: interpolations are the run's to resolve
    of_hydra = [text for text in given["hydra"] if not text.startswith(OF_THE_SWEEP)]
    place = [f"hydra.job.num={hydra.job.num}", f"hydra.job.id={hydra.job.id}"]
    return [*PROGRAM, *flags, *given["task"], *of_hydra, *place]
