"""The validation documents: the requested share, never none, chosen by position alone."""

import pytest

from data.sources import effective_fraction, in_validation


def test_the_share_is_the_fraction():
    chosen = in_validation(unit=3, first=0, count=1_000_000, fraction=0.01)
    assert chosen.sum() == pytest.approx(10_000, abs=500)  # five standard deviations


def test_units_choose_independently():
    one, two = (in_validation(unit=unit, first=0, count=100_000, fraction=0.5) for unit in (1, 2))
    assert (one == two).mean() == pytest.approx(0.5, abs=0.01)


def test_the_first_document_is_always_validation():
    assert in_validation(unit=0, first=0, count=3, fraction=1e-12).tolist() == [True, False, False]
    assert in_validation(unit=0, first=3, count=3, fraction=1e-12).tolist() == [False] * 3
    assert len(in_validation(unit=0, first=0, count=0, fraction=0.5)) == 0


def test_small_texts_hold_out_more():
    assert effective_fraction(0.0005, 40_000_000_000) == 0.0005
    assert effective_fraction(0.0005, 100 << 20) == pytest.approx(256 / (100 << 10))
    assert effective_fraction(0.0005, 1 << 20) == 0.1
    assert effective_fraction(0.25, 1 << 20) == 0.25
