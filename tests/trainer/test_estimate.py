import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common.errors import TrainingError
from data.corpus import open_corpus
from model.llama import Llama
from tests import warm
from train import run
from trainer import estimate
from trainer.checks import check
from trainer.distributed import Ranks
from trainer.estimate import check_disk, check_memory, describe, memory_parts, run_seconds, speed
from trainer.optimizer import build_optimizer
from trainer.run import make_loader

ONE_RANK = Ranks(0, 1, torch.device("cpu"))
RESULTS = Path(__file__).parents[2] / "results/speed"


def rows(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def allocated(settings, ranks):
    parts = memory_parts(settings, ranks)
    return sum(size for name, size in parts.items() if not name.startswith("CUDA")) / 2**30


ATTENTIONS = {"fpa-cudnn": "fpa", "sagebwd": "sagebwd", "sagebwd-consistent": "sagebwd_consistent"}


def measured_steps():
    for name in ("bench_training", "bench_training_24gb"):
        for row in rows(name):
            if row["attention"] in ATTENTIONS and row["peak_memory_gib"]:
                context, sequences = row["context"], row["micro_batch"]
                run = [f"attention={ATTENTIONS[row['attention']]}", f"hardware.micro_batch={sequences}"]
                run += [f"context={context}", f"model.max_context={context}"]
                run += [f"tps.tokens_per_step={4 * context * sequences}"]
                yield pytest.param(row["peak_memory_gib"], run, id=f"{run[0]}-{context}-{sequences}")


@pytest.mark.parametrize(("measured", "overrides"), [*measured_steps()])
def test_memory_of_steps_measured_on_an_h200(compose_settings, measured, overrides):
    settings = compose_settings("probe.every=0", *overrides)
    found = allocated(settings, 1)
    if "attention=fpa" not in overrides:  # when measured, it saved Q in 16 bits, not in INT8
        model = settings.model
        found += model.n_layers * model.d_model * settings.context * settings.hardware.micro_batch / 2**30
    assert found == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("row", rows("bench_gpus"), ids=lambda row: f"{row['devices']}-{row['parallel']}")
def test_memory_of_runs_measured_on_several_h200s(compose_settings, row):
    parallel = row["parallel"].replace("none", "auto")
    settings = compose_settings(f"hardware.parallel={parallel}")
    assert allocated(settings, row["devices"]) == pytest.approx(row["peak_memory_gib"], rel=0.01)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_gradients_and_moments_to_the_byte(compose_settings, name):
    # Of one sequence, four times a step: gradients are there when the last one runs.
    settings = compose_settings("experiment=debug", "hardware.micro_batch=1", f"optimizer={name}")
    llama = Llama(settings.model, F.scaled_dot_product_attention)
    optimizer = build_optimizer(llama, settings.optimizer)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    llama(tokens, tokens).backward()
    optimizer.step()
    weights = sum(p.nbytes for p in llama.parameters())
    gradients = sum(p.grad.nbytes for p in llama.parameters())
    states = (x for state in optimizer.state.values() for x in state.values())
    moments = sum(x.nbytes for x in states if x.dim() > 0)  # a step count is a scalar
    parts = memory_parts(settings, 1)
    counted = (parts["weights"], parts["gradients"], parts["the optimizer's moments"])
    assert counted == (weights, gradients, moments)
    assert estimate.checkpoint_copy(settings, 1) == weights + moments


def test_a_run_that_cannot_fit_is_refused(compose_settings, caplog):
    settings = compose_settings("model=llama_1b", "gpu=RTX 4090")
    with pytest.raises(TrainingError) as refused:
        check_memory(settings, 1)
    moments = "the optimizer's moments 8.9 GiB"  # 8 bytes × 1.2 billion
    for words in ("23.6 GiB (RTX 4090)", moments, "hardware.check_memory=false"):
        assert words in str(refused.value)
    settings.hardware.check_memory = False
    check_memory(settings, 1)
    assert "of 23.6 GiB (RTX 4090), which may not suffice" in caplog.text


def test_the_fix_of_a_refusal_fits(compose_settings):
    """With the memory that it needs, the simplest change; here on 24 GB."""
    settings = compose_settings("attention=sagebwd")
    there = estimate.Memory(memory_parts(settings, 1), 24 << 30, "a GPU")
    assert there.is_hopeless
    told = estimate.refusal(settings, 1, there)
    assert "hardware.micro_batch=4: " in told  # 8 do not fit
    changed = replace(settings, hardware=replace(settings.hardware, micro_batch=4))
    assert estimate.gib(sum(memory_parts(changed, 1).values())) in told


def test_what_fits_is_not_refused(compose_settings, monkeypatch):
    """By the margin, even if the estimate says that it is too much."""
    settings = compose_settings("gpu=RTX 4090")
    needed = sum(memory_parts(settings, 1).values())
    monkeypatch.setattr(estimate, "memory_of", lambda _: needed / 1.2)
    check_memory(settings, 1)
    monkeypatch.setattr(estimate, "memory_of", lambda _: needed / (estimate.MARGIN + 0.1))
    with pytest.raises(TrainingError):
        check_memory(settings, 1)
    check_memory(compose_settings("experiment=debug", "model=llama_1b"), 1)  # on a CPU


def test_peaks_are_those_of_the_very_gpu(monkeypatch):
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 NVL": 835,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-PCIE-40GB": 312,
        "NVIDIA GeForce RTX 4090": 165.2,
        **dict.fromkeys(("NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4")),
    }
    assert {name: estimate.peak_of(name) for name in peaks} == peaks
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert estimate.peak_tflops(torch.device("cuda")) == 756
    assert estimate.peak_tflops(torch.device("cpu")) is None


def test_mfu_and_scaling_are_the_measured_ones():
    measured = {row["attention"]: row["mfu"] for row in rows("bench_training") if row["context"] == 4096}
    assert round(measured["fpa-cudnn"], 3) == estimate.MFU_ON_H200["fpa"]
    assert round(measured["sagebwd"], 3) == estimate.MFU_ON_H200["sagebwd"]
    for row in (row for row in rows("bench_gpus") if row["devices"] > 1):
        assert row["efficiency"] == pytest.approx(estimate.SCALING[row["parallel"]], abs=0.03)


def test_time_of_the_papers_run(compose_settings):
    """117 h, as docs/training.md says of the measured speed."""
    settings = compose_settings("attention=sagebwd", "tps=260k", "plan=true")
    found = speed(settings, 1)
    assert found.tokens_per_second == pytest.approx(187_817, rel=0.01)
    hours = run_seconds(settings, check(settings, 1), found.tokens_per_second) / 3600
    assert hours == pytest.approx(117, rel=0.01)
    assert speed(settings, 4).tokens_per_second == pytest.approx(4 * 0.96 * found.tokens_per_second)


def test_a_small_text_is_refused_until_a_length_is_set(datasets, tmp_path, caplog):
    """The paper's length, which no setting changes, would be months."""

    def settings(*length):
        return warm.debug_settings(datasets, f"run_dir={tmp_path / 'run'}", "steps=null", *length)

    refused = warm.run(settings(), code=1)
    told = re.search(r"([\d,]+) passes over the text; .* (total_tokens=\d+) for 10 passes", refused)
    assert "model:" not in refused
    assert not (tmp_path / "run").exists()
    assert f": {told[1]} passes, too many: set total_tokens" in describe(settings("plan=true"), 1)
    caplog.set_level("INFO")
    for length, passes in ((told[2], "10"), ("total_tokens=78643200000", told[1])):
        make_loader(own := settings(length), check(own, 1), open_corpus(own.data), ONE_RANK)
        assert f" tokens, {passes} passes over the text" in caplog.messages[-1]


def test_other_gpus_are_assumed_and_unknown_ones_are_not_guessed(compose_settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    settings = compose_settings("attention=sagebwd", "plan=true")
    found = speed(settings, 1)
    assert "assumed" in found.basis
    rate = 187_817 * estimate.ASSUMED_MFU / 0.465 * 312 / 989
    assert found.tokens_per_second == pytest.approx(rate, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    assert speed(settings, 1).tokens_per_second is None
    assert "hardware.peak_tflops" in speed(settings, 1).basis


@pytest.mark.parametrize(
    ("gpu", "gib", "micro_batch"), [("nvidia geforce rtx 4090", 23.6, 4), ("A100 40GB", 39.6, 8)]
)
def test_a_plan_for_a_gpu_that_is_not_here(compose_settings, tmp_path, gpu, gib, micro_batch):
    """The largest micro-batch fits there, the next one does not."""
    settings = compose_settings(f"gpu={gpu}", "attention=sagebwd", "plan=true", f"data.root={tmp_path}")
    assert estimate.memory(settings, 1).available == pytest.approx(gib * 2**30, rel=1e-6)
    table = describe(settings, 1)
    assert re.search(rf"that fits +hardware.micro_batch={micro_batch}: ", table)
    for factor, fits in ((1, True), (2, False)):
        hardware = replace(settings.hardware, micro_batch=factor * micro_batch)
        assert estimate.memory(replace(settings, hardware=hardware), 1).is_tight is not fits
    assert f"TFLOP/s of {gpu}" in table


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["gpu=RTX 4900", "plan=true"], "gpu=RTX 4900 is not known; choose one of A100, .*RTX 4090"),
        (["gpu=RTX 4090", "hardware=cpu", "plan=true"], "hardware.device=cpu; choose hardware=gpu"),
        (["gpu=RTX 4090", "hardware=cpu"], "add plan=true"),
    ],
)
def test_a_gpu_that_says_nothing_is_refused(compose_settings, overrides, told):
    with pytest.raises(TrainingError, match=told):
        describe(compose_settings(*overrides), 1)


def test_the_table_reads_the_prepared_text_and_writes_nothing(datasets, tmp_path):
    settings = warm.debug_settings(datasets, f"runs_dir={tmp_path / 'runs'}", "plan=true")
    corpus = open_corpus(settings.data)
    table = describe(settings, 1)
    sizes = check(settings, 1)
    assert f"{len(corpus.train):,} training tokens are prepared" in table
    assert f"{sizes.tokens_per_step:,} = 1 micro-batches × 4 sequences × 64 tokens × 1 device(s)" in table
    assert table.count("estimated for GPUs only") == 2  # memory and time
    assert not list(tmp_path.iterdir())


def test_a_plan_needs_neither_gpu_nor_data_and_leaves_the_run_directory_alone(
    compose_settings, tmp_path, capsys
):
    """Also that of a finished run."""
    (tmp_path / "DONE").touch()
    places = (f"run_dir={tmp_path}", f"data.root={tmp_path}")
    settings = compose_settings("plan=true", *places, "hardware.devices=4")
    run(settings)
    table = capsys.readouterr().out
    for part, size in memory_parts(settings, 4).items():
        assert f"{part:<42}{estimate.gib(size)}" in table
    assert "not prepared yet" in table
    assert "1 micro-batches × 16 sequences" in table
    assert [file.name for file in tmp_path.iterdir()] == ["DONE"]


def test_a_disk_that_is_too_small_is_named(compose_settings, monkeypatch, tmp_path):
    places = (f"runs_dir={tmp_path}", f"data.root={tmp_path}")
    settings = compose_settings("plan=true", *places, "milestone_every=1000")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: type("", (), {"free": 10 << 30}))
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
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    check_disk(settings)
    free[tmp_path / "other"] -= 1
    with pytest.raises(TrainingError, match=r"a checkpoint takes \d+ MiB, and .*run has \d+ MiB left"):
        check_disk(settings)
