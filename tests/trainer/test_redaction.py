import os
from types import SimpleNamespace

import pytest
import wandb

from common.errors import SettingsError
from common.redaction import redact
from tests import warm
from trainer import identity
from trainer.record import start_wandb
from trainer.settings import LoggerSettings, Settings

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


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ("https://alice:pw@example.com/x@y", "https://<redacted>@example.com/x@y"),
        ("git+ssh://alice@example.com", "git+ssh://<redacted>@example.com"),
        ("https://example.com/a@b", "https://example.com/a@b"),
        ("alice@example.com", "alice@example.com"),
    ],
)
def test_users_in_urls_are_replaced(given, recorded):
    assert redact(given) == recorded


def set_key():
    os.environ["MY_API_KEY"] = SECRET


def test_a_run_records_no_secret(monkeypatch, datasets, tmp_path):
    """Not even that of a prompt, which every text sample repeats."""
    monkeypatch.setenv("MY_API_KEY", SECRET)
    run_dir = tmp_path / "run"
    settings = warm.debug_settings(
        datasets,
        "steps=3",
        f"run_dir={run_dir}",
        "sample_prompt='The ${oc.env:MY_API_KEY}'",
        "logger.group=${oc.env:MY_API_KEY}",
        "logger.project=https://alice:pw@example.com",
    )
    assert settings.logger.group == SECRET  # it is used
    warm.run(settings, set_key)
    recorded = {file.name: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    assert {"config.yaml", "environment.jsonl", "metrics.jsonl", "log.txt"} <= recorded.keys()
    assert [name for name, content in recorded.items() if SECRET.encode() in content] == []
    assert [name for name, content in recorded.items() if b"alice" in content] == []
    assert b"The <redacted: MY_API_KEY>" in recorded["metrics.jsonl"]
    assert b"group: '<redacted: MY_API_KEY>'" in recorded["config.yaml"]

    warm.run(settings, set_key)  # a run that goes on compares what was recorded


def test_wandb_gets_no_secret(monkeypatch, tmp_path):
    """W&B itself would record the git remote with its user. The command line it records as it was typed."""
    monkeypatch.setenv("MY_API_KEY", SECRET)
    given = {}

    def init(**arguments):
        given.update(arguments)
        return SimpleNamespace(id="abc", url="", offline=False, define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    settings = LoggerSettings(wandb="offline")
    start_wandb(settings, folder=tmp_path, config={"data": {"path": [SECRET]}})
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
