"""scripts.paper.curves: its statistics against closed forms and simulation, and what it makes of runs."""

import json
import math
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from data.files import write_text
from scripts.paper import curves
from scripts.paper import experiment_runs as experiments
from scripts.paper.loss_pictures import own_settings
from scripts.paper.loss_statistics import (
    STUDENT,
    Estimate,
    compare,
    difference_of,
    differences,
    quantile,
)
from scripts.paper.report.pool import ended
from scripts.paper.result_files import read_json, write_compressed_json
from scripts.paper.run_summary import POINTS, divergence, read, read_run, thin, without_places
from scripts.paper.variants import variant_of
from tests.cli import ROOT
from trainer.run_directory import RunDirectory


def test_quantiles_are_those_of_students_t():
    assert quantile(1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-4)
    assert quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (4 * 0.975 * 0.025)), rel=1e-4)
    for degrees in range(3, 2 * len(STUDENT)):
        x = np.linspace(0, quantile(degrees), 20_001)
        density = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        area = np.trapezoid(density * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x)
        assert area == pytest.approx(0.475, abs=5e-5 if degrees <= len(STUDENT) else 1e-3)


def cells(losses):
    """What `differences` takes, of losses by variant and seed."""
    return [(variant, seed, loss) for variant, own in losses.items() for seed, loss in own.items()]


def test_two_variants_give_the_paired_t_interval():
    """Independent truth: mean and standard error of the seeds' own differences."""
    a, b = {1: 2.51, 2: 2.55, 3: 2.49}, {1: 2.60, 2: 2.61, 3: 2.62}
    gaps = [b[seed] - a[seed] for seed in a]
    found = next(d for d in differences(cells({"a": a, "b": b}))["differences"] if d["of"] == "b")
    assert found["mean"] == pytest.approx(mean(gaps))
    assert found["half_width"] == pytest.approx(4.303 * stdev(gaps) / math.sqrt(3), rel=1e-6)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Four variants, two seeds, a seed's own offset ten times the noise."""
    generator = np.random.default_rng(0)
    hits, draws = 0, 1000
    for _ in range(draws):
        offsets = generator.normal(size=2)
        noise = 0.1 * generator.normal(size=(4, 2))
        losses = {str(i): {s: i + offsets[s] + noise[i, s] for s in range(2)} for i in range(4)}
        found = next(
            d for d in differences(cells(losses))["differences"] if d["of"] == "3" and d["minus"] == "1"
        )
        hits += abs(found["mean"] - 2) < found["half_width"]
    assert hits / draws == pytest.approx(0.95, abs=0.03)


def test_one_seed_gives_a_difference_without_an_interval():
    found = differences(cells({"a": {1: 2.0}, "b": {1: 2.5}}))
    assert found["noise"] is None
    assert [(d["of"], d["half_width"]) for d in found["differences"]] == [("a", None), ("b", None)]
    assert [d["mean"] for d in found["differences"]] == pytest.approx([-0.5, 0.5])


def test_repetitions_of_one_seed_give_the_interval_of_their_own_noise():
    """Independent truth: the t interval of a mean of two against one, of the two's variance."""
    found = differences([("a", 1, 2.0), ("a", 1, 2.1), ("b", 1, 2.5)])
    gap = next(d for d in found["differences"] if d["of"] == "b")
    assert (gap["mean"], gap["seeds"]) == (pytest.approx(0.45), 1)
    assert found["noise"] == pytest.approx(stdev([2.0, 2.1]))
    assert gap["half_width"] == pytest.approx(12.706 * stdev([2.0, 2.1]) * math.sqrt(1 + 1 / 2), rel=1e-6)


def test_a_missing_run_costs_only_its_own_comparison():
    whole = {"a": {1: 2.51, 2: 2.55}, "b": {1: 2.60, 2: 2.61}, "c": {1: 2.70, 2: 2.75}}
    short = {**whole, "d": {1: 2.9}}
    found, before = differences(cells(short)), differences(cells(whole))
    assert found["degrees_of_freedom"] == before["degrees_of_freedom"] == 2
    assert found["noise"] == pytest.approx(before["noise"])
    by_pair = {(d["of"], d["minus"]): d for d in found["differences"]}
    for pair in before["differences"]:
        assert by_pair[pair["of"], pair["minus"]] == pytest.approx(pair)
    of_one_run = by_pair["d", "a"]
    # Independent truth, by hand: d − mean of seed 1's others + mean of all whole cells, minus the mean of a.
    assert of_one_run["mean"] == pytest.approx(2.9 - 7.81 / 3 + 15.72 / 6 - 2.53)
    assert of_one_run["seeds"] == 1
    assert of_one_run["half_width"] > by_pair["b", "a"]["half_width"]


def test_variants_without_a_common_seed_are_not_compared():
    found = differences(cells({"a": {1: 2.0, 2: 9.0, 3: 2.0}, "b": {1: 2.5, 3: 2.5}}))
    assert {d["seeds"] for d in found["differences"]} == {2}
    assert found["differences"][0]["mean"] == pytest.approx(-0.5)
    assert differences(cells({"a": {1: 2.0}, "b": {2: 2.0}}))["differences"] == []
    assert differences([])["differences"] == []


def records(losses, tokens_per_step=256):
    return [
        {"step": i, "tokens": i * tokens_per_step, "loss": loss, "tokens_per_second": 100.0}
        for i, loss in enumerate(losses, start=1)
    ]


def test_runs_with_other_gains_or_one_batch_are_groups_of_their_own(make_run, tmp_path):
    losses = np.linspace(5, 3, 40)
    overrides = {"usual": (), "gain": ("model.qk_norm_gain=4.0",), "one": ("train_sequences=4",)}
    runs = [read_run(make_run(name, losses, *own)) for name, own in overrides.items()]
    added = [run["group"].items() - runs[0]["group"].items() for run in runs]
    assert added == [set(), {("qk_norm_gain", 4.0)}, {("train_sequences", 4)}]
    groups = compare(runs)
    assert len(groups) == 3
    assert [own_settings(group) for group in groups] == [run["group"] for run in runs]


def test_divergence_by_a_rise_and_by_a_value_that_is_not_finite(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.finish()
    falling = list(np.linspace(5, 3, 40))
    assert divergence(directory, records(falling)) is None
    assert divergence(directory, records([*falling, *[3.2] * 10])) is None
    assert divergence(directory, records([*falling, *[3.6] * 10])).startswith("ends 0.")
    directory.note_divergence(17)
    assert divergence(directory, records(falling)) == "loss or gradient not finite at step 17"


def test_a_run_under_way_has_not_diverged_because_its_loss_stands_high(tmp_path):
    assert divergence(RunDirectory(tmp_path), records([*np.linspace(5, 3, 40), *[3.6] * 10])) is None


def test_curves_keep_their_mean_and_their_end_when_thinned():
    tokens, losses = np.arange(1, 1001) * 512, np.linspace(5, 3, 1000)
    thinned = thin(tokens, losses)
    assert len(thinned["loss"]) == POINTS
    assert thinned["tokens"][-1] == 512_000
    assert mean(thinned["loss"]) == pytest.approx(4, abs=1e-4)
    assert thin(tokens[:3], losses[:3])["tokens"] == [512, 1024, 1536]
    assert thin(tokens[:0], losses[:0]) == {"tokens": [], "loss": []}


NAMES = {
    "fpa": "full precision",
    "sagebwd": "SageBwd",
    "fpa-no_qk_norm": "full precision, no QK-norm",
    "sagebwd-no_qk_norm": "SageBwd, no QK-norm",
    "sagebwd-no_smoothing": "SageBwd, no smoothing",
    "sagebwd-smooth_qk": "SageBwd, Q+K smoothing",
    "sagebwd-paper": "SageBwd, paper",
    "sagebwd-paper-no_qk_norm": "SageBwd, paper, no QK-norm",
    "sagebwd-paper-no_smoothing": "SageBwd, paper, no smoothing",
    "sagebwd-paper-smooth_qk": "SageBwd, paper, Q+K smoothing",
    "sagebwd-accurate": "SageBwd, accurate",
    "sagebwd-consistent": "SageBwd, consistent",
}


def test_variants_are_named_by_what_differs_from_the_paper(compose_settings):
    """Those of the experiments, whose names the report's verdicts look for."""
    for name, overrides in (
        experiments.QK_NORM_GRID | experiments.SMOOTHING | experiments.PRESET_GRID
    ).items():
        settings = compose_settings("experiment=debug", *overrides)
        config = OmegaConf.to_container(OmegaConf.structured(settings))
        if name in NAMES:  # a preset that was added later needs no test of its own
            assert variant_of(config) == NAMES[name]


def test_presets_are_recognized_by_their_values_or_their_name():
    def name(qk_norm=True, **attention):
        return variant_of({"model": {"qk_norm": qk_norm}, "attention": {"backend": "sagebwd"} | attention})

    assert name() == name(preset="default", smooth_k=None) == "SageBwd"
    assert name(preset="paper") == name(granularity="block", block_q=128, block_kv=64) == "SageBwd, paper"
    assert name(preset="strictly_causal", qk_norm=False) == "SageBwd, strictly causal, no QK-norm"
    assert name(preset="paper", block_q=64) == "SageBwd, paper, block_q=64"
    assert name(granularity="block", block_q=64) == "SageBwd, granularity=block, block_q=64"
    assert name(preset="paper", smooth_k=False, qk_norm=False) == "SageBwd, paper, no QK-norm, no smoothing"
    assert name(smooth_k=False, qk_norm=False) == "SageBwd, no QK-norm, no smoothing"
    assert name(smooth_q=True, unsigned_p=True) == "SageBwd, Q+K smoothing, unsigned_p=true"
    assert name(backend="fpa", sdpa="cudnn", smooth_k=True) == "full precision"
    assert name(backend="windowed", window=8, qk_norm=False) == "windowed, no QK-norm, window=8"


LARGE_TPS = "tps.tokens_per_step=2097152"
SAGE = ("attention.backend=sagebwd", "attention.smooth_k=true", "attention.smooth_q=false")


@pytest.fixture
def make_run(tmp_path, compose_settings):
    """make_run("name", losses, "seed=2", …, done=True): a full-precision run as train.py leaves it."""
    debug = OmegaConf.structured(compose_settings("experiment=debug"))

    def made(name, losses, *overrides, done=True):
        directory = RunDirectory(tmp_path / name)
        directory.path.mkdir()
        settings = OmegaConf.merge(debug, OmegaConf.from_dotlist(list(overrides)))
        write_text(directory.config, OmegaConf.to_yaml(settings))
        lines = records(losses)
        lines.append({"step": len(losses), "tokens": 256 * len(losses), "val_loss": losses[-1] + 1})
        write_text(directory.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        directory.note_environment(torch.device("cpu"), 1)
        if done:
            directory.finish()
        return directory.path

    return made


@pytest.fixture
def make_pairs(make_run):
    """Losses of full precision, but for the seed's offset; runs of it, and of SageBwd 0.1 above, by seed."""

    def made():
        losses = np.linspace(5, 3, 40)
        paths = [
            make_run(f"{name}{seed}", losses + gap + seed, *overrides, f"seed={seed}")
            for name, gap, overrides in (("f", 0, ()), ("s", 0.1, SAGE))
            for seed in (1, 2)
        ]
        return losses, paths

    return made


def test_runs_become_groups_variants_and_files(make_run, make_pairs, tmp_path):
    losses, paths = make_pairs()
    paths.append(make_run("large", losses, LARGE_TPS))
    paths.append(make_run("unfinished", losses, "seed=3", done=False))
    curves.main([*map(str, paths), "--out", str(tmp_path / "out" / "figure"), "--item", "figure1b"])

    result = read_json(tmp_path / "out" / "figure.json")
    small, large = compare(ended(result["runs"]))
    assert (small["tokens_per_step"], large["tokens_per_step"]) == (256, 2048)
    first, second = small["variants"]
    assert (first["variant"], first["seeds"], first["diverged"]) == ("full precision", [1, 2], 0)
    assert first["final_loss"] == pytest.approx(losses[-4:].mean() + 1.5)
    assert first["spread"] == pytest.approx(1)
    assert first["held_out_loss"] == pytest.approx(5.5)
    gap = next(d for d in small["differences"] if d["of"] == second["variant"])
    assert gap["mean"] == pytest.approx(0.1)
    assert gap["half_width"] == pytest.approx(0, abs=1e-9)  # the seeds' offset is not noise
    assert [run["finished"] for run in result["runs"]] == [True] * 5 + [False]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "figure.json.gz",
        "figure.png",
    ]


def test_runs_that_are_gone_are_compared_from_their_json(make_pairs, tmp_path):
    _, paths = make_pairs()
    curves.main([*map(str, paths), "--out", str(tmp_path / "whole")])
    curves.main([*map(str, paths[:3]), "--out", str(tmp_path / "part")])
    curves.main([str(tmp_path / "part.json.gz"), str(paths[3]), "--out", str(tmp_path / "part")])
    whole, part = (read_json(tmp_path / f"{name}.json") for name in ("whole", "part"))
    assert part["runs"] == whole["runs"]


def test_names_in_older_files_are_renewed():
    """presets.json.gz spells out the settings of paper(); merged with new runs, both are one variant."""
    runs = read(ROOT / "results" / "presets.json.gz")
    assert {run["variant"] for run in runs} >= {"full precision", "SageBwd", "SageBwd, paper"}
    assert not any("granularity" in run["variant"] for run in runs)


def test_a_final_loss_is_the_mean_of_the_losses_stored_with_it(make_run, tmp_path):
    losses = np.random.default_rng(0).normal(4, 1, 1234)
    run = read_run(make_run("a", losses))
    assert run["last_losses"] == list(losses[-123:])
    assert run["final_loss"] == float(np.mean(run["last_losses"])) == float(losses[-123:].mean())
    path = write_compressed_json(tmp_path / "x.json", {"runs": [run]})
    assert read(path)[0]["final_loss"] == run["final_loss"]
    write_compressed_json(tmp_path / "x.json", {"runs": [run | {"final_loss": run["final_loss"] + 1e-9}]})
    with pytest.raises(ValueError, match=r"a has the final loss .*, but its last losses have the mean"):
        read(path)


def test_the_differences_are_printed(make_pairs, tmp_path, capsys):
    _, paths = make_pairs()
    curves.main([*map(str, paths), "--out", str(tmp_path / "x")])
    assert "  SageBwd  4.6769  +0.1000  ± 0.0000" in capsys.readouterr().out.splitlines()


# --- Which runs count ---------------------------------------------------------------------------------------


def made_of(commit, *losses_by_seed, variant="a", lr=1e-3, **config):
    """Runs of one variant and commit: a seed for each loss."""
    return [
        {
            "name": f"{variant}-seed{seed}",
            "group": {"lr": lr},
            "variant": variant,
            "attention": "fpa",
            "qk_norm": True,
            "seed": seed,
            "diverged": None,
            "final_loss": loss,
            "held_out_loss": None,
            "curve": {"tokens": [1], "loss": [loss]},
            "commit": commit,
            "config": {"hardware": {"compile": True, "dtype": "bfloat16"}} | config,
        }
        for seed, loss in enumerate(losses_by_seed, start=1)
    ]


def test_a_seed_that_other_code_repeated_does_not_count():
    """The runs of the commit that most runs of the group have are kept."""
    runs = made_of("old", 2.0, 2.1) + made_of("old", 2.5, 2.6, variant="b")
    again = made_of("new", 9.0) + made_of("new", 2.7, 2.8, variant="c")
    [group] = compare([*again, *runs])
    assert group["left_out"] == [{"name": "a-seed1", "variant": "a", "commit": "new"}]
    assert group["commits"] == ["new", "old"]
    by_name = {own["variant"]: own for own in group["variants"]}
    assert (by_name["a"]["runs"], by_name["a"]["final_loss"]) == (2, pytest.approx(2.05))
    assert (by_name["a"]["commits"], by_name["c"]["commits"]) == (["old"], ["new"])
    assert group["noise"] == pytest.approx(compare(runs + again[1:])[0]["noise"])


def test_a_seed_that_the_same_code_repeated_shows_the_noise():
    runs = made_of("x", 2.0) + made_of("x", 2.1) + made_of("x", 2.5, variant="b")
    [group] = compare(runs)
    assert (group["left_out"], group["noise"]) == ([], pytest.approx(stdev([2.0, 2.1])))


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({"hardware": {"compile": False, "dtype": "bfloat16"}}, True),  # how it executes
        ({"hardware": {"compile": True, "dtype": "float32"}}, False),  # what it computes
        ({"optimizer": {"beta2": 0.99}}, False),
    ],
)
def test_a_repetition_has_the_same_settings(config, counts):
    runs = made_of("x", 2.0) + made_of("x", 2.1, **config)
    assert (compare(runs)[0]["left_out"] == []) == counts


# --- Differences of differences -----------------------------------------------------------------------------


def test_the_difference_of_two_gaps_of_equal_noise_has_twice_the_degrees_of_freedom():
    """Closed form: both standard errors are s, so that of the difference is s √2, with 2n degrees."""
    s, n = 0.01, 4
    gap = Estimate(0.05, quantile(n) * s, n)
    found = difference_of(gap, gap._replace(mean=-0.01))
    assert found.mean == pytest.approx(0.06)
    assert found.degrees == 2 * n
    assert found.half_width == pytest.approx(quantile(2 * n) * s * math.sqrt(2))


def test_the_noisier_gap_decides_how_sure_the_difference_is():
    noisy, quiet = Estimate(0.0, 1.0, 3), Estimate(0.0, 1e-6, 9)
    assert difference_of(noisy, quiet).degrees == 3
    assert difference_of(noisy, quiet).half_width == pytest.approx(1.0, rel=1e-6)


def test_intervals_of_differences_hold_the_truth_as_often_as_they_say():
    """Two variants at two numbers of tokens per step, the noise at one a tenth of that at the other."""
    generator = np.random.default_rng(0)
    hits, draws = 0, 2000
    for _ in range(draws):
        gaps = []
        for noise, truth, seeds in ((1.0, 3.0, 3), (0.1, 1.0, 2)):
            losses = noise * generator.normal(size=(2, seeds)) + generator.normal(size=seeds)
            own = {"b": losses[1] + truth, "a": losses[0]}
            found = differences(cells({name: dict(enumerate(row)) for name, row in own.items()}))
            gap = found["differences"][0]
            gaps.append(Estimate(gap["mean"], gap["half_width"], found["degrees_of_freedom"]))
        found = difference_of(*gaps)
        hits += abs(found.mean - 2.0) < found.half_width
    assert hits / draws == pytest.approx(0.95, abs=0.03)


def test_a_diverged_seed_takes_its_variant_out_of_the_comparison(make_run):
    losses = np.linspace(5, 3, 40)
    paths = [make_run("a", losses), make_run("b", losses, *SAGE, done=False)]
    RunDirectory(paths[1]).note_divergence(41)
    group = compare([read_run(path) for path in paths])[0]
    assert [variant["diverged"] for variant in group["variants"]] == [0, 1]
    assert group["variants"][1]["final_loss"] is None
    assert group["differences"] == []


def test_a_run_that_diverged_before_its_first_record_counts(make_run):
    path = make_run("a", [5.0], done=False)
    write_text(RunDirectory(path).metrics, "")
    RunDirectory(path).note_divergence(1)
    variant = compare([read_run(path)])[0]["variants"][0]
    assert (variant["diverged"], variant["final_loss"]) == (1, None)


def test_a_repeated_seed_counts_once_in_the_mean(make_run):
    paths = [make_run("a", [5.0, 4.0]), make_run("b", [5.0, 4.2]), make_run("c", [5.0, 5.1], "seed=2")]
    variant = compare([read_run(path) for path in paths])[0]["variants"][0]
    assert (variant["seeds"], variant["runs"]) == ([1, 2], 3)
    assert variant["final_loss"] == pytest.approx((4.1 + 5.1) / 2)


def test_one_run_twice_is_refused(make_run, tmp_path):
    path = make_run("a", [5.0, 4.0])
    with pytest.raises(SystemExit, match=r"a and a, full precision with seed 1, are the same run twice"):
        curves.main([str(path), str(path), "--out", str(tmp_path / "x")])


def test_what_is_no_run_is_named(tmp_path, make_run):
    with pytest.raises(SystemExit, match=r"holds no config.yaml, so it is not a run directory"):
        curves.main([str(tmp_path), "--out", str(tmp_path / "x")])
    unfinished = make_run("u", [5.0, 4.0], done=False)
    with pytest.raises(SystemExit, match="none of the 1 runs is finished"):
        curves.main([str(unfinished), "--out", str(tmp_path / "x")])
    (unfinished / "environment.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"holds no environment.jsonl"):
        curves.main([str(unfinished), "--out", str(tmp_path / "x")])
    assert not list(tmp_path.glob("x.*"))
    write_text(tmp_path / "other.json", "{}")
    with pytest.raises(SystemExit, match=r"other\.json is not a comparison .*give an OUT\.json\.gz"):
        curves.main([str(tmp_path / "other.json"), "--out", str(tmp_path / "x")])


def test_of_places_on_a_machine_only_names_are_kept():
    data = {
        "source": "parquet",
        "root": "/disk/tokens",
        "path": "/disk/corpus/train-*.parquet",
        "val_path": None,
    }
    config = {
        "seed": 1,
        "run_dir": "/disk/a",
        "runs_dir": "/disk",
        "init_from": "/disk/base/weights",
        "data": data,
    }
    found = without_places(config)
    assert found["data"] == {"source": "parquet", "path": "train-*.parquet", "val_path": None}
    assert {name: value for name, value in found.items() if name != "data"} == {
        "seed": 1,
        "init_from": "base",
    }
