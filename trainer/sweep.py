"""A sweep's runs: checked before the first begins, side by side on GPUs, summarized at the end.

`hydra/launcher=local_gpus` runs each as a `python train.py …` of its own that sees only its GPUs. Hydra's
launchers for one machine do not do that: submitit_local starts all runs at once on the same GPUs, and joblib
knows no GPUs.
"""

import atexit
import copy
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.errors import CompactHydraException, HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from common.errors import TrainingError
from common.terminal import say
from trainer.checks import check
from trainer.estimate import describe
from trainer.processes import (
    FINISHED,
    INTERRUPTED,
    Job,
    Outcome,
    exit_on_signals,
    forget_one_run,
    run_all,
    under_torchrun,
)
from trainer.settings import Settings, unresolved
from trainer.start import TrainingDirectory, default_name, inherited, name_directory

# ---------------------------------------------------------------------- before and after


class SweepSummary(Callback):
    """Hydra callback: checks all runs before the first, and prints at the end how each of them ended.

    Hydra itself makes the sweep's exit code 1 when a run failed. A run that started and has not ended is an
    interrupted one: a launcher calls `on_job_end` for no such run.
    """

    def __init__(self) -> None:
        self._planned = 0  # or not known: a sweeper that searches decides as it goes
        self._done = "finished"
        self._started: list[list[str]] = []  # the overrides of each
        self._ended: list[JobReturn] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if under_torchrun():
            sys.exit("a sweep starts its own processes: use hardware.devices=N, not torchrun")
        runs = runs_of(config)
        refuse_what_cannot_be_trained(config, runs)
        self._planned = len(runs)
        group = default_name(unresolved(config.hydra.overrides.task))
        os.environ.setdefault("WANDB_RUN_GROUP", group)  # W&B's own; the runs inherit it
        forget_one_run(self._planned or OmegaConf.select(config, "hydra.sweeper.n_trials") or 0)
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
        finished = f"\n{len(ended) - len(failed)} of {self._planned or len(self._started)} runs {self._done}"
        told = ", ".join([finished, *(f"{n} {what}" for what, n in counts.items() if n > 0)])
        goes_on = self._planned and (interrupted or counts["not started"] > 0)
        say(f"{told}; the same command continues" if goes_on else told)
        for job in failed:
            error = str(job._return_value)  # reading the property raises it
            say(f"failed: {command_of(job.overrides or [])}\n  " + error.replace("\n", "\n  "))
        for overrides in () if self._planned else interrupted:
            say(f"interrupted: {command_of(overrides)}")


def command_of(overrides: Sequence[str]) -> str:
    """The command that trains a run with these overrides."""
    return shlex.join(["python", "train.py", *overrides])


def runs_of(config: DictConfig) -> list[list[str]]:
    """The overrides of each run of the sweep `config`; none if a sweeper such as Optuna chooses them."""
    if config.hydra.runtime.choices.get("hydra/sweeper", "basic") != "basic":
        return []
    parsed = OverridesParser.create().parse_overrides(unresolved(config.hydra.overrides.task))
    (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return runs


def refuse_what_cannot_be_trained(config: DictConfig, runs: list[list[str]]) -> None:
    """End the program with a message that lists the runs of the sweep `config` with impossible settings.

    If they run on this machine: another may have other devices.
    """
    shared = [place for place, count in Counter(map(_place, runs)).items() if count > 1 and "$" not in place]
    if shared:
        sys.exit(f"two runs of this sweep would train in {shared[0]}; let them differ, or leave one out")
    if config.hydra.runtime.choices.get("hydra/launcher") not in ("basic", "local_gpus"):
        return
    search_path = [text for text in config.hydra.overrides.hydra if text.startswith("hydra.searchpath=")]
    name = config.hydra.job.config_name
    found = [f"{command_of(run)}\n{why}" for run in runs if (why := _problem(name, run, search_path))]
    if found:
        sys.exit("\n".join(["no run of this sweep was started:", *found]))


def _place(run: list[str]) -> str:
    """The overrides that give the run its directory, and the name that it gets without run_dir."""
    given = {text.partition("=")[0]: text for text in run}
    if given.get("run_dir", "run_dir=null") != "run_dir=null":
        return given["run_dir"]
    return "/".join([*filter(None, [given.get("runs_dir")]), default_name(run)])


def _problem(config_name: str, overrides: list[str], search_path: list[str]) -> str | None:
    try:
        composed = compose(config_name, overrides=[*overrides, *search_path])
        settings = OmegaConf.to_object(inherited(composed, overrides))
        check(settings, settings.hardware.devices)
    except InterpolationResolutionError:  # of Hydra's own values, such as the number of the job
        return None
    except (HydraException, OmegaConfBaseException) as error:
        return "\n".join([str(error), *str(error.__cause__ or "").splitlines()[:1]])
    except TrainingError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- hydra/launcher=local_gpus

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
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        gpus = visible_gpus()
        limit = self.jobs or max(1, len(gpus))
        place = f"on GPU {','.join(gpus)}" if gpus else "without GPUs"
        print(
            f"{len(job_overrides)} runs {place}, {limit} at a time; each prints to {OUTPUT} in its directory"
        )
        runs = [self._prepare(list(job), initial_job_idx + i, limit) for i, job in enumerate(job_overrides)]
        of_job = {id(run.job): run for run in runs}
        stopped_by = run_all(
            [run.job for run in runs if run.job],
            gpus=gpus,
            limit=limit,
            on_start=lambda job: self._note_start(of_job[id(job)]),
            on_end=lambda job, outcome: self._note_end(of_job[id(job)], outcome),
        )
        if stopped_by:
            sys.exit(128 + stopped_by)
        return [run.result for run in runs]

    def _prepare(self, overrides: list[str], index: int, limit: int) -> "_Run":
        """The run of these overrides; without a job if only its estimate was asked for."""
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        run = _Run(config, JobReturn(overrides=unresolved(config.hydra.overrides.task)))
        settings = _settings_of(config)
        if settings.plan:
            self._note_start(run)
            print(describe(settings, settings.hardware.devices))
            self._note_end(run, Outcome(FINISHED))
        else:
            run.job = _job(settings, config, limit)
        return run

    def _note_start(self, run: "_Run") -> None:
        self.context.callbacks.on_job_start(config=run.config, task_function=self.task)

    def _note_end(self, run: "_Run", outcome: Outcome) -> None:
        """Take the outcome as Hydra's result. An interrupted run has not ended for the callbacks."""
        if outcome.kind == FINISHED:
            directory = TrainingDirectory(Path(run.job.name)) if run.job else None
            run.result.status = JobStatus.COMPLETED
            run.result.return_value = directory and directory.validation_loss()  # as train.py's main()
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


def _settings_of(config: DictConfig) -> Settings:
    """The settings of a run of the sweep, with its directory."""
    own, overrides = copy.deepcopy(config), unresolved(config.hydra.overrides.task)
    with _hydra_config(config), open_dict(own):
        del own["hydra"]
        settings = OmegaConf.to_object(inherited(own, overrides))
    name_directory(settings, overrides)
    return settings


@contextmanager
def _hydra_config(config: DictConfig) -> Iterator[None]:
    """Within this context ${hydra:…} in a setting refers to this run."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
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
        ended_well=lambda code: code == 0 and TrainingDirectory(Path(settings.run_dir)).is_finished,
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
