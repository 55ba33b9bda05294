"""The report is what the results give, says what is missing, names what is damaged, and follows its rules."""

import fnmatch
import json
import re
import shutil

import pytest

from scripts.paper import report
from scripts.paper.attention_errors import TITLES
from scripts.paper.experiments import ITEMS
from scripts.paper.report import template, training
from scripts.paper.report.__main__ import main
from scripts.paper.report.claims import CLAIMS
from scripts.paper.report.speed import presets_speed
from scripts.paper.report.template import UnknownField
from scripts.paper.report.training import FULL_PRECISION, SAGE, clear_gaps
from scripts.paper.report.verdicts import (
    AGREES,
    CANNOT_TELL,
    DIFFERS,
    MARGIN,
    Verdict,
    divergence_verdict,
    gap_verdict,
    joined,
    match_verdict,
    table1_verdict,
)
from scripts.paper.result_files import DamagedResult, Results
from tests.cli import ROOT

RESULTS = ROOT / "results"
FULL, SCALED, DEBUG = ({"scale": scale} for scale in ("full", "scaled", "debug"))


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path / "results"


def test_the_report_in_the_repository_is_the_generated_one():
    main(["--check"])


def test_all_that_it_links_to_is_there():
    for path in [*RESULTS.glob("*.md"), *RESULTS.glob("tables/*.md")]:
        text = path.read_text(encoding="utf-8")
        targets = {part.split(")")[0].split("#")[0] for part in text.split("](")[1:]}
        here = [name for name in targets if "{{" not in name and not name.startswith("https:")]
        missing = [name for name in here if not (path.parent / name).exists()]
        assert missing == [], path


def test_every_file_is_named_and_every_name_is_a_file():
    """FILES.md, whose first column holds file names, some with *."""
    lines = (RESULTS / "FILES.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    patterns = {name for cell in cells for name in re.findall("`([^`]+)`", cell)}
    files = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    unnamed = [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert unnamed == []
    assert [pattern for pattern in patterns if not fnmatch.filter(files, pattern)] == []


def test_large_files_are_compressed_and_the_folder_is_small():
    sizes = {path: path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 6e6
    assert [path.name for path, size in sizes.items() if size > 1e6] == []


def test_every_experiment_has_a_section():
    assert {item.name for item in ITEMS} == report.SECTIONS.keys()
    assert CLAIMS.keys() <= report.SECTIONS.keys()


def test_an_empty_folder_lists_every_item_with_its_cost(tmp_path):
    texts = report.generate(tmp_path)
    assert list(texts) == ["README.md"]
    for item in ITEMS:
        assert f"| `python -m scripts.reproduce {item.name}` | {item.title} | not run; " in texts["README.md"]
        assert item.cost_in_words() in texts["README.md"]
        for words, _ in CLAIMS.get(item.name, {}).values():
            assert f"| {item.name} | {words} | not run |" in texts["README.md"]


def test_the_template_works_in_a_folder_without_results(tmp_path):
    """What was not run stands as such in the place of every number."""
    shutil.copy(RESULTS / template.NAME, tmp_path)
    text = report.generate(tmp_path)["README.md"]
    assert "{{" not in text
    assert "*not run*" in text


def test_numbers_come_from_the_files(copied):
    path = copied / "table1.json"
    data = json.loads(path.read_text())
    row = next(row for row in data["rows"] if row["variant"] == "row" and row["sigma"] == 3)
    row["dk"][1] = 0.3456
    path.write_text(json.dumps(data))
    texts = report.generate(copied)
    assert "dK at σ = 3, .3456 against .0777" in texts["tables/table1.md"]
    assert "18 of 20" in texts["README.md"]


def test_every_verdict_is_shown_with_its_numbers_and_rule():
    results = Results(RESULTS)
    for item in ITEMS:
        section = report.SECTIONS[item.name](results)
        page = report.item_page(item, section, results)
        assert {verdict.claim for verdict in section.verdicts} == CLAIMS.get(item.name, {}).keys()
        for verdict in section.verdicts:
            words, rule = CLAIMS[item.name][verdict.claim]
            claim = f"{words}; {verdict.case}" if verdict.case else words
            assert f"| {claim} | **{verdict.answer}** | {verdict.numbers} | {rule} |" in page


def test_placeholders():
    fields, absent = {"a.x": "1", "verdicts": "2"}, {"b": "not run"}
    assert template.fill("{{a.x}} {{ verdicts }} {{b.y}}", fields, absent) == "1 2 not run"
    with pytest.raises(UnknownField, match=r"\{\{a\.y\}\}, which is not known; use one of a\.x"):
        template.fill("{{a.y}}", fields, absent)


def test_answers_of_several_cases():
    same = [Verdict("", AGREES, case="a"), Verdict("", AGREES, case="b")]
    assert joined(same) == AGREES
    assert joined([*same, Verdict("", DIFFERS, case="c")]) == "agrees (a, b); does not agree (c)"


def test_the_report_says_what_attention_is_measured_and_what_is_open():
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    sentence = next(line for line in text.splitlines() if line.startswith("`attention=sagebwd`"))
    for part in ("per output row", "64 × 128", "`SageConfig.paper()`"):
        assert part in sentence
    table2 = text.split("Table 2, under `paper()`")[1].split("\n\n")[0]
    assert "**without** QK-norm" in table2


def test_several_gpus_are_compared_with_one(tmp_path):
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
    text = report.generate(tmp_path)["tables/many_gpus.md"]
    assert "| 2, ddp | 1,950 | 97.5% | 0.0123 | 55.7 |" in text
    assert "| 4, fsdp |  |  |  |  |" in text


def test_settings_are_compared_with_the_default_where_both_were_timed():
    def row(name, tokens, ms, mode="both, graph"):
        shape = {"causal": True, "head_dim": 64, "tokens": tokens}
        return {"implementation": name, "shape": shape, "mode": mode, "status": "passed", "median_ms": ms}

    data = {"command": "bench", "settings": {"lengths": [1024, 2048]}}
    rows = [row("sagebwd", 1024, 3.0), row("sagebwd x", 1024, 2.0), row("cuDNN", 1024, 1.0)]
    rows += [row("sagebwd x", 2048, 2.0), row("sagebwd x", 1024, 9.0, mode="both")]
    table = presets_speed(data | {"rows": rows}).splitlines()[-1]
    assert table == "| sagebwd x | causal, D 64 | 1.50 |  |"
    assert presets_speed(data | {"rows": rows[:1]}) == ""


def test_gaps_that_the_noise_does_not_explain():
    def group(mean, half_width):
        gap = {"of": SAGE, "minus": FULL_PRECISION, "mean": mean, "half_width": half_width, "seeds": 2}
        variants = [{"variant": FULL_PRECISION}, {"variant": SAGE}]
        return {"lr": 0.001, "variants": variants, "differences": [gap]}

    ending = "at learning rate 0.001"
    assert clear_gaps([group(-0.03, 0.02)]) == f"SageBwd: -0.0300 ± 0.0200 (2 seeds) of 1 {ending}"
    assert clear_gaps([group(0.03, 0.04)]) == f"none of 1 {ending}"
    assert clear_gaps([group(0.03, None)]) == f"none of 0 {ending}"


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


@pytest.mark.parametrize("name", ["README.md", "tables/layers.md"])
def test_check_fails_for_an_edited_report_and_writes_nothing(copied, name):
    main(["--results", str(copied), "--check"])
    edited = (copied / name).read_text() + "by hand\n"
    (copied / name).write_text(edited)
    with pytest.raises(SystemExit, match=rf"{name}: not what the results give"):
        main(["--results", str(copied), "--check"])
    assert (copied / name).read_text() == edited
    main(["--results", str(copied), "--write"])
    main(["--results", str(copied), "--check"])


def test_check_fails_for_tables_of_what_is_gone(copied):
    (copied / "tables" / "old.md").touch()
    with pytest.raises(SystemExit, match=r"tables/old\.md: not what the results give"):
        main(["--results", str(copied), "--check"])


def test_nothing_is_written_without_a_wish(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "one of the arguments --write --check is required" in capsys.readouterr().err


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
    full = "full precision, no QK-norm"
    group = {
        "tokens_per_step": 8,
        "steps": 2,
        "variants": [{"variant": "SageBwd, no QK-norm", "diverged": 0}],
    }

    def verdict(data, variant="SageBwd, no QK-norm"):
        return divergence_verdict(data, group, variant, full)

    assert verdict(SCALED).answer == CANNOT_TELL
    assert verdict(FULL).answer == DIFFERS
    group["variants"][0]["diverged"] = 1
    assert verdict(SCALED).answer == AGREES
    assert verdict(FULL, "SageBwd").answer == CANNOT_TELL
    group["variants"].append({"variant": full, "diverged": 1})
    assert (verdict(FULL).answer, "so does full precision" in verdict(FULL).numbers) == (CANNOT_TELL, True)


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
    assert table1_verdict(rows, "row", TITLES).answer == AGREES
    rows[0]["dv"][1] = 0.03
    assert table1_verdict(rows, "row", TITLES).answer == AGREES  # 11 of 12
    rows[1]["dv"][1] = 0.01
    assert table1_verdict(rows, "row", TITLES).answer == DIFFERS
    assert "10 of 12" in table1_verdict(rows, "row", TITLES).numbers


def test_the_papers_algorithm_is_judged_where_it_was_run():
    group = {"variants": [{"variant": SAGE}]}
    assert training.algorithms(group, "lr 1") == [("SageBwd", "lr 1")]
    group["variants"].append({"variant": "SageBwd, paper"})
    assert training.algorithms(group, "lr 1")[1] == ("SageBwd, paper", "lr 1, `paper()`")
    assert training.algorithms(group, "")[1] == ("SageBwd, paper", "`paper()`")
