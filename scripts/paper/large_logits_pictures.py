"""The picture of scripts.paper.large_logits: gaps and errors over the gain, gaps in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.paper import drawing
from scripts.paper import published as paper
from scripts.paper.large_logits_tables import Interval, Row
from scripts.paper.variants import FULL_PRECISION

SHIFT = 1.025  # between the points of two settings at one gain


def draw(rows: list[Row], curves: dict[tuple[str, float], dict[str, Any]]) -> Any:
    """Upper row: gap over the gain in each assay, and errors. Lower row: loss minus full precision in time.

    curves: by assay and gain, and by setting, (tokens, mean over seeds of the loss minus full precision).
    """
    assays = list(dict.fromkeys(row.assay for row in rows))
    looks = drawing.styles(list(dict.fromkeys(row.setting for row in rows)))
    columns = max(len(assays) + 2, len(curves))
    figure, (upper, lower) = drawing.grid(2, columns, width=4, height=3)
    for axes, assay in zip(upper, assays, strict=False):
        own = [row for row in rows if row.assay == assay]
        over_gain(axes, own, lambda row: row.gap, looks)
        axes.axhline(0, color="0.5", linewidth=0.8)
        axes.set(title=assay, ylabel="final loss minus full precision")
    for axes, name in zip(upper[len(assays) :], ("dq", "dk"), strict=False):
        own = [row for row in rows if row.assay == assays[0]]
        over_gain(axes, own, lambda row, key=f"{name}_l2": without_interval(row.probe.get(key)), looks)
        axes.axhline(paper.TABLE_2[name][1], color="0.5", linewidth=0.8, linestyle="--")
        axes.set(title=f"error of d{name[1].upper()}; dashed: the paper's Table 2", yscale="log")
    for axes, ((assay, gain), of_setting) in zip(lower, curves.items(), strict=False):
        for setting, (tokens, gap) in of_setting.items():
            axes.plot(tokens, gap, color=looks[setting].color, linestyle=looks[setting].dashes, linewidth=1.2)
        axes.set(title=f"{assay}, gain {gain:g}", ylabel="training loss minus full precision")
        axes.set_yscale("symlog", linthresh=0.01)
        drawing.tokens_axis(axes)
    for axes in (*upper[len(assays) + 2 :], *lower[len(curves) :]):
        axes.set_visible(False)
    handles = [
        upper[0].plot([], [], color=s.color, linestyle=s.dashes, marker=s.marker)[0] for s in looks.values()
    ]
    drawing.legend_below(figure, handles, list(looks))
    figure.suptitle("Training with large logits. Bars: 95% intervals", fontsize=11)
    return figure


def over_gain(axes: Any, rows: list[Row], value: Callable[[Row], Interval], looks: dict) -> None:
    """A line for each setting, its points beside each other."""
    settings = list(looks)
    for setting in dict.fromkeys(row.setting for row in rows):
        own = [row for row in rows if row.setting == setting and value(row)["mean"] is not None]
        place = SHIFT ** (settings.index(setting) - len(settings) / 2)
        look = looks[setting]
        axes.errorbar(
            [row.gain * place for row in own],
            [value(row)["mean"] for row in own],
            yerr=[value(row)["half_width"] or 0 for row in own],
            color=look.color,
            linestyle=look.dashes,
            marker=look.marker,
            markersize=4,
            linewidth=1,
            capsize=2,
        )
    gains = sorted({row.gain for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(gains, [f"{gain:g}" for gain in gains])
    axes.minorticks_off()
    axes.set_xlabel("initial gain of QK-norm")
    axes.grid(alpha=0.3)


def without_interval(value: float | None) -> Interval:
    return {"mean": value, "half_width": None}


def gap_curves(by_setting: dict[str, list[dict]]) -> dict[str, tuple[list[int], np.ndarray]]:
    """By setting, tokens and the mean over seeds of the loss minus full precision's at the same seed."""
    full: dict[int, list[dict]] = {}
    for run in by_setting.get(FULL_PRECISION, []):
        full.setdefault(run["seed"], []).append(run)
    found = {}
    for setting, own in by_setting.items():
        pairs = [
            (run["curve"], other["curve"])
            for run in own
            for other in full.get(run["seed"], [])
            if run["curve"]["tokens"] == other["curve"]["tokens"]
        ]
        if pairs and setting != FULL_PRECISION:
            gaps = [np.subtract(mine["loss"], theirs["loss"]) for mine, theirs in pairs]
            found[setting] = pairs[0][0]["tokens"], np.mean(gaps, axis=0)
    return found
