"""The report is what the results give, says what is missing, names what is damaged, and follows its rules."""

import json
import shutil

import pytest

from scripts.paper import report, report_training
from scripts.paper.experiments import ITEMS
from scripts.paper.report_parts import AGREES, CANNOT_TELL, DIFFERS
from scripts.paper.report_sections import table1_verdict
from scripts.paper.report_speed import presets_speed
from scripts.paper.report_training import MARGIN, divergence_verdict, gap_verdict, match_verdict
from scripts.paper.results import DamagedResult
from tests.cli import ROOT

RESULTS = ROOT / "results"
FULL, SCALED, DEBUG = ({"scale": scale} for scale in ("full", "scaled", "debug"))


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path / "results"


def test_the_report_in_the_repository_is_the_generated_one():
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == report.generate(RESULTS), (
        "run python -m scripts.paper.report"
    )


def test_all_that_it_links_to_is_there():
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    targets = {part.split(")")[0].split("#")[0] for part in text.split("](")[1:]}
    missing = [name for name in targets if not name.startswith("https:") and not (RESULTS / name).exists()]
    assert missing == []


def test_an_empty_folder_lists_every_item_with_its_command(tmp_path):
    text = report.generate(tmp_path)
    for item in ITEMS:
        assert f"Not run. `python -m scripts.reproduce {item.name}` runs it: {item.cost_in_words()}." in text
        if item.question:
            assert f"| {item.name} | {item.question} | not run |" in text


def test_numbers_come_from_the_files(copied):
    path = copied / "table1.json"
    data = json.loads(path.read_text())
    row = next(row for row in data["rows"] if row["variant"] == "row" and row["sigma"] == 3)
    row["dk"][1] = 0.3456
    path.write_text(json.dumps(data))
    text = report.generate(copied)
    assert ".3456" in text
    assert "dK at σ = 3, .3456 against .0777" in text


def test_several_gpus_stand_beside_one(tmp_path):
    runs = [
        (1, "none", 1000.0, 1.0, 0.0, None),
        (2, "ddp", 1950.0, 0.975, 0.0123, 55.66),
        (4, "fsdp", *[None] * 4),
    ]
    names = ("devices", "parallel", "tokens_per_second", "efficiency", "loss_difference", "peak_memory_gib")
    data = {
        "command": "python -m scripts.bench.gpus",
        "hardware": {"name": "NVIDIA H200"},
        "settings": {"steps": 20},
        "rows": [dict(zip(names, run, strict=True)) for run in runs],
    }
    (tmp_path / "bench_gpus.json").write_text(json.dumps(data))
    text = report.generate(tmp_path)
    assert "| 2, ddp | 1,950 | 97.5% | 0.0123 | 55.7 |" in text
    assert "| 4, fsdp |  |  |  |  |" in text


def test_settings_stand_beside_the_default_where_both_were_timed():
    def row(name, tokens, ms, mode="both, graph"):
        shape = {"causal": True, "head_dim": 64, "tokens": tokens}
        return {"implementation": name, "shape": shape, "mode": mode, "status": "passed", "median_ms": ms}

    data = {"command": "bench", "settings": {"lengths": [1024, 2048]}}
    rows = [row("sagebwd", 1024, 3.0), row("sagebwd x", 1024, 2.0), row("cuDNN", 1024, 1.0)]
    rows += [row("sagebwd x", 2048, 2.0), row("sagebwd x", 1024, 9.0, mode="both")]
    table = presets_speed(data | {"rows": rows}).splitlines()[-1]
    assert table == "| sagebwd x | causal, D 64 | 1.50 |  |"
    assert presets_speed(data | {"rows": rows[:1]}) == ""


def test_a_gap_to_full_precision_is_said_with_its_interval_or_how_wide_that_is():
    def group(mean, half_width):
        full, sage = report_training.FULL_PRECISION, report_training.SAGE
        gap = {"of": sage, "minus": full, "mean": mean, "half_width": half_width, "seeds": 2}
        return {"lr": 0.001, "variants": [{"variant": full}, {"variant": sage}], "differences": [gap]}

    text = report_training.gaps_to_full_precision(group(-0.03, 0.02))
    assert "zero for SageBwd (-0.0300 ± 0.0200 (2 seeds)), of 1 settings" in text
    text = report_training.gaps_to_full_precision(group(0.03, 0.04))
    assert text.endswith("no setting is seen to end away from full precision; the intervals are ±0.0400.")
    assert report_training.gaps_to_full_precision(group(0.03, None)) == ""


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": []}', '{"settings": 3, "rows": 4}'])
def test_a_damaged_file_is_named(copied, content):
    (copied / "table1.json").write_text(content)
    with pytest.raises(DamagedResult, match=r"table1\.json .*(run its command again)"):
        report.generate(copied)


@pytest.mark.parametrize("name", ["layers", "gradient_formats", "gradient_error"])
def test_a_file_without_a_measurement_is_named(tmp_path, name):
    settings = {"sequences": 1, "tile": [128, 64]}
    nothing = {"hardware": "cpu", "settings": settings, "normalisation": "", "rows": [], "table2": {}}
    for content in ({}, nothing | {"runs": {}, "sources": {}}):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        with pytest.raises(DamagedResult, match=rf"{name}\.json lacks what the report needs"):
            report.generate(tmp_path)


def test_check_fails_for_an_edited_report_and_writes_nothing(copied):
    report.main(["--results", str(copied), "--check"])
    edited = (copied / "README.md").read_text() + "by hand\n"
    (copied / "README.md").write_text(edited)
    with pytest.raises(SystemExit, match="is not what the results give"):
        report.main(["--results", str(copied), "--check"])
    assert (copied / "README.md").read_text() == edited
    report.main(["--results", str(copied)])
    report.main(["--results", str(copied), "--check"])


@pytest.mark.parametrize(
    ("mean", "half_width", "gap", "match"),
    [
        (2 * MARGIN, 0.5 * MARGIN, AGREES, DIFFERS),
        (0.5 * MARGIN, 0.2 * MARGIN, AGREES, AGREES),  # small, but there
        (0.0, 0.5 * MARGIN, DIFFERS, AGREES),
        (-2 * MARGIN, 0.5 * MARGIN, DIFFERS, DIFFERS),
        (0.5 * MARGIN, 2 * MARGIN, CANNOT_TELL, CANNOT_TELL),
        (2 * MARGIN, None, CANNOT_TELL, CANNOT_TELL),
    ],
)
def test_a_difference_is_judged_by_its_interval(mean, half_width, gap, match):
    found = {"of": "a", "minus": "b", "mean": mean, "half_width": half_width, "seeds": 2 if half_width else 1}
    group = {"variants": [], "differences": [found], "tokens_per_step": 8, "steps": 2}
    assert gap_verdict("", FULL, group, "a", "b").answer == gap
    assert gap_verdict("", SCALED, group, "a", "b").answer == (CANNOT_TELL if gap == DIFFERS else gap)
    assert match_verdict("", SCALED, group, "a", "b").answer == match
    for verdict in (gap_verdict, match_verdict):
        assert verdict("", DEBUG, group, "a", "b").answer == CANNOT_TELL


@pytest.mark.parametrize("verdict", [gap_verdict, match_verdict])
def test_what_was_not_compared_is_judged_only_if_one_alone_diverged(verdict):
    def answer(**diverged):
        variants = [{"variant": name, "diverged": count} for name, count in diverged.items()]
        return verdict("", SCALED, {"variants": variants, "differences": []}, "a", "b").answer

    assert answer() == answer(a=0, b=2) == answer(a=1, b=1) == CANNOT_TELL
    assert answer(a=1) == CANNOT_TELL  # the other was not run
    assert answer(a=1, b=0) == DIFFERS


def test_a_short_run_that_does_not_diverge_says_nothing():
    group = {
        "tokens_per_step": 8,
        "steps": 2,
        "variants": [{"variant": "SageBwd, no QK-norm", "diverged": 0}],
    }
    assert divergence_verdict(SCALED, group, "SageBwd, no QK-norm", "").answer == CANNOT_TELL
    assert divergence_verdict(FULL, group, "SageBwd, no QK-norm", "").answer == DIFFERS
    group["variants"][0]["diverged"] = 1
    assert divergence_verdict(SCALED, group, "SageBwd, no QK-norm", "").answer == AGREES
    assert divergence_verdict(FULL, group, "SageBwd", "").answer == CANNOT_TELL
    group["variants"].append({"variant": "full precision, no QK-norm", "diverged": 1})
    found = divergence_verdict(FULL, group, "SageBwd, no QK-norm", "")
    assert (found.answer, "so does full precision" in found.why) == (CANNOT_TELL, True)


def test_table1_agrees_when_nine_tenths_of_its_errors_do():
    tensors = ("out", "dq", "dk", "dv")
    paper = {
        1: (0.016, 0.0184, 0.022, 0.0159),
        3: (0.0389, 0.0758, 0.0777, 0.0387),
        5: (0.0603, 0.2014, 0.2007, 0.0605),
    }
    rows = [
        {"sigma": sigma, "variant": "row", **{n: [1, 1.09 * e] for n, e in zip(tensors, errors, strict=True)}}
        for sigma, errors in paper.items()
    ]
    assert table1_verdict(rows, "row").answer == AGREES
    rows[0]["dv"][1] = 0.03
    assert table1_verdict(rows, "row").answer == AGREES  # 11 of 12
    rows[1]["dv"][1] = 0.01
    assert table1_verdict(rows, "row").answer == DIFFERS
    assert "10 of 12" in table1_verdict(rows, "row").why
