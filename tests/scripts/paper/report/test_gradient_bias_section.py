"""The section on the bias of gradients, and its verdicts at both sides of every bound."""

import json

import pytest

from scripts.paper.report.gradient_bias import gradient_bias
from scripts.paper.report.rules import AGREES, CONTRADICTS_HERE, NOT_SEEN, OPEN
from scripts.paper.report.verdicts import bottleneck_verdict, critical_verdict
from scripts.paper.result_files import Results
from tests.cli import ROOT

RESULTS = Results(ROOT / "results")


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (262_144, 2_097_152, AGREES),
        (262_143, 1e6, OPEN),
        (1e6, 2_097_153, OPEN),
        (2_097_153, 3e6, NOT_SEEN),
        (2_097_153, None, NOT_SEEN),
        (1e6, None, OPEN),
        (1e5, 262_143, CONTRADICTS_HERE),
    ],
)
def test_noise_hides_the_bias_up_to_a_number_of_tokens_per_step(low, high, answer):
    estimate = None if high is None else (low + high) / 2
    verdict = critical_verdict([estimate, low, high], "x")
    assert (verdict.answer, bool(verdict.why)) == (answer, answer == OPEN)


@pytest.mark.parametrize(
    ("of_ds", "answer"),
    [
        ([0.5, 0.41, 0.6], AGREES),
        ([0.5, 0.4, 0.6], OPEN),
        ([0.1, 0.0, 0.2], OPEN),
        ([0.1, 0.0, 0.19], CONTRADICTS_HERE),
        ([None, None, None], OPEN),
    ],
)
def test_the_bottleneck_is_what_biases_most(of_ds, answer):
    assert bottleneck_verdict(of_ds, [0.3, 0.2, 0.4], "x").answer == answer


def test_its_numbers_are_those_of_the_file():
    """Of the last checkpoint, raw gradients; read here without the section's code."""
    data, section = RESULTS.json("gradient_bias.json"), gradient_bias(RESULTS)

    def value(run, setting, group, key, step=382):
        [row] = [
            row
            for row in data["rows"]
            if (row["run"], row["step"], row["setting"], row["group"]) == (run, step, setting, group)
            and row["view"] == "raw"
            and row["layer"] is None
        ]
        return row[key]

    biases = sorted(value(run, "paper", "qk", "bias")[0] for run in data["runs"])
    assert section.fields["qk.paper"] == f"{biases[0]:.3f} to {biases[1]:.3f}"
    noise, critical = (
        value("qk-norm", "paper", "qk", "noise")[0],
        value("qk-norm", "paper", "qk", "critical_tokens"),
    )
    ratios = {f"{2_097_152 / critical[0] / noise:.0f}"}
    assert ratios <= set(section.fields["bias_over_noise"].split(" to "))
    verdicts = {verdict.case: verdict for verdict in section.verdicts if verdict.claim == "critical"}
    numbers = verdicts["`paper()`, 34.7M parameters, with QK-norm"].numbers
    assert numbers.startswith(
        f"{critical[0] / 1e6:.2f}M [{critical[1] / 1e6:.2f}M, {critical[2] / 1e6:.2f}M]"
    )
    assert f"{value('qk-norm', 'paper', 'qk', 'critical_tokens', 96)[0] / 1e6:.2f}M after 12.6M" in numbers
    assert len(section.verdicts) == 10


def test_settings_that_were_not_measured_are_left_out(tmp_path):
    data = RESULTS.json("gradient_bias.json")
    data["rows"] = [row for row in data["rows"] if row["setting"] in ("control", "paper")]
    (tmp_path / "gradient_bias.json").write_text(json.dumps(data))
    section = gradient_bias(Results(tmp_path))
    assert {verdict.case for verdict in section.verdicts} == {
        "`paper()`, 34.7M parameters, with QK-norm",
        "`paper()`, 34.7M parameters, without QK-norm",
    }
    assert "all.default" not in section.fields
