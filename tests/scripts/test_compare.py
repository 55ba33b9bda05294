"""scripts.compare: which runs it finds, what it calls them, its table, and where the picture goes."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from scripts import compare
from scripts.runs import find_runs, places
from trainer.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """Groups and baselines of what would have been drawn; monkeypatch.undo() lets it be drawn."""
    found = []
    monkeypatch.setattr(
        compare, "plot_losses", lambda groups, out, baselines: found.append((groups, baselines))
    )
    return found


def records(loss, steps=20, per_step=100, **last):
    """A metrics.jsonl: the loss falls to `loss`, which the last tenth has."""
    lines = [
        {"step": n, "tokens": per_step * n, "loss": loss + (n <= 18), "tokens_per_second": 1000 + n}
        for n in range(1, steps + 1)
    ]
    return [*lines, {"step": steps, "tokens": per_step * steps} | last] if last else lines


FPA, SAGE = {"attention.backend": "fpa"}, {"attention.backend": "sagebwd"}


def run(folder, *args, settings=None, **kwargs):
    """A run directory. settings: by dotted name; None: it has no config.yaml."""
    folder.mkdir(parents=True)
    lines = map(json.dumps, records(*args, **kwargs))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if settings is not None:
        stored = {"data": {}}
        for name, value in settings.items():
            *group, key = name.split(".")
            place = stored.setdefault(group[0], {}) if group else stored
            place[key] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(stored, sort_keys=False))
    return folder


def compared(capsys, *arguments):
    """The rows of the table that a comparison prints."""
    compare.main([str(argument) for argument in arguments])
    return cells(capsys.readouterr().out.split("\n\n")[0])


def cells(text):
    """{first cell: the others} of a Markdown table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if not row[0].startswith("-")}


def test_the_table_has_the_losses_and_the_speed_of_every_run(tmp_path, capsys):
    run(tmp_path / "a", 3.0, val_loss=3.5)
    run(tmp_path / "b", 3.25)
    run(tmp_path / "new", 3.0, steps=0)
    with open(run(tmp_path / "nan", 3.0, val_loss=3.5) / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "loss": null, "val_loss": null}\n')
    rows = compared(capsys, tmp_path)
    assert rows["run"] == ["steps", "tokens", "training loss", "validation loss", "tokens/s"]
    assert rows["a"] == ["20", "2,000", "3.0000", "3.5000", "1,010"]
    assert rows["b"] == ["20", "2,000", "3.2500", "", "1,010"]
    assert rows["new"] == ["0", "0", "", "", ""]
    assert rows["nan"][2:4] == ["nan", "nan"]  # not hidden by the ones before


def test_a_run_is_named_after_the_settings_that_differ(tmp_path, capsys):
    """A sweep over attention and QK-norm, whose directories have names that were cut."""
    for index, (attention, norm) in enumerate([(a, n) for a in (FPA, SAGE) for n in (True, False)]):
        own = attention | {
            "model.qk_norm": norm,
            "seed": 1,
            "runs_dir": f"runs{index}",
            "logger.group": index,
        }
        run(tmp_path / f"attention-long_name_that_was_cut-{index}", 3.0, settings=own)
    assert [*compared(capsys, tmp_path)][1:] == [
        "attention=fpa model.qk_norm=true",
        "attention=sagebwd model.qk_norm=true",
        "attention=fpa model.qk_norm=false",
        "attention=sagebwd model.qk_norm=false",
    ]


def test_an_option_stands_for_its_values_and_what_was_changed_of_it_is_named(
    tmp_path, capsys, compose_settings
):
    choices = (
        ["attention=sagebwd_paper", "tps=260k", "model=llama_tiny"],
        ["attention=sagebwd_paper", "tps=2.1m", "model=llama_35m", "model.n_layers=3", "optimizer=muon"],
    )
    for index, choice in enumerate(choices):
        recorded = compose_settings("logger=files", *choice).recorded()
        run(tmp_path / str(index), 3.0)
        (tmp_path / str(index) / "config.yaml").write_text(yaml.safe_dump(recorded))
    assert [*compared(capsys, tmp_path)][1:] == [
        "model=llama_tiny tps=260k optimizer=adamw model.n_layers=4",
        "model=llama_35m tps=2.1m optimizer=muon model.n_layers=3",
    ]


def test_repeated_runs_are_told_apart_by_their_folders(tmp_path, capsys):
    for folder in ("one", "two"):
        for seed in (1, 2):
            run(tmp_path / folder / f"fpa+seed-{seed}", 3.0, settings=FPA | {"seed": seed})
    rows = [name for name in compared(capsys, tmp_path) if name.startswith("seed=") or "mean" in name]
    assert rows[:3] == ["seed=1 (one)", "seed=2 (one)", "one: mean ± std of 2 seeds"]
    assert rows[3:] == ["seed=1 (two)", "seed=2 (two)", "two: mean ± std of 2 seeds"]


def test_the_baseline_is_the_full_precision_run_of_the_same_other_settings(tmp_path, capsys, pictures):
    losses = {(True, "fpa"): 3.0, (True, "sagebwd"): 3.25, (False, "fpa"): 4.0, (False, "sagebwd"): 4.125}
    for (norm, backend), loss in losses.items():
        # A setting of how a run executes does not tell a run from its baseline.
        own = {"attention.backend": backend, "model.qk_norm": norm, "steps": 8}
        own["hardware.micro_batch"] = len(backend)
        run(tmp_path / f"{backend}{norm}", loss, val_loss=loss + 1, settings=own)
    run(tmp_path / "x", 5.0, settings=SAGE | {"model.qk_norm": True, "steps": 7})  # has no baseline
    rows = compared(capsys, tmp_path)
    assert rows["run"][2:6] == ["training loss", "difference", "validation loss", "difference"]
    names = [
        f"attention={backend} model.qk_norm={norm} steps=8 hardware.micro_batch={len(backend)}"
        for norm in ("false", "true")
        for backend in ("fpa", "sagebwd")
    ]
    assert [*rows][1:5] == names
    assert [row[3] for row in rows.values()][1:] == ["", "+0.1250", "", "+0.2500", ""]
    ((_, baselines),) = pictures
    assert baselines == {names[1]: names[0], names[3]: names[2]}


def test_losses_are_subtracted_and_averaged_at_the_last_step_that_all_have(tmp_path, capsys):
    """Before step 19 a loss is higher by one."""
    for seed, steps in ((1, 30), (2, 20)):
        run(tmp_path / f"fpa{seed}", 3.0, steps, settings=FPA | {"seed": seed})
    run(tmp_path / "sagebwd", 3.5, 12, settings=SAGE | {"seed": 1})
    rows = compared(capsys, tmp_path)
    assert rows["attention=sagebwd seed=1"][:4] == ["12", "1,200", "4.5000", "+0.5000 (step 12)"]
    assert rows["attention=fpa: mean ± std of 2 seeds"][2] == "3.0000 ± 0.0000 (step 20)"


@pytest.mark.parametrize(
    ("other", "per_step", "told"),
    [
        ({"data.path": "b.txt"}, 100, "data"),
        ({"context": 128, "eval_sequences": 8}, 200, "context, tokens per step, eval_sequences"),
        ({"optimizer.lr": 2}, 100, None),
    ],
)
def test_a_baseline_that_trained_on_something_else_is_named(tmp_path, capsys, other, per_step, told):
    own = {"context": 64, "eval_sequences": 16, "optimizer.lr": 1}
    run(tmp_path / "a", 3.0, settings=FPA | own | {"data.path": "a.txt"})
    run(tmp_path / "b", 3.5, per_step=per_step, settings=FPA | own | {"data.path": "a.txt"} | other)
    compare.main([str(tmp_path), "--baseline", str(tmp_path / "a")])
    line = next((one for one in capsys.readouterr().out.splitlines() if "not like for like" in one), None)
    assert told is None if line is None else line.endswith(f" have different {told}")


def test_a_text_is_known_by_its_tokens_wherever_it_lies(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scripts.runs.fingerprint", lambda directory: directory.path.name[:3])
    for name, own in {"one-a": FPA, "one-b": SAGE, "two-c": SAGE}.items():
        run(tmp_path / name, 3.0, settings=own | {"data.path": name[-1]})
    assert [row[3] for row in compared(capsys, tmp_path).values()][1:] == ["", "+0.0000", ""]
    for seed, name in enumerate(("one-a", "two-b")):
        run(tmp_path / "seeds" / name, 3.0, settings=FPA | {"seed": seed})
    assert "seed=0 text=one" in (rows := " ".join(compared(capsys, tmp_path / "seeds")))
    assert "mean" not in rows


def test_seeds_stand_together_and_differences_are_of_seeds_that_both_have(tmp_path, capsys):
    run(tmp_path / "1", 3.0, val_loss=4.0, settings=FPA | {"seed": 1})
    run(tmp_path / "2", 5.0, settings=SAGE | {"seed": 1})
    run(tmp_path / "3", 3.2, val_loss=4.2, settings=FPA | {"seed": 2})
    rows = compared(capsys, tmp_path)
    first, second, mean, sage = [*rows][1:]
    assert (first, second, sage) == tuple(
        f"attention={it}" for it in ("fpa seed=1", "fpa seed=2", "sagebwd seed=1")
    )
    assert rows[mean] == ["", "", "3.1000 ± 0.1414", "", "4.1000 ± 0.1414", "", ""]
    assert rows[sage][3] == "+2.0000"


def test_named_validation_sets_have_columns(tmp_path, capsys):
    losses = {1: (2.0, 5.0), 2: (2.5, 6.0)}
    for backend, shift in (("fpa", 0.0), ("sagebwd", 0.25)):
        for seed, (wiki, code) in losses.items():
            last = {"val_loss": 4.0, "val_loss/wiki": wiki + shift, "val_loss/code": code + 2 * shift}
            own = {"attention.backend": backend, "seed": seed}
            run(tmp_path / f"{backend}{seed}", 3.0 + shift, settings=own, **last)
    rows = compared(capsys, tmp_path)
    assert rows["run"][4:10:2] == ["validation loss", "val_loss/wiki", "val_loss/code"]
    found = rows["attention=sagebwd seed=2"]
    assert (found[6:8], found[8:10]) == (["2.7500", "+0.2500"], ["6.5000", "+0.5000"])
    assert rows["attention=fpa: mean ± std of 2 seeds"][6:10:2] == ["2.2500 ± 0.3536", "5.5000 ± 0.7071"]


def test_names_that_are_no_text_neither_stop_a_comparison_nor_reach_the_terminal(tmp_path, capfdbinary):
    names = [b"a\x1b[2J", b"b\xff", b"c\n", "d\u202e".encode(), "é $\\x$".encode()]
    for name in names:
        run(tmp_path / os.fsdecode(name), 3.0, **{"val_loss/\x1b\ud800$\\x$": 2.0})
    for value in ("b\x1b", "c\x1b"):
        run(tmp_path / value[0] / "own", 3.0, settings=FPA | {"a\x1b": value})
    compare.main([str(tmp_path), "--out", str(tmp_path / "out.png")])
    out = capfdbinary.readouterr().out
    for shown in (
        rb"a\x1b=b\x1b",
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


def test_differences_have_intervals_where_seeds_tell_the_noise(tmp_path, capsys):
    """Two seeds each: least squares is the paired difference, its interval Student's with one degree."""
    for name, losses in {"fpa": (3.5, 3.7), "sagebwd": (3.0, 3.1)}.items():
        for seed, loss in enumerate(losses, start=1):
            own = {"attention.backend": name, "seed": seed}
            run(tmp_path / f"{name}{seed}", loss, val_loss=loss + 1, settings=own)
    paired = np.array([-0.5, -0.6])
    width = 12.706 * paired.std(ddof=1) / np.sqrt(2)
    for given in (
        [],
        ["--baseline", "attention=fpa"],
        ["--baseline", "fpa2"],
        ["--baseline", tmp_path / "fpa1"],
    ):
        rows = compared(capsys, tmp_path, *given)
        assert rows["attention=sagebwd: mean ± std of 2 seeds"][3:6:2] == [f"-0.5500 ± {width:.4f}"] * 2
        assert rows["attention=sagebwd seed=1"][3] == "-0.5000"
    rows = compared(capsys, tmp_path, "--baseline", "attention=sagebwd seed=1")
    assert [*rows][1] == "attention=sagebwd seed=1"  # the group that the others are compared with comes first
    assert rows["attention=fpa: mean ± std of 2 seeds"][3] == f"+0.5500 ± {width:.4f}"


def test_committed_results_are_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "RESULTS", tmp_path / "results")
    committed = [tmp_path / "results/runs/quickstart" / name for name in ("fpa", "sagebwd")]
    assert compare.default_out(committed) == Path("runs/comparison.png")
    assert compare.default_out([tmp_path / "mine" / "fpa"]) == tmp_path / "mine" / "comparison.png"
    apart = [tmp_path / "a" / "fpa", tmp_path / "b" / "fpa"]
    assert compare.default_out(apart) == Path("runs/comparison.png")
    assert compare.default_out([Path("runs/fpa"), Path("runs/sagebwd")]) == Path("runs/comparison.png")


def test_a_run_that_diverged_has_no_final_loss_and_counts_in_no_mean(tmp_path, capsys):
    for seed in (1, 2):
        run(tmp_path / str(seed), 3.0, val_loss=3.5, settings=FPA | {"seed": seed})
    RunDirectory(tmp_path / "2").note_divergence(21)
    rows = compared(capsys, tmp_path)
    assert rows["seed=1"][2:4] == ["3.0000", "3.5000"]
    assert rows["seed=2"][2:4] == ["DIVERGED at step 21", ""]
    assert rows["all seeds: mean ± std of 2 seeds"][2:4] == ["", ""]


def test_runs_are_found_and_labelled_once_each(tmp_path):
    deep = [
        run(tmp_path / sweep / name, 3.0) for sweep in ("one", "two") for name in ("fpa+seed-1", "x+seed-1")
    ]
    (deep[0] / "checkpoints").mkdir()
    (deep[0] / "checkpoints" / "metrics.jsonl").write_text("")
    (tmp_path / "one" / "again").symlink_to(tmp_path)
    assert find_runs([tmp_path, tmp_path / "one"]) == deep
    assert places(deep) == ["one/fpa+seed-1", "one/x+seed-1", "two/fpa+seed-1", "two/x+seed-1"]


def test_the_picture_goes_next_to_the_runs_or_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.undo()
    runs = run(tmp_path / "runs" / "fpa", 3.0).parent
    for options, place in (
        ([], runs / "comparison.png"),
        (["--out", str(tmp_path / "new" / "x.png")], tmp_path / "new" / "x.png"),
        (["--out", str(tmp_path / "folder")], tmp_path / "folder" / "comparison.png"),
    ):
        compare.main([str(runs), *options])
        assert place.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("damage", "options", "told"),
    [
        ("config.yaml", (), r"fpa/config\.yaml is damaged .*or leave this run out"),
        ("metrics.jsonl", (), r"fpa is finished, but metrics\.jsonl is .*or leave this run out"),
        ("DONE", (), "DONE cannot be read"),
        (None, ("--baseline", "gone"), "--baseline gone is none of the runs; .* one of "),
        (None, ("--out", "x.docx"), r"x\.docx is no picture: end it in \.png, \.pdf, \.svg"),
        (None, ("nowhere",), "nowhere holds no run: there is no metrics.jsonl"),
        (None, ("--out", "{runs}/fpa/config.yaml/x.png"), "cannot write .*x.png: .*--out"),
    ],
)
def test_what_cannot_be_compared_is_told(tmp_path, capsys, monkeypatch, damage, options, told):
    monkeypatch.undo()
    folder = run(tmp_path / "fpa", 3.0, settings=FPA)
    run(tmp_path / "sagebwd", 3.0, settings=SAGE)
    RunDirectory(folder).finish()
    if damage:
        (folder / damage).write_text("{damaged: [")
    with pytest.raises(SystemExit) as stop:
        compare.main([str(tmp_path), *(option.replace("{runs}", str(tmp_path)) for option in options)])
    assert re.search(told, f"{stop.value} {capsys.readouterr().err}")
