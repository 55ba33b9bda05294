"""How far branches of one model end above full precision, and which part of the backward does it.

    python -m scripts.paper.branches results

Reads losses/branches.json.gz, which scripts.paper.curves wrote, and losses/ablation.json.gz of the folder,
and writes gap.png and losses/branches.md there. A gap is a branch's training loss minus that of the branch
with cuDNN from the same model. What trained the ablation, and its picture, are last in commit 6513e903.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from common.pictures import ATTENTION, BASELINE, Style, grid, legend_below
from common.terminal import command_parser
from scripts.output import read_json, save_figure, table, write_markdown
from scripts.paper.variants import FULL_PRECISION, NO_QK_NORM
from trainer.optimizer import learning_rate

NULL = f"{FULL_PRECISION}, FlashAttention-2"
POINTS = 20  # of a curve
FLOOR = 1e-5  # nats; the pictures end there

#: Of branches.json: name, tokens per step, gain of QK-norm, whether without QK-norm, steps of the branch.
SETUPS = {
    "35M, with QK-norm": (131_072, 1.0, False, 1017),
    "35M, without QK-norm": (131_072, 1.0, True, 1017),
    "35M, QK-norm with gain 4": (131_072, 4.0, False, 1017),
    "35M, with QK-norm, 16,384 tokens per step": (16_384, 1.0, False, 8140),
    "35M, with QK-norm, 1,048,576 tokens per step": (1_048_576, 1.0, False, 127),
    "35M, with QK-norm, 2,097,152 tokens per step": (2_097_152, 1.0, False, 64),
    "35M, with QK-norm, 2,097,152 tokens per step, long": (2_097_152, 1.0, False, 256),
    "325M, with QK-norm": (131_072, 1.0, False, 1350),
    "325M, without QK-norm, 262,144 tokens per step": (262_144, 1.0, True, 100),
    "325M, with QK-norm, 2,097,152 tokens per step": (2_097_152, 1.0, False, 88),
}
PICTURED = ("35M, with QK-norm", "35M, without QK-norm", "325M, with QK-norm, 2,097,152 tokens per step")
LOOKS = {
    NULL: Style(BASELINE, ":", ""),
    "SageBwd": ATTENTION["sagebwd"],
    "SageBwd, paper": ATTENTION["sagebwd_paper"],
}
WORDS = {
    NULL: NULL,
    "SageBwd": "default",
    "SageBwd, low bias": "`low_bias()`",
    "SageBwd, no smoothing": "default, no K-smoothing",
    "SageBwd, paper": "`paper()`",
    "SageBwd, paper, no smoothing": "`paper()`, no K-smoothing",
    "SageBwd, paper, Q+K smoothing": "`paper()`, Q- and K-smoothing",
    "SageBwd, paper, dP in INT8": "`paper()`, dP in INT8",
}

LAST = slice(916, 1017)  # steps of the ablation: the last tenth
#: Of ablation.json: arm and its words.
ARMS = {
    "sagebwd-paper": "`paper()`",
    "p_per_row": "P with a scale per row",
    "dv_16_bit": "dV in 16 bit",
    "ds_per_row": "dS with a scale per row",
    "dq_dk_16_bit": "dQ and dK in 16 bit",
    "dq_16_bit": "dQ in 16 bit",
    "stochastic": "dS rounded at random, up or down (without bias)",
    "random_sign": "dS with the same errors, signs at random",
    "zero_elements": "dQ and dK in 16 bit, but elements of dS that round to zero zeroed",
    "zero_rows": "dQ and dK in 16 bit, but rows of dS that round to zero zeroed",
    "sagebwd": "the default instead",
}


Gaps = dict[int | str, np.ndarray]  # by seed, of each step


class Branch(NamedTuple):
    """A training run that goes on from a model's weights, moments and order of data; a loss for each step."""

    setup: str
    variant: str
    seed: int | str  # the model: "1, trained again" is a second one of seed 1
    losses: np.ndarray
    run: dict[str, Any]


def read_branches(folder: Path) -> list[Branch]:
    found = []
    for run in read_json(folder / "losses/branches.json")["runs"]:
        group, variant = run["group"], run["variant"]
        has_none = NO_QK_NORM in variant
        losses = np.array(run["curve"]["loss"])
        own = (group["tokens_per_step"], group.get("qk_norm_gain", 1.0), has_none, len(losses))
        [setup] = [name for name, setup in SETUPS.items() if setup == own]
        found.append(Branch(setup, variant.replace(NO_QK_NORM, ""), run["seed"], losses, run))
    return found


def read_ablation(folder: Path) -> tuple[list[Branch], dict[str, Any]]:
    """The branches; and by seed and arm, rows of dQ and dK in the model before its branches."""
    found = read_json(folder / "losses/ablation.json")
    branches = [
        Branch("ablation", run["arm"], run["seed"], np.array(run["curve"]["loss"]), run)
        for run in found["runs"]
    ]
    return branches, found["rows"]


def gaps(branches: Iterable[Branch], setup: str, variant: str, base: str = FULL_PRECISION) -> Gaps:
    """By seed, the loss of each step minus the base's; of a branch that was cut off, of the steps it has."""
    own = [one for one in branches if one.setup == setup]
    bases = {one.seed: one.losses for one in own if one.variant == base}
    return {
        one.seed: one.losses - bases[one.seed][: len(one.losses)]
        for one in own
        if one.variant == variant and one.seed in bases
    }


def windows(steps: int) -> list[slice]:
    """Of a table: the first twentieth, then wider ones, and the last tenth."""
    edges = [round(share * steps) for share in (0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1)]
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def gap_table(found: Mapping[str, Gaps]) -> str:
    """Mean over models by window of steps, and the range of the last."""
    steps = len(next(iter(next(iter(found.values())).values())))
    rows = []
    for words, own in found.items():
        means = [[one[window].mean() for one in own.values()] for window in windows(steps)]
        rows.append([words, str(len(own)), *map(nats, map(np.mean, means)), range_of(means[-1])])
    names = [f"{window.start + 1}–{window.stop}" for window in windows(steps)]
    return table(["training loss minus cuDNN, steps", "models", *names, "range of the last"], rows)


def mean_and_range(values: Sequence[float], models: int) -> str:
    """ ".0029 (.0028 to .0031; 2 models)": the range if it shows, and how many if not all."""
    if not values:
        return ""
    notes = [range_of(values)] * (" to " in range_of(values)) + [f"{len(values)} models"] * (
        len(values) != models
    )
    return nats(np.mean(values)) + f" ({'; '.join(notes)})" * bool(notes)


def last_tenth(own: Gaps) -> list[float]:
    return [one[windows(len(one))[-1]].mean() for one in own.values()]


def range_of(values: Iterable[float]) -> str:
    return " to ".join(dict.fromkeys([nats(min(values)), nats(max(values))]))


def nats(value: float) -> str:
    """ ".0003", "−.0001"; what rounds to zero has no sign."""
    digits = f"{abs(value):.4f}".removeprefix("0")
    return f"−{digits}" if value < 0 and digits != ".0000" else digits


# --- Tables -------------------------------------------------------------------------------------------------


def branch_tables(branches: Sequence[Branch]) -> dict[str, str]:
    """By setup, the gaps of all variants."""
    return {
        setup: gap_table(
            {words: own for variant, words in WORDS.items() if (own := gaps(branches, setup, variant))}
        )
        for setup in SETUPS
    }


def summary(branches: Sequence[Branch]) -> str:
    """The last tenth of the branches: mean over models, and for more than one their range."""
    rows = []
    for setup in SETUPS:
        found = [
            last_tenth(gaps(branches, setup, variant)) for variant in ("SageBwd", "SageBwd, paper", NULL)
        ]
        models = len(found[1])
        cells = [mean_and_range(own, models) for own in found]
        rows.append([setup, str(models), f"{SETUPS[setup][-1]:,}", *cells])
    return table(["branches of", "models", "steps", "default", "`paper()`", "null: FlashAttention-2"], rows)


def at_equal_learning(branches: Sequence[Branch]) -> str:
    """The gap of paper() with QK-norm at the sum of learning rates of each length of branches of 2.1M.

    Mean over the last quarter of that sum; of branches that get so far. Without the learning rate, steps of
    16K and of 2.1M tokens could not be compared.
    """
    found: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    totals: dict[int, float] = {}
    for name, (tokens, gain, has_none, steps) in SETUPS.items():
        if gain != 1 or has_none:
            continue
        rates = learning_rates(next(one.run for one in branches if one.setup == name))
        differences = gaps(branches, name, "SageBwd, paper").values()
        found.setdefault((int(name.split("M")[0]), tokens), []).extend((rates, one) for one in differences)
        if tokens == 2_097_152:
            totals[steps] = rates.sum()
    rows = []
    for (millions, tokens), every in sorted(found.items()):
        means = [
            [late_mean(*one, total) for one in every if one[0].sum() >= total]
            for _, total in sorted(totals.items())
        ]
        rows.append([f"{millions}M", f"{tokens:,}", *(mean_and_range(one, models=1) for one in means)])
    return table(
        ["model", "tokens per step", *(f"as {steps} steps of 2.1M" for steps in sorted(totals))], rows
    )


def late_mean(rates: np.ndarray, gap: np.ndarray, total: float) -> float:
    """Over the steps at which the sum of learning rates lies between .75 and 1 of the total."""
    sums = np.cumsum(rates)
    return gap[(sums > 0.75 * total) & (sums <= total)].mean()


def learning_rates(run: Mapping[str, Any]) -> np.ndarray:
    """Of each step of a branch."""
    group, settings = run["group"], SimpleNamespace(**run["config"]["optimizer"])
    steps = range(group["branch_step"], group["steps"])
    return np.array(
        [
            learning_rate(step, steps=group["steps"], warmup_steps=group["warmup_steps"], settings=settings)
            for step in steps
        ]
    )


def ablation_table(arms: Sequence[Branch], rows: Mapping[str, Any]) -> str:
    """The last tenth of each model, final weights with full attention, and what is left of small rows."""
    seeds = sorted({one.seed for one in arms})
    lines = []
    for arm, words in ARMS.items():
        own = gaps(arms, "ablation", arm, "fpa-cudnn")
        cells = [
            nats(own[seed][LAST].mean()) + "*" * (len(own[seed]) < LAST.stop) if seed in own else ""
            for seed in seeds
        ]
        lines.append([words, *cells, weights_gaps(arms, arm), small_rows(rows, arm)])
    heads = [f"seed {seed}" for seed in seeds]
    return table(["`paper()` with", *heads, "final weights, full precision", "left of small rows"], lines)


def weights_gaps(arms: Sequence[Branch], arm: str) -> str:
    """Loss of the final weights on 4 million training tokens, minus that of full precision's weights."""
    found = {
        (one.variant, one.seed): one.run["final_weights"]["training"]["full precision"]
        for one in arms
        if one.run["final_weights"]
    }
    values = [loss - found["fpa-cudnn", seed] for (own, seed), loss in found.items() if own == arm]
    return ", ".join(map(nats, values))


def small_rows(rows: Mapping[str, Any], arm: str) -> str:
    """Of dQ and of dK: the smallest median over models, see sagebwd.metrics.small_rows_left."""
    own = [found[arm] for found in rows.values() if arm in found]
    if not own:
        return ""
    return ", ".join(f"{min(one[f'{x}_small_median'] for one in own):.2%}" for x in ("dq", "dk"))


# --- Pictures -----------------------------------------------------------------------------------------------


def points(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of twentieths of the steps, at their last steps."""
    parts = np.array_split(losses, POINTS)
    return np.cumsum([len(part) for part in parts]), np.array([part.mean() for part in parts])


def draw_gap(axes: Any, own: Gaps, look: Style, *, label: str) -> None:
    """The mean over models and their range; what is not above FLOOR is drawn on it."""
    values = np.maximum([points(one)[1] for one in own.values()], FLOOR)
    steps = points(next(iter(own.values())))[0]
    axes.fill_between(steps, values.min(0), values.max(0), color=look.color, alpha=0.18, linewidth=0)
    axes.plot(steps, values.mean(0), color=look.color, linestyle=look.dashes, linewidth=1.8, label=label)


def draw_branches(branches: Sequence[Branch]) -> Any:
    """Losses of full precision, the default and paper(), and below their gaps next to the null."""
    figure, panels = grid(2, len(PICTURED), width=4.6, height=3, sharex="col", sharey="row")
    for (losses, below), setup in zip(panels.T, PICTURED, strict=True):
        seeds = gaps(branches, setup, "SageBwd, paper")
        for variant, look in {FULL_PRECISION: ATTENTION["fpa"], **LOOKS}.items():
            own = [
                one.losses
                for one in branches
                if (one.setup, one.variant) == (setup, variant) and one.seed in seeds
            ]
            if own and variant != NULL:
                steps, mean = points(np.mean(own, axis=0))
                width = 4 if variant == FULL_PRECISION else 1.6  # the default hides it otherwise
                losses.plot(steps, mean, color=look.color, linestyle=look.dashes, linewidth=width)
        for variant, look in LOOKS.items():
            if own := gaps(branches, setup, variant):
                draw_gap(below, own, look, label=WORDS[variant].strip("`"))
        tokens = f"{SETUPS[setup][0]:,} tokens"
        count = f"mean of {len(seeds)} models" if len(seeds) > 1 else "one model"
        losses.set(title=f"{setup.removesuffix(f', {tokens} per step')}: {count}")
        below.set(yscale="log", ylim=(FLOOR, 0.1), xlabel=f"step of the branch ({tokens} each)")
        for axes in (losses, below):
            axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("training loss, nats per token")
    panels[1, 0].set_ylabel("minus full precision, nats")
    handles, labels = panels[1, 0].get_legend_handles_labels()
    [black] = panels[0, 0].plot([], [], color=ATTENTION["fpa"].color, linewidth=4)
    legend_below(figure, [black, *handles], ["full precision, cuDNN", *labels])
    return figure


# --- Command ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("python -m scripts.paper.branches", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="default: %(default)s")
    folder = parser.parse_args(argv).folder
    branches, (arms, rows) = read_branches(folder), read_ablation(folder)
    save_figure(draw_branches(branches), folder / "gap.png")
    sections = branch_tables(branches)
    sections["With QK-norm, after equal sums of learning rates"] = at_equal_learning(branches)
    sections["Ablation"] = ablation_table(arms, rows) + "\n\n\\* cut off before its last step"
    text = "".join(f"\n## {name}\n\n{own}\n" for name, own in sections.items())
    write_markdown(
        folder / "losses/branches",
        f"# Branches of one model\n\nNats per token; [the report](../README.md) explains them.\n{text}",
    )
    print(text)


if __name__ == "__main__":
    main()
