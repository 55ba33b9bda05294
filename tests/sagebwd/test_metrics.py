"""The measures against closed forms, and at their edges."""

import math

import pytest
import torch

from sagebwd.metrics import cosine_similarity, relative_l2, small_rows_left

X = torch.tensor([[3.0, 4.0]])
ZERO = torch.zeros(1, 2)


def test_closed_forms():
    assert cosine_similarity(X, torch.tensor([[4.0, 3.0]])) == pytest.approx(24 / 25)
    assert cosine_similarity(X, -2 * X) == pytest.approx(-1)
    assert relative_l2(torch.tensor([[3.0, 5.0]]), X) == pytest.approx(1 / 5)


def test_what_small_rows_keep():
    """Of 12 rows that count the smallest three: zeroed, at .7, and at .9 with an error across."""
    sizes = torch.tensor([0.0, 1, 2, 3, *range(10, 19)])
    rows = sizes[:, None, None] * torch.tensor([0.6, 0.8]).expand(13, 1, 2)
    found = rows.clone()
    found[1:4] *= torch.tensor([0.0, 0.9, 0.7])[:, None, None]
    found[2] += torch.tensor([-0.8, 0.6])
    found[4:] *= 0.1  # large rows do not count, nor does what a zero row becomes
    found[0] = 5.0
    assert small_rows_left(found, rows) == pytest.approx(0.7)
    assert small_rows_left(found[:2], torch.zeros(2, 1, 2)) == 1


def test_sums_in_float64():
    x = torch.full((1_000_000,), 300.0, dtype=torch.float16)
    assert relative_l2(x, x + 1) == pytest.approx(1 / 301, rel=1e-12)
    assert cosine_similarity(x, x) == pytest.approx(1.0, abs=1e-12)


def test_zero_vectors():
    assert cosine_similarity(ZERO, ZERO) == 1
    assert cosine_similarity(X, ZERO) == cosine_similarity(ZERO, X) == 0
    assert relative_l2(ZERO, ZERO) == 0
    assert relative_l2(X, ZERO) == math.inf
    assert relative_l2(ZERO, X) == 1


@pytest.mark.parametrize("measure", [cosine_similarity, relative_l2, small_rows_left])
@pytest.mark.parametrize("other", [X, ZERO])
def test_nan_gives_nan(measure, other):
    nan = torch.tensor([[math.nan, 1.0]])
    assert math.isnan(measure(nan, other))
    assert math.isnan(measure(other, nan))
