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

from model.backends import Attention, Backend


@dataclass
class Settings(Attention):
    """Settings of windowed attention."""

    window: int = 4

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"attention.window={self.window} must be at least 1")

    def build(self, *, device, dtype, d_head, is_gqa) -> Backend:
        def attend(q, k, v, *, is_causal, enable_gqa):
            n = q.shape[-2]
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

        return Backend(attend, f"a window of {self.window} tokens", title="windowed attention")
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


READ = """
import json, sys
from model import backends

for group in json.loads(sys.argv[1]):
    try:
        print(backends.read(group))
    except ValueError as error:
        print(error)
"""


def test_its_setting_is_checked_and_known(checkout):
    """All in one process: to start one takes seconds."""
    wrong = [{"backend": "window", **one} for one in ({"window": 0}, {"window": "wide"}, {"windw": 3})]
    command = [sys.executable, "-c", READ, json.dumps([*wrong, {"backend": "fpa", "window": 3}])]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    told = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    zero, wide, unknown, of_another = told.stdout.splitlines()
    assert zero == "attention.window=0 must be at least 1"
    assert wide.startswith("attention.window=wide: ")
    assert "did you mean attention.window" in unknown
    assert of_another == "Settings(sdpa=None)"
