"""The verdicts on errors in trained models follow the rules that they state."""

import math

import pytest

from scripts.paper.report.layer_errors import Layers
from scripts.paper.report.layers import alike_but, extreme, most_against_fewest_tokens
from scripts.paper.report.markdown import without_repeats
from scripts.paper.report.verdicts import (
    AGREES,
    CANNOT_TELL,
    DIFFERS,
    TRAINED,
    Case,
    by_share,
    dp_verdict,
    ds_verdict,
    gradients_verdict,
    ratio_verdict,
    rms_verdict,
)


def run(qk_norm=True, tokens_per_step=512, tokens=TRAINED, lr=1e-3, **attention):
    return {
        "qk_norm": qk_norm,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "lr": lr,
        "context": 64,
        "seed": 1,
        "model": {"d_model": 32, "qk_norm": qk_norm},
        "attention_settings": {"smooth_k": True, "smooth_q": False, "smooth_v": None} | attention,
    }


def layers_of(runs, errors=None, table=None, statistics=None):
    """Layers of {name: run}; errors: {name: (o, dq, dk, dv) of each layer}, under the paper's algorithm."""
    rows = [
        {
            "run": name,
            "errors": {"paper": {f"{t}_l2": e for t, e in zip(("o", "dq", "dk", "dv"), layer, strict=True)}},
            "statistics": (statistics or {}).get(name, {}),
        }
        for name in runs
        for layer in (errors or {}).get(name, [(0.1, 0.2, 0.2, 0.1)])
    ]
    tables = {name: {"paper": {key: [1.0, value] for key, value in (table or {}).items()}} for name in runs}
    return Layers({"runs": runs, "rows": rows, "table2": tables})


def test_all_cases_agree_or_none_does():
    def answer(*cases):
        return by_share("", [Case("x", tokens, holds, "0.5") for tokens, holds in cases]).answer

    old, young = TRAINED, TRAINED - 1
    assert answer((old, True), (old, True), (young, False)) == AGREES
    assert answer((old, False), (young, True)) == DIFFERS
    assert answer((old, True), (old, False)) == CANNOT_TELL
    assert answer((young, True)) == answer() == CANNOT_TELL
    found = by_share("", [Case("a", old, True, "1"), Case("b", old, False, "0.5")], "0.5 to 1")
    assert found.numbers == "0.5 to 1; 1 of 2 runs; not b: 0.5"


@pytest.mark.parametrize(
    ("errors", "answer"),
    [
        ([(0.1, 0.3, 0.2, 0.1)], AGREES),
        ([(0.1, 0.3, 0.2, 0.25)], DIFFERS),  # dV has a larger error than dK
        ([(0.0, 0.3, 0.3, 0.0), (0.3, 0.1, 0.1, 0.3)], AGREES),  # the mean over layers decides
        ([(0.1, math.nan, 0.2, 0.1)], DIFFERS),
        ([(0.1, None, 0.2, 0.1)], DIFFERS),
    ],
)
def test_gradients_have_larger_errors_than_what_they_come_from(errors, answer):
    assert gradients_verdict(layers_of({"a": run()}, {"a": errors})).answer == answer


def test_runs_with_other_smoothing_are_left_out():
    runs = {"plain": run(), "none": run(smooth_k=False), "qk": run(smooth_q=True), "v": run(smooth_v=True)}
    found = layers_of(runs, {name: [(0.3, 0.1, 0.1, 0.3)] for name in ("none", "qk", "v")})
    assert gradients_verdict(found).answer == AGREES
    assert layers_of({"none": runs["none"]}).plain() == ["none"]


def test_ds_dp_and_rms():
    runs = {"a": run()}
    table = {"ds": 0.2, "p": 0.1, "dp": 0.0, "delta": 0.07}
    assert ds_verdict(layers_of(runs, table=table)).answer == AGREES
    assert ds_verdict(layers_of(runs, table=table | {"p": 0.3})).answer == DIFFERS
    assert dp_verdict(layers_of(runs, table=table)).answer == AGREES
    assert dp_verdict(layers_of(runs, table=table | {"dp": 0.002})).answer == DIFFERS
    for ds_rms, answer in ((1e-7, AGREES), (1e-5, DIFFERS)):
        statistics = {"a": {"dp_rms": 5e-5, "ds_rms": ds_rms}}
        assert rms_verdict(layers_of(runs, statistics=statistics)).answer == answer


def test_pairs_differ_in_one_thing():
    runs = {
        "large": run(tokens_per_step=512),
        "large, plain": run(qk_norm=False, tokens_per_step=512),
        "medium": run(tokens_per_step=128),
        "small": run(tokens_per_step=64),
        "small, Q": run(tokens_per_step=64, smooth_q=True),
        "small, Q, plain": run(qk_norm=False, tokens_per_step=64, smooth_q=True),
    }
    found = layers_of(runs)
    pairs = [("large", "large, plain"), ("small, Q", "small, Q, plain")]
    assert alike_but(found, "qk_norm", True, False) == pairs
    assert most_against_fewest_tokens(found) == [("large", "small")]


def test_runs_of_other_learning_rates_or_lengths_make_no_pair():
    runs = {
        "a": run(),
        "a, plain, fast": run(qk_norm=False, lr=6e-3),
        "b, fast": run(tokens_per_step=64, lr=6e-3),
        "c, long": run(tokens_per_step=64, tokens=2 * TRAINED),
        "the same again": run(),
    }
    found = layers_of(runs)
    assert alike_but(found, "qk_norm", True, False) == most_against_fewest_tokens(found) == []


@pytest.mark.parametrize(
    ("factors", "answer"),
    [
        ((1.2, 3.0), AGREES),
        ((1.2, 1.05), CANNOT_TELL),
        ((0.8, 0.7), DIFFERS),
        ((0.8, 1.2), CANNOT_TELL),
        ((math.nan, 1.2), CANNOT_TELL),
        ((), CANNOT_TELL),
    ],
)
def test_ratios_of_errors(factors, answer):
    runs, errors = {"base": run()}, {}
    for number, factor in enumerate(factors):
        runs[f"{number}"] = run()
        errors[f"{number}"] = [(0.1, 0.2 * factor, 0.2 * factor, 0.1)]
    pairs = [(f"{number}", "base") for number in range(len(factors))]
    verdict = ratio_verdict("", layers_of(runs, errors), pairs)
    assert verdict.answer == answer
    assert all(
        f"{factor:.2f} times, {number} against base" in verdict.numbers
        for number, factor in enumerate(factors)
    )
    runs["base"]["tokens"] = 1
    assert ratio_verdict("", layers_of(runs, errors), pairs).answer == CANNOT_TELL


def test_the_worst_layer_is_one_that_is_no_number():
    assert extreme([0.1, 0.3], max) == 0.3
    assert math.isnan(extreme([0.1, math.nan, 0.3], max))


def test_names_are_shown_once():
    rows = [["a", "x", "1"], ["a", "x", "2"], ["b", "x", "3"], ["b", "y", "4"]]
    shown = [["a", "x", "1"], ["", "", "2"], ["b", "x", "3"], ["", "y", "4"]]
    assert without_repeats(rows, 2) == shown
