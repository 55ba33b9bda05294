import os
import shlex
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from common import terminal
from tests import cli
from tests.cli import ROOT
from trainer import settings, sweep
from trainer.sweep import SweepSummary, refuse_what_cannot_be_trained

PARSER = OverridesParser.create()
OVERRIDES = ["data.path='a, b=$HOME/*.txt'", "optimizer.lr=1e-3,2e-3", 'sample_prompt="It\'s"']


@pytest.fixture
def begin(monkeypatch):
    """begin("seed=1,2", …) -> the summary of a sweep that begins, without a trace in this process."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr(sweep, "exit_on_signals", lambda: None)
    monkeypatch.setenv("WANDB_RUN_GROUP", "")
    monkeypatch.delenv("WANDB_RUN_GROUP")  # and put back as it was

    def begun(*overrides, **sweeper):
        summary = SweepSummary()
        summary.on_multirun_start(hydra(overrides, **sweeper))
        return summary

    return begun


def hydra(overrides, **sweeper):
    choices = {"hydra/sweeper": "optuna"} if sweeper else {}
    own = {"overrides": {"task": list(overrides)}, "runtime": {"choices": choices}, "sweeper": sweeper}
    return OmegaConf.create({"hydra": own})


def end(summary, overrides, error=None):
    result = JobReturn(overrides=overrides, status=JobStatus.FAILED if error else JobStatus.COMPLETED)
    result.return_value = error
    summary.on_job_end(SimpleNamespace(), result)


def test_the_runs_of_a_sweep_have_a_group_of_their_own_unless_one_is_given(begin, monkeypatch):
    """W&B's own variable, which the processes of the runs inherit."""

    def group(*overrides):
        begin(*overrides)
        return os.environ["WANDB_RUN_GROUP"]

    first = group("seed=1,2", "steps=3", "logger=wandb")
    assert first.startswith("seed-1-2+steps-3-")
    monkeypatch.delenv("WANDB_RUN_GROUP")
    assert group("seed=1,2,3", "steps=3") != first
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert group("seed=1,2", "steps=3") == "mine"


def test_the_runs_of_a_sweep_do_not_share_a_run_of_wandb(begin, monkeypatch, capsys):
    for variable in ("WANDB_RUN_ID", "WANDB_NAME"):
        monkeypatch.setenv(variable, "mine")
    begin("seed=1")
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_NAME"]) == ("mine", "mine")
    begin("seed=1,2")
    assert not {"WANDB_RUN_ID", "WANDB_NAME"} & os.environ.keys()
    assert "WANDB_RUN_ID is ignored: it names one run, and 2 are planned" in capsys.readouterr().err


def test_a_sweeper_that_chooses_the_runs_is_summarized(begin, monkeypatch, capsys):
    """Optuna's: which runs there will be is not known, and the same command chooses others."""
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    summary = begin("optimizer.lr=interval(1e-4,1e-2)", n_trials=3)
    assert "3 are planned" in capsys.readouterr().err
    for rate in (1, 2):
        own = [f"optimizer.lr={rate}"]
        summary.on_job_start(hydra(own), task_function=None)
        if rate == 1:
            end(summary, own)
    summary._report()
    told = capsys.readouterr().err
    assert "1 of 2 runs finished, 1 interrupted\ninterrupted: python train.py optimizer.lr=2\n" in told


def test_the_command_of_a_failed_run_can_be_pasted(begin, capsys):
    summary = begin(*OVERRIDES)
    ((job, other),) = BasicSweeper.split_arguments(PARSER.parse_overrides(OVERRIDES), None)
    for one, error in ((job, ValueError("no such file")), (other, None)):
        summary.on_job_start(hydra(one), task_function=None)
        end(summary, one, error)
    summary._report()
    told = capsys.readouterr().err
    assert told.startswith("\n1 of 2 runs finished, 1 failed\n")
    assert "no such file" in told
    assert "The same command" not in told
    line = next(line for line in told.splitlines() if line.startswith("failed: "))
    python, script, *words = shlex.split(line.removeprefix("failed: "))
    assert (python, script) == ("python", "train.py")
    assert [one.value() for one in PARSER.parse_overrides(words)] == ["a, b=$HOME/*.txt", 1e-3, "It's"]


def test_the_summary_may_have_no_reader(begin, monkeypatch):
    """As after Ctrl-C with `2>&1 | tee log`, which ends tee, too."""
    summary, discarded = begin("seed=1,2"), []
    summary.on_job_start(hydra(["seed=1"]), task_function=None)
    monkeypatch.setattr(terminal, "discard", discarded.append)
    monkeypatch.setattr("sys.stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    summary._report()
    assert set(discarded) == {2}


def test_a_launcher_that_runs_them_elsewhere_reports_by_itself(begin, capsys):
    begin("seed=1,2")._report()
    assert capsys.readouterr().err == ""


SWEEP = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
from trainer.processes import ForwardedStop, exit_on_signals
atexit.register(print, "summary")
exit_on_signals()
with ForwardedStop() as stop:  # of a run; its own message and exit code are those that count
    stop.signal = signal.{name}
    stop.call_previous_handler()
print("went on")
os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_between_runs_leaves_time_for_the_summary(tmp_path, name):
    (tmp_path / "sweep.py").write_text(SWEEP.format(name=name))
    printed = cli.run([sys.executable, str(tmp_path / "sweep.py")], code=128 + getattr(signal, name))
    assert printed == "went on\nsummary\n"


INTERRUPTED_SWEEP = """
import train
from pathlib import Path
from trainer import settings, sweep
from common.errors import Interrupted

def run(run_settings):
    with Path(__file__).with_name("started").open("a") as file:
        print(run_settings.seed, file=file)
    raise Interrupted("stopped", 2)

train.run = run
settings.register()
sweep.register()
train.main()
"""


def test_an_interrupted_sweep_starts_no_other_run(tmp_path):
    (tmp_path / "sweep.py").write_text(INTERRUPTED_SWEEP)
    arguments = ["-m", "experiment=debug", "seed=1,2", f"runs_dir={tmp_path / 'runs'}"]
    cli.run([sys.executable, str(tmp_path / "sweep.py"), *arguments], code=128 + signal.SIGINT)
    assert (tmp_path / "started").read_text() == "1\n"


def refuse(*runs, launcher="basic", hydra=()):
    settings.register()
    known = {"job": {"config_name": "train"}, "overrides": {"hydra": ["hydra.mode=MULTIRUN", *hydra]}}
    config = OmegaConf.create({"hydra": known | {"runtime": {"choices": {"hydra/launcher": launcher}}}})
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        refuse_what_cannot_be_trained(config, [["experiment=debug", *run] for run in runs])


def test_runs_that_cannot_be_trained_are_listed_before_the_first_begins():
    refuse(["seed=1"], ["seed=2"])
    with pytest.raises(SystemExit) as stopped:
        refuse(["seed=1"], ["optimizer.lr=-1"], ["optimizer.lr=abc"], ["attention.sdpa=fast"])
    message = str(stopped.value)
    assert message.startswith("no run of this sweep was started:\npython train.py experiment=debug optimizer")
    for text in (
        "optimizer.lr=-1.0 must be",
        "optimizer.lr=abc",
        "to Float",
        "attention.sdpa=fast is unknown",
    ):
        assert text in message
    assert "seed=1" not in message


def test_runs_that_would_train_in_one_directory_are_refused():
    with pytest.raises(SystemExit, match="two runs of this sweep would train in run_dir=X"):
        refuse(["seed=1", "run_dir=X"], ["seed=2", "run_dir=X"])
    with pytest.raises(SystemExit, match="two runs of this sweep would train in experiment-debug"):
        refuse(["seed=1"], ["seed=1", "logger=files"])
    refuse(["seed=1", "run_dir=X"], ["seed=2", "run_dir=Y"])
    refuse(["seed=1", "run_dir=null"], ["seed=2", "run_dir=null"])
    refuse(["seed=1", "runs_dir=X"], ["seed=1", "runs_dir=Y"])
    refuse(["seed=1", "run_dir=runs/${seed}"], ["seed=2", "run_dir=runs/${seed}"])


def test_options_of_ones_own_are_found(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nsteps: 0\n")
    with pytest.raises(SystemExit, match="steps=0 must be greater than zero"):
        refuse(["experiment=own"], hydra=[f"hydra.searchpath=[file://{tmp_path}]"])


def test_what_is_only_known_later_is_not_judged_here():
    refuse(["optimizer.lr=-1"], launcher="slurm")
    refuse(["sample_prompt=${hydra:job.num}"])
