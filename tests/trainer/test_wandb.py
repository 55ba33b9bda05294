import importlib.util
import json
import logging
from unittest.mock import Mock, call

import pytest
import wandb

from trainer.record import WandbRun, start_wandb
from trainer.settings import LoggerSettings

VARIABLES = ("MODE", "PROJECT", "ENTITY", "RUN_GROUP", "TAGS", "NAME", "DIR", "RUN_ID", "RESUME")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(f"WANDB_{name}", raising=False)


def start(mode, folder, **settings):
    return start_wandb(LoggerSettings(wandb=mode, **settings), folder=folder, config={"seed": 1})


@pytest.fixture
def calls(monkeypatch):
    made = []

    def init(**arguments):
        made.append(arguments)
        return Mock(spec=wandb.Run, offline=False, url=f"https://wandb.test/{arguments['id']}")

    for name, stand_in in (("init", init), ("login", lambda **_: False), ("teardown", Mock())):
        monkeypatch.setattr(wandb, name, stand_in)
    return made


def test_off_and_not_installed(tmp_path, monkeypatch, caplog):
    assert start("off", tmp_path) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert start("auto", tmp_path) is None
    assert not caplog.records
    assert start("online", tmp_path) is None
    assert "wandb is not installed" in caplog.text


@pytest.mark.parametrize(("key_configured", "mode"), [(True, "online"), (False, "offline")])
def test_auto_is_online_only_with_a_key(tmp_path, monkeypatch, calls, key_configured, mode):
    monkeypatch.setattr(wandb, "login", lambda **_: key_configured)
    assert start("auto", tmp_path)
    assert [(call["mode"], call["resume"]) for call in calls] == [(mode, "allow")]


def test_a_service_that_cannot_be_reached_leaves_the_run_its_id(tmp_path, monkeypatch, caplog):
    """W&B's service on this machine keeps the id of the first attempt in use, unless it is torn down."""
    attempts = []

    def init(**arguments):
        attempts.append((arguments["mode"], arguments["id"]))
        if arguments["mode"] == "online":
            raise TimeoutError("no answer")
        assert torn_down == [1]
        return Mock(spec=wandb.Run, offline=False)

    torn_down = []
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda exit_code: torn_down.append(exit_code))
    (tmp_path / ".wandb_id").write_text("abc\n")
    assert start("online", tmp_path)
    assert attempts == [("online", "abc"), ("offline", "abc")]
    assert "W&B (online): no answer" in caplog.text


def test_mode_of_the_environment_holds_for_auto_only(tmp_path, monkeypatch, calls):
    monkeypatch.setenv("WANDB_MODE", "online")
    start("auto", tmp_path)
    start("offline", tmp_path)
    assert [call["mode"] for call in calls] == ["online", "offline"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert start("auto", tmp_path) is None


def test_variables_hold_where_no_setting_is_given(tmp_path, monkeypatch, calls):
    start("offline", tmp_path)
    plain = calls.pop()
    assert (plain["project"], plain["group"]) == ("sagebwd", None)
    assert (plain["name"], plain["dir"]) == (tmp_path.name, tmp_path)
    # W&B's own would wait until there is a network.
    assert (plain["settings"].init_timeout, plain["settings"].finish_timeout) == (20, 120)
    for name in ("PROJECT", "RUN_GROUP", "NAME", "DIR", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", f"their {name}")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "300")
    monkeypatch.setenv("WANDB_RESUME", "must")
    start("offline", tmp_path, group="mine")
    (call,) = calls
    assert (call["project"], call["group"]) == ("their PROJECT", "mine")
    assert (call["name"], call["dir"], call["id"]) == ("their NAME", "their DIR", "their RUN_ID")
    assert call["resume"] == "must"
    assert "init_timeout" not in call["settings"].model_fields_set  # so that theirs holds


def test_a_run_has_one_id(tmp_path, calls, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        start("offline", folder)
    first, again, other = (call["id"] for call in calls)
    assert len(first) == 8
    assert first == again != other
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    start("offline", tmp_path)
    monkeypatch.delenv("WANDB_RUN_ID")
    start("offline", tmp_path)
    assert [call["id"] for call in calls[-2:]] == ["theirs", "theirs"]
    assert f"W&B: https://wandb.test/{first}" in caplog.text


def test_tokens_are_the_axis_and_samples_a_table_that_a_resumed_run_continues(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    before = {"step": 1, "tokens": 10, "val_loss": 2.0, "sample": "a"}
    metrics.write_text(f'{{"step": 1, "tokens": 10, "loss": 2.0}}\n{json.dumps(before)}\n')
    run = Mock(spec=wandb.Run)
    logger = WandbRun(run, metrics)
    assert run.define_metric.mock_calls == [call("tokens"), call("*", step_metric="tokens")]
    logger.log({"tokens": 20, "loss": 1.0}, step=2)
    logger.log({"tokens": 20, "val_loss": 1.5, "sample": "b"}, step=2)
    plain, (_, (evaluation,), when) = run.log.mock_calls
    assert plain == call({"tokens": 20, "loss": 1.0}, step=2)
    assert (evaluation["val_loss"], when) == (1.5, {"step": 2})
    assert evaluation["sample"].columns == ["step", "tokens", "text"]
    assert evaluation["sample"].data == [[1, 10, "a"], [2, 20, "b"]]


def test_offline_run_leaves_files_and_says_how_to_upload_them(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = start("offline", tmp_path)
    run.log({"loss": 1.0, "tokens": 2, "sample": "text"}, step=1)
    run.finish()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert f"wandb sync {file.parent}" in caplog.text
    assert (tmp_path / ".wandb_id").read_text().strip() in file.name
