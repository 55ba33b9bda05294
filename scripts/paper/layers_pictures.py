"""Pictures of scripts.paper.layers: errors by layer, and what smoothing changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from scripts.paper import drawing
from scripts.paper.layers_tables import MAIN_VARIANTS, Row
from trainer.plot import PROBED

LABELS = {"paper": "paper()", "default": "default"}
SMOOTHINGS = {
    "smooth-none": "no smoothing",
    "default": "K smoothed (default)",
    "smooth-qk": "Q and K smoothed",
}


def draw_layers(runs: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> Any:
    """Relative L2 by layer; a row for each group of runs, a panel for each tensor.

    A group: runs of one model, tokens per step and learning rate. Solid with QK-norm, dashed without; the
    band is the range over the group's runs.
    """
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        groups.setdefault(title_of(run), []).append(name)
    figure, panels = drawing.grid(len(groups), 4, width=2.7, height=2.1, sharex="row", sharey="row")
    looks = drawing.styles(MAIN_VARIANTS)
    shown: dict[str, Any] = {}
    for line, (title, names) in zip(panels, groups.items(), strict=True):
        for axes, (tensor, tensor_title) in zip(line, PROBED.items(), strict=True):
            for variant in MAIN_VARIANTS:
                for qk_norm in (True, False):
                    own = [
                        by_layer(rows, name, variant, f"{tensor}_l2")
                        for name in names
                        if runs[name]["qk_norm"] == qk_norm
                    ]
                    if own:
                        label = f"{LABELS[variant]}{'' if qk_norm else ', no QK-norm'}"
                        shown[label] = draw_range(axes, own, looks[variant].color, "-" if qk_norm else "--")
            axes.set_title(tensor_title, fontsize=9)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3, which="both")
        line[0].set_ylabel(f"{title}\nrelative L2", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    drawing.legend_below(figure, list(shown.values()), list(shown))
    figure.suptitle("Error of SageBwd by layer of trained models; bands: range over runs", fontsize=11)
    return figure


def title_of(run: Mapping[str, Any]) -> str:
    """What the runs of a group share."""
    return (
        f"{run['model']['n_layers']} layers,\n{run['tokens_per_step']:,} tokens per step,\nlr {run['lr']:g}"
    )


def by_layer(rows: Iterable[Row], run: str, variant: str, key: str) -> dict[int, float]:
    return {row.layer: row.errors[variant][key] for row in rows if row.run == run}


def draw_range(axes: Any, runs: Sequence[dict[int, float]], color: str, dashes: str) -> Any:
    """The mean over runs, their range as a band, on a logarithmic axis."""
    layers = sorted(runs[0])
    values = [[run.get(layer, math.nan) for run in runs] for layer in layers]
    if len(runs) > 1:
        axes.fill_between(
            layers, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.2, lw=0
        )
    means = [fmean(v) for v in values]
    if any(mean > 0 for mean in means):
        drawing.log_axis(axes.yaxis)
    return axes.plot(layers, means, marker=".", color=color, linestyle=dashes, linewidth=1.3)[0]


def draw_smoothing(rows: Sequence[Row]) -> Any:
    """Mean relative L2 of dQ and dK over layers; a line of points for each run."""
    runs = list(dict.fromkeys(row.run for row in rows))
    figure, panels = drawing.grid(1, 2, width=4.5, height=1.6 + 0.25 * len(runs), sharey=True)
    looks = {
        "smooth-none": drawing.OTHERS[0],
        "default": drawing.styles(["default"])["default"],
        "smooth-qk": drawing.OTHERS[1],
    }
    for axes, tensor in zip(panels[0], ("dq", "dk"), strict=True):
        for variant, title in SMOOTHINGS.items():
            means = [fmean(by_layer(rows, run, variant, f"{tensor}_l2").values()) for run in runs]
            look = looks[variant]
            axes.plot(means, range(len(runs)), look.marker, color=look.color, label=title, markersize=6)
        drawing.log_axis(axes.xaxis)
        axes.set_title(f"Error of {PROBED[tensor]}")
        axes.set_xlabel("relative L2, mean over layers")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_yticks(range(len(runs)), runs, fontsize=8)
    panels[0][0].invert_yaxis()
    drawing.legend_below(figure, *panels[0][0].get_legend_handles_labels())
    figure.suptitle("What smoothing changes in the layers of trained models", fontsize=11)
    return figure
