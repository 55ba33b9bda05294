"""The measures against closed forms, and at their edges."""

import math

import pytest
import torch

from sagebwd.metrics import cosine_similarity, relative_l2

X = torch.tensor([[3.0, 4.0]])
ZERO = torch.zeros(1, 2)


def test_closed_forms():
    assert cosine_similarity(X, torch.tensor([[4.0, 3.0]])) == pytest.approx(24 / 25)
    assert cosine_similarity(X, -2 * X) == pytest.approx(-1)
    assert relative_l2(torch.tensor([[3.0, 5.0]]), X) == pytest.approx(1 / 5)


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


@pytest.mark.parametrize("measure", [cosine_similarity, relative_l2])
@pytest.mark.parametrize("other", [X, ZERO])
def test_nan_gives_nan(measure, other):
    nan = torch.tensor([[math.nan, 1.0]])
    assert math.isnan(measure(nan, other))
    assert math.isnan(measure(other, nan))


@pytest.mark.parametrize("measure", [cosine_similarity, relative_l2])
def test_shapes_must_agree(measure):
    with pytest.raises(ValueError, match="compare equal shapes"):
        measure(X, X.T)


def test_tensors_with_gradients_are_welcome():
    x = X.clone().requires_grad_()
    assert relative_l2(x, x) == 0
