import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.corpus import open_corpus
from train import run
from trainer import estimate
from trainer import plan as plans
from trainer.checks import check
from trainer.errors import TrainingError
from trainer.plan import ASSUMED_MFU, MFU_ON_H200, SCALING, check_disk, describe, run_seconds, speed

RESULTS = Path(__file__).parents[2] / "results"


def test_mfu_and_scaling_are_the_measured_ones():
    measured = {
        row["contestant"]: row["mfu"]
        for row in json.loads((RESULTS / "bench_training.json").read_text())["rows"]
        if row["context"] == 4096
    }
    assert round(measured["fpa-cudnn"], 3) == MFU_ON_H200["fpa"]
    assert round(measured["sagebwd"], 3) == MFU_ON_H200["sagebwd"]
    several = [
        row for row in json.loads((RESULTS / "bench_gpus.json").read_text())["rows"] if row["devices"] > 1
    ]
    for row in several:
        assert row["efficiency"] == pytest.approx(SCALING[row["parallel"]], abs=0.03)


def test_time_of_the_papers_run(compose_settings):
    """117 h, as docs/training.md says of the measured speed."""
    settings = compose_settings("attention=sagebwd", "tps=260k", "plan=true")
    found = speed(settings, 1)
    assert found.tokens_per_second == pytest.approx(187_817, rel=0.01)
    assert run_seconds(settings, check(settings, 1), found.tokens_per_second) / 3600 == pytest.approx(
        117, rel=0.01
    )
    assert speed(settings, 4).tokens_per_second == pytest.approx(4 * 0.96 * found.tokens_per_second)


def test_other_gpus_are_assumed_and_unknown_ones_are_not_guessed(compose_settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    settings = compose_settings("attention=sagebwd", "plan=true")
    found = speed(settings, 1)
    assert "assumed" in found.basis
    assert found.tokens_per_second == pytest.approx(187_817 * ASSUMED_MFU / 0.465 * 312 / 989, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    assert speed(settings, 1).tokens_per_second is None
    assert "hardware.peak_tflops" in speed(settings, 1).basis


def test_the_table_reads_the_prepared_text_and_writes_nothing(compose_settings, datasets, tmp_path):
    settings = compose_settings(
        "experiment=debug", f"data.root={datasets}", f"runs_dir={tmp_path / 'runs'}", "plan=true"
    )
    corpus = open_corpus(settings.data)
    table = describe(settings, 1)
    sizes = check(settings, 1)
    assert f"{len(corpus.train):,} training tokens are prepared" in table
    assert f"{sizes.tokens_per_step:,} = 1 micro-batches × 4 sequences × 64 tokens × 1 device(s)" in table
    for part, size in estimate.memory_parts(settings, 1).items():
        if part != "Python and libraries":
            assert f"{part:<42}{estimate.gib(size)}" in table
    assert not list(tmp_path.iterdir())


def test_a_plan_needs_neither_gpu_nor_data(compose_settings, tmp_path):
    settings = compose_settings("plan=true", f"data.root={tmp_path}", "hardware.devices=4")
    table = describe(settings, 4)
    assert "not prepared yet" in table
    assert "1 micro-batches × 16 sequences" in table
    assert not list(tmp_path.iterdir())


def test_a_plan_leaves_the_run_directory_alone(compose_settings, tmp_path, capsys):
    """Also that of a finished run."""
    (tmp_path / "DONE").touch()
    run(compose_settings("experiment=debug", "plan=true", f"run_dir={tmp_path}", f"data.root={tmp_path}"))
    assert "memory per device" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["DONE"]


def test_a_disk_that_is_too_small_is_named(compose_settings, monkeypatch, tmp_path):
    settings = compose_settings(
        "plan=true", f"runs_dir={tmp_path}", f"data.root={tmp_path}", "milestone_every=1000"
    )
    monkeypatch.setattr(plans.shutil, "disk_usage", lambda path: type("", (), {"free": 10 << 30}))
    table = describe(settings, 1)
    assert "303 of 3.6 GiB" in table  # 300 milestones, two newest, one that is being written
    assert "10.0 GiB: not enough" in table


def test_a_disk_without_room_for_one_checkpoint_is_refused(compose_settings, tmp_path, monkeypatch):
    """The disk of the checkpoints, which may lie behind a link."""
    settings = compose_settings("experiment=debug", f"run_dir={tmp_path / 'run'}")
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "other")
    free = {tmp_path / "other": estimate.state_bytes(settings)}
    monkeypatch.setattr(plans.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    check_disk(settings)
    free[tmp_path / "other"] -= 1
    with pytest.raises(TrainingError, match=r"a checkpoint takes \d+ MiB, and .*run has \d+ MiB left"):
        check_disk(settings)
