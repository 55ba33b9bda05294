import importlib.util
import json
import logging

import pytest
import wandb

from trainer.settings import LoggerSettings
from trainer.telemetry import Telemetry, start_wandb


def start(mode, folder, run_id=None):
    return start_wandb(LoggerSettings(wandb=mode), folder=folder, config={"seed": 1}, run_id=run_id)


def test_off_and_not_installed(tmp_path, monkeypatch, caplog):
    assert start("off", tmp_path) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert start("auto", tmp_path) is None
    assert not caplog.records
    assert start("online", tmp_path) is None
    assert "wandb is not installed" in caplog.text


@pytest.fixture
def calls(monkeypatch):
    """Records wandb.init's arguments instead of starting a service."""
    made = []

    class Run:
        id = "abc"

    def init(**arguments):
        made.append(arguments)
        if arguments["mode"] == "online" and arguments["project"] == "unreachable":
            raise wandb.errors.CommError("no route to host")
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    return made


@pytest.mark.parametrize(("key_configured", "mode"), [(True, "online"), (False, "offline")])
def test_auto_is_online_only_with_a_key(tmp_path, monkeypatch, calls, key_configured, mode):
    monkeypatch.setattr(wandb, "login", lambda **_: key_configured)
    assert start("auto", tmp_path, run_id="abc").id == "abc"
    assert [(call["mode"], call["id"], call["resume"]) for call in calls] == [(mode, "abc", "allow")]


def test_unreachable_service_means_offline(tmp_path, calls, caplog):
    settings = LoggerSettings(wandb="online", project="unreachable")
    assert start_wandb(settings, folder=tmp_path, config={}, run_id=None) is not None
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert "no route to host" in caplog.text


def test_records_reach_the_file_line_by_line_and_wandb(tmp_path, capsys):
    class Run:
        def __init__(self):
            self.logged, self.finished = [], False

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    run = Run()
    telemetry = Telemetry(tmp_path / "metrics.jsonl", run, steps=3, first_step=0, name="name")
    telemetry.record({"step": 1, "loss": 2.5, "mfu": None})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5, "mfu": None}
    telemetry.record({"step": 2, "loss": 2.0, "grad_norm": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[
        1
    ] == '{"step": 2, "loss": 2.0, "grad_norm": null}'
    telemetry.progress(2.5, 1234.0, 0.25)
    telemetry.advance()
    telemetry.close()
    assert run.logged == [(1, {"loss": 2.5}), (2, {"loss": 2.0})]
    assert run.finished
    shown = capsys.readouterr().err
    assert "1/3" in shown
    assert "loss=2.500, tok/s=1,234, MFU=25.0%" in shown


def test_offline_run_leaves_files_to_upload(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    run = start("offline", tmp_path)
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_alerts_reach_wandb_and_its_failures_do_not_reach_training(tmp_path, caplog):
    class Run:
        def __init__(self):
            self.alerts = []

        def alert(self, title, text):
            self.alerts.append((title, text))
            raise OSError("no route to host")

        def finish(self):
            pass

    run = Run()
    for wandb_run in (run, None):
        telemetry = Telemetry(tmp_path / "metrics.jsonl", wandb_run, steps=3, first_step=0, name="name")
        telemetry.alert("title", "text")
        telemetry.close()
    assert run.alerts == [("title", "text")]
    assert caplog.text.count("no route to host") == 1
