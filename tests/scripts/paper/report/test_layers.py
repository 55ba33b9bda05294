"""The verdicts on errors in trained models follow the rules that they state."""

import math

import pytest

from scripts.paper.report.layer_errors import Layers
from scripts.paper.report.layers import alike_but, extreme, most_against_fewest_tokens
from scripts.paper.report.markdown import without_repeats
from scripts.paper.report.rules import AGREES, CONTRADICTS_HERE, NOT_SEEN, OPEN
from scripts.paper.report.verdicts import (
    Case,
    by_share,
    ds_verdicts,
    gradients_verdicts,
    ratio_verdicts,
    rms_verdicts,
)

TRAINED = 1_000_000


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


def answers(verdicts):
    return {verdict.case: verdict.answer for verdict in verdicts}


def test_most_cases_decide_and_young_models_do_not_count():
    def answer(*cases):
        return by_share("", [Case("x", tokens, holds, "0.5") for tokens, holds in cases]).answer

    old, young = TRAINED, TRAINED - 1
    assert answer(*[(old, True)] * 3, (old, False), *[(young, False)] * 9) == AGREES
    assert answer(*[(old, False)] * 3, (old, True), (young, True)) == CONTRADICTS_HERE
    assert answer((old, True), (old, False)) == OPEN
    assert answer((young, True)) == answer() == OPEN
    found = by_share("", [Case("a", old, True, "1"), Case("b", old, False, "0.5")], "0.5 to 1")
    assert found.numbers == "0.5 to 1; 1 of 2 runs; not b: 0.5"
    assert found.why == "holds in 1 of 2 runs"


@pytest.mark.parametrize(
    ("errors", "answer"),
    [
        ([(0.1, 0.3, 0.2, 0.1)], AGREES),
        ([(0.1, 0.3, 0.2, 0.25)], CONTRADICTS_HERE),  # dV has a larger error than dK
        ([(0.0, 0.3, 0.3, 0.0), (0.3, 0.1, 0.1, 0.3)], AGREES),  # the mean over layers decides
        ([(0.1, math.nan, 0.2, 0.1)], CONTRADICTS_HERE),
        ([(0.1, None, 0.2, 0.1)], CONTRADICTS_HERE),
    ],
)
def test_gradients_have_larger_errors_than_what_they_come_from(errors, answer):
    assert answers(gradients_verdicts(layers_of({"a": run()}, {"a": errors}))) == {"with QK-norm": answer}


def test_runs_with_other_smoothing_are_left_out():
    runs = {"plain": run(), "none": run(smooth_k=False), "qk": run(smooth_q=True), "v": run(smooth_v=True)}
    found = layers_of(runs, {name: [(0.3, 0.1, 0.1, 0.3)] for name in ("none", "qk", "v")})
    assert answers(gradients_verdicts(found)) == {"with QK-norm": AGREES}
    assert layers_of({"none": runs["none"]}).plain() == ["none"]


def test_runs_with_and_without_qk_norm_are_judged_apart():
    runs = {"a": run(), "b": run(qk_norm=False)}
    found = layers_of(runs, {"b": [(0.3, 0.1, 0.1, 0.3)]})
    assert answers(gradients_verdicts(found)) == {
        "with QK-norm": AGREES,
        "without QK-norm": CONTRADICTS_HERE,
    }


def test_ds_and_rms():
    runs = {"a": run()}
    table = {"ds": 0.2, "p": 0.1, "dp": 0.0, "delta": 0.07}
    for change, answer in (({}, AGREES), ({"p": 0.3}, CONTRADICTS_HERE), ({"delta": 0.3}, CONTRADICTS_HERE)):
        [verdict] = ds_verdicts(layers_of(runs, table=table | change))
        assert verdict.answer == answer
    # 500 times in the paper; within a factor of ten of it, on both sides.
    for ratio, answer in (
        (50.001, AGREES),
        (49.999, CONTRADICTS_HERE),
        (4999, AGREES),
        (5001, CONTRADICTS_HERE),
    ):
        statistics = {"a": {"dp_rms": ratio * 1e-7, "ds_rms": 1e-7}}
        [verdict] = rms_verdicts(layers_of(runs, statistics=statistics))
        assert verdict.answer == answer, ratio


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
        ((1.1001, 1.1001), AGREES),
        ((1.0999, 1.0999), NOT_SEEN),
        ((1.2, 1.05), OPEN),
        ((0.8, 0.7), NOT_SEEN),
        ((1.2, 1.2, 1.2, 0.8), AGREES),
        ((math.nan, 1.2), OPEN),
        ((), OPEN),
    ],
)
def test_ratios_of_errors(factors, answer):
    runs, errors = {"base": run()}, {}
    for number, factor in enumerate(factors):
        runs[f"{number}"] = run()
        errors[f"{number}"] = [(0.1, 0.2 * factor, 0.2 * factor, 0.1)]
    pairs = [(f"{number}", "base") for number in range(len(factors))]

    def judged():
        return ratio_verdicts("", layers_of(runs, errors), pairs, lambda run: "", NOT_SEEN)

    [verdict] = judged()
    assert verdict.answer == answer
    assert (verdict.answer == OPEN) == bool(verdict.why)
    runs["base"]["tokens"] = TRAINED - 1
    assert [own.answer for own in judged()] == [OPEN]


def test_pairs_of_other_learning_rates_are_judged_apart():
    runs = {"a": run(), "b": run(), "c": run(lr=6e-3), "d": run(lr=6e-3)}
    errors = {
        name: [(0.1, error, error, 0.1)] for name, error in zip("abcd", (0.2, 0.2, 0.6, 0.2), strict=True)
    }
    found = ratio_verdicts("", layers_of(runs, errors), [("a", "b"), ("c", "d")], lambda run: f"{run['lr']}")
    assert answers(found) == {"0.001": CONTRADICTS_HERE, "0.006": AGREES}


def test_the_worst_layer_is_one_that_is_no_number():
    assert extreme([0.1, 0.3], max) == 0.3
    assert math.isnan(extreme([0.1, math.nan, 0.3], max))


def test_names_are_shown_once():
    rows = [["a", "x", "1"], ["a", "x", "2"], ["b", "x", "3"], ["b", "y", "4"]]
    shown = [["a", "x", "1"], ["", "", "2"], ["b", "x", "3"], ["", "y", "4"]]
    assert without_repeats(rows, 2) == shown
