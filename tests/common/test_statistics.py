"""Differences of losses: least squares over seeds, intervals, and which runs count."""

import numpy as np
import pytest

from common.statistics import Cell, difference_of, fit
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
