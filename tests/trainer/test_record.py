import importlib.util
import json
import logging
import os
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
import wandb

from common.errors import SettingsError, TrainingError
from common.redaction import redact
from tests import warm
from trainer import identity
from trainer.record import Record, Stopwatch, TensorBoard, WandbRun, logged_steps, start_wandb
from trainer.settings import LoggerSettings, Settings


def make_record(folder, wandb_run, tensorboard=None):
    loggers = {"W&B": wandb_run, "TensorBoard": tensorboard}
    return Record(folder / "metrics.jsonl", loggers, steps=3, first_step=0, name="name")


def test_records_reach_the_file_line_by_line_and_wandb(tmp_path, capsys):
    run = Mock()
    record = make_record(tmp_path, run)
    record.write({"step": 1, "loss": 2.5, "mfu": None})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5, "mfu": None}
    record.write({"step": 2, "loss": 2.0, "grad_norm": float("nan")})
    _, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert second == '{"step": 2, "loss": 2.0, "grad_norm": null}'
    record.progress(2.5, 1234.0, 0.25)
    record.advance()
    record.close()
    expected = [call.log({"loss": 2.5}, step=1), call.log({"loss": 2.0}, step=2), call.finish()]
    assert run.mock_calls == expected
    shown = capsys.readouterr().err
    assert "1/3" in shown
    assert "loss=2.500, tok/s=1,234, MFU=25.0%" in shown


def test_a_record_counts_the_steps_with_a_loss_and_those_of_before(tmp_path):
    for step in (3, 4):
        record = make_record(tmp_path, None)
        record.write({"step": step, "loss": 5.0})
        record.write({"step": step, "val_loss": 5.0})
        record.close()
    assert record.logged == 2
    assert logged_steps(tmp_path / "metrics.jsonl") == [3, 4]


def test_records_reach_tensorboard_without_what_is_not_a_number(tmp_path, monkeypatch):
    """And hide the steps that run again."""
    writer = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    record = make_record(tmp_path, None, TensorBoard(tmp_path / "tensorboard", 4))
    record.write({"step": 5, "tokens": 20, "loss": 2.5, "mfu": None, "grad_norm": float("nan")})
    record.write({"step": 6, "sample": "text"})
    record.close()
    assert writer.mock_calls == [
        call(str(tmp_path / "tensorboard"), purge_step=5),
        call().add_scalar("tokens", 20, 5),
        call().add_scalar("loss", 2.5, 5),
        call().add_text("sample", "text", 6),
        call().close(),
    ]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    with pytest.raises(TrainingError, match="pip install"):
        TensorBoard(tmp_path, 0)


def test_one_logger_that_fails_does_not_stop_the_other(tmp_path, caplog):
    whole, broken = Mock(), Mock()
    broken.log.side_effect = OSError("no room")
    record = make_record(tmp_path, whole, broken)
    for step in (1, 2):
        record.write({"step": step})
    record.close()
    assert whole.mock_calls == [call.log({}, step=1), call.log({}, step=2), call.finish()]
    assert caplog.text.count("TensorBoard failed (OSError: no room)") == 1


def test_stopwatch_leaves_pauses_out():
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    time.sleep(0.02)
    with watch.paused(), watch.paused():
        time.sleep(0.15)
    time.sleep(0.02)
    assert 0.04 <= watch.take() < 0.15
    assert watch.take() < 0.02  # starts from zero, and still runs


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("MODE", "PROJECT", "ENTITY", "RUN_GROUP", "TAGS", "NAME", "DIR", "RUN_ID", "RESUME"):
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


def test_auto_is_online_only_with_a_key_or_by_the_environment(tmp_path, monkeypatch, calls):
    for has_key in (True, False):
        monkeypatch.setattr(wandb, "login", Mock(return_value=has_key))
        assert start("auto", tmp_path)
    monkeypatch.setenv("WANDB_MODE", "online")
    start("auto", tmp_path)
    start("offline", tmp_path)  # the setting comes first
    assert [call["mode"] for call in calls] == ["online", "offline", "online", "offline"]
    assert {call["resume"] for call in calls} == {"allow"}
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert start("auto", tmp_path) is None


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


SECRET = "s3cret-value-123"


SECRETS = ["KEY", "WANDB_API_KEY", "HF_TOKEN", "aws_secret_access_key", "DB_PASSWORD", "GITHUB_AUTH", "MY_PW"]


@pytest.mark.parametrize("name", SECRETS)
def test_values_of_variables_that_are_called_secret_are_replaced(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)
    given, wanted = (
        {"a": [f"x{text}y", 3, None], "b": {"c": text}, "d": 1.5} for text in (SECRET, f"<redacted: {name}>")
    )
    assert redact(given) == wanted


def test_other_variables_and_short_values_are_recorded(monkeypatch):
    """TOKENS_KEY=true must not replace every true."""
    for name in ("TIKTOKEN_CACHE_DIR", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "HOME", "MONKEY"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("TOKENS_KEY", "true")
    assert redact(f"{SECRET} skip=true") == f"{SECRET} skip=true"


def test_the_longest_of_two_secrets_goes_first(monkeypatch):
    monkeypatch.setenv("SHORT_KEY", SECRET)
    monkeypatch.setenv("LONG_KEY", f"{SECRET}-and-more")
    assert redact(f"{SECRET}-and-more, {SECRET}") == "<redacted: LONG_KEY>, <redacted: SHORT_KEY>"


def test_users_in_urls_are_replaced():
    assert redact("https://alice:pw@example.com/x@y") == "https://<redacted>@example.com/x@y"
    assert redact("git+ssh://alice@example.com") == "git+ssh://<redacted>@example.com"
    for whole in ("https://example.com/a@b", "alice@example.com"):
        assert redact(whole) == whole


def set_key():
    os.environ["MY_API_KEY"] = SECRET


def test_a_run_records_no_secret(monkeypatch, datasets, tmp_path):
    """Not even that of a prompt, which every text sample repeats."""
    monkeypatch.setenv("MY_API_KEY", SECRET)
    run_dir = tmp_path / "run"
    logger = ("logger.group=${oc.env:MY_API_KEY}", "logger.project=https://alice:pw@example.com")
    prompt = "sample_prompt='The ${oc.env:MY_API_KEY}'"
    settings = warm.debug_settings(datasets, "steps=3", f"run_dir={run_dir}", prompt, *logger)
    assert settings.logger.group == SECRET  # it is used
    warm.run(settings, set_key)
    recorded = {file.name: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    assert {"config.yaml", "environment.jsonl", "metrics.jsonl", "log.txt"} <= recorded.keys()
    assert [name for name, content in recorded.items() if SECRET.encode() in content] == []
    assert [name for name, content in recorded.items() if b"alice" in content] == []
    assert b"The <redacted: MY_API_KEY>" in recorded["metrics.jsonl"]
    assert b"group: '<redacted: MY_API_KEY>'" in recorded["config.yaml"]

    warm.run(settings, set_key)  # a run that goes on compares what was recorded


def test_wandb_gets_no_secret(monkeypatch, tmp_path, calls):
    """W&B itself would record the git remote with its user. The command line it records as it was typed."""
    monkeypatch.setenv("MY_API_KEY", SECRET)
    start_wandb(LoggerSettings(wandb="offline"), folder=tmp_path, config={"data": {"path": [SECRET]}})
    (given,) = calls
    assert given["config"] == {"data": {"path": ["<redacted: MY_API_KEY>"]}}
    assert given["settings"].disable_git
    assert len(given["settings"].git_commit.rstrip("+")) == 40


def test_variables_in_recorded_settings_stay_text(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    with pytest.raises(SettingsError, match=r"MY_API_KEY") as error:
        Settings(attention={"backend": "fpa", "sdpa": "${oc.env:MY_API_KEY}"})
    assert SECRET not in str(error.value)
    stored = Settings().recorded()
    stored["attention"] = {"backend": "sagebwd", "kernels": "${oc.env:MY_API_KEY}"}
    assert SECRET not in identity.changes(stored, Settings())
