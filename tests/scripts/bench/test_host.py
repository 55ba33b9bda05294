"""The host's time, where a driver returns at once."""

from __future__ import annotations

import json

import pytest
import torch

from sagebwd import explain
from scripts.bench import host


def test_parts_make_the_whole_and_every_launch_is_seen(tmp_path, capsys):
    out = tmp_path / "host"
    options = ["--device", "cpu", "--shapes", "1,2,8,64", "--calls", "2", "--rounds", "2", "--out", str(out)]
    host.main(options)
    found = json.loads((tmp_path / "host.json").read_text())
    assert {row["name"] for row in found["rows"]} == {"SageBwd default", "SageBwd for sdpa"}
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in found["rows"])
    whole = found["parts"].pop("whole")["us"]
    assert sum(part["us"] for part in found["parts"].values()) == pytest.approx(whole)
    assert found["parts"]["launches"]["calls"] == 9
    assert found["parts"]["looking up the plan"]["calls"] == 2
    assert "| launches" in capsys.readouterr().out
    assert explain(torch.zeros(1, 1, 8, 64)).kernels == "reference"  # the stand-in is gone
