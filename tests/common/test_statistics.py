"""Differences of losses: least squares over seeds, intervals, and permutation within seeds."""

import numpy as np
import pytest

from common.statistics import Cell, by_seed, difference_of, fit, permutation_p, quantile
from scripts.paper.losses import of_one_code


def cells(losses):
    """Of {variant: {seed: loss, or losses}}."""
    return [
        Cell(variant, seed, loss)
        for variant, own in losses.items()
        for seed, found in own.items()
        for loss in np.atleast_1d(found).tolist()
    ]


def test_the_offset_of_a_seed_is_not_noise_and_a_missing_run_costs_a_degree():
    losses = {"a": {1: 2.0, 2: 3.0, 3: 7.0}, "b": {1: 2.1, 2: 3.1, 3: 7.1}, "c": {1: 2.5, 2: 3.5}}
    found = fit(cells(losses))
    assert found.degrees == 3
    assert found.noise == pytest.approx(0, abs=1e-9)
    assert found.difference("c", "a").mean == pytest.approx(0.5)
    assert found.difference("c", "nowhere") is None


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Also of differences of differences: two setups, the noise at one a tenth of that at the other."""
    generator = np.random.default_rng(0)
    hits, draws = np.zeros(2), 1000
    for _ in range(draws):
        gaps = []
        for noise, truth, seeds in ((1.0, 3.0, 3), (0.1, 1.0, 2)):
            losses = noise * generator.normal(size=(2, seeds)) + generator.normal(size=seeds)
            own = {"b": losses[1] + truth, "a": losses[0]}
            gaps.append(
                fit(cells({name: dict(enumerate(row)) for name, row in own.items()})).difference("b", "a")
            )
        found = difference_of(*gaps)
        hits += [abs(one.mean - truth) < one.half_width for one, truth in ((gaps[0], 3.0), (found, 2.0))]
    assert hits / draws == pytest.approx(0.95, abs=0.03)


def test_quantiles_are_those_of_student():
    """Published: 2.086 for 20, 2.042 for 30, 1.984 for 100."""
    assert [quantile(n) for n in (1, 4, 20, 30, 100)] == pytest.approx(
        [12.706, 2.776, 2.086, 2.042, 1.984], rel=0.005
    )


# --- Permutation --------------------------------------------------------------------------------------------


def test_two_seeds_of_one_sign_say_nothing():
    assert permutation_p(cells({"a": {1: 1, 2: 1}, "b": {1: 2, 2: 2}}), "b", "a") == 0.5
    assert permutation_p(cells({"a": {1: 1, 2: 1}, "b": {1: 2, 2: 0}}), "b", "a") == 1.0


def test_with_full_precision_twice_a_seed_has_three_ways():
    """Four seeds, the variant always on top: 1 of 81, two-sided because nothing lies as far below."""
    base = {seed: [0.0, 0.01] for seed in range(4)}
    assert permutation_p(cells({"a": base, "b": dict.fromkeys(range(4), 1.0)}), "b", "a") == 1 / 81


def test_by_seed_takes_the_mean_of_repetitions():
    assert by_seed(cells({"a": {1: [1.0, 2.0], 2: 5.0}, "b": {1: 2.0, 3: 1.0}}), "b", "a") == {1: 0.5}


# --- Which runs count ---------------------------------------------------------------------------------------


def made_of(commit, *losses, variant="a", **config):
    """Runs of one variant and commit: a seed for each loss."""
    settings = {"hardware": {"compile": True, "dtype": "bfloat16"}} | config
    return [
        {"variant": variant, "seed": seed, "final_loss": loss, "commit": commit, "config": settings}
        for seed, loss in enumerate(losses, start=1)
    ]


def test_a_seed_that_other_code_repeated_does_not_count():
    runs = made_of("old", 2.0, 2.1) + made_of("old", 2.5, 2.6, variant="b")
    again = made_of("new", 9.0)
    other = made_of("new", 2.7, variant="c")
    assert of_one_code([*again, *runs, *other]) == [*runs, *other]


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({"hardware": {"compile": False, "dtype": "bfloat16"}}, True),  # how it executes
        ({"hardware": {"compile": True, "dtype": "float32"}}, False),  # what it computes
        ({"optimizer": {"beta2": 0.99}}, False),
    ],
)
def test_a_repetition_has_the_same_settings(config, counts):
    runs = made_of("x", 2.0) + made_of("x", 2.1, **config)
    assert (of_one_code(runs) == runs) == counts
