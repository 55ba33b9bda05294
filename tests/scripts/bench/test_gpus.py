import json
import shlex
import signal

import pytest

from scripts import output
from scripts.bench import gpus as bench_gpus
from scripts.bench.gpus import Row
from trainer.checks import check
from trainer.errors import Interrupted


def left_by_a_run(folder, losses, speeds, log=""):
    folder.mkdir()
    records = [
        {"step": step, "loss": loss, "tokens_per_second": speed, "mfu": speed / 1e3, "peak_memory_gib": 2.0}
        for step, (loss, speed) in enumerate(zip(losses, speeds, strict=True), start=1)
    ]
    records += [
        {"step": 2, "probe/seconds": 3.0},
        {"step": 3, "val_loss": 4.0},
        {"step": 4, "probe/seconds": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    bench_gpus.log_of(folder).write_text(log)
    return folder


def row_of(folder, devices=1, warm_up=1):
    row = Row(devices, "ddp" if devices > 1 else "none")
    bench_gpus.read(row, folder, warm_up)
    return row


def test_a_row_leaves_the_warm_up_out_and_takes_the_first_pause(tmp_path):
    log = (
        "step 2: training paused 0.10 s for a checkpoint\nstep 4: training paused 4.92 s for a checkpoint, …"
    )
    row = row_of(left_by_a_run(tmp_path / "run", [5.0, 4.0, 3.0, 2.0], [1.0, 100.0, 300.0, 200.0], log))
    assert row.losses == [5.0, 4.0, 3.0, 2.0]
    assert (row.tokens_per_second, row.mfu, row.peak_memory_gib) == (200.0, 0.2, 2.0)
    assert (row.checkpoint_pause_s, row.probe_s) == (0.1, 0.5)


def test_efficiency_and_differences_are_to_the_run_on_one_device(tmp_path):
    one = row_of(left_by_a_run(tmp_path / "one", [5.0, 4.0], [1.0, 100.0]))
    two = row_of(left_by_a_run(tmp_path / "two", [5.0, 4.25], [1.0, 150.0]), devices=2)
    lost = Row(4, "ddp", reason="no such GPU")
    bench_gpus.compare([two, one, lost])
    assert (one.efficiency, one.loss_difference) == (1.0, 0.0)
    assert (two.efficiency, two.loss_difference) == (0.75, 0.25)
    assert lost.efficiency is None
    text = "\n".join(bench_gpus.table([one, two, lost], "cuda"))
    assert "75.0%" in text
    assert "0.2500" in text
    assert "failed" in text


def test_without_a_run_on_one_device_nothing_is_compared(tmp_path):
    two = row_of(left_by_a_run(tmp_path / "two", [5.0, 4.25], [1.0, 150.0]), devices=2)
    bench_gpus.compare([two])
    assert (two.efficiency, two.loss_difference) == (None, None)


def test_it_trains_and_writes_what_it_found(tmp_path, datasets, monkeypatch):
    arguments = ["--device", "cpu", "--devices", "1", "--steps", "4", "--warm-up", "1"]
    arguments += ["--out", str(tmp_path / "gpus"), "--runs-dir", str(tmp_path)]
    bench_gpus.main([*arguments, "--", "experiment=debug", f"data.root={datasets}"])
    result = json.loads((tmp_path / "gpus.json").read_text())
    (row,) = result["rows"]
    assert len(row["losses"]) == 4
    assert row["tokens_per_second"] > 0
    assert row["checkpoint_pause_s"] >= 0
    assert "runs_dir" not in result["settings"]
    assert (tmp_path / "gpus.md").exists()
    assert (tmp_path / "gpus.png").exists()


@pytest.mark.parametrize("overrides", [["data=embedded"], ["experiment=gone"]])
def test_draw_writes_the_table_and_picture_from_the_json(tmp_path, overrides, capsys):
    """Of an old result, too, whose overrides are not known any more."""
    rows = [Row(1, "none", tokens_per_second=10.0, efficiency=1.0)]
    rows += [Row(2, "ddp", tokens_per_second=19.0, efficiency=0.95), Row(2, "fsdp", reason="broken")]
    record = {"command": "…", "date": "…", "commit": None, "hardware": {"name": "a GPU", "driver": None}}
    result = record | {"versions": {}, "settings": {"device": "cuda", "overrides": overrides}}
    output.write_tables(tmp_path / "old", result, rows, "")
    bench_gpus.main(["--draw", str(tmp_path / "old.json")])
    assert "| 2, ddp  |       19 |              95.0% |" in (tmp_path / "old.md").read_text()
    assert (tmp_path / "old.png").read_bytes().startswith(b"\x89PNG")
    assert "old.md, " in capsys.readouterr().out


def test_the_title_says_what_was_trained():
    assert bench_gpus.trained(["model=llama_tiny", "context=512"]) == (
        "llama_tiny, context 512, 262,144 tokens per step"
    )


def test_a_run_that_fails_becomes_a_row_with_its_reason(tmp_path, capsys):
    arguments = [
        "--device",
        "cpu",
        "--devices",
        "1",
        "--out",
        str(tmp_path / "gpus"),
        "--runs-dir",
        str(tmp_path),
    ]
    with pytest.raises(SystemExit) as end:
        bench_gpus.main([*arguments, "--", "experiment=debug", "model.n_heads=3"])
    assert end.value.code == 1
    (row,) = json.loads((tmp_path / "gpus.json").read_text())["rows"]
    assert "n_heads" in row["reason"]
    assert row["tokens_per_second"] is None


def test_a_stop_keeps_the_rows_before_it(tmp_path, monkeypatch):
    def run_jobs(jobs, on_success):
        left_by_a_run(jobs[0].output.with_suffix(""), [5.0, 4.0, 3.0], [1.0, 100.0, 300.0])
        on_success(jobs[0])
        raise Interrupted("stopped", signal.SIGTERM)

    monkeypatch.setattr(bench_gpus, "run_jobs", run_jobs)
    out = ["--out", str(tmp_path / "gpus"), "--runs-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        bench_gpus.main(["--device", "cpu", "--devices", "1", "2", "--warm-up", "1", *out])
    assert end.value.code == 128 + signal.SIGTERM
    (row,) = json.loads((tmp_path / "gpus.json").read_text())["rows"]
    assert (row["devices"], row["tokens_per_second"], row["efficiency"]) == (1, 200.0, 1.0)


def test_the_example_for_a_cpu_can_be_trained_on_all_its_devices(compose_settings, tmp_path):
    lines = bench_gpus.EXAMPLES.replace("\\\n", " ").splitlines()
    (words,) = (shlex.split(line)[3:] for line in lines if "--device cpu" in line)
    arguments = bench_gpus.parse_arguments(words)
    for devices in arguments.devices:
        train = bench_gpus.job(Row(devices, "ddp"), tmp_path / "run", arguments).command
        check(compose_settings(*train[2:]), devices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--warm-up", "20"], "--warm-up 20 leaves none of --steps 20"), (["--devices", "0"], "--devices")],
)
def test_arguments_that_cannot_work_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench_gpus.main(["--device", "cpu", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
