"""An attention with a setting of its own takes one module and one config file, and nothing else."""

import logging
import sys

import pytest
import yaml

from common.errors import TrainingError
from model import backends
from tests.trainer.conftest import train_here

__all__ = ["train_here"]

MODULE = '''
"""Causal attention to the last `window` tokens."""
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from model.backends import Attention, Backend

@dataclass
class Settings(Attention):
    window: int = 4

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"attention.window={self.window} must be at least 1")

    def build(self, *, device, dtype, d_head, is_gqa):
        def attend(q, k, v, *, is_causal, enable_gqa):
            n = q.shape[-2]
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

        return Backend(attend, f"a window of {self.window} tokens", title="windowed attention")
'''


def test_a_new_attention_trains_and_is_resumed_with_a_setting_of_its_own(
    train_here, tmp_path, monkeypatch, caplog
):
    """And its setting is checked, and known where a name is misspelt."""
    caplog.set_level(logging.INFO, logger="trainer")
    run = tmp_path / "run"
    (tmp_path / "attention").mkdir()
    (tmp_path / "window.py").write_text(MODULE)
    (tmp_path / "attention" / "window.yaml").write_text("backend: window\nwindow: 8\n")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    own = (run, f"hydra.searchpath=[file://{tmp_path}]", "attention=window", "steps=3", "probe.every=1")
    train_here(*own)
    assert "a window of 8 tokens" in caplog.text
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["attention"] == {"backend": "window", "window": 8}
    assert "probe/layer_0/dq_l2" in (run / "metrics.jsonl").read_text()  # its own error
    with pytest.raises(TrainingError, match=r"attention\.window was 8, is now 64"):
        train_here(*own, "attention.window=64")
    train_here(*own)
    assert "continuing" in caplog.text

    for wrong, told in (
        ({"window": 0}, r"^attention\.window=0 must be at least 1"),
        ({"window": "wide"}, r"^attention\.window=wide: "),
        ({"windw": 3}, r"did you mean attention\.window"),
    ):
        with pytest.raises(ValueError, match=told):
            backends.read({"backend": "window", **wrong})
    assert backends.read({"backend": "fpa", "window": 3}) == backends.read({"backend": "fpa"})
    del sys.modules["model.backends.window"]  # of this test alone
