"""A sweep with a run that cannot be trained does not begin."""

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from tests.cli import ROOT
from trainer import settings
from trainer.sweep_checks import refuse_what_cannot_be_trained


def refuse(*runs, launcher="basic", hydra=()):
    settings.register()
    known = {"job": {"config_name": "train"}, "overrides": {"hydra": ["hydra.mode=MULTIRUN", *hydra]}}
    config = OmegaConf.create({"hydra": known | {"runtime": {"choices": {"hydra/launcher": launcher}}}})
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        refuse_what_cannot_be_trained(config, [["experiment=debug", *run] for run in runs])


def test_runs_that_cannot_be_trained_are_listed_before_the_first_begins():
    refuse(["seed=1"], ["seed=2"])
    with pytest.raises(SystemExit) as stopped:
        refuse(["seed=1"], ["optimizer.lr=-1"], ["optimizer.lr=abc"])
    message = str(stopped.value)
    assert message.startswith("no run of this sweep was started:\npython train.py experiment=debug optimizer")
    assert "optimizer.lr=-1.0 must be greater than zero" in message
    assert "optimizer.lr=abc" in message
    assert "could not be converted to Float" in message
    assert "seed=1" not in message


def test_options_of_ones_own_are_found(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nsteps: 0\n")
    with pytest.raises(SystemExit, match="steps=0 must be greater than zero"):
        refuse(["experiment=own"], hydra=[f"hydra.searchpath=[file://{tmp_path}]"])


def test_what_is_only_known_later_is_not_judged_here():
    refuse(["optimizer.lr=-1"], launcher="slurm")
    refuse(["sample_prompt=${hydra:job.num}"])
