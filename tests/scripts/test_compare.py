"""scripts.compare: which runs it finds, what it calls them, its table, and where the picture goes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from scripts import compare
from scripts.runs import distinct, find_runs, labels_of
from trainer.run_directory import RunDirectory


def records(loss, steps=20, **last):
    """A metrics.jsonl: the loss falls to `loss`, which the last tenth has."""
    lines = [
        {"step": step, "tokens": 100 * step, "loss": loss + (step <= 18), "tokens_per_second": 1000 + step}
        for step in range(1, steps + 1)
    ]
    return [*lines, {"step": steps, "tokens": 100 * steps} | last] if last else lines


def run(folder, *args, **kwargs):
    folder.mkdir(parents=True)
    lines = map(json.dumps, records(*args, **kwargs))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def cells(text):
    """{first cell: the others} of a Markdown table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if not row[0].startswith("-")}


def test_the_table_has_the_losses_and_the_speed_of_every_run():
    rows = cells(compare.table({"fpa": records(3.0, val_loss=3.5), "sagebwd": records(3.25)}))
    assert rows["run"] == ["steps", "tokens", "training loss", "validation loss", "tokens/s"]
    assert rows["fpa"] == ["20", "2,000", "3.0000", "3.5000", "1,010"]
    assert rows["sagebwd"] == ["20", "2,000", "3.2500", "", "1,010"]


def test_a_run_that_has_just_started_is_a_row():
    assert cells(compare.table({"new": []}))["new"] == ["0", "0", "", "", ""]


def test_seeds_stand_together_with_mean_and_standard_deviation():
    runs = {
        "attention-fpa+seed-1": records(3.0, val_loss=4.0),
        "attention-sagebwd+seed-1": records(5.0),
        "attention-fpa+seed-2": records(3.2, val_loss=4.2),
    }
    rows = cells(compare.table(runs))
    assert [*rows] == [
        "run",
        "attention-fpa+seed-1",
        "attention-fpa+seed-2",
        "attention-fpa: mean ± std of 2 seeds",
        "attention-sagebwd+seed-1",
    ]
    assert rows["attention-fpa: mean ± std of 2 seeds"] == [
        *("", "", "3.1000 ± 0.1414", "4.1000 ± 0.1414", ""),
    ]


def test_named_validation_sets_have_columns_in_both_tables():
    losses = {1: (2.0, 5.0), 2: (2.5, 6.0)}
    runs = {
        f"{name}+seed-{seed}": [
            *records(3.0 + shift, val_loss=4.0),
            {"step": 21, "val_loss/wiki": wiki + shift, "val_loss/code": code + 2 * shift},
        ]
        for name, shift in (("fpa", 0.0), ("sagebwd", 0.25))
        for seed, (wiki, code) in losses.items()
    } | {"bare+seed-1": records(1.0)}
    rows = cells(compare.table(runs))
    assert rows["run"][3:6] == ["validation loss", "val_loss/wiki", "val_loss/code"]
    assert rows["sagebwd+seed-2"][3:6] == ["4.0000", "2.7500", "6.5000"]
    assert rows["fpa: mean ± std of 2 seeds"][4:6] == ["2.2500 ± 0.3536", "5.5000 ± 0.7071"]
    assert rows["bare+seed-1"][3:6] == ["", "", ""]
    rows = cells(compare.difference_table(runs, "fpa", {}))
    assert rows["minus fpa"][2:] == ["val_loss/wiki", "val_loss/code"]
    assert [cell.split(" ±")[0] for cell in rows["sagebwd"]] == ["+0.2500", "+0.0000", "+0.2500", "+0.5000"]


def test_a_mean_needs_a_value_of_every_seed():
    rows = cells(compare.table({"seed-1": records(3.0, val_loss=4.0), "seed-2": records(3.0)}))
    assert rows["mean ± std of 2 seeds"] == ["", "", "3.0000 ± 0.0000", "", ""]


def test_names_that_are_no_text_neither_stop_a_comparison_nor_reach_the_terminal(tmp_path, capfdbinary):
    names = [b"a\x1b[2J", b"b\xff", b"c\n", "d\u202e".encode(), "é $\\x$".encode()]
    for name in names:
        run(tmp_path / os.fsdecode(name), 3.0, **{"val_loss/\x1b\ud800$\\x$": 2.0})
    compare.main([str(tmp_path), "--out", str(tmp_path / "out.png")])
    out = capfdbinary.readouterr().out
    for shown in (
        rb"a\x1b[2J",
        rb"b\udcff",
        rb"c\n",
        rb"d\u202e",
        "é $\\x$".encode(),
        rb"val_loss/\x1b\ud800",
    ):
        assert shown in out
    assert b"\x1b" not in out
    (tmp_path / os.fsdecode(names[0]) / "metrics.jsonl").write_text('{"step": 1, "loss": "3.0"}\n')
    with pytest.raises(SystemExit, match=r"a\\x1b.*its loss is no number.*leave this run out"):
        compare.main([str(tmp_path)])


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_a_finished_run_whose_curve_is_damaged_is_not_compared(tmp_path, damage):
    folder = run(tmp_path / "a", 3.0)
    run(tmp_path / "b", 3.0)
    RunDirectory(folder).finish()
    RunDirectory(folder).config.touch()
    (tmp_path / "DONE").write_text("of something else")
    compare.main([str(tmp_path)])
    metrics = folder / "metrics.jsonl"
    metrics.unlink() if damage == "lost" else metrics.write_text(metrics.read_text().replace("3.0", "3.1"))
    with pytest.raises(SystemExit, match=r"a is finished, but metrics.jsonl is .*or leave this run out"):
        compare.main([str(tmp_path)])


@pytest.mark.parametrize(
    ("label", "group"),
    [
        ("attention-fpa+seed-12", "attention-fpa"),
        ("seed-3", ""),
        ("seed-3+tps-260k", "tps-260k"),
        ("large/fpa-seed1", "large/fpa"),
        ("seedling", "seedling"),
    ],
)
def test_the_seed_is_found_in_a_label(label, group):
    assert compare.without_seed(label) == group


def test_runs_are_found_in_folders_and_shown_once(tmp_path, capsys):
    a, b = run(tmp_path / "runs" / "a", 3.0), run(tmp_path / "runs" / "b", 3.0)
    (tmp_path / "runs" / "no_run").mkdir()
    assert find_runs([tmp_path / "runs"]) == [a, b]
    compare.main([str(b), str(tmp_path / "runs")])
    assert [*cells(capsys.readouterr().out.split("\n\n")[0])] == ["run", "b", "a"]


def test_labels_are_what_differs_and_never_the_same_twice():
    def of(*paths):
        return labels_of([Path(path) for path in paths])

    assert of("runs/attention-fpa+tps-260k", "runs/attention-sagebwd+tps-260k") == [
        "attention-fpa",
        "attention-sagebwd",
    ]
    assert of("runs/default") == ["default"]
    assert of("one/fpa", "two/fpa") == ["one/fpa", "two/fpa"]
    assert of("a/x/fpa", "b/x/fpa") == ["a/x/fpa", "b/x/fpa"]
    assert of("large/a-seed1", "large/b-seed1") == ["a-seed1", "b-seed1"]


def test_runs_of_one_name_are_never_taken_for_one(tmp_path):
    """Without the shared `s`, the first two would both be called `a`."""
    assert distinct(["s+a", "a+s", "s+c"]) == ["s+a", "a+s", "s+c"]
    deep = [
        run(tmp_path / sweep / name, 3.0) for sweep in ("one", "two") for name in ("fpa+seed-1", "x+seed-1")
    ]
    (deep[0] / "checkpoints").mkdir()
    (deep[0] / "checkpoints" / "metrics.jsonl").write_text("")
    (tmp_path / "one" / "again").symlink_to(tmp_path)
    found = find_runs([tmp_path, tmp_path / "one"])
    assert found == deep
    assert len(set(labels_of(found))) == 4


def test_differences_to_the_baseline_have_intervals_where_seeds_tell_the_noise(tmp_path, capsys):
    """Two seeds each: least squares is the paired difference, its interval Student's with one degree."""
    for name, losses in {"b": (3.5, 3.7), "a": (3.0, 3.1)}.items():
        for seed, loss in enumerate(losses, start=1):
            run(tmp_path / f"{name}+seed-{seed}", loss, val_loss=loss + 1)
    for baseline in ("b", "b+seed-2", str(tmp_path / "b+seed-1")):
        compare.main([str(tmp_path), "--baseline", baseline])
        first, second, _ = capsys.readouterr().out.split("\n\n")
        assert [*cells(first)][1] == "b+seed-1"  # the group that the others are compared with comes first
        paired = np.array([-0.5, -0.6])
        width = 12.706 * paired.std(ddof=1) / np.sqrt(2)
        assert cells(second)["a"] == [f"-0.5500 ± {width:.4f}"] * 2
    with pytest.raises(SystemExit, match=r"--baseline gone is none of the runs; .* one of a, b"):
        compare.main([str(tmp_path), "--baseline", "gone"])


def test_the_baseline_may_be_the_name_of_a_directory_in_which_one_group_lies(tmp_path):
    paths = [tmp_path / "wide" / "first", tmp_path / "narrow" / "first", tmp_path / "narrow" / "second"]
    groups = ["wide", "narrow+first", "narrow+second"]
    assert compare.group_called("second", groups, paths) == "narrow+second"
    with pytest.raises(SystemExit, match="--baseline first is none of the runs"):
        compare.group_called("first", groups, paths)


def test_one_seed_has_a_difference_and_no_interval_and_a_diverged_run_neither():
    runs = {"a": records(3.0), "b": records(3.25), "c": records(9.0)}
    rows = cells(compare.difference_table(runs, "a", {"c": 3}))
    assert rows == {
        "minus a": ["training loss", "validation loss"],
        "b": ["+0.2500", ""],
        "c": ["", ""],
    }


def test_the_picture_goes_next_to_the_runs(tmp_path, capsys):
    run(tmp_path / "fpa", 3.0)
    run(tmp_path / "sagebwd", 3.0)
    compare.main([str(tmp_path)])
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| sagebwd |" in printed
    assert f"written: {tmp_path}/comparison.png" in printed


def test_the_picture_goes_where_the_user_says(tmp_path):
    run(tmp_path / "runs" / "fpa", 3.0)
    compare.main([str(tmp_path / "runs"), "--out", str(tmp_path / "new" / "x.png")])
    assert (tmp_path / "new" / "x.png").exists()
    assert not (tmp_path / "runs" / "comparison.png").exists()
    compare.main([str(tmp_path / "runs"), "--out", str(tmp_path / "folder")])
    assert (tmp_path / "folder" / "comparison.png").exists()


def test_a_picture_of_no_known_kind_is_refused(tmp_path, capsys):
    run(tmp_path / "fpa", 3.0)
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), "--out", "x.docx"])
    assert "x.docx is no picture: end it in .png, .pdf, .svg" in capsys.readouterr().err


def test_committed_results_are_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "RESULTS", tmp_path / "results")
    committed = [tmp_path / "results" / "quickstart" / name for name in ("fpa", "sagebwd")]
    assert compare.default_out(committed) == Path("runs/comparison.png")
    assert compare.default_out([tmp_path / "mine" / "fpa"]) == tmp_path / "mine" / "comparison.png"
    apart = [tmp_path / "a" / "fpa", tmp_path / "b" / "fpa"]
    assert compare.default_out(apart) == Path("runs/comparison.png")
    assert compare.default_out([Path("runs/fpa"), Path("runs/sagebwd")]) == Path("runs/comparison.png")


def test_a_path_without_a_run_is_refused(tmp_path, capsys):
    run(tmp_path / "fpa", 3.0)
    with pytest.raises(SystemExit) as end:
        compare.main([str(tmp_path / "fpa"), str(tmp_path / "gone")])
    assert end.value.code == 2
    assert f"{tmp_path}/gone holds no run: there is no metrics.jsonl" in capsys.readouterr().err


def test_a_run_that_diverged_has_no_final_loss_and_counts_in_no_mean(tmp_path, capsys):
    for seed in (1, 2):
        run(tmp_path / f"fpa-seed-{seed}", 3.0, val_loss=3.5)
    RunDirectory(tmp_path / "fpa-seed-2").note_divergence(21)
    compare.main([str(tmp_path)])
    rows = cells(capsys.readouterr().out.split("\n\n")[0])
    assert rows["fpa-seed-1"][2:4] == ["3.0000", "3.5000"]
    assert rows["fpa-seed-2"][2:4] == ["DIVERGED at step 21", ""]
    assert rows["fpa: mean ± std of 2 seeds"][2:4] == ["", ""]


def test_a_loss_that_is_not_finite_is_not_hidden_by_the_ones_before():
    rows = cells(
        compare.table({"nan": [*records(3.0, val_loss=3.5), {"step": 21, "loss": None, "val_loss": None}]})
    )
    assert rows["nan"][2:4] == ["nan", "nan"]


def test_damaged_metrics_end_with_a_message(tmp_path):
    folder = run(tmp_path / "fpa", 3.0)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("{damaged\n" + text)
    with pytest.raises(SystemExit, match=r"metrics\.jsonl is damaged"):
        compare.main([str(folder)])


def test_a_place_that_takes_no_picture_is_named_after_the_table(tmp_path, capsys):
    folder, place = run(tmp_path / "runs" / "a", 3.0), tmp_path / "file"
    place.write_text("")
    with pytest.raises(SystemExit, match=r"cannot write .*comparison.png: .*; give another place with --out"):
        compare.main([str(folder), "--out", str(place / "comparison.png")])
    assert "3.0000" in capsys.readouterr().out
