"""An attention with a setting of its own takes one module and one config file, and nothing else."""

import json
import re
import sys

import yaml

from tests.cli import run

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


PROGRAM = """
import json, sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from model import backends
from trainer import settings
from common.errors import TrainingError
from trainer.loop import train

folder, runs, groups = json.loads(sys.argv[1])
backends.__path__.append(folder)
settings.register()
common = ["experiment=debug", f"hydra.searchpath=[file://{folder}]"]
with initialize_config_dir(str(Path("configs").resolve()), version_base="1.3"):
    for overrides in runs:
        print("--- run", flush=True)
        try:
            train(OmegaConf.to_object(compose("train", [*common, *overrides])))
        except TrainingError as error:
            print(error)
        Path(folder, "window", "DONE").unlink(missing_ok=True)  # as if it had been killed
for group in groups:
    print("--- group")
    try:
        print(backends.read(group))
    except ValueError as error:
        print(error)
"""


def test_a_new_attention_trains_and_is_resumed_with_a_setting_of_its_own(tmp_path, datasets):
    """And its setting is checked, and known where a name is misspelt. All in one process."""
    windowed = tmp_path / "window"
    (tmp_path / "attention").mkdir()
    (tmp_path / "window.py").write_text(MODULE)
    (tmp_path / "attention" / "window.yaml").write_text("backend: window\nwindow: 8\n")
    common = (f"data.root={datasets}", "steps=3", "probe.every=1")
    own = ["attention=window", f"run_dir={windowed}"]
    runs = [own, [*own, "attention.window=64"], own]
    wrong = [{"backend": "window", **one} for one in ({"window": 0}, {"window": "wide"}, {"windw": 3})]
    (tmp_path / "program").write_text(PROGRAM)
    groups = [*wrong, {"backend": "fpa", "window": 3}]
    asked = json.dumps([str(tmp_path), [[*one, *common] for one in runs], groups])
    output = run([sys.executable, str(tmp_path / "program"), asked])
    first, changed, resumed, *told = re.split(r"--- (?:run|group)\n", output)[1:]

    assert "a window of 8 tokens" in first
    config = yaml.safe_load((windowed / "config.yaml").read_text())
    assert config["attention"] == {"backend": "window", "window": 8}
    assert "probe/layer_0/dq_l2" in (windowed / "metrics.jsonl").read_text()  # its own error
    assert "Error" not in first
    assert "attention.window was 8, is now 64" in changed
    assert "continuing" in resumed

    zero, wide, unknown, of_another = map(str.strip, told)
    assert zero == "attention.window=0 must be at least 1"
    assert wide.startswith("attention.window=wide: ")
    assert "did you mean attention.window" in unknown
    assert of_another == "Settings(sdpa=None)"
