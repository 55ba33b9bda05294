"""Pictures of training losses: a column for each group of runs, seeds as bands."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.paper import drawing
from scripts.paper.variants import NO_QK_NORM, title_of
from trainer.style import Style

#: By experiment.
TITLES = {
    "figure1a": "Figure 1a: training loss at many tokens per step",
    "figure1b": "Figure 1b: training loss at few tokens per step",
    "figure4": "Figure 4: training loss and smoothing",
    "finetune": "Fine-tuning: training loss",
    "presets": "Presets: training loss",
    "long_runs": "Long runs: training loss",
    "learning_rate": "Learning rates: training loss",
}

#: What `compare` adds to a group.
COMPARED = ("variants", "commits", "left_out", "noise", "degrees_of_freedom", "differences")


def draw(groups: list[dict], runs: list[dict], title: str = "Training loss") -> Any:
    """Loss over tokens, and below it the distance from the group's first variant at the same seed.

    A line is the mean over seeds, a band the range; the key below tells the variants.
    """
    figure, panels = drawing.grid(2, len(groups), width=6, height=2.9, sharex="col", height_ratios=(3, 2))
    names = list(dict.fromkeys(variant["variant"] for group in groups for variant in group["variants"]))
    looks = variant_styles(names)
    shown: dict[str, Any] = {}
    for (losses, gaps), group in zip(panels.T, groups, strict=True):
        own = [run for run in runs if run["group"] == own_settings(group)]
        first = group["variants"][0]["variant"]
        for variant in (variant["variant"] for variant in group["variants"]):
            of_variant = [run for run in own if run["variant"] == variant]
            look = looks[variant]
            shown[title_of(variant)] = draw_band(losses, curves_of(of_variant), look)
            # Of the first variant only repetitions of a seed differ from it: they show the noise.
            if variant != first or len({run["seed"] for run in of_variant}) < len(of_variant):
                draw_band(gaps, gaps_of(of_variant, own, first), look)
        losses.set_title(group_name(group), fontsize=9)
        losses.set_ylabel("training loss, nats")
        gaps.axhline(0, color="0.5", linewidth=0.8)
        gaps.set_ylabel(f"minus {first},\nsame seed", fontsize=9)
        drawing.tokens_axis(gaps)
        zoom(losses, own)
        for axes in (losses, gaps):
            axes.grid(alpha=0.3)
    drawing.legend_below(figure, list(shown.values()), list(shown))
    figure.suptitle(f"{title}. Line: mean over seeds, band: range", fontsize=11)
    return figure


def own_settings(group: dict[str, Any]) -> dict[str, Any]:
    """What the runs of a group share, without what was made of them."""
    return {key: value for key, value in group.items() if key not in COMPARED}


def variant_styles(names: list[str]) -> dict[str, Style]:
    """The style of each variant's attention; without QK-norm the same colour, dashed."""
    titles = {name: title_of(name) for name in names}
    looks = drawing.styles(list(dict.fromkeys(title.removesuffix(NO_QK_NORM) for title in titles.values())))
    return {
        name: looks[title.removesuffix(NO_QK_NORM)]._replace(dashes=(0, (4, 2)))
        if title.endswith(NO_QK_NORM)
        else looks[title.removesuffix(NO_QK_NORM)]
        for name, title in titles.items()
    }


Curve = tuple[list[float], np.ndarray]


def curves_of(runs: list[dict]) -> list[Curve]:
    return [(run["curve"]["tokens"], np.array(run["curve"]["loss"])) for run in runs]


def gaps_of(runs: list[dict], group: list[dict], first: str) -> list[Curve]:
    """Each run's loss minus that of the first variant at the same seed (the mean of its repetitions).

    Nothing for a run that ended before the other: the points of its thinned curve are means of other steps.
    """
    gaps = []
    for run in runs:
        tokens = run["curve"]["tokens"]
        others = [
            other["curve"]["loss"]
            for other in group
            if (other["variant"], other["seed"], other["curve"]["tokens"]) == (first, run["seed"], tokens)
        ]
        if others:
            gaps.append((tokens, np.subtract(run["curve"]["loss"], np.mean(others, axis=0))))
    return gaps


def draw_band(axes: Any, curves: list[Curve], look: Style) -> Any:
    """The mean of the curves, and their range as a band; those of other lengths (diverged) as thin lines."""
    longest = max((tokens for tokens, _ in curves), key=len, default=[])
    whole = [values for tokens, values in curves if tokens == longest]
    for tokens, values in curves:
        if tokens != longest:
            axes.plot(tokens, values, color=look.color, linestyle=look.dashes, linewidth=0.7)
    if not whole:
        return axes.plot([], [], color=look.color, linestyle=look.dashes)[0]
    if len(whole) > 1:
        axes.fill_between(longest, np.min(whole, 0), np.max(whole, 0), color=look.color, alpha=0.18, lw=0)
    return axes.plot(longest, np.mean(whole, 0), color=look.color, linestyle=look.dashes, linewidth=1.4)[0]


def zoom(axes: Any, runs: list[dict]) -> None:
    """Leave out the fall of the first steps, where all curves are one."""
    losses = [run["curve"]["loss"] for run in runs if len(run["curve"]["loss"]) > 20]
    if losses:
        later = [loss for own in losses for loss in own[len(own) // 12 :]]
        low, high = min(min(own) for own in losses), max(later)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def group_name(group: dict[str, Any]) -> str:
    """ "34.7M parameters, 131,072 tokens per step, 382 steps, lr 0.001", in two lines."""
    size = f"{group['parameters'] / 1e6:.3g}M parameters"
    start = ", from trained weights" if group["init_from"] else ""
    schedule = f"{group['tokens_per_step']:,} tokens per step"
    return f"{size}, {schedule},\n{group['steps']:,} steps, lr {group['lr']:g}{start}"
