"""One noise for all runs of a setup, whichever experiment they belong to."""

import math
from statistics import mean

import pytest

from scripts.paper.report import generate
from scripts.paper.report.pool import alike_but_tokens_per_step, groups_of, pooled
from scripts.paper.result_files import DamagedResult, Results, write_compressed_json

GROUP = {
    "parameters": 10,
    "context": 8,
    "tokens_per_step": 64,
    "steps": 100,
    "lr": 0.001,
    "warmup_steps": 1,
    "text": "t",
    "init_from": None,
}
ATTENTION = {
    "full precision": {"backend": "fpa"},
    "SageBwd": {"backend": "sagebwd"},
    "SageBwd, paper": {"backend": "sagebwd", "preset": "paper"},
    "SageBwd, consistent": {"backend": "sagebwd", "preset": "consistent"},
}


def run(variant, seed, loss, commit="c", **group):
    attention = ATTENTION[variant]
    return {
        "name": f"{variant}-seed{seed}",
        "group": GROUP | group,
        "variant": variant,
        "attention": attention["backend"],
        "qk_norm": True,
        "seed": seed,
        "finished": True,
        "diverged": None,
        "final_loss": loss,
        "last_losses": [loss],
        "held_out_loss": None,
        "curve": {"tokens": [6400], "loss": [loss]},
        "commit": commit,
        "config": {"attention": attention, "model": {"qk_norm": True}},
    }


def runs_of(losses, **group):
    """losses: {variant: (of seed 1, of seed 2)}."""
    return [
        run(variant, seed, loss, **group)
        for variant, own in losses.items()
        for seed, loss in enumerate(own, start=1)
    ]


@pytest.fixture
def store(tmp_path):
    def stored(**files):
        for name, runs in files.items():
            data = {"scale": "scaled", "hardware": "CPU", "runs": runs}
            write_compressed_json(tmp_path / f"{name}.json", data)
        return Results(tmp_path)

    return stored


PLAIN = {"full precision": (2.0, 2.2), "SageBwd": (2.1, 2.28)}
MORE = {"SageBwd, paper": (2.05, 2.31), "SageBwd, consistent": (2.0, 2.24)}


def gap(group, of="SageBwd", minus="full precision"):
    return next(d for d in group["differences"] if (d["of"], d["minus"]) == (of, minus))


def test_the_noise_is_that_of_all_experiments(store):
    """Closed form: residuals of the table of variants and seeds, over (variants − 1)(seeds − 1) degrees."""
    [group] = pooled(store(figure1a=runs_of(PLAIN), presets=runs_of(PLAIN | MORE)))
    losses = PLAIN | MORE
    by_seed = [mean(own[seed] for own in losses.values()) for seed in range(2)]
    residuals = [
        loss - mean(own) - by_seed[seed] + mean(by_seed)
        for own in losses.values()
        for seed, loss in enumerate(own)
    ]
    assert group["degrees_of_freedom"] == 3
    assert group["noise"] == pytest.approx(math.sqrt(sum(r * r for r in residuals) / 3))
    assert gap(group)["half_width"] == pytest.approx(3.182 * group["noise"])
    [alone] = pooled(store(presets=runs_of(PLAIN)))
    assert alone["degrees_of_freedom"] == 1


def test_a_run_of_two_experiments_counts_once(store):
    runs = runs_of(PLAIN)
    [group] = pooled(store(figure1a=runs, figure4=runs, presets=runs))
    assert [own["runs"] for own in group["variants"]] == [2, 2]


def test_a_repetition_in_another_experiment_counts_if_its_code_is_the_same(store):
    again = {commit: [run("SageBwd", 1, 2.15, commit)] for commit in ("c", "another")}
    for commit, runs in again.items():
        [group] = pooled(store(figure1a=runs_of(PLAIN), presets=runs))
        assert [own["runs"] for own in group["variants"]] == [2, 3 if commit == "c" else 2]
        assert len(group["left_out"]) == (commit == "another")


def test_other_setups_have_their_own_noise(store):
    results = store(figure1a=runs_of(PLAIN), presets=runs_of(PLAIN | MORE, lr=0.006))
    assert [group["degrees_of_freedom"] for group in pooled(results)] == [1, 3]
    data = results.json("presets.json")
    assert [group["lr"] for group in groups_of(data, pooled(results))] == [0.006]


def test_gaps_at_fewer_tokens_per_step_have_the_same_model_rate_and_tokens(store):
    few = {"tokens_per_step": 8, "steps": 800, "warmup_steps": 8}
    results = store(
        figure1a=runs_of(PLAIN),
        figure1b=[
            *runs_of(PLAIN, **few),
            *runs_of(PLAIN, **few, lr=0.006),
            *runs_of(PLAIN, **few, parameters=20),
            *runs_of(PLAIN, **few | {"steps": 801}),
        ],
    )
    groups = pooled(results)
    assert alike_but_tokens_per_step(groups[0], groups) == [groups[1]]
    assert alike_but_tokens_per_step(groups[1], groups) == []


def test_a_final_loss_that_is_not_the_mean_of_its_losses_is_named(store, tmp_path):
    store(figure1a=[run("SageBwd", 1, 2.0) | {"final_loss": 2.5}])
    with pytest.raises(DamagedResult, match=r"figure1a\.json.*SageBwd-seed1 has the final loss 2\.5"):
        generate(tmp_path)
