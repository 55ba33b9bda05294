"""An attention with a setting of its own takes one module and one config file, and nothing else."""

import json
import os
import re
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


PROGRAM = """
import json, sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from model import backends
from trainer import settings
from trainer.errors import TrainingError
from trainer.loop import train

runs, groups = json.loads(sys.argv[1])
settings.register()
with initialize_config_dir(str(Path("configs").resolve()), version_base="1.3"):
    for overrides in runs:
        print("--- run", flush=True)
        try:
            train(OmegaConf.to_object(compose("train", ["experiment=debug", *overrides])))
        except TrainingError as error:
            print(error)
        Path("runs", "window", "DONE").unlink(missing_ok=True)  # as if it had been killed
for group in groups:
    print("--- group")
    try:
        print(backends.read(group))
    except ValueError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def told(checkout, datasets):
    """What was printed of each run and each group, all in one process: to start one takes seconds."""
    common = (f"data.root={datasets}", "steps=3", "probe.every=1")
    windowed = ["attention=window", "run_dir=runs/window"]
    runs = [windowed, ["attention=fpa", "run_dir=runs/fpa"], [*windowed, "attention.window=64"]]
    runs = [[*run, *common] for run in (*runs, [*windowed, "attention.window=8"])]
    wrong = [{"backend": "window", **one} for one in ({"window": 0}, {"window": "wide"}, {"windw": 3})]
    command = [sys.executable, "-c", PROGRAM, json.dumps([runs, [*wrong, {"backend": "fpa", "window": 3}]])]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    parts = re.split(r"--- (?:run|group)\n", done.stdout)[1:]
    assert len(parts) == 8
    return parts


def losses(run_dir):
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_a_new_attention_trains_and_is_resumed_with_a_setting_of_its_own(checkout, told):
    windowed, full = checkout / "runs" / "window", checkout / "runs" / "fpa"
    assert "a window of 8 tokens" in told[0]
    assert yaml.safe_load((windowed / "config.yaml").read_text())["attention"] == {
        "backend": "window",
        "window": 8,
    }
    assert losses(windowed) != losses(full)
    assert "probe/layer_0/dq_l2" in (windowed / "metrics.jsonl").read_text()  # its own error
    assert "Error" not in told[0] + told[1]
    assert "attention.window was 8, is now 64" in told[2]
    assert "continuing" in told[3]


def test_its_setting_is_checked_and_known(told):
    zero, wide, unknown, of_another = (part.strip() for part in told[4:])
    assert zero == "attention.window=0 must be at least 1"
    assert wide.startswith("attention.window=wide: ")
    assert "did you mean attention.window" in unknown
    assert of_another == "Settings(sdpa=None)"
