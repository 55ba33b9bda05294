"""An attention with a setting of its own takes one module and one config file, and nothing else."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.cli import ROOT

MODULE = '''
"""Causal attention to the last `window` tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.backends import Backend


@dataclass
class Settings:
    """Settings of windowed attention."""

    window: int = 4


def check(settings: Settings, *, deterministic: bool) -> None:
    if settings.window < 1:
        raise ValueError(f"attention.window={settings.window} must be at least 1")


def build(settings: Settings, *, device, dtype, d_head, is_gqa) -> Backend:
    def attend(q, k, v, *, is_causal, enable_gqa):
        n = q.shape[-2]
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - settings.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

    return Backend(attend, f"a window of {settings.window} tokens", title="windowed attention")
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the program with the two files of a new attention."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("model", "data", "trainer", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", root)
    (root / "sagebwd").symlink_to(ROOT / "sagebwd")
    (root / "model" / "backends" / "window.py").write_text(MODULE)
    (root / "configs" / "attention" / "window.yaml").write_text("backend: window\nwindow: 8\n")
    return root


TRAIN = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from trainer import settings
from trainer.errors import TrainingError
from trainer.loop import train

settings.register()
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    for overrides in json.loads(sys.argv[2]):
        try:
            train(OmegaConf.to_object(compose("train", ["experiment=debug", *overrides])))
        except TrainingError as error:
            print(error)
"""


def train(checkout, datasets, *runs):
    """Train these lists of overrides, all in one process: to start one takes seconds. What was printed."""
    common = (f"data.root={datasets}", "steps=3", "probe.every=1")
    runs = json.dumps([[*run, *common] for run in runs])
    command = [sys.executable, "-c", TRAIN, str(checkout / "configs"), runs]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(run_dir):
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_a_new_attention_trains_and_is_resumed_with_a_setting_of_its_own(checkout, datasets):
    windowed, full = checkout / "runs" / "window", checkout / "runs" / "fpa"
    output = train(
        checkout,
        datasets,
        ["attention=window", f"run_dir={windowed}"],
        ["attention=fpa", f"run_dir={full}"],
    )
    assert "a window of 8 tokens" in output
    assert yaml.safe_load((windowed / "config.yaml").read_text())["attention"] == {
        "backend": "window",
        "window": 8,
    }
    assert losses(windowed) != losses(full)
    assert "probe/layer_0/dq_l2" in (windowed / "metrics.jsonl").read_text()  # its own error
    assert "Error" not in output

    (windowed / "DONE").unlink()
    resumed = ["attention=window", f"run_dir={windowed}"]
    output = train(checkout, datasets, [*resumed, "attention.window=64"], [*resumed, "attention.window=8"])
    assert "attention.window was 8, is now 64" in output
    assert "continuing" in output


CHECK = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from trainer import settings
from trainer.errors import SettingsError
from trainer.plan import make_plan

settings.register()
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    for overrides in json.loads(sys.argv[2]):
        chosen = OmegaConf.to_object(compose("train", ["experiment=debug", *overrides]))
        try:
            make_plan(chosen, 1)
        except SettingsError as error:
            print(error)
"""


def test_its_setting_is_checked_and_known(checkout):
    """All in one process: to start one takes seconds."""
    wrong = [
        ["attention=window", "attention.window=0"],
        ["attention=window", "attention.window=wide"],
        ["attention=fpa", "+attention.window=3"],
        ["attention=window", "+attention.windw=3"],
    ]
    command = [sys.executable, "-c", CHECK, str(checkout / "configs"), json.dumps(wrong)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    told = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    assert "attention.window=0 must be at least 1" in told.stdout
    assert "attention.window=wide" in told.stdout
    assert "attention.window=3: has no effect with attention=fpa" in told.stdout
    assert "use attention=window" in told.stdout
    assert "did you mean attention.window" in told.stdout
