"""scripts.reproduce: its command line, the runs it asks for, and items from one end to the other."""

import argparse
import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from common.errors import Interrupted
from scripts import reproduce
from scripts.output import read_json
from scripts.paper.experiments import COMMON, SCALES, find, items, read_yaml
from tests.cli import ROOT, assert_takes
from tests.processes import wait_until
from trainer.checks import check
from trainer.processes import FAILED, FINISHED, Outcome
from trainer.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def arguments(*argv):
    return reproduce.parse_arguments(list(argv))


# --- What is asked for --------------------------------------------------------------------------------------


def test_every_run_can_be_planned(compose_settings, monkeypatch):
    """Each setup and each variant in one run at least: settings exist, tokens per step come out exactly."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    runs = {run.name: run for item in items().values() for s in SCALES for run in item.runs[s]}
    assert all(f"seed={name.rpartition('-seed')[2]}" in run.overrides for name, run in runs.items())
    by_setup, plans = {}, {}
    for name, run in runs.items():
        setup, variant = name.rpartition("-seed")[0].split("/")
        by_setup.setdefault(setup, {})[variant] = run
    variants = read_yaml(COMMON)["variants"]
    left = {*variants}
    for setup, own in by_setup.items():
        variant = min(left & own.keys() or own)
        left.discard(variant)
        run = own[variant]
        trunk = runs[run.branches_from].overrides if run.branches_from else ()
        settings = compose_settings(*trunk, *run.overrides)
        settings.init_from = None  # there is no trained model here
        plans[setup] = settings, check(settings, ranks=run.gpus)
    for variant in left:
        compose_settings("experiment=debug", *variants[variant])
    tokens = {setup: plan.steps * plan.tokens_per_step for setup, (_, plan) in plans.items()}
    assert tokens["325m-2.1m"] == tokens["325m-260k"] == 78_643_200_000
    assert tokens["35m-131k"] == tokens["35m-16k"] == 50_069_504
    assert tokens["35m-2.1m"] == 755 * 2_097_152
    large, small = plans["35m-131k"], plans["35m-16k"]
    assert large[1].tokens_per_step == 8 * small[1].tokens_per_step
    warm_up = [settings.tps.warmup_steps * plan.tokens_per_step for settings, plan in (large, small)]
    assert warm_up[0] == warm_up[1]
    assert large[0].optimizer == small[0].optimizer
    tuning = plans["finetune-325m"][0]
    assert (tuning.steps, tuning.tps.warmup_steps, tuning.optimizer.schedule) == (700, 100, "linear")


@pytest.mark.parametrize("scale", SCALES)
def test_every_command_is_one_that_its_script_takes(scale):
    for text in {text for item in items().values() for text in item.commands[scale]}:
        asked = argparse.Namespace(results="r")
        _, _, module, *words = reproduce.measure_command(text, [Path("runs/NAME")], asked)
        assert_takes(module, words)
        assert words[words.index("--out") + 1].startswith("r/")


def test_fine_tuning_and_branches_follow_the_runs_they_start_from():
    asked = arguments("finetune", "--runs-dir", "r", "--", "data=parquet", "data.path=x", "data.root=t")
    item = find("finetune")
    first, then = reproduce.stages(item.runs["scaled"])
    base = reproduce.train_command(first[0], asked)
    assert base[-3:] == ["data=parquet", "data.path=x", "data.root=t"]
    tuned = reproduce.train_command(then[0], asked)
    assert f"init_from=r/{first[0].name}/weights" in tuned
    assert [text for text in tuned if text.startswith("data")] == ["data.root=t"]
    assert first[0] not in item.compared("scaled")

    trunks, branches = reproduce.stages(find("branches").runs["scaled"])
    for branch in branches:
        words = reproduce.train_command(branch, asked)
        (own,), (trunk,) = ([x for x in words if x.startswith(key)] for key in ("run_dir=", "branch_from="))
        assert trunk.removeprefix("branch_from=r/") in {x.name for x in trunks}
        assert ("gain1" in own, own[-1]) == ("gain1" in trunk, trunk[-1])  # its logits and its seed
        assert [text for text in words if text.startswith("data")] == ["data.root=t"]
    assert find("branches").compared("scaled") == branches


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name what to reproduce, or --all"),
        (["figure9"], "there is no item 'figure9'; choose among table1, figure1a"),
        (["table1", "--all"], "name what to reproduce, or --all"),
        (["table1", "--", "fast"], "'fast' after --"),
        (["table1", "--write-results", "--scale", "debug"], "--write-results: the debug scale"),
        (["table1", "--results", "./runs/../results"], "use --write-results"),
        (["table1", "--", "run_dir=x"], "run_dir=x after --"),
        (["table1", "--", "foo=3"], "there is no setting 'foo'"),
    ],
)
def test_bad_command_lines_are_refused_before_anything_runs(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        arguments(*argv)
    assert message in capsys.readouterr().err + str(stop.value)


def test_the_committed_results_are_touched_on_request_alone(capsys):
    assert arguments("table1", "--runs-dir", "r").results == Path("r/results")
    assert arguments("table1", "--scale", "debug").results == Path("runs/reproduce/debug-results")
    assert arguments("table1", "--write-results").results == Path("results")
    reproduce.main(["table1", "--dry-run"])
    first, *_, command = capsys.readouterr().out.splitlines()
    assert first.startswith("results go to runs/reproduce/results/; --write-results")
    assert command.endswith("scripts.paper.table1 --out runs/reproduce/results/accuracy/table1.json")


def test_all_means_what_is_not_there_yet(tmp_path):
    for name in ("accuracy/table1.json", "losses/figure1a.json.gz"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    names = [item.name for item in arguments("--all", "--results", str(tmp_path)).items]
    assert names == [name for name in items() if name not in ("table1", "figure1a")]


# --- From one end to the other ------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch, train_here):
    """Training and measuring in this process: what other processes would do, without their start-up."""
    trained = []

    def run_all(jobs, *, gpus, limit, on_end):
        for job in jobs:
            words = dict(text.split("=", 1) for text in job.command[2:])
            run_dir = Path(words.pop("run_dir"))
            words.pop("experiment")
            train_here(run_dir, *(f"{name}={value}" for name, value in words.items()))
            line = {"command": job.command[1:], "device": "CPU", "torch": "2", "commit": None}
            (run_dir / "environment.jsonl").write_text(json.dumps(line) + "\n")
            trained.append(job.name)
            on_end(job, Outcome(FINISHED))

    def run_here(line, gpu):
        import_module(line[2]).main(line[3:])
        return 0

    monkeypatch.setattr(reproduce, "run_all", run_all)
    monkeypatch.setattr(reproduce, "run_here", run_here)
    return trained


def only(monkeypatch, name, *variants):
    """Of an item, its runs of these variants."""
    item = find(name)
    runs = {
        scale: tuple(r for r in own if r.name.split("/")[1] in variants) for scale, own in item.runs.items()
    }
    monkeypatch.setattr(reproduce, "find", {name: replace(item, runs=runs)}.__getitem__)


def test_a_training_item_resumes_and_refuses_other_settings(here, tmp_path, datasets, monkeypatch, capfd):
    only(monkeypatch, "figure1b", "fpa-seed1", "sagebwd-seed1")
    command = ["figure1b", "--scale", "debug", "--runs-dir", str(tmp_path)]
    command += ["--", f"data.root={datasets}", "steps=3"]
    reproduce.main(command)
    assert here == ["debug-256/fpa-seed1", "debug-256/sagebwd-seed1"]
    results = tmp_path / "debug-results"
    runs = read_json(results / "losses/figure1b.json")["runs"]
    assert [run["variant"] for run in runs] == ["full precision", "SageBwd"]
    assert len({run["group"]["text"] for run in runs}) == 1
    assert len(runs[0]["group"]["text"]) == 64  # the fingerprint
    assert (results / "losses/figure1b.png").exists()

    shutil.rmtree(results)
    reproduce.main(command)
    assert here[2:] == []  # both are finished
    assert (results / "losses/figure1b.json.gz").exists()
    shutil.rmtree(results)
    with pytest.raises(SystemExit, match="failed: figure1b"):
        reproduce.main([*command, "optimizer.lr=1"])
    assert not results.exists()  # runs with other settings are not measured as if they had these
    assert "finished, but with other settings: optimizer.lr=1 on one side only" in capfd.readouterr().err


def test_of_weights_only_finished_runs_are_measured(here, tmp_path, datasets, monkeypatch, capsys):
    only(monkeypatch, "gradient_bias", "fpa-seed1", "fpa-no_qk_norm-seed1")
    command = ["gradient_bias", "--scale", "debug", "--runs-dir", str(tmp_path)]
    given = ["--", f"data.root={datasets}", "steps=3"]
    lost = find("gradient_bias").runs["debug"][1]
    diverged = RunDirectory(tmp_path / lost.name)
    diverged.path.mkdir(parents=True)
    diverged.metrics.touch()
    diverged.note_divergence(1)
    line = {"command": reproduce.train_command(lost, arguments(*command, *given))}
    (diverged.path / "environment.jsonl").write_text(json.dumps(line) + "\n")
    reproduce.main([*command, *given])
    assert here == ["debug-2k/fpa-seed1"]
    assert "has no finished weights" in capsys.readouterr().err
    rows = read_json(tmp_path / "debug-results/accuracy/gradient_bias.json")["rows"]
    assert {row["setting"] for row in rows} >= {"paper", "only_o"}


# --- GPUs and stops -----------------------------------------------------------------------------------------


def test_runs_share_gpus_as_asked(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(reproduce, "run_all", lambda jobs, **options: asked.append((jobs, options)))
    given = arguments("figure1b", "--gpus", "5,7", "--per-gpu", "2", "--runs-dir", str(tmp_path))
    assert reproduce.train(find("figure1b").runs["debug"], given)
    [(jobs, options)] = asked
    assert (options["gpus"], options["limit"]) == (["5", "7", "5", "7"], 4)
    assert {job.gpus for job in jobs} == {1}
    assert {reproduce.job(run, given).gpus for run in find("figure1a_325m").runs["scaled"]} == {4}


def test_a_failed_run_is_shown_and_a_diverged_one_has_come_to_its_end(monkeypatch, tmp_path, capsys):
    given = arguments("figure1b", "--runs-dir", str(tmp_path))
    first, second = find("figure1b").runs["debug"][:2]
    diverged = RunDirectory(tmp_path / first.name)
    diverged.path.mkdir(parents=True)
    own = reproduce.job(first, given)
    assert not own.ended_well(1)
    diverged.note_divergence(3)
    assert own.ended_well(1)

    def fail(jobs, on_end, **options):
        assert [job.name for job in jobs] == [second.name]
        on_end(jobs[0], Outcome(FAILED, "out of memory"))

    monkeypatch.setattr(reproduce, "run_all", fail)
    assert not reproduce.train([first, second], given)
    assert "    out of memory" in capsys.readouterr().err


def test_a_stop_ends_the_command_that_measures(tmp_path):
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    script = f'trap "touch {saved}; exit 1" INT; touch {ready}; while true; do sleep 0.05; done'

    def stop():
        wait_until(ready.exists, 20)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        reproduce.run_here(["sh", "-c", script], None)
    assert saved.exists()
