"""From run directories to stored runs, and from these to differences and the forest plot."""

import json

import numpy as np
import pytest
from omegaconf import OmegaConf

from common.files import write_text
from sagebwd.config import MATMULS
from scripts.output import read_json
from scripts.paper import curves, losses
from scripts.paper.curves import divergence, read_run, without_places
from scripts.paper.losses import compare
from scripts.paper.variants import base_of, is_null, variant_of
from tests.cli import ROOT
from trainer.run_directory import RunDirectory
from trainer.start import TrainingDirectory

SAGE = ("attention.backend=sagebwd", "attention.smooth_k=true", "attention.smooth_q=false")
FLASH = ("attention.sdpa=flash",)
LARGE_TPS = "tps.tokens_per_step=2097152"


def records(values):
    return [{"step": i, "tokens": 256 * i, "loss": float(loss)} for i, loss in enumerate(values, start=1)]


@pytest.fixture
def make_run(tmp_path, compose_settings):
    """make_run("name", losses, "seed=2", …, done=True): a full-precision run as train.py leaves it."""
    debug = OmegaConf.create(compose_settings("experiment=debug").recorded())
    ran_on = json.dumps({"command": [], "device": "CPU", "torch": "2", "commit": "abc"}) + "\n"

    def made(name, values, *overrides, done=True, validation=()):
        directory = TrainingDirectory(tmp_path / name)
        directory.path.mkdir()
        settings = OmegaConf.merge(debug, OmegaConf.from_dotlist(list(overrides)))
        write_text(directory.config, OmegaConf.to_yaml(settings))
        lines = [*records(values), *validation]
        write_text(directory.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        write_text(directory.environment, ran_on)
        if done:
            directory.finish()
        return directory.path

    return made


# --- A run --------------------------------------------------------------------------------------------------


def test_a_final_loss_is_the_mean_of_losses_that_are_stored(make_run):
    values = np.random.default_rng(0).normal(4, 1, 1234)
    run = read_run(make_run("a", values))
    assert run["final_loss"] == np.mean(run["curve"]["loss"][-123:])
    assert run["final_loss"] == pytest.approx(values[-123:].mean(), abs=1e-5)


def test_of_a_window_the_mean_counts_and_the_run_need_not_be_finished(make_run):
    values = np.linspace(5, 3, 40)
    validation = [
        {"step": step, "tokens": 1, "val_loss": step / 10, "val_loss/web": step / 5} for step in (10, 20, 30)
    ]
    path = make_run("a", values, done=False, validation=validation)
    run = read_run(path, window=(11, 20))
    assert (run["finished"], run["group"]["window"]) == (True, [11, 20])
    assert run["final_loss"] == pytest.approx(values[10:20].mean(), abs=1e-5)
    assert run["validation"] == {"": {"step": 20, "loss": 2.0}, "web": {"step": 20, "loss": 4.0}}
    assert not read_run(path, window=(11, 41))["finished"]
    assert not read_run(path)["finished"]


def test_the_text_of_a_run_without_checkpoints_is_named_as_told(make_run):
    copied = make_run("copied", [5.0, 4.0])
    assert read_run(copied, text="abc")["group"]["text"] == "abc"
    assert read_run(copied)["group"]["text"] == "stdlib"


def test_runs_that_diverge(tmp_path):
    directory = RunDirectory(tmp_path)
    assert divergence(directory, np.array([*np.linspace(5, 3, 40), *[3.6] * 10])) is None  # under way
    directory.finish()
    assert divergence(directory, np.linspace(5, 3, 50)) is None
    assert "0.4" in divergence(directory, np.array([*np.linspace(5, 3, 40), *[3.5] * 10]))
    directory.note_divergence(17)
    assert divergence(directory, np.array([])) == "loss or gradient not finite at step 17"


def test_of_places_on_a_machine_only_names_are_kept():
    data = {"source": "parquet", "root": "/disk/tokens", "path": "/disk/corpus/*.parquet", "val_path": None}
    config = {
        "seed": 1,
        "run_dir": "/disk/a",
        "runs_dir": "/disk",
        "init_from": "/disk/base/weights",
        "data": data,
    }
    assert without_places(config) == {
        "seed": 1,
        "init_from": "base",
        "data": {"source": "parquet", "path": "*.parquet", "val_path": None},
    }


def test_variants_are_named_by_what_differs():
    def name(qk_norm=True, **attention):
        return variant_of({"model": {"qk_norm": qk_norm}, "attention": {"backend": "sagebwd"} | attention})

    assert name() == name(preset="default", smooth_k=None, kernels="triton") == "SageBwd"
    assert name(preset="paper") == name(granularity="block", block_q=128, block_kv=64) == "SageBwd, paper"
    spelled = {"granularity": "block", "block_q": 128, "block_kv": 64}  # as config.yaml holds a preset
    assert name(smooth_k=False, **spelled) == "SageBwd, paper, no smoothing"
    assert name(int8_matmuls=list(MATMULS), **spelled) == "SageBwd, paper, dP in INT8"
    assert name(preset="strictly_causal", qk_norm=False) == "SageBwd, strictly causal, no QK-norm"
    assert name(preset="paper", block_q=64) == "SageBwd, paper, block_q=64"
    assert name(smooth_k=False, qk_norm=False) == "SageBwd, no QK-norm, no smoothing"
    assert name(smooth_q=True, unsigned_p=True) == "SageBwd, Q+K smoothing, unsigned_p=true"
    assert name(backend="fpa", sdpa="cudnn") == name(backend="fpa", sdpa=None) == "full precision"
    assert name(backend="fpa", sdpa="flash", qk_norm=False) == "full precision, FlashAttention-2, no QK-norm"
    assert name(backend="windowed", window=8, qk_norm=False) == "windowed, no QK-norm, window=8"
    assert base_of("SageBwd, paper, no smoothing") == "SageBwd, paper"
    assert base_of("SageBwd, low bias, no QK-norm") == "full precision, no QK-norm"
    assert is_null("full precision, FlashAttention-2")
    assert not is_null("full precision")


# --- A comparison -------------------------------------------------------------------------------------------


def test_a_difference_stands_beside_its_null(make_run, tmp_path, capsys):
    """Full precision twice and SageBwd 0.1 above their mean, two seeds that lie a nat apart.

    Some of the runs are gone, and merged from the JSON that they were stored in.
    """
    values = np.linspace(5, 3, 40)
    kinds = (("f", 0, ()), ("n", 0.02, FLASH), ("s", 0.11, SAGE))
    paths = [
        make_run(f"{name}{seed}", values + gap + seed, *overrides, f"seed={seed}")
        for name, gap, overrides in kinds
        for seed in (1, 2)
    ]
    first, others = map(str, paths[:3]), map(str, paths[3:])
    curves.main([*first, "--out", str(tmp_path / "figure1b")])
    curves.main([str(tmp_path / "figure1b.json.gz"), *others, "--out", str(tmp_path / "figure1b")])
    runs = read_json(tmp_path / "figure1b.json")["runs"]
    assert runs == [read_run(path) for path in paths]
    null, sage = compare(runs)
    assert (null.kind, null.minus) == ("null", "full precision")
    assert null.losses["training"].by_seed == {"1": pytest.approx(0.02), "2": pytest.approx(0.02)}
    gap = sage.losses["training"]
    assert (sage.kind, sage.has_null, sage.proxy) == ("difference", True, True)
    assert gap.mean == pytest.approx(0.1, abs=1e-5)  # minus the mean of both kernels
    assert gap.degrees == 6 - 3  # two variants, two seeds
    noise = (4 * 0.01**2 / 3) ** 0.5
    assert gap.half_width == pytest.approx(3.182 * noise * (1 / 2 + 1 / 4) ** 0.5, rel=1e-3)
    assert gap.p == pytest.approx(1 / 9)
    assert "+0.1000" in capsys.readouterr().out
    assert (tmp_path / "figure1b.png").exists()


def test_a_diverged_seed_takes_its_variant_out(make_run):
    values = np.linspace(5, 3, 40)
    paths = [
        make_run("a", values),
        make_run("b", values, *SAGE, done=False),
        make_run("c", values, *SAGE, "seed=2"),
    ]
    RunDirectory(paths[1]).note_divergence(41)
    assert compare([read_run(path) for path in paths]) == []


def test_only_runs_on_one_text_at_one_schedule_are_compared(make_run):
    """Setups that differ in the text alone have names of their own."""
    values = np.linspace(5, 3, 40)
    runs = [
        read_run(make_run(f"{text}{gap}{step}", values + gap, *own, *step), text=text)
        for text in ("a", "b")
        for gap, own in ((0, ()), (1, SAGE))
        for step in ((), (LARGE_TPS,))
    ]
    assert compare(runs[:1] + runs[-1:]) == []
    rows = compare(runs)
    assert len({row.setup for row in rows}) == len(rows) == 4
    assert {round(row.losses["training"].mean, 5) for row in rows} == {1}
    assert {row.losses["training"].half_width for row in rows} == {None}


# --- The committed results ----------------------------------------------------------------------------------


RESULTS = ROOT / "results/losses"


def test_the_committed_table_is_that_of_the_committed_runs(tmp_path):
    losses.main([str(RESULTS), "--out", str(tmp_path / "losses")])
    assert read_json(tmp_path / "losses.json")["rows"] == read_json(RESULTS / "losses.json")["rows"]
