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
from scripts.paper.report.rules import AGREES, ANSWERS, CONTRADICTS, CONTRADICTS_HERE, NOT_SEEN, OPEN
from scripts.paper.report.section import Section
from scripts.paper.report.speed import presets_speed
from scripts.paper.report.template import UnknownField
from scripts.paper.report.training import FULL_PRECISION, SAGE, clear_gaps
from scripts.paper.report.verdicts import (
    Shape,
    Verdict,
    always_faster_verdict,
    compare_table1,
    divergence_verdict,
    fastest_verdict,
    interaction_verdict,
    joined,
    k_smoothing_verdict,
    loss_verdict,
    table1_verdict,
)
from scripts.paper.result_files import DamagedResult, Results
from tests.cli import ROOT

RESULTS = ROOT / "results"
#: Those that have been run.
HERE = [item for item in ITEMS if Results(RESULTS).has(item.json)]
SCALED, DEBUG = ({"scale": scale} for scale in ("scaled", "debug"))


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
    row = next(row for row in data["rows"] if row["variant"] == "row" and row["sigma"] == 1)
    row["dk"][1] = 0.3456
    path.write_text(json.dumps(data))
    texts = report.generate(copied)
    for name in ("tables/table1.md", "README.md"):
        assert "| 1 | `row`: P and dS scaled per output row | .0169 | .0184 | .3456 |" in texts[name]
    assert "18 of 20 of the relative errors" in texts["SUMMARY.md"]


def test_every_verdict_is_shown_with_its_numbers_and_rule():
    results = Results(RESULTS)
    for item in HERE:
        section = report.SECTIONS[item.name](results)
        page = report.item_page(item, section, results)
        assert {verdict.claim for verdict in section.verdicts} == CLAIMS.get(item.name, {}).keys()
        for verdict in section.verdicts:
            words, rule = CLAIMS[item.name][verdict.claim]
            claim = f"{words}; {verdict.case}" if verdict.case else words
            assert f"| {claim} | **{verdict.answer}** | {verdict.numbers} | {rule} |" in page


def test_the_count_is_that_of_the_verdicts_and_every_open_one_says_why():
    results = Results(RESULTS)
    sections = {item.name: report.section_of(item, results) for item in HERE}
    verdicts = [verdict for _, verdict in report.all_verdicts(sections)]
    assert {verdict.answer for verdict in verdicts} <= set(ANSWERS)
    still_open = [verdict for verdict in verdicts if verdict.answer == OPEN]
    assert all(verdict.why for verdict in still_open)
    assert not any(verdict.why for verdict in verdicts if verdict.answer != OPEN)
    count = report.count_of(sections)
    assert count.startswith(f"{len(verdicts)} verdicts, {len(verdicts) - len(still_open)} decided: ")
    assert count.endswith(f". {len(still_open)} open")
    assert report.open_table(sections).count("\n") == 1 + len(still_open)
    made = {"a": Section("", {}, [Verdict("x", AGREES), Verdict("y", NOT_SEEN), Verdict("z", OPEN)])}
    assert report.count_of(made) == (
        "3 verdicts, 2 decided: 1 “agrees”, 0 “contradicts”, 0 “contradicts at this scale”, 1 “not seen at "
        "this scale”. 1 open"
    )


def test_a_comparison_has_one_number_wherever_it_is_printed():
    """SageBwd − full precision of one setup, in the tables of three experiments."""
    results = Results(RESULTS)
    printed = {}
    for name in ("figure1a", "figure1b", "figure4", "presets"):
        for field, text in report.SECTIONS[name](results).fields.items():
            if field.startswith("gap."):
                printed.setdefault(field, {})[name] = text
    assert any(len(found) == 3 for found in printed.values())
    for field, found in printed.items():
        assert len(set(found.values())) == 1, field


@pytest.mark.parametrize("name", ["figure1a", "figure1b", "figure4", "finetune", "presets"])
def test_a_training_section_names_algorithms_text_steps_seeds_and_commits(name):
    results = Results(RESULTS)
    runs = [run for run in results.json(f"{name}.json")["runs"] if run["finished"] or run["diverged"]]
    setting = report.SECTIONS[name](results).setting
    for run in runs:
        assert f"{run['group']['tokens_per_step']:,}" in setting
        assert run["group"]["text"] in setting
        assert training.title_of(run["variant"]) in setting
        assert run["commit"][:7] in setting
    assert f"Seeds: {'; '.join(str(seed) for seed in sorted({run['seed'] for run in runs}))}." in setting
    commits = setting.split("Commits: ")[1].split(".")[0].split("; ")
    assert ("Runs of different commits are compared" in setting) == (len(commits) > 1)


def test_other_sections_name_their_commit():
    for item in HERE:
        setting = report.SECTIONS[item.name](Results(RESULTS)).setting
        assert re.search(r"[Cc]ommits?:? (?:[0-9a-f]{7}|not recorded)", setting), item.name


# --- SUMMARY.md ---------------------------------------------------------------------------------------------


def test_the_summary_has_two_pages_and_is_linked():
    text = (RESULTS / "SUMMARY.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert "(SUMMARY.md)" in (RESULTS / "README.md").read_text(encoding="utf-8")
    assert "(results/SUMMARY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_measured_number_of_the_summary_is_written_by_hand():
    """Outside the placeholders stand tile sizes, tokens per step, models and other settings alone."""
    words = (RESULTS / "summary.template.md").read_text(encoding="utf-8")
    by_hand = set(re.findall(r"(?<![\w.])\d[\d,.]*\d(?:[KMB]\b)?", template.PLACEHOLDER.sub("", words)))
    settings = {"2603.02170", "260K", "2.1M", "16,384", "131,072", "325M", "35M", "64", "128", "16", "95"}
    assert by_hand <= settings


def test_placeholders():
    fields, absent = {"a.x": "1", "verdicts": "2"}, {"b": "not run"}
    assert template.fill("{{a.x}} {{ verdicts }} {{b.y}}", fields, absent) == "1 2 not run"
    with pytest.raises(UnknownField, match=r"\{\{a\.y\}\}, which is not known; use one of a\.x"):
        template.fill("{{a.y}}", fields, absent)


def test_answers_of_several_cases():
    same = [Verdict("", AGREES, case="a"), Verdict("", AGREES, case="b")]
    assert joined(same) == AGREES
    assert joined([*same, Verdict("", NOT_SEEN, case="c")]) == "agrees (a; b); not seen at this scale (c)"


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
        return {"lr": 0.001, "variants": variants, "differences": [gap], "degrees_of_freedom": 1}

    ending = "at learning rate 0.001"
    for gap, shown in (
        ((-0.03, 0.02), f"SageBwd: -0.0300 ± 0.0200 (2 seeds) of 1 {ending}"),
        ((0.03, 0.04), f"none of 1 {ending}"),
        ((0.03, None), f"none of 0 {ending}"),
    ):
        assert clear_gaps([group(*gap)], {SAGE}) == shown
    assert clear_gaps([group(-0.03, 0.02)], {"another"}) == f"none of 0 {ending}"


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


def group_of(mean=0.0, half_width=0.01, degrees=4, **changed):
    """A group with one difference, a − b, in a run of 16 tokens."""
    seeds = 1 if half_width is None else 2
    found = {"of": "a", "minus": "b", "mean": mean, "half_width": half_width, "seeds": seeds}
    made = {"variants": [], "differences": [found], "degrees_of_freedom": degrees}
    return made | {"tokens_per_step": 8, "steps": 2} | changed


def diverging(**diverged):
    """A group of runs of which so many diverged, by variant."""
    variants = [{"variant": name, "diverged": count} for name, count in diverged.items()]
    return {"variants": variants, "differences": [], "tokens_per_step": 8, "steps": 2}


PAIR = ("a", "b")
LONG_RUN = {"tokens_per_step": 2**21, "steps": 37_500}


@pytest.mark.parametrize(
    ("mean", "half_width", "gap", "match", "why"),
    [
        (0.054, 0.02, AGREES, CONTRADICTS_HERE, ""),
        (0.0, 0.02, NOT_SEEN, AGREES, ""),
        (0.0, 0.06, OPEN, OPEN, "the interval is too wide: ± 0.060"),
        (0.054, None, OPEN, OPEN, "one seed, not repeated: no interval"),
    ],
)
def test_a_difference_is_judged_by_its_interval(mean, half_width, gap, match, why):
    """The rule itself: test_rules.py."""
    group = group_of(mean, half_width)
    judged = [loss_verdict("", SCALED, group, PAIR, printed) for printed in (0.054, 0.0)]
    assert [verdict.answer for verdict in judged] == [gap, match]
    assert {verdict.why for verdict in judged if verdict.answer == OPEN} <= {why}
    debug = loss_verdict("", DEBUG, group, PAIR, 0.0)
    assert (debug.answer, "measures nothing" in debug.why) == (OPEN, half_width is not None)
    if half_width:
        assert f"{mean:+.4f} ± {half_width:.4f} (2 seeds)" in judged[0].numbers


def test_a_long_run_contradicts():
    assert loss_verdict("", SCALED, group_of(**LONG_RUN), PAIR, 0.054).answer == CONTRADICTS
    assert "16 " not in loss_verdict("", SCALED, group_of(**LONG_RUN), PAIR, 0.054).numbers


def test_what_was_not_compared_is_judged_only_if_one_alone_diverged():
    def answer(rule=loss_verdict, **diverged):
        if rule is loss_verdict:
            return loss_verdict("", SCALED, diverging(**diverged), PAIR, 0.054).answer
        return rule(SCALED, diverging(**diverged), PAIR).answer

    for rule in (loss_verdict, k_smoothing_verdict):
        assert answer(rule) == answer(rule, a=0, b=2) == answer(rule, a=1, b=1) == OPEN
        assert answer(rule, a=1) == OPEN  # the other was not run
    assert answer(a=1, b=0) == CONTRADICTS_HERE
    assert answer(k_smoothing_verdict, a=1, b=0) == AGREES


def test_the_interaction_is_the_difference_of_the_gaps():
    """Closed form: of two gaps with 5 degrees of freedom each and equal noise, 10 and √2 times the noise."""
    half_width = 2.571 * 0.01
    large, small = group_of(0.050, half_width, 5), group_of(-0.006, half_width, 5)
    verdict = interaction_verdict("i", SCALED, large, small, PAIR, 0.056)
    assert verdict.numbers.startswith(f"+0.0560 ± {2.228 * 0.01 * 2**0.5:.4f}: +0.0500")
    assert verdict.answer == AGREES
    assert interaction_verdict("i", SCALED, small, small, PAIR, 0.056).answer == NOT_SEEN
    # Either gap alone agrees with what the paper says of it; the interaction is what is open.
    wide = group_of(0.054, 0.053, 5)
    assert loss_verdict("", SCALED, wide, PAIR, 0.054).answer == AGREES
    assert interaction_verdict("i", SCALED, wide, group_of(0.02, 0.004, 5), PAIR, 0.056).answer == OPEN
    without = interaction_verdict("i", SCALED, large, group_of(half_width=None), PAIR, 0.056)
    assert (without.answer, "one seed" in without.why) == (OPEN, True)
    assert interaction_verdict("i", SCALED, large, diverging(), PAIR, 0.056).why.startswith("not run at both")


def test_a_short_run_that_does_not_diverge_does_not_contradict():
    full, name = "full precision, no QK-norm", "SageBwd, no QK-norm"

    def verdict(group, variant=name):
        return divergence_verdict(SCALED, group, variant, full)

    group = diverging(**{name: 0})
    assert verdict(group).answer == NOT_SEEN
    assert verdict(group | LONG_RUN).answer == CONTRADICTS
    assert verdict(diverging(**{name: 1})).answer == AGREES
    assert verdict(group, "SageBwd").why == "no run"
    both = verdict(diverging(**{name: 1, full: 1}))
    assert (both.answer, "so does full precision" in both.why) == (OPEN, True)


PRINTED = {1: (0.016, 0.0184, 0.022, 0.0159), 3: (0.0389, 0.0758, 0.0777, 0.0387)}
PRINTED[5] = (0.0603, 0.2014, 0.2007, 0.0605)


def of_table1(factor, sigmas=(1, 3, 5)):
    tensors = ("out", "dq", "dk", "dv")
    return [
        {"sigma": sigma, **{n: [1, factor * e] for n, e in zip(tensors, PRINTED[sigma], strict=True)}}
        for sigma in sigmas
    ]


def test_an_error_of_table1_is_the_same_within_ten_percent():
    for factor, same in ((1.099, 12), (1.101, 0), (0.901, 12), (0.899, 0)):
        assert compare_table1("", of_table1(factor), TITLES).same == same


def test_table1_agrees_when_nine_tenths_of_its_errors_do():
    rows = of_table1(1.0)
    rows[0]["dv"][1] = 0.03
    assert compare_table1("", rows, TITLES).agrees  # 11 of 12
    rows[1]["dv"][1] = 0.01
    found = compare_table1("", rows, TITLES)
    assert (found.agrees, f"{found}"[:8]) == (False, "10 of 12")
    assert [Shape("", same, 20, "").agrees for same in (17, 18)] == [False, True]


def test_table1_is_judged_by_the_shape_that_fits_best():
    good, bad = Shape("N 1", 19, 20, ""), Shape("N 2", 9, 20, "x")
    verdict = table1_verdict("row", bad, [bad, good])
    assert verdict.answer == AGREES
    assert verdict.numbers == "19 of 20; at N 1, the best of the shapes tried; 1 of 2 of these give the table"
    assert table1_verdict("row", bad, [bad]).answer == table1_verdict("row", bad).answer == CONTRADICTS


@pytest.mark.parametrize(("best", "answer"), [(1.504, AGREES), (1.502, CONTRADICTS)])
def test_the_best_speed_up_may_be_a_tenth_less_than_1_67(best, answer):
    assert fastest_verdict([1.0, best]).answer == answer
    assert fastest_verdict([]).answer == always_faster_verdict([]).answer == OPEN


def test_it_is_faster_in_as_many_cases_as_in_the_paper():
    """23 of 24."""
    assert always_faster_verdict([1.1] * 23 + [0.9]).answer == AGREES
    assert always_faster_verdict([1.1] * 22 + [0.9] * 2).answer == CONTRADICTS


def test_the_papers_algorithm_is_judged_where_it_was_run():
    group = {"variants": [{"variant": SAGE}]}
    assert training.algorithms(group, "lr 1") == [("SageBwd", "lr 1")]
    group["variants"].append({"variant": "SageBwd, paper"})
    assert training.algorithms(group, "lr 1")[1] == ("SageBwd, paper", "lr 1, `paper()`")
    assert training.algorithms(group, "")[1] == ("SageBwd, paper", "`paper()`")
