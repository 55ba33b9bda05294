"""scripts.reproduce: its command line, the runs it asks for, and items from one end to the other."""

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts import reproduce
from scripts.paper import experiment_runs, experiments, further_runs
from scripts.paper.experiment_runs import SCALES, runs_of
from scripts.paper.experiments import ITEMS, Item, find
from scripts.paper.result_files import read_json
from tests.cli import ROOT
from trainer.checks import check
from trainer.run_directory import RunDirectory

SETUPS = (
    experiment_runs.FULL_LARGE,
    experiment_runs.FULL_SMALL,
    experiment_runs.LARGE,
    experiment_runs.BEGINNING,
    experiment_runs.STEEP,
    experiment_runs.BIAS,
    experiment_runs.SMALL,
    experiment_runs.SHORT,
    experiment_runs.DEBUG_LARGE,
    experiment_runs.DEBUG_SMALL,
    experiment_runs.FINE_TUNE_FULL,
    further_runs.RATE,
    further_runs.EQUAL_LARGE,
    further_runs.EQUAL_SMALL,
    further_runs.LONG_LARGE,
    further_runs.LONG_SMALL,
)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


# --- What is asked for --------------------------------------------------------------------------------------


def plan_of(compose_settings, *overrides):
    settings = compose_settings(*overrides)
    settings.init_from = None  # there is no trained model here
    return settings, check(settings, ranks=1)


def test_every_setup_is_a_run_of_the_tokens_it_says(compose_settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plans = {}
    for setup in SETUPS:
        overrides = experiment_runs.milestone_overrides(setup, "sagebwd", setup.seeds[0])
        settings, plan = plan_of(compose_settings, *setup.overrides, *overrides, "init_from=x")
        assert plan.steps * plan.tokens_per_step == setup.tokens, setup.name
        plans[setup.name] = settings, plan
    large, small = plans["35m-131k"], plans["35m-16k"]
    assert large[1].tokens_per_step == 8 * small[1].tokens_per_step == 131_072
    warm_up = [settings.tps.warmup_steps * plan.tokens_per_step for settings, plan in (large, small)]
    assert warm_up[0] == warm_up[1]
    assert large[0].optimizer == small[0].optimizer
    long = [plans[name] for name in ("35m-131k-long", "35m-16k-long")]
    assert [plan.steps for _, plan in long] == [7_630, 61_040]
    assert len({settings.tps.warmup_steps * plan.tokens_per_step for settings, plan in long}) == 1
    tuning = plans["finetune-325m"][0]
    assert (tuning.steps, tuning.tps.warmup_steps, tuning.optimizer.schedule) == (700, 100, "linear")
    assert (tuning.optimizer.lr, tuning.optimizer.min_lr_ratio, tuning.data.source) == (3e-5, 0, "stdlib")


def test_runs_of_one_name_are_the_same_run_in_every_item():
    runs = {run for scale in SCALES for item in ITEMS for run in item.runs(scale)}
    assert len({run.name for run in runs}) == len(runs)


def test_the_grid_has_every_seed_and_variant():
    runs = find("figure1a").runs("scaled")
    assert len(runs) == 24  # six variants, two seeds, two learning rates
    assert runs[0].name == "35m-131k/fpa-seed1"
    assert {run.overrides[-1] for run in runs} == {"seed=1", "seed=2"}
    assert [run.name for run in find("layers").runs("scaled")].count("35m-131k/sagebwd-seed1") == 1


def test_only_the_runs_that_are_traced_keep_milestones():
    """They are large. Each has two or more before its end."""
    for scale in SCALES:
        traced = {run for name in ("gradient_error", "gradient_formats") for run in find(name).runs(scale)}
        if scale == "scaled":
            traced |= set(find("gradient_bias").runs(scale))
        traced |= set(find("equal_loss").runs(scale))
        runs = {run for item in ITEMS for run in item.runs(scale)}
        assert {run for run in runs if "milestone_every" in str(run.overrides)} == traced
        assert {"no_qk_norm" in run.name for run in traced} == {True, False}
    for setup in (experiment_runs.FULL_LARGE, experiment_runs.LARGE, experiment_runs.SHORT):
        tokens_per_step = {"325m-2.1m": 2**21, "35m-131k": 2**17, "325m-260k-short": 2**18}[setup.name]
        assert setup.tokens / tokens_per_step / setup.milestone_every > 2


def arguments(*argv):
    return reproduce.parse_arguments(list(argv))


def test_fine_tuning_follows_its_base_and_brings_its_own_text():
    asked = arguments("finetune", "--runs-dir", "r", "--", "data=parquet", "data.path=x", "data.root=t")
    first, then = find("finetune").stages["scaled"]
    base = reproduce.train_command(first[0], asked)
    assert base[-3:] == ["data=parquet", "data.path=x", "data.root=t"]
    tuned = reproduce.train_command(then[0], asked)
    assert f"init_from=r/{first[0].name}/weights" in tuned
    assert f"run_dir=r/{then[0].name}" in tuned
    assert [text for text in tuned if text.startswith("data")] == ["data.root=t"]
    assert then[0].name not in {run.name for run in first}
    assert first[0] not in reproduce.compared(find("finetune"), "scaled")


def test_a_folder_with_an_awkward_name_reaches_train_py_as_it_is():
    asked = arguments("finetune", "--runs-dir", "it's a run, seed=1")
    first, then = find("finetune").stages["scaled"]
    given = {
        one.key_or_group: one.value()
        for one in OverridesParser.create().parse_overrides(reproduce.train_command(then[0], asked)[2:])
    }
    assert given["run_dir"] == f"it's a run, seed=1/{then[0].name}"
    assert given["init_from"] == f"it's a run, seed=1/{first[0].name}/weights"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name what to reproduce, or --all"),
        (["figure9"], "there is no item 'figure9'; choose among table1, figure1a"),
        (["table1", "--all"], "name what to reproduce, or --all"),
        (["table1", "--per-gpu", "0"], "--per-gpu 0: at least one run"),
        (["table1", "--", "fast"], "'fast' after -- is not an override of train.py"),
        (
            ["table1", "--write-results", "--scale", "debug"],
            "--write-results: the debug scale measures nothing",
        ),
        (["table1", "--write-results", "--results", "x"], "leave out --results x"),
        (["table1", "--results", "results"], "--results results: use --write-results to replace"),
        (["table1", "--results", "./runs/../results"], "use --write-results to replace"),
        (["table1", "--", "run_dir=x"], "run_dir=x after --: each run has its own"),
    ],
)
def test_bad_command_lines_are_refused_before_anything_runs(argv, message, capsys):
    with pytest.raises(SystemExit):
        arguments(*argv)
    assert message in capsys.readouterr().err


def test_list_shows_every_item_with_its_cost(capsys):
    reproduce.main(["--list"])
    shown = capsys.readouterr().out.splitlines()
    for item in ITEMS:
        line = next(line for line in shown if line.startswith(f"{item.name} "))
        assert experiments.duration_in_words(item.cost("full")) in line
    assert experiments.duration_in_words(89) == "89 min"
    assert experiments.duration_in_words(5 * 60 * 24) == "120 h"


def test_further_names_lead_to_their_item():
    assert find("table2") is find("rms") is find("figure5") is find("layers")


# --- Where results go ---------------------------------------------------------------------------------------


def test_the_committed_results_are_touched_on_request_alone():
    assert arguments("table1").results == Path("runs/reproduce/results")
    assert arguments("table1", "--runs-dir", "r").results == Path("r/results")
    assert arguments("table1", "--scale", "debug").results == Path("runs/reproduce/debug-results")
    assert arguments("table1", "--results", "elsewhere").results == Path("elsewhere")
    assert arguments("table1", "--write-results").results == Path("results")


def test_it_says_where_results_go(capsys):
    reproduce.main(["table1", "--dry-run"])
    first, *_, command = capsys.readouterr().out.splitlines()
    assert first == (
        "results go to runs/reproduce/results/; --write-results replaces the committed ones in results/"
    )
    assert command.endswith("scripts.paper.table1 --out runs/reproduce/results/table1.json")
    reproduce.main(["table1", "--dry-run", "--write-results"])
    first, *_, command = capsys.readouterr().out.splitlines()
    assert (first, command.split()[-1]) == ("results go to results/", "results/table1.json")


@pytest.mark.parametrize(
    "module",
    [
        "accuracy",
        "causal_leak",
        "error_against_time",
        "gradient_bias",
        "gradient_error",
        "gradient_formats",
        "layers",
        "table1",
    ],
)
def test_no_command_writes_to_results_by_default(module, monkeypatch):
    of_runs = {"layers": ["runs/NAME"], "gradient_bias": ["runs/NAME"]}
    required = ({"gradient_error": ["--sigmas", "1"]} | of_runs).get(module, [])
    found = import_module(f"scripts.paper.{module}").parse_arguments(required)
    assert Path(found.out).is_relative_to("runs/paper")


def test_what_was_done_elsewhere_is_not_done_in_results():
    item = find("table1")
    assert reproduce.marker(arguments("table1"), item) != reproduce.marker(
        arguments("table1", "--write-results"), item
    )


# --- From one end to the other ------------------------------------------------------------------------------


def only(monkeypatch, *items):
    monkeypatch.setattr(reproduce, "ITEMS", items)
    monkeypatch.setattr(reproduce, "find", {item.name: item for item in items}.__getitem__)


@pytest.fixture
def here(monkeypatch, train_here):
    """Training and measuring in this process: what other processes would do, without their start-up."""
    trained = []

    def run_jobs(jobs, gpus, per_gpu, on_success):
        for job in jobs:
            run_dir = next(
                text.removeprefix("run_dir=") for text in job.command if text.startswith("run_dir=")
            )
            train_here(Path(run_dir), *(text for text in job.command[2:] if text != "experiment=debug"))
            line = {"command": job.command[1:], "device": "CPU", "torch": "2", "commit": None}
            (Path(run_dir) / "environment.jsonl").write_text(json.dumps(line) + "\n")
            trained.append(job.name)
            on_success(job)
        return {}

    def run_here(line, gpu):
        assert line[1] == "-m"
        import_module(line[2]).main(line[3:])
        return 0

    monkeypatch.setattr(reproduce, "run_jobs", run_jobs)
    monkeypatch.setattr(reproduce, "run_here", run_here)
    return trained


def test_table1(here, tmp_path, monkeypatch, capfd):
    command = find("table1").commands["scaled"][0]
    small = ("--tokens", "40", "--head-dim", "16", "--heads", "2")
    only(monkeypatch, Item("table1", "T", "table1.json", {"scaled": ((*command, *small),)}))
    paths = ["--results", str(tmp_path / "results"), "--runs-dir", str(tmp_path / "runs")]
    reproduce.main(["table1", *paths])
    assert sorted(file.name for file in (tmp_path / "results").iterdir()) == [
        "README.md",
        "table1.json",
        "table1.png",
        "tables",
    ]
    assert "N 40, D 16, causal, 2 heads" in (tmp_path / "results" / "tables" / "table1.md").read_text()
    reproduce.main(["--all", *paths])
    assert "table1: done before" in capfd.readouterr().out


def test_a_training_item_resumes_and_reports(here, tmp_path, datasets, monkeypatch, capfd):
    runs = runs_of(
        experiment_runs.DEBUG_SMALL, {"fpa": ("attention=fpa",), "sagebwd": ("attention=sagebwd",)}
    )
    stages = {"debug": (runs,)}
    item = Item("figure1b", "F", "figure1b.json", experiments.curves("figure1b"), stages=stages)
    only(monkeypatch, item)
    command = [
        "figure1b",
        "--scale",
        "debug",
        "--runs-dir",
        str(tmp_path),
        "--",
        f"data.root={datasets}",
        "steps=3",
    ]
    reproduce.main(command)
    assert here == ["debug-256/fpa-seed1", "debug-256/sagebwd-seed1"]
    results = tmp_path / "debug-results"
    runs = read_json(results / "figure1b.json")["runs"]
    assert [run["variant"] for run in runs] == ["full precision", "SageBwd"]
    assert (results / "figure1b.png").exists()
    assert "| open |" in (results / "README.md").read_text()

    shutil.rmtree(results)
    reproduce.main(command)
    assert here[2:] == []  # both are finished
    assert (results / "figure1b.json.gz").exists()
    for file in results.glob("figure1b.*"):
        file.unlink()
    with pytest.raises(SystemExit, match="failed: figure1b; when that is fixed, the same command"):
        reproduce.main([*command, "optimizer.lr=1"])
    assert not [*results.glob("figure1b.*")]  # runs with other settings are not measured as if they had these
    with pytest.raises(SystemExit, match="there is no setting 'foo'"):
        reproduce.main([*command, "foo=3"])
    assert "finished, but with other settings: optimizer.lr=1 on one side only" in capfd.readouterr().err


def test_traces_are_written_and_then_read(here, tmp_path, datasets, monkeypatch, capsys):
    """Of two runs the one that has diverged leaves no weights, and is left out."""
    variants = {"sagebwd": ("attention=sagebwd",), "diverged": ("attention=sagebwd", "optimizer.lr=9")}
    runs = runs_of(experiment_runs.DEBUG_LARGE, variants)
    only(monkeypatch, replace(find("gradient_formats"), stages={"debug": (runs,)}))
    command = ["gradient_formats", "--scale", "debug", "--runs-dir", str(tmp_path)]
    given = ["--", f"data.root={datasets}", "steps=3", "checkpoint_every=2", "milestone_every=2"]
    diverged = RunDirectory(tmp_path / runs[1].name)
    diverged.path.mkdir(parents=True)
    diverged.metrics.touch()
    diverged.note_divergence(1)
    line = {"command": reproduce.train_command(runs[1], arguments(*command, *given))}
    (diverged.path / "environment.jsonl").write_text(json.dumps(line) + "\n")
    reproduce.main([*command, *given])
    assert here == ["debug-2k/sagebwd-seed1"]
    traces = tmp_path / "debug-2k" / "sagebwd-seed1" / "traces"
    assert [file.name for file in sorted(traces.iterdir())] == [
        "step_00000002.safetensors",
        "step_00000003.safetensors",
    ]
    result = read_json(tmp_path / "debug-results" / "gradient_formats.json")
    assert list(result["sources"]) == ["sagebwd-seed1, step 2", "sagebwd-seed1, step 3"]
    assert (
        "| sagebwd-seed1, step 3 | block |"
        in (tmp_path / "debug-results" / "tables" / "gradient_formats.md").read_text()
    )
    assert "diverged-seed1 is left out, it has no finished weights" in capsys.readouterr().err

    reproduce.main([*command, "--dry-run"])
    trace, read = capsys.readouterr().out.splitlines()[-2:]
    assert "--traces --milestones --only-traces --trace-heads 0 1" in trace
    assert f"scripts.paper.gradient_formats {traces} " in read


def test_the_bias_of_gradients_is_measured_and_reported(here, tmp_path, datasets, monkeypatch):
    item = find("gradient_bias")
    runs = item.stages["debug"][0][:1]
    only(monkeypatch, replace(item, stages={"debug": (runs,)}))
    command = ["gradient_bias", "--scale", "debug", "--runs-dir", str(tmp_path)]
    reproduce.main([*command, "--", f"data.root={datasets}", "steps=3"])
    assert here == ["debug-2k/fpa-seed1"]
    results = tmp_path / "debug-results"
    assert {row["setting"] for row in read_json(results / "gradient_bias.json")["rows"]} >= {
        "paper",
        "only_o",
    }
    assert "With QK-norm, end of the run" in (results / "tables" / "gradient_bias.md").read_text()
    assert "[gradient_bias](tables/gradient_bias.md)" in (results / "README.md").read_text()


def test_what_diverged_at_half_the_rate_is_not_trained_and_runs_lose_their_weights(
    here, tmp_path, datasets, monkeypatch, capsys
):
    """Of two variants one diverged at the lowest rate: the higher ones follow from that."""
    grid = {"fpa": ("attention=fpa",), "fpa-no_qk_norm": ("attention=fpa", "model.qk_norm=false")}
    monkeypatch.setattr(further_runs, "RATE_GRID", grid)
    setup = replace(experiment_runs.DEBUG_SMALL, name="rates")
    stages = further_runs.rate_stages(setup, (1e-3, 2e-3, 4e-3))
    assert stages[0][0].unless_diverged == ()
    assert stages[2][1].unless_diverged == ("rates/lr0.002/fpa-no_qk_norm-seed1",)
    only(monkeypatch, replace(find("learning_rate"), stages={"debug": stages}))
    command = ["learning_rate", "--scale", "debug", "--runs-dir", str(tmp_path)]
    given = ["--", f"data.root={datasets}", "steps=3"]
    diverged = RunDirectory(tmp_path / "rates/lr0.001/fpa-no_qk_norm-seed1")
    diverged.path.mkdir(parents=True)
    diverged.metrics.write_text('{"step": 1, "tokens": 256, "loss": 3.0}\n')
    diverged.config.write_text("")
    diverged.note_divergence(1)
    line = {"command": reproduce.train_command(stages[0][1], arguments(*command, *given))}
    (diverged.path / "environment.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(reproduce, "run_here", lambda line, gpu: 0)
    reproduce.main([*command, *given])
    assert here == [f"rates/lr{rate}/fpa-seed1" for rate in ("0.001", "0.002", "0.004")]
    assert capsys.readouterr().out.count("not trained, it diverged at half the learning rate") == 2
    for rate in ("0.001", "0.004"):
        run = RunDirectory(tmp_path / f"rates/lr{rate}/fpa-seed1")
        assert run.is_finished
        assert not run.checkpoints.exists()
        assert not run.weights.exists()


def test_what_is_not_part_of_the_checkout_is_said_before_training(here, tmp_path, monkeypatch, capsys):
    stages = {"debug": (runs_of(experiment_runs.DEBUG_SMALL, {"fpa": ("attention=fpa",)}),)}
    only(monkeypatch, Item("x", "X", "x.json", {"debug": (("scripts.not_there",),)}, stages=stages))
    with pytest.raises(SystemExit, match="failed: x"):
        reproduce.main(["x", "--scale", "debug", "--runs-dir", str(tmp_path), "--results", str(tmp_path)])
    assert "scripts.not_there is not part of this checkout yet" in capsys.readouterr().err
    assert here == []
