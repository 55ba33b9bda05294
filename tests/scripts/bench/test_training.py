"""scripts.bench.training: the runs that it starts, what it reads from them, and its files."""

import json
from pathlib import Path

import pytest
import torch

from scripts.bench import training as bench
from scripts.bench.training import Row
from tests.cli import run
from trainer import checks
from trainer.processes import FAILED, FINISHED, Outcome
from trainer.run_directory import RunDirectory

SHAPE = ["--model", "llama_debug", "--contexts", "32", "--tokens-per-micro-batch", "64"]
SMALL = ["--device", "cpu", *SHAPE, "--steps", "2", "--warm-up", "1"]


def overrides_of(name, *options, row=None):
    """Of the train.py command of an attention."""
    arguments = bench.parse_arguments([*SMALL, "--attention", name, *options])
    row = row or bench.rows_to_measure(arguments)[0]
    job = bench.job_of(row, Path("run"), arguments)
    return job.command[job.command.index("logger=files") :]


@pytest.mark.parametrize("name", bench.ATTENTIONS)
def test_every_attention_has_settings_that_go_together(name, compose_settings):
    settings = compose_settings(*overrides_of(name))
    assert [*checks.check_values(settings)] == []
    assert (settings.hardware.device, settings.context, settings.hardware.micro_batch) == ("cpu", 32, 2)


def test_a_run_has_the_shape_that_was_asked_for(compose_settings):
    options = ["--contexts", "256", "--tokens-per-micro-batch", "1024", "--accumulation", "3"]
    row = Row("fpa-flash", 256, 4, "fsdp")
    settings = compose_settings(*overrides_of("fpa", *options, "--set", "model.qk_norm=false", row=row))
    assert (settings.context, settings.hardware.micro_batch, settings.tps.tokens_per_step) == (256, 4, 3072)
    assert (settings.hardware.devices, settings.hardware.parallel) == (4, "fsdp")
    assert settings.model.max_context == 256  # the file has 128
    assert settings.attention.sdpa == "flash"
    assert not settings.model.qk_norm
    assert (settings.steps, settings.log_every) == (3, 1)


def test_speed_is_that_after_the_warm_up(tmp_path):
    directory = RunDirectory(tmp_path)
    records = [
        {"step": step, "loss": 5.0 - step, "tokens_per_second": speed, "mfu": 0.5, "peak_memory_gib": step}
        for step, speed in ((5, 1.0), (10, 300.0), (15, 100.0), (20, 200.0))
    ]
    records.insert(2, {"step": 10, "val_loss": 1.0})
    directory.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    row = Row("fpa", 32, 1, "none")
    bench.read(row, tmp_path, bench.parse_arguments([*SMALL, "--warm-up", "5", "--steps", "15"]))
    assert (row.tokens_per_second, row.step_ms, row.mfu, row.peak_memory_gib) == (200, 320, 0.5, 20)
    assert row.losses == {5: 0.0, 10: -5.0, 15: -10.0, 20: -15.0}


def test_rows_are_compared_with_what_differs_in_one_thing():
    def row(name, devices, parallel, speed, loss, context=32):
        return Row(name, context, devices, parallel, tokens_per_second=speed, losses={1: 5.0, 2: loss})

    rows = [
        row("fpa", 1, "none", 100.0, 4.0),
        row("sagebwd", 1, "none", 150.0, 4.0),
        row("fpa", 2, "ddp", 160.0, 4.25),
        row("sagebwd", 2, "ddp", 240.0, 4.5),
        row("sagebwd", 2, "ddp", 10.0, 4.5, context=64),
        Row("sagebwd", 32, 2, "fsdp", reason="broken"),
    ]
    bench.compare(rows)
    assert [row.speedup for row in rows] == [1, 1.5, 1, 1.5, 1, None]
    assert [row.efficiency for row in rows] == [None, None, 0.8, 0.8, None, None]
    assert [row.loss_difference for row in rows] == [None, None, 0.25, 0.5, None, None]
    assert "- sagebwd, context 32, 2 × fsdp: broken" in bench.tables(rows)


def run_all_warm(jobs, on_end, **_):
    """In processes that start sooner."""
    for job in jobs:
        is_flash = "attention.sdpa=flash" in job.command
        printed = run(job.command, code=int(is_flash))
        on_end(job, Outcome(FAILED, printed) if is_flash else Outcome(FINISHED))


def test_the_command_measures_runs_or_says_why_not(tmp_path, datasets, capsys, monkeypatch):
    """FlashAttention-2 fails on a CPU."""
    monkeypatch.setattr(bench, "run_all", run_all_warm)
    out = tmp_path / "new" / "v1.2"
    options = ["--attention", "fpa-flash", "sagebwd", "--runs-dir", str(tmp_path), "--out", str(out)]
    bench.main([*SMALL, *options, "--set", f"data.root={datasets}"])
    report = json.loads((tmp_path / "new/v1.2.json").read_text(), parse_constant=pytest.fail)
    flash, own = report["rows"]
    assert (flash["attention"], own["attention"], own["reason"]) == ("fpa-flash", "sagebwd", None)
    assert "attention.sdpa=flash cannot run on cpu" in flash["reason"]
    assert own["tokens_per_second"] == pytest.approx(64e3 / own["step_ms"])
    assert all(5 < loss < 7 for loss in own["losses"].values())  # ln(320) is 5.8
    assert report["command"].startswith("python -m scripts.bench.training --device cpu --model llama_debug ")
    assert (report["hardware"]["name"], report["versions"]["torch"]) == ("cpu", torch.__version__)
    text = (tmp_path / "new/v1.2.md").read_text()
    assert f" {own['tokens_per_second']:,.0f} " in text
    assert "- fpa-flash, context 32: " in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]  # the runs are gone
    assert "| sagebwd " in capsys.readouterr().out


def test_an_interrupt_keeps_what_is_done(monkeypatch, tmp_path):
    def run_all(jobs, on_end, **_):
        on_end(jobs[0], Outcome(FINISHED))
        return 2

    def read(row, folder, arguments):
        row.tokens_per_second, row.losses = 64.0, {1: 5.0}

    monkeypatch.setattr(bench, "run_all", run_all)
    monkeypatch.setattr(bench, "read", read)
    with pytest.raises(SystemExit) as stop:
        bench.main([*SMALL, "--attention", "fpa", "sagebwd", "--out", str(tmp_path / "bench")])
    assert stop.value.code == 130
    assert [row["attention"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == ["fpa"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "48", "--tokens-per-micro-batch", "64"], "not a multiple of context 48; use 96"),
        (["--attention", "best"], "invalid choice: 'best'"),
    ],
)
def test_refuses_bad_options(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.parse_arguments(["--device", "cpu", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
