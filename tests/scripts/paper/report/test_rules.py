"""Every outcome of every rule, and its thresholds, in numbers: a test fails when one of them is moved."""

import itertools

import pytest

from scripts.paper.report.rules import (
    AGREES,
    ANSWERS,
    CONTRADICTS,
    CONTRADICTS_HERE,
    NOT_SEEN,
    OPEN,
    between,
    by_share,
    is_larger,
    judge,
)

SHORT, LONG = 0.001, 1.0  # of the paper's tokens
GAP, NONE = 0.054, -0.002  # the paper's differences: Figure 1a, Figure 1b
EPS = 1e-6


@pytest.mark.parametrize(
    ("printed", "low", "high", "short", "long"),
    [
        # The paper sees a gap.
        (GAP, 0.03, 0.08, AGREES, AGREES),
        (GAP, 0.03, 0.05, AGREES, AGREES),  # smaller, but most of it
        (GAP, 0.01, 0.06, AGREES, AGREES),  # no 0, and the gap in reach
        (GAP, 0.20, 0.30, AGREES, AGREES),  # larger
        (GAP, 0.01, 0.05, OPEN, OPEN),  # there is a gap, and it may be half of the paper's or not
        (GAP, -0.01, 0.06, OPEN, OPEN),
        (GAP, -0.01, 0.05, NOT_SEEN, CONTRADICTS),  # 0 in it, the gap not
        (GAP, 0.005, 0.02, NOT_SEEN, CONTRADICTS),  # a gap, but less than half of the paper's
        (GAP, -0.02, -0.01, NOT_SEEN, CONTRADICTS),
        (GAP, -0.08, -0.03, CONTRADICTS_HERE, CONTRADICTS),  # the other way round
        (GAP, -0.06, -0.01, CONTRADICTS_HERE, CONTRADICTS),
        # The paper sees none.
        (NONE, -0.01, 0.01, AGREES, AGREES),
        (NONE, 0.001, 0.02, AGREES, AGREES),  # no 0 in it, but within the margin
        (NONE, -0.01, 0.04, OPEN, OPEN),
        (NONE, 0.01, 0.04, OPEN, OPEN),
        (NONE, -0.30, 0.30, OPEN, OPEN),
        (NONE, 0.01, 0.06, CONTRADICTS_HERE, CONTRADICTS),
        (NONE, 0.03, 0.04, CONTRADICTS_HERE, CONTRADICTS),
        (NONE, -0.06, -0.01, CONTRADICTS_HERE, CONTRADICTS),
        (NONE, -0.05, -0.035, CONTRADICTS_HERE, CONTRADICTS),
    ],
)
def test_every_outcome_of_a_difference(printed, low, high, short, long):
    assert judge(low, high, printed, SHORT) == short
    assert judge(low, high, printed, LONG) == long


def test_the_margin_is_half_of_the_papers_gap():
    """0.027, on both sides and for either kind of claim."""
    assert judge(0.027, 0.04, GAP, SHORT) == AGREES
    assert judge(0.027 - EPS, 0.04, GAP, SHORT) == OPEN
    assert judge(0.01, 0.027 - EPS, GAP, SHORT) == NOT_SEEN
    assert judge(0.01, 0.027 + EPS, GAP, SHORT) == OPEN
    assert judge(-0.04, -0.027, GAP, SHORT) == CONTRADICTS_HERE
    assert judge(-0.04, -0.027 + EPS, GAP, SHORT) == NOT_SEEN
    assert judge(0.0, 0.025 - EPS, NONE, SHORT) == AGREES
    assert judge(0.0, 0.025 + EPS, NONE, SHORT) == OPEN
    assert judge(-0.029 + EPS, 0.0, NONE, SHORT) == AGREES
    assert judge(-0.029 - EPS, 0.0, NONE, SHORT) == OPEN
    assert judge(0.027, 0.04, NONE, SHORT) == CONTRADICTS_HERE
    assert judge(0.027 - EPS, 0.04, NONE, SHORT) == OPEN
    # A printed difference of less than the margin is none.
    assert judge(0.0, 0.05, 0.027 - EPS, SHORT) == AGREES
    assert judge(0.0, 0.05, 0.027 + EPS, SHORT) == OPEN


def test_an_interval_reaches_the_gap_or_excludes_it():
    assert judge(EPS, GAP, GAP, SHORT) == AGREES
    assert judge(EPS, GAP - EPS, GAP, SHORT) == OPEN
    assert judge(0.0, GAP, GAP, SHORT) == OPEN
    assert judge(0.0, GAP - EPS, GAP, SHORT) == NOT_SEEN
    assert judge(EPS, 0.054, NONE, SHORT) == CONTRADICTS_HERE
    assert judge(EPS, 0.054 - EPS, NONE, SHORT) == OPEN
    # Of another gap, as of an interaction.
    assert judge(0.0, 0.1, 0.11, SHORT) == NOT_SEEN
    assert judge(0.055, 0.1, 0.11, SHORT) == AGREES
    assert judge(0.055 - EPS, 0.1, 0.11, SHORT) == OPEN


def test_a_run_of_a_tenth_of_the_papers_tokens_is_long_enough():
    for interval, printed, answers in (
        ((-0.01, 0.01), GAP, (NOT_SEEN, CONTRADICTS)),
        ((0.06, 0.07), NONE, (CONTRADICTS_HERE, CONTRADICTS)),
        ((-0.07, -0.06), GAP, (CONTRADICTS_HERE, CONTRADICTS)),
    ):
        found = tuple(judge(*interval, printed, share) for share in (0.1 - EPS, 0.1))
        assert found == answers


def test_no_difference_is_both_a_gap_and_a_match():
    ends = [i / 500 for i in range(-50, 51)]
    for low, high in itertools.combinations(ends, 2):
        answers = [judge(low, high, printed, SHORT) for printed in (GAP, NONE)]
        assert answers.count(AGREES) < 2, (low, high)
        assert set(answers) <= set(ANSWERS)


def test_a_claim_holds_or_fails_in_three_quarters_of_the_models():
    found = [by_share(holds, 4) for holds in range(5)]
    assert found == [CONTRADICTS_HERE, CONTRADICTS_HERE, OPEN, AGREES, AGREES]
    assert [by_share(holds, 100) for holds in (74, 75, 26, 25)] == [OPEN, AGREES, OPEN, CONTRADICTS_HERE]
    assert by_share(0, 3, NOT_SEEN) == NOT_SEEN
    assert by_share(0, 0) == OPEN


def test_a_number_between_two_others():
    assert between(1.0, 2.0, 1.0, 2.0) == AGREES
    assert between(0.99, 1.5, 1.0, 2.0) == between(1.5, 2.01, 1.0, 2.0) == OPEN
    assert between(2.01, 3.0, 1.0, 2.0) == NOT_SEEN
    assert between(2.0, 3.0, 1.0, 2.0) == OPEN
    assert between(0.1, 0.99, 1.0, 2.0) == CONTRADICTS_HERE


def test_the_larger_of_two_numbers():
    assert is_larger((2.1, 3.0), (1.0, 2.0)) == AGREES
    assert is_larger((1.0, 2.0), (2.1, 3.0)) == CONTRADICTS_HERE
    assert is_larger((2.0, 3.0), (1.0, 2.0)) == OPEN
