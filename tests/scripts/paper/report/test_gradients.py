"""The verdicts on the formats of gradients follow the rules that they state."""

import pytest

from scripts.paper.report.gradients import format_errors
from scripts.paper.report.rules import AGREES, CONTRADICTS_HERE, OPEN
from scripts.paper.report.verdicts import dp_bits_verdict, formats_verdict

TRAINED = 1_000_000


def test_formats_are_compared_at_the_last_step_of_each_run():
    sources = {f"r, step {step:,}": {"run": "r", "step": step} for step in (2000, 30)}
    scheme = {"granularity": "row", "format": "int8", "dp_bits": 16}
    rows = [
        {"trace": name, "scheme": scheme, "errors": {"dq": {"l1": l1, "cos": 1.0}}}
        for name, values in zip(sources, ((0.1, 0.3), (0.9, 0.9)), strict=True)
        for l1 in values
    ]
    found = format_errors({"sources": sources, "rows": rows})
    assert found == {("r, step 2,000", "row"): {("int8", 16): {"l1": pytest.approx(0.2), "cos": 1.0}}}
    assert list(format_errors({"sources": {}, "rows": rows})) == [(name, "row") for name in sources]


def test_formats_are_judged_by_granularity():
    def errors(int8, fp8, dp):
        values = {("int8", 16): int8, ("e4m3", 16): fp8, ("e5m2", 16): 2 * fp8, ("int8", 8): dp}
        return {scheme: {"l1": value, "cos": 1.0} for scheme, value in values.items()}

    measured = {
        ("a", "row"): errors(0.1, 0.2, 0.3),
        ("b", "row"): errors(0.1, 0.11, 0.2),
        ("a", "block"): errors(0.1, 0.09, 0.15),
        ("b", "block"): errors(0.1, 0.09, 0.25),
    }
    seen = {"a": TRAINED, "b": TRAINED}
    judged = {
        granularity: [
            verdict(measured, granularity, seen).answer for verdict in (formats_verdict, dp_bits_verdict)
        ]
        for granularity in ("row", "block")
    }
    assert judged == {"row": [AGREES, AGREES], "block": [CONTRADICTS_HERE, OPEN]}
    assert formats_verdict(measured, "row", {}).answer == OPEN
    assert dp_bits_verdict(measured, "block", seen).why == "holds in 1 of 2 runs"


@pytest.mark.parametrize(("factor", "answer"), [(2.0, AGREES), (1.999, CONTRADICTS_HERE)])
def test_an_int8_dp_must_double_the_error_to_be_forbidden(factor, answer):
    values = {("int8", 16): 1.0, ("e4m3", 16): 2.0, ("e5m2", 16): 2.0, ("int8", 8): factor}
    measured = {("a", "row"): {scheme: {"l1": value, "cos": 1.0} for scheme, value in values.items()}}
    assert dp_bits_verdict(measured, "row", {"a": TRAINED}).answer == answer
    assert dp_bits_verdict(measured, "row", {"a": TRAINED - 1}).answer == OPEN
