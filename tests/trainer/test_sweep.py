"""What a sweep says at its end."""

import os
import shlex
from types import SimpleNamespace

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from trainer.sweep import SweepSummary

PARSER = OverridesParser.create()
OVERRIDES = ["data.path='a, b=$HOME/*.txt'", "optimizer.lr=1e-3,2e-3", 'sample_prompt="It\'s"']


def test_the_runs_of_a_sweep_have_a_group_of_their_own_unless_one_is_given(monkeypatch):
    """W&B's own variable, which the processes of the runs inherit."""
    monkeypatch.setattr("atexit.register", lambda *_: None)

    def group(*overrides):
        task = {"overrides": {"task": list(overrides)}}
        SweepSummary().on_multirun_start(OmegaConf.create({"hydra": task}))
        return os.environ["WANDB_RUN_GROUP"]

    monkeypatch.setenv("WANDB_RUN_GROUP", "")
    monkeypatch.delenv("WANDB_RUN_GROUP")  # and put back as it was
    first = group("seed=1,2", "steps=3", "logger=wandb")
    assert first.startswith("seed-1-2+steps-3-")
    monkeypatch.delenv("WANDB_RUN_GROUP")
    assert group("seed=1,2,3", "steps=3") != first
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert group("seed=1,2", "steps=3") == "mine"


def test_the_command_of_a_failed_run_can_be_pasted(capsys):
    summary = SweepSummary()
    ((job, _),) = BasicSweeper.split_arguments(PARSER.parse_overrides(OVERRIDES), None)
    failed = JobReturn(overrides=job, status=JobStatus.FAILED)
    failed.return_value = ValueError("no such file")
    summary.on_job_end(SimpleNamespace(), failed)
    summary._report()
    told = capsys.readouterr().err
    assert "0 of 1 runs finished" in told
    assert "no such file" in told
    line = next(line for line in told.splitlines() if line.startswith("failed: "))
    python, script, *words = shlex.split(line.removeprefix("failed: "))
    assert (python, script) == ("python", "train.py")
    assert [one.value() for one in PARSER.parse_overrides(words)] == ["a, b=$HOME/*.txt", 1e-3, "It's"]
