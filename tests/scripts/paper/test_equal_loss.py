"""scripts.paper.equal_loss: closed forms of what it measures, and from a run to its numbers."""

import math

import pytest
import torch

from scripts.paper import equal_loss
from scripts.paper.equal_loss_tables import Row, common_loss, curve, error_at, rank_correlation
from scripts.paper.result_files import read_json


def test_the_mean_of_k_over_its_spread():
    """Keys ±a around m: ‖m‖ / ‖a‖; a scale of K changes nothing."""
    a, m = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 2.0, 0.0])
    k = torch.stack([m + a, m - a, m + a, m - a])[None, None]
    assert equal_loss.mean_over_spread(k).tolist() == [[pytest.approx(2 / 5)]]
    assert equal_loss.mean_over_spread(7 * k).tolist() == [[pytest.approx(2 / 5)]]
    both = torch.cat([k, k - m], dim=1)
    assert equal_loss.mean_over_spread(both)[0].tolist() == pytest.approx([2 / 5, 0])


def test_an_error_between_two_checkpoints_is_their_weighted_geometric_mean():
    points = [(4.0, 0.01), (3.0, 0.04), (2.0, 0.02)]
    assert error_at(points, 3.5) == pytest.approx(math.sqrt(0.01 * 0.04))
    assert error_at(points, 2.25) == pytest.approx(0.04**0.25 * 0.02**0.75)
    assert error_at(points, 2.0) == pytest.approx(0.02)
    assert error_at(points, 1.9) is None
    assert error_at(points, 4.1) is None
    assert common_loss(points, [(5.0, 1.0), (2.5, 1.0)]) == 2.5


def test_rank_correlation():
    assert rank_correlation([0, 1, 2, 3], [0.1, 0.2, 5.0, 9.0]) == pytest.approx(1)
    assert rank_correlation([0, 1, 2, 3], [9, 5, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([0, 1, 2, 3], [2, 1, 4, 3]) == pytest.approx(
        1 - 6 * 4 / (4 * 15)
    )  # Spearman's formula
    assert rank_correlation([0, 1], [1, 2]) is None


def test_from_a_run_to_its_numbers(train_here, tmp_path, capsys):
    trainer = train_here(
        tmp_path / "run", "steps=3", "eval_every=99", "sample_tokens=0", "probe.every=0",
        "checkpoint_every=2", "milestone_every=2", "keep_checkpoints=1",
    )  # fmt: skip
    out = tmp_path / "out" / "equal_loss"
    equal_loss.main([str(tmp_path / "run"), "--sequences-of-loss", "6", "--device", "cpu", "--out", str(out)])
    result = read_json(out.with_suffix(".json"))
    rows = [Row(**row) for row in result["rows"]]
    assert [(row.step, row.layer) for row in rows] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert set(rows[0].errors) == {"paper", "default", "smooth-none"}
    assert all(0 < row.statistics["k_mean"] < 10 for row in rows)
    inputs, targets = equal_loss.stack_sequences(trainer.corpus.val, equal_loss.np.arange(6), 64)
    with torch.no_grad():
        wanted = trainer.llama(inputs, targets).item()
    assert rows[-1].loss == pytest.approx(wanted, rel=1e-5)
    assert [loss for loss, _ in curve(rows, "run")] == [rows[0].loss, rows[-1].loss]
    assert result["runs"]["run"]["model"]["n_layers"] == 2
    assert "‖μ_K‖ / spread" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 1000
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl under"):
        equal_loss.main([str(tmp_path / "nowhere"), "--device", "cpu"])
