"""scripts.paper.large_logits: statistics against closed forms, what it makes of runs, the grid it trains."""

import math
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from sagebwd.config import MATMULS
from scripts.paper import large_logits, large_logits_runs
from scripts.paper.large_logits_pictures import gap_curves
from scripts.paper.large_logits_tables import excludes_zero
from scripts.paper.result_files import read_json
from trainer.checks import check
from trainer.run_directory import RunDirectory

SAGE = {"backend": "sagebwd", "preset": "default"}
ALL_INT8 = SAGE | {"int8_matmuls": list(MATMULS)}
PROBE = {
    "step": 4,
    "layer_0/dq_l2": 0.1,
    "layer_1/dq_l2": 0.3,
    "layer_0/largest_logit": 9,
    "layer_1/largest_logit": 5,
}


def run(attention, seed, loss, *, gain=1.0, sequences=None, diverged=None, probe=PROBE):
    """What scripts.paper.run_summary.read says of a run whose training loss ends at `loss`."""
    backend = attention["backend"]
    return {
        "name": f"{attention}-{gain}-{seed}-{sequences}",
        "variant": "full precision" if backend == "fpa" else "SageBwd",
        "attention": backend,
        "group": {"text": "book", "lr": 1e-3},
        "seed": seed,
        "finished": True,
        "diverged": diverged,
        "final_loss": None if diverged else loss,
        "held_out_loss": None if diverged else loss + 1,
        "curve": {"tokens": [1, 2], "loss": [loss + 3, loss]},
        "last_probe": probe,
        "device": "CPU",
        "commit": "c",
        "config": {
            "attention": attention,
            "model": {"qk_norm": True, "qk_norm_gain": gain},
            "train_sequences": sequences,
        },
    }


FPA, FLASH = {"backend": "fpa", "sdpa": None}, {"backend": "fpa", "sdpa": "flash"}
FULL = {1: 3.00, 2: 3.20, 3: 2.90}
INT8 = {1: 3.11, 2: 3.25, 3: 3.02}


def cell(**options):
    return [run(FPA, s, x, **options) for s, x in FULL.items()] + [
        run(SAGE, s, x, **options) for s, x in INT8.items()
    ]


def test_gap_is_the_paired_t_interval_of_two_settings():
    rows = large_logits.compare(cell())
    assert [row.setting for row in rows] == ["full precision", "SageBwd"]
    gaps = [INT8[seed] - FULL[seed] for seed in FULL]
    for interval in (rows[1].gap, rows[1].mean_gap):
        assert interval["mean"] == pytest.approx(mean(gaps))
        assert interval["half_width"] == pytest.approx(4.303 * stdev(gaps) / math.sqrt(3), rel=1e-6)
    assert rows[0].gap == {"mean": None, "half_width": None}


def test_losses_have_the_t_interval_of_their_mean():
    row = large_logits.compare(cell())[0]
    assert row.training["mean"] == pytest.approx(mean(FULL.values()))
    assert row.validation["mean"] == pytest.approx(mean(FULL.values()) + 1)
    assert row.validation["half_width"] == pytest.approx(
        4.303 * stdev(FULL.values()) / math.sqrt(3), rel=1e-6
    )


def test_gaps_are_those_of_the_training_loss_in_both_assays():
    runs = [*cell(), *cell(sequences=128)]
    for own in runs:
        own["held_out_loss"] = 7.0
    rows = large_logits.compare(runs)
    wanted = mean(INT8[seed] - FULL[seed] for seed in FULL)
    assert [row.gap["mean"] for row in rows[1::2]] == pytest.approx([wanted, wanted])


def test_gains_and_assays_are_compared_apart():
    rows = large_logits.compare([*cell(gain=4.0), *cell(gain=1.0), *cell(gain=4.0, sequences=128)])
    assert [(row.assay, row.gain) for row in rows[::2]] == [
        ("fresh text", 1),
        ("fresh text", 4),
        ("one batch", 4),
    ]
    assert [row.gap["mean"] for row in rows[1::2]] == pytest.approx([rows[1].gap["mean"]] * 3)


def test_a_setting_that_diverged_has_no_gap_but_its_count():
    runs = [*cell(), run(ALL_INT8, 1, 9.0, diverged="loss not finite"), run(ALL_INT8, 2, 3.3)]
    row = large_logits.compare(runs)[2]
    assert (row.diverged, row.gap["mean"], row.training["mean"]) == (1, None, 3.3)
    assert large_logits.cells_of([row]) == [{"assay": "fresh text", "gain": 1.0, "sees": True}]


def test_probes_are_averaged_and_logits_are_the_layers_largest():
    other = PROBE | {"layer_0/largest_logit": 11, "layer_1/dq_l2": 0.5}
    row = large_logits.compare([run(FPA, 1, 3.0), run(FPA, 2, 3.1, probe=other), run(FPA, 3, 3.2, probe={})])[
        0
    ]
    assert row.largest_logit == pytest.approx(10)
    assert row.probe == {"dq_l2": pytest.approx((0.1 + 0.3 + 0.1 + 0.5) / 4)}


def test_controls_are_named_and_found():
    runs = [run(FLASH, 1, 3.0), run(ALL_INT8, 1, 3.0), run(SAGE, 1, 3.0)]
    assert [large_logits.setting_of(own) for own in runs] == [
        "full precision, flash",
        "SageBwd, all INT8",
        "SageBwd",
    ]
    assert [large_logits.is_positive_control(own) for own in runs] == [False, True, False]
    printed = {"granularity": "block", "block_q": 128, "block_kv": 64}
    assert large_logits.setting_of(run(ALL_INT8 | printed, 1, 3.0)) == "SageBwd, paper, all INT8"


def control(gap, noise):
    """Full precision and a positive control that lies `gap` above it, in three seeds."""
    offsets = dict(zip((1, 2, 3), (noise, -noise, 0), strict=True))
    return [run(FPA, s, 3.0) for s in offsets] + [run(ALL_INT8, s, 3 + gap + x) for s, x in offsets.items()]


@pytest.mark.parametrize(("gap", "sees"), [(0.1, True), (0.02, False), (-0.1, False)])
def test_an_assay_sees_if_the_interval_of_a_positive_control_lies_above_zero(gap, sees):
    """Half-width by hand: 4.303 · .01 / √3 = .0248."""
    rows = large_logits.compare(control(gap, 0.01))
    assert rows[1].gap["half_width"] == pytest.approx(0.0248, rel=2e-3)
    assert large_logits.cells_of(rows) == [{"assay": "fresh text", "gain": 1.0, "sees": sees}]


def test_without_an_interval_sight_is_open():
    assert (
        large_logits.cells_of(large_logits.compare([run(FPA, 1, 3.0), run(ALL_INT8, 1, 4.0)]))[0]["sees"]
        is None
    )
    assert excludes_zero({"mean": 0.1, "half_width": None}) is None


def test_gaps_in_time_are_those_of_the_same_seed():
    gap = gap_curves(large_logits.by_setting(cell()))
    tokens, values = gap["SageBwd"]
    assert (list(gap), tokens) == (["SageBwd"], [1, 2])
    np.testing.assert_allclose(values, [mean(INT8[s] - FULL[s] for s in FULL)] * 2)


def test_runs_of_other_schedules_are_refused():
    runs = cell()
    runs[1]["group"] = {"text": "book", "lr": 2e-3}
    with pytest.raises(ValueError, match=r"are not alike: \{'lr': \(0.001, 0.002\)\}"):
        large_logits.compare(runs)


# --- The grid -----------------------------------------------------------------------------------------------


def asked(*argv):
    return large_logits_runs.parse_arguments(list(argv))


def test_every_setting_of_the_grid_can_be_planned_and_has_a_name_of_its_own(compose_settings, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    names = set()
    for setting, overrides in large_logits_runs.SETTINGS.items():
        settings = compose_settings("experiment=large_logits", "model.qk_norm_gain=4", *overrides)
        assert check(settings, 1).steps == 382, setting
        names.add(str(settings.attention))
    assert len(names) == len(large_logits_runs.SETTINGS)


def test_one_batch_is_exactly_a_step(compose_settings, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    settings = compose_settings("experiment=one_batch")
    assert settings.train_sequences == check(settings, 1).sequences_per_step == 128
    fresh = compose_settings("experiment=large_logits")
    fresh.train_sequences = 128
    assert settings == fresh


def test_runs_go_seed_by_seed_with_the_overrides_of_train_py():
    commands = large_logits_runs.grid(
        asked(
            "--assay",
            "one_batch",
            "--gains",
            "1",
            "4",
            "--seeds",
            "1",
            "2",
            "--settings",
            "fpa",
            "--",
            "data=x",
        )
    )
    assert [path.name for path in commands] == [
        f"one_batch-gain{gain}-fpa-seed{seed}" for seed in (1, 2) for gain in (1, 4)
    ]
    path, command = list(commands.items())[1]
    assert command[1:] == [
        *("train.py", "experiment=one_batch", "attention=fpa", "model.qk_norm_gain=4", "seed=1"),
        *(f"run_dir={path}", "data=x"),
    ]


def test_a_word_that_is_no_override_is_refused(capsys):
    with pytest.raises(SystemExit):
        asked("--", "fast")
    assert "'fast' after -- is not an override" in capsys.readouterr().err


def test_a_run_under_way_keeps_its_checkpoints(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.checkpoints.mkdir(parents=True)
    large_logits_runs.drop_weights_of(large_logits_runs.job(directory.path, []))
    assert directory.checkpoints.exists()


def test_runs_train_lose_their_weights_and_are_compared(train_here, tmp_path, datasets, capsys):
    """Two runs of the grid, in this process instead of the queue."""
    arguments = asked("--debug", "--gains", "4", "--seeds", "1", "--settings", "fpa", "sagebwd-all_int8")
    arguments.runs_dir = tmp_path / "runs"
    for path, command in large_logits_runs.grid(arguments).items():
        train_here(path, *(text for text in command[2:] if not text.startswith(("experiment=", "run_dir="))))
        RunDirectory(path).note_environment(torch.device("cpu"), 1)
        large_logits_runs.drop_weights_of(large_logits_runs.job(path, command))
        assert large_logits_runs.is_settled(RunDirectory(path))
        assert not (path / "checkpoints").exists()
        assert not (path / "weights").exists()
    out = tmp_path / "out" / "large_logits"
    large_logits.main([str(tmp_path / "runs"), "--out", str(out)])
    result = read_json(out.with_suffix(".json"))
    assert [row["setting"] for row in result["rows"]] == ["full precision", "SageBwd, all INT8"]
    assert result["rows"][1]["gap"]["mean"] is not None
    assert result["rows"][1]["probe"]["dq_l2"] > 0
    assert "## Fresh text, gain 4" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 1000

    large_logits.main([str(out.with_suffix(".json.gz")), "--out", str(tmp_path / "again")])
    assert read_json(tmp_path / "again.json")["rows"] == result["rows"]
