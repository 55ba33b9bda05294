"""The sections on further experiments, from hand-made results whose answers are known."""

import json

import pytest

from sagebwd.config import MATMULS
from scripts.paper.experiments import find
from scripts.paper.large_logits import compare
from scripts.paper.report import SECTIONS, generate
from scripts.paper.report.controls import BLIND, UNSTEADY
from scripts.paper.report.learning_rate import BROKEN_BY, breaks_at
from scripts.paper.report.long_runs import ALIKE
from scripts.paper.report.rules import AGREES, CONTRADICTS_HERE, NOT_SEEN, OPEN
from scripts.paper.result_files import Results
from tests.scripts.paper.report import test_pool

FPA, SAGE, PAPER = "full precision", "SageBwd", "SageBwd, paper"
FLASH, ALL_INT8 = "full precision, flash", "SageBwd, all INT8"
ATTENTION = {
    FPA: {"backend": "fpa"},
    FLASH: {"backend": "fpa", "sdpa": "flash"},
    SAGE: {"backend": "sagebwd"},
    PAPER: {"backend": "sagebwd", "preset": "paper"},
    ALL_INT8: {"backend": "sagebwd", "int8_matmuls": list(MATMULS)},
}
NOISE = 0.002
SEEDS = {1: (0.0, 0.3), 2: (NOISE, 0.1), 3: (-NOISE, 0.2)}  # noise of one setting, effect of the seed


def run(variant, seed, loss, *, norm=True, gain=1.0, sequences=None, diverged=None, **group):
    found = test_pool.run(FPA, seed, loss, **group)
    model = {"qk_norm": norm, "qk_norm_gain": gain}
    if gain != 1:
        found["group"]["qk_norm_gain"] = gain
    config = {"attention": ATTENTION[variant], "model": model, "train_sequences": sequences}
    found |= {"name": f"{variant}-{norm}-{seed}-{group}", "attention": ATTENTION[variant]["backend"]}
    found |= {"config": config, "qk_norm": norm, "diverged": diverged, "last_probe": {}, "device": "H200"}
    if diverged:
        found |= {"final_loss": None, "last_losses": []}
    return found


def at_gaps(gaps, **options):
    """Three seeds of full precision and of settings that lie so far above it."""
    return [
        run(variant, seed, 3 + effect + gap + (noise if variant != FPA else 0), **options)
        for variant, gap in ({FPA: 0.0} | gaps).items()
        for seed, (noise, effect) in SEEDS.items()
    ]


def stored(folder, name, runs, **more):
    data = {"scale": "scaled", "hardware": "H200", "runs": runs, **more}
    (folder / f"{name}.json").write_text(json.dumps(data))
    return Results(folder)


def assay(folder, name="large_logits", **gaps_by_gain):
    """gaps_by_gain: {"gain4": {variant: gap}}."""
    runs = [own for gain, gaps in gaps_by_gain.items() for own in at_gaps(gaps, gain=float(gain[4:]))]
    rows = [vars(row) for row in compare([own | {"held_out_loss": 3.0} for own in runs])]
    return SECTIONS[name](stored(folder, name, runs, rows=rows, trained_on=["H200"]))


def answers(section, claim="gap"):
    return [(own.case, own.answer, own.why) for own in section.verdicts if own.claim == claim]


# --- Large logits, one batch --------------------------------------------------------------------------------


def test_a_match_counts_where_the_positive_control_ends_above(tmp_path):
    seen = assay(tmp_path, gain4={SAGE: 0.0, ALL_INT8: 0.1})
    assert answers(seen) == [("gain 4", NOT_SEEN, "")]
    assert seen.fields["sight"] == "sees errors of this size (gain 4)"
    assert "A positive control ends above full precision" in "\n".join(seen.tables.values())


def test_a_blind_assay_says_so_of_every_match(tmp_path):
    blind = assay(tmp_path, gain1={SAGE: 0.0, PAPER: 0.0, ALL_INT8: 0.0}, gain4={SAGE: 0.0, ALL_INT8: 0.1})
    assert answers(blind) == [
        ("gain 1", OPEN, BLIND),
        ("gain 1, `paper()`", OPEN, BLIND),
        ("gain 4", NOT_SEEN, ""),
    ]
    assert blind.fields["sight"] == "blind (gain 1); sees errors of this size (gain 4)"
    assert all(BLIND in own.numbers for own in blind.verdicts[:2])
    assert "| 1 |  |  | no |" in blind.fields["gaps"]


def test_a_gap_counts_unless_the_negative_control_has_one(tmp_path):
    gap = {SAGE: 0.06, ALL_INT8: 0.1}
    assert answers(assay(tmp_path, gain4=gap | {FLASH: 0.0})) == [("gain 4", AGREES, "")]
    assert answers(assay(tmp_path, gain4=gap | {FLASH: 0.05})) == [("gain 4", OPEN, UNSTEADY)]
    # A gap that is seen needs no control to show that one can be.
    assert answers(assay(tmp_path, gain4={SAGE: 0.06, ALL_INT8: 0.0}))[0][1] == AGREES


def test_a_control_that_diverges_alone_is_seen(tmp_path):
    runs = [*at_gaps({SAGE: 0.0}, gain=4.0), run(ALL_INT8, 1, 0, gain=4.0, diverged="not finite")]
    results = stored(tmp_path, "one_batch", runs, rows=[], trained_on=["H200"])
    section = SECTIONS["one_batch"](results)
    assert answers(section) == [("gain 4", NOT_SEEN, "")]
    assert "| diverged |" in section.fields["gaps"]


def test_without_a_control_a_match_is_open(tmp_path):
    assert answers(assay(tmp_path, gain4={SAGE: 0.0}))[0][1:] == (
        OPEN,
        "no interval of a positive control, so a match means nothing",
    )


# --- Long runs ----------------------------------------------------------------------------------------------


def long_runs(folder, large, small, apart=0.0):
    runs = at_gaps({SAGE: large}, tokens_per_step=64, steps=100)
    few = at_gaps({SAGE: small}, tokens_per_step=8, steps=800)
    for own in few:
        own["final_loss"] += apart
        own["last_losses"] = [own["final_loss"]]
    return SECTIONS["long_runs"](stored(folder, "long_runs", runs + few))


def test_long_runs_judge_both_gaps_and_their_difference(tmp_path):
    as_printed = long_runs(tmp_path, 0.054, -0.002)
    claims = ("gap", "match", "interaction")
    assert [answers(as_printed, claim)[0][1] for claim in claims] == [AGREES] * 3
    none = long_runs(tmp_path, 0.0, 0.0)
    assert [answers(none, claim)[0][1] for claim in claims] == [NOT_SEEN, AGREES, NOT_SEEN]


@pytest.mark.parametrize(("apart", "answer"), [(ALIKE - 0.001, AGREES), (ALIKE + 0.001, OPEN)])
def test_the_interaction_is_open_where_full_precision_ends_elsewhere(tmp_path, apart, answer):
    section = long_runs(tmp_path, 0.054, -0.002, apart)
    assert answers(section, "interaction")[0][1] == answer
    assert section.fields["distance"] == f"{apart:.4f}"


def test_long_runs_at_one_number_of_tokens_per_step_decide_nothing(tmp_path):
    runs = at_gaps({SAGE: 0.0})
    section = SECTIONS["long_runs"](stored(tmp_path, "long_runs", runs))
    assert {own.answer for own in section.verdicts} == {OPEN}


# --- Learning rate ------------------------------------------------------------------------------------------


def rates(variant, losses, seed=1, norm=True):
    """losses: at .001, .002, .004, …; None: diverged."""
    return [
        run(variant, seed, loss or 0, norm=norm, diverged=None if loss else "not finite", lr=1e-3 * 2**k)
        for k, loss in enumerate(losses)
    ]


def test_a_run_breaks_where_it_diverges_or_ends_far_above_its_best():
    def at(*losses):
        return breaks_at({own["group"]["lr"]: own for own in rates(SAGE, losses)})

    assert at(3.0, 2.9, None) == 0.004
    assert at(3.0, 2.9, 2.9 + BROKEN_BY + 0.01, 2.8) == 0.004
    assert at(3.0, 2.9, 2.9 + BROKEN_BY - 0.01) == float("inf")
    assert at(None, 2.9) == 0.001


def of_rates(folder, *runs):
    section = SECTIONS["learning_rate"](
        stored(folder, "learning_rate", [own for part in runs for own in part])
    )
    return section, {own.claim: own.answer for own in section.verdicts}


def test_which_breaks_at_the_lower_rate(tmp_path):
    norm = [
        rates(v, losses, seed) for seed in (1, 2) for v, losses in ((FPA, (3, 3, None)), (SAGE, (3, 3, None)))
    ]
    without = [
        rates(v, losses, seed, norm=False)
        for seed in (1, 2)
        for v, losses in ((FPA, (3, 3, None)), (SAGE, (3, None)))
    ]
    section, found = of_rates(tmp_path, *norm, *without)
    assert found == {"stable": AGREES, "breaks": AGREES}
    assert (
        "| SageBwd, no QK-norm | breaks at 0.002 | breaks at 0.002 | 3.0000 at 0.001 |"
        in section.fields["breaks"]
    )
    assert section.fields["rates"] == "0.001 to 0.004"


def test_rates_that_do_not_differ_or_never_break(tmp_path):
    alike = [
        rates(v, (3, 3, None), seed, norm) for seed in (1, 2) for v in (FPA, SAGE) for norm in (True, False)
    ]
    assert of_rates(tmp_path, *alike)[1] == {"stable": AGREES, "breaks": NOT_SEEN}
    earlier = [rates(FPA, (3, 3, 3), seed) for seed in (1, 2)] + [
        rates(SAGE, (3, None), seed) for seed in (1, 2)
    ]
    assert of_rates(tmp_path, *earlier)[1] == {"stable": CONTRADICTS_HERE}
    split = [rates(FPA, (3, 3, 3), seed) for seed in (1, 2)] + [
        rates(SAGE, (3, None)),
        rates(SAGE, (3, 3, None), 2),
    ]
    assert of_rates(tmp_path, *split[:2], split[2], rates(SAGE, (3, 3, 3), 2))[1] == {
        "stable": CONTRADICTS_HERE
    }
    never = [rates(v, (3, 3, 3)) for v in (FPA, SAGE)]
    section, found = of_rates(tmp_path, *never)
    assert found == {"stable": OPEN}
    assert section.verdicts[0].why == "up to 0.004 the two never end 0.3 apart where one alone breaks"
    # One that was not tried at the rate at which the other breaks says nothing.
    section, found = of_rates(tmp_path, rates(FPA, (3, 3)), rates(SAGE, (3, 3, None)))
    assert found == {"stable": OPEN}
    assert "| full precision | does not break up to 0.002 |" in section.fields["breaks"]


def test_just_above_the_limit_beside_just_below_it_says_nothing(tmp_path):
    above, below = 3 + BROKEN_BY + 0.01, 3 + BROKEN_BY - 0.01
    section, found = of_rates(tmp_path, rates(FPA, (3, below)), rates(SAGE, (3, above)))
    assert found == {"stable": OPEN}
    assert section.verdicts[0].why.startswith("up to 0.002 the two never end 0.3 apart")
    assert of_rates(tmp_path, rates(FPA, (3, 3)), rates(SAGE, (3, above)))[1] == {"stable": CONTRADICTS_HERE}
    assert of_rates(tmp_path, rates(FPA, (3, above)), rates(SAGE, (3, above)))[1] == {"stable": AGREES}
    assert section.fields["diverged"] == "0 of 4 runs diverged"


def test_how_far_they_are_apart_at_the_same_rate_and_seed(tmp_path):
    """Neither diverged runs nor those without QK-norm count."""
    section, _ = of_rates(
        tmp_path,
        rates(FPA, (3, 3.1, None)),
        rates(SAGE, (2.9, 3.2, 5)),
        rates(FPA, (3, 3), 2),
        rates(SAGE, (3.25,), 2),
        rates(SAGE, (9, 9), 2, norm=False),
    )
    assert section.fields["gaps"] == "-0.10 to +0.25"


# --- Equal loss ---------------------------------------------------------------------------------------------


def layers_at(run, step, loss, error, k_means=(0.1, 0.5, 2.0)):
    """Three layers; errors of dQ grow with depth around `error`, smoothing gains with the mean of K."""
    return [
        {
            "run": run, "step": step, "tokens": step * 1_000_000, "loss": loss, "layer": layer,
            "errors": {
                "paper": dict.fromkeys(("o_l2", "dq_l2", "dk_l2", "dv_l2"), error * (0.9, 1.0, 1.1)[layer]),
                "default": {"dq_l2": 0.1, "dk_l2": 0.1},
                "smooth-none": {"dq_l2": 0.1 * (1 + k_means[layer]), "dk_l2": 0.1},
            },
            "statistics": {"k_mean": k_means[layer]},
        }
        for layer in range(3)
    ]  # fmt: skip


def trained(norm=True, tokens_per_step=64):
    return {
        "qk_norm": norm, "tokens_per_step": tokens_per_step, "tokens": 2_000_000, "lr": 1e-3, "context": 8,
        "seed": 1, "text": "t", "model": {"d_model": 32, "qk_norm": norm}, "attention_settings": {},
    }  # fmt: skip


def equal_loss(folder, runs, rows):
    data = {"hardware": "H200", "commit": "abcdef0", "runs": runs, "rows": rows}
    (folder / "equal_loss.json").write_text(json.dumps(data))
    return SECTIONS["equal_loss"](Results(folder))


def test_errors_are_compared_at_equal_loss_and_not_at_equal_steps(tmp_path):
    """Without QK-norm the run is slower: at equal steps its error is half, at equal loss twice."""
    rows = [*layers_at("norm", 1, 4.0, 0.01), *layers_at("norm", 2, 2.0, 0.04)]
    rows += [*layers_at("none", 1, 5.0, 0.02), *layers_at("none", 2, 4.0, 0.02)]
    section = equal_loss(tmp_path, {"norm": trained(), "none": trained(norm=False)}, rows)
    [(_, answer, _)] = answers(section, "qk_norm")
    assert answer == AGREES
    assert "| none against norm | 4.000 | .0200 / .0100 | 2.00 | 0.50 |" in section.fields["pairs"]
    assert answers(section, "tokens_per_step")[0][1] == OPEN
    assert "| norm | 2.000 | .0360 | .0440 | +1.00 | 0.10 to 2.00 | 1.87 |" in section.fields["depth"]
    assert section.fields["k_mean"].startswith("0.10 to 2.00; rank correlation with what K-smoothing gains +")


def test_runs_that_share_no_loss_are_not_compared(tmp_path):
    rows = [*layers_at("many", 1, 3.0, 0.01), *layers_at("many", 2, 2.0, 0.04)]
    rows += [*layers_at("few", 1, 5.0, 0.02), *layers_at("few", 2, 4.0, 0.02)]
    runs = {"many": trained(tokens_per_step=64), "few": trained(tokens_per_step=8)}
    assert answers(equal_loss(tmp_path, runs, rows), "tokens_per_step")[0][1] == OPEN


# --- Remedies -----------------------------------------------------------------------------------------------


def trained_run(norm):
    sizes = {"vocab_size": 32, "d_model": 16, "n_layers": 1, "n_heads": 1, "d_ffn": 16, "max_context": 8}
    return {
        "qk_norm": norm, "attention": "fpa", "tokens": 1000, "tokens_per_step": 100, "context": 8, "seed": 1,
        "model": sizes, "data": {"source": "parquet", "fingerprint": "0123456789"},
    }  # fmt: skip


def remedies(folder, *biases, runs=None):
    """biases: of each run {candidate: (units, interval of the bias)}, of all weights and of q and k alike."""
    runs = {"r": trained_run(True), "s": trained_run(False)} if runs is None else runs
    candidates = {
        name: {"title": name.upper(), "units": units, "all_int8": units == 11, "has_kernel": name == "a"}
        | {"kernel_time": {"time": 1.5, "commit": "abcdef0123"} if name == "b" else None, "extra": "x"}
        for name, (units, _) in biases[0].items()
    }
    measured = {"along": [0.0] * 3, "noise": [0.01] * 3, "critical_tokens": [None] * 3}
    place = {"step": 1, "tokens": 2, "view": "raw", "layer": None}
    rows = [
        place | measured | {"run": run, "setting": name, "group": group, "bias": bias}
        for run, own in zip(runs, biases, strict=False)
        for name, (_, bias) in own.items()
        for group in ("all", "qk")
    ]
    tensors = [
        {"source": run, "candidate": name, "tensor": tensor, "heads": 1}
        | {"error": 0.5, "bias": 0.4, "noise": 0.3 if name == "a" else 0.0, "along": 0.0}
        for run in runs
        for name in biases[0]
        for tensor in ("dq", "dk", "dv")
    ]
    data = {
        "hardware": "cpu", "commit": "abcdef0", "candidates": candidates, "rows": rows, "tensors": tensors,
        "runs": runs, "refined": {}, "kernel_time": "of x", "settings": {"batches": 4},
        "tokens_per_batch": 64, "checkpoints": [{"truth": "T"}] if runs else [],
    }  # fmt: skip
    (folder / "remedies.json").write_text(json.dumps(data))
    return SECTIONS["remedies"](Results(folder))


def test_the_best_remedy_is_all_int8_and_those_alike_in_every_run_are_named(tmp_path):
    with_norm = {
        "a": (11, [0.02, 0.01, 0.03]),
        "b": (11, [0.015, 0.014, 0.016]),
        "default": (11, [0.06, 0.05, 0.07]),
        "d": (18, [0.001, 0.0, 0.002]),
    }
    without = with_norm | {"b": (11, [0.03, 0.025, 0.035]), "default": (11, [0.05, 0.04, 0.06])}
    found = remedies(tmp_path, with_norm, without)
    assert found.fields["best"] == "A"
    assert found.fields["all.a"] == "0.0200"
    assert found.fields["all.b"] == "0.0150 to 0.0300"
    assert found.fields["less.qk.b"] == "1.7 to 4.0"
    first, second = found.fields["table"].split("Without QK-norm:")
    assert first.startswith("With QK-norm:")
    lines = first.splitlines()
    bias = "0.0200 [0.0100, 0.0300] | 0.0200 [0.0100, 0.0300] | 0.0100"
    both = " | ".join(["0.4000 / 0.3000"] * 3)
    assert lines[4] == f"| A | 11 | not timed | {bias} | {both} |"
    assert lines[5].startswith("| B | 11 | 1.50 (abcdef0) | 0.0150")
    assert lines[7].startswith("| D | 18 | no kernel | 0.0010")
    assert "| B | 11 | 1.50 (abcdef0) | 0.0300" in second
    assert "on 1,000 tokens of parquet (tokens 01234567), 100 a step" in found.setting
    assert found.setting.count("parquet") == 1  # runs alike are told once
    assert "4 batches of 64 tokens, compared with T." in found.setting
    assert found.verdicts == []


def test_a_bias_that_may_be_zero_is_not_a_divisor(tmp_path):
    biases = {"a": (11, [0.001, -0.002, 0.002]), "default": (11, [0.06, 0.05, 0.07])}
    fields = remedies(tmp_path, biases, runs={"r": trained_run(True)}).fields
    assert fields["all.a"] == "0.0010"
    assert "less.all.a" not in fields
    assert fields["less.all.default"] == "1.0"


def test_remedies_without_a_run_are_costs_and_gaussian_heads(tmp_path):
    found = remedies(tmp_path, {"b": (11, [0.1] * 3)}, runs={})
    assert found.fields["best"] == "unknown"
    assert found.fields["table"].splitlines()[2] == "| B | 11 | 1.50 (abcdef0) | x |"
    assert "all.b" not in found.fields


# --- Not run ------------------------------------------------------------------------------------------------


def test_what_was_not_run_is_listed_with_its_cost(tmp_path):
    text = generate(tmp_path)["README.md"]
    for name in ("large_logits", "one_batch", "long_runs", "learning_rate", "equal_loss", "remedies"):
        item = find(name)
        assert (
            f"| `python -m scripts.reproduce {name}` | {item.title} | not run; {item.cost_in_words()} |"
            in text
        )
