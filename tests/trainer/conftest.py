"""Settings composed by Hydra from configs/, as train.py does, and runs in this process."""

from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from tests import warm
from trainer.distributed import Ranks
from trainer.loop import loop
from trainer.processes import StopRequest
from trainer.run import Run
from trainer.start import TrainingDirectory


@pytest.fixture
def compose_settings():
    """compose_settings("tps=260k", …) -> Settings, as `python train.py tps=260k …` would see them."""
    return warm.composed


@pytest.fixture
def train_here(datasets, monkeypatch):
    """train_here(run_dir, "steps=3", …) -> a debug run, at its end."""

    def trained(run_dir, *overrides):
        return train(warm.debug_settings(datasets, f"run_dir={run_dir}", *overrides), monkeypatch)

    return trained


def train(run_settings, monkeypatch):
    directory = TrainingDirectory(Path(run_settings.run_dir))
    with directory.locked(), StopRequest() as stop, monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", warm.no_picture)
        directory.open(run_settings)
        run = Run(run_settings, directory, Ranks(0, 1, torch.device("cpu")), stop)
        loop(run)
    return run
