"""scripts.bench.masks: the rows, on a CPU at a tiny shape."""

import json

import torch

from scripts.bench import masks
from scripts.bench.attention_peers import Shape

SIZES = ["--lengths", "24", "--head-dims", "16", "--tokens", "72", "--width", "32", "--repetitions", "2"]
NAMES = ["no mask", "mask of ones", "mask", "SDPA efficient", "FlashAttention-2"]


def test_it_measures_and_draws_again(tmp_path, capsys):
    out = tmp_path / "masks"
    masks.main(["--device", "cpu", *SIZES, "--implementations", *NAMES, "--out", str(out)])
    rows = json.loads((tmp_path / "masks.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == 4 * NAMES  # two modes, causal and not
    for row in rows:
        is_missing = row["implementation"] == "FlashAttention-2"  # which needs a GPU
        assert bool(row["reason"]) == is_missing
        assert (row["median_ms"] is None) == is_missing
        assert (row["visible"] < 1) == (row["implementation"] not in masks.SEES_PADDING)
    table = (tmp_path / "masks.md").read_text()
    assert "24" in table
    masks.main(["--draw", str(tmp_path / "masks.json"), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again.md").read_text() == table
    assert "written" in capsys.readouterr().out


def test_lengths_are_between_half_and_all():
    mask = masks.draw_mask(Shape(50, 1, 9, 16, False), "cpu", 0)
    lengths = mask.sum(1)
    assert lengths.min() == 4
    assert lengths.max() == 9
    assert torch.equal(mask, torch.arange(9) < lengths[:, None])
