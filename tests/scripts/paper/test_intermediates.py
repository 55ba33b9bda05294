"""Table 2's measurement against whole matrices in float64."""

import math

import pytest
import torch

import sagebwd.reference
from sagebwd import SageConfig
from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import exact_attention
from scripts.paper import intermediates
from scripts.paper.intermediates import Comparison
from tests.inputs import draw
from trainer.probe import Captured


@pytest.mark.parametrize("entries_at_once", [1, 4 * 37**2, 2**26])  # one group of heads, two, all
def test_it_is_that_of_whole_matrices(monkeypatch, entries_at_once):
    monkeypatch.setattr(intermediates, "ENTRIES_AT_ONCE", entries_at_once)
    inputs = q, k, v, grad_out = draw(heads=6, kv_heads=3, sigma=3.0)
    config = SageConfig.paper()
    found = intermediates.measure(Captured(q, k, v, q, {}, grad_out), config)
    sage = sagebwd.reference.attention(*inputs, is_causal=True, enable_gqa=True, config=config)
    exact = exact_attention(*inputs, is_causal=True, matrices=True)
    assert list(found) == ["delta", "p", "dp", "ds", "o", "dq", "dk", "dv"]
    for name in found:
        actual, expected = (getattr(x, "out" if name == "o" else name) for x in (sage, exact))
        cosine, error = found[name]
        assert cosine == pytest.approx(cosine_similarity(actual, expected), abs=1e-6), name
        assert error == pytest.approx(relative_l2(actual, expected), rel=1e-3, abs=1e-6), name
    assert found["dp"] == pytest.approx((1, 0), abs=1e-6)  # the product that stays out of INT8
    assert found["dq"][1] > found["o"][1] > 0.01


def test_parts_add_up_to_the_whole():
    torch.manual_seed(0)
    actual, exact = torch.randn(2, 1001)
    comparison = Comparison()
    for parts in zip(actual.split(300), exact.split(300), strict=True):
        comparison.add(*parts)
    whole = (cosine_similarity(actual, exact), relative_l2(actual, exact))
    assert comparison.values() == pytest.approx(whole, rel=1e-12)


def test_without_anything_to_compare_with():
    zero, one = torch.zeros(3), torch.ones(3)
    for actual, exact, values in ((one, zero, (math.nan, math.nan)), (zero, one, (0, 1))):
        comparison = Comparison()
        comparison.add(actual, exact)
        assert comparison.values() == pytest.approx(values, nan_ok=True)
