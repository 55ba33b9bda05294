"""TensorBoard, with a stand-in for its writer: the package is optional."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from tests import warm
from trainer.errors import SettingsError, TrainingError
from trainer.plan import make_plan
from trainer.settings import LoggerSettings
from trainer.telemetry import Telemetry
from trainer.tensorboard import start_tensorboard


class SummaryWriter:
    """The part of torch.utils.tensorboard.SummaryWriter that is used."""

    def __init__(self, log_dir=None, comment="", purge_step=None):
        self.log_dir, self.purge_step, self.written = log_dir, purge_step, []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.written.append((tag, scalar_value, global_step))

    def add_text(self, tag, text_string, global_step=None):
        self.written.append((tag, text_string, global_step))

    def close(self):
        self.written.append("closed")


@pytest.fixture
def _installed(monkeypatch):
    stand_in = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)


def start(tmp_path, first_step=0):
    return start_tensorboard(LoggerSettings("off", tensorboard=True), folder=tmp_path, first_step=first_step)


@pytest.mark.usefixtures("_installed")
def test_records_reach_tensorboard_without_what_is_not_a_number(tmp_path):
    assert start_tensorboard(LoggerSettings("off"), folder=tmp_path, first_step=0) is None
    logger = start(tmp_path)
    arguments = {"steps": 3, "first_step": 0, "name": "name"}
    telemetry = Telemetry(tmp_path / "metrics.jsonl", None, **arguments, tensorboard=logger)
    telemetry.record({"step": 2, "tokens": 20, "loss": 2.5, "mfu": None, "grad_norm": float("nan")})
    telemetry.record({"step": 3, "sample": "text"})
    telemetry.close()
    writer = logger._writer
    assert writer.log_dir == str(tmp_path / "tensorboard")
    assert writer.written == [("tokens", 20, 2), ("loss", 2.5, 2), ("sample", "text", 3), "closed"]


@pytest.mark.usefixtures("_installed")
def test_steps_that_run_again_are_hidden(tmp_path):
    assert start(tmp_path)._writer.purge_step == 1
    assert start(tmp_path, first_step=4)._writer.purge_step == 5


def test_one_logger_that_fails_does_not_stop_the_other(tmp_path, caplog):
    class Broken:
        def log(self, values, step):
            raise OSError("no room")

    class Whole:
        def __init__(self):
            self.calls = []

        def log(self, values, step):
            self.calls.append(step)

        def finish(self):
            self.calls.append("finished")

    whole = Whole()
    arguments = {"steps": 3, "first_step": 0, "name": "name"}
    telemetry = Telemetry(tmp_path / "metrics.jsonl", whole, **arguments, tensorboard=Broken())
    for step in (1, 2):
        telemetry.record({"step": step})
    telemetry.close()
    assert whole.calls == [1, 2, "finished"]
    assert caplog.text.count("TensorBoard failed (OSError: no room)") == 1


def test_a_missing_package_is_named_before_any_work(tmp_path, monkeypatch, datasets):
    settings = warm.debug_settings(datasets, "logger.tensorboard=true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install -e '\.\[train,tensorboard\]'"):
        make_plan(settings, 1)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match=r"pip install -e '\.\[train,tensorboard\]'"):
        start(tmp_path)
