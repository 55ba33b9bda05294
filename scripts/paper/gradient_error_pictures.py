"""Pictures of scripts.paper.gradient_error: error against cost, and its parts over the tokens seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from scripts.paper import drawing
from scripts.paper.attention_errors import TITLES
from scripts.paper.gradient_error_rows import (
    PARTS,
    HeadSource,
    Row,
    chosen,
    front,
    mean_error,
    points_of,
    runs_with_progress,
)
from trainer.style import ATTENTION, CYCLE

#: Variants that are named in the picture, with those of the Pareto front.
NAMED = ("paper", "default", "consistent", "accurate", "strictly causal", "all in 16 bit")
#: Styles of the parts of the error; black is the whole.
PART_STYLES = CYCLE[1:5]


def draw_costs(sources: Sequence[HeadSource], rows: Sequence[Row]) -> Any:
    """Error of dQ and dK against cost: geometric mean over the runs' last steps, some with their range."""
    figure, panels = drawing.grid(1, len(PARTS), width=5, height=4.2)
    last = [source for source in sources if source.is_last]
    every = {tensor: [points_of(rows, source, tensor) for source in last] for tensor in PARTS}
    means = {tensor: mean_points(every[tensor]) for tensor in PARTS}
    on_front = [name for tensor in PARTS for name in front(means[tensor])]
    named = [name for name in dict.fromkeys((*NAMED, *on_front)) if name in means["dq"]]
    looks = drawing.styles(named)
    for axes, tensor in zip(panels[0], PARTS, strict=True):
        points = means[tensor]
        axes.plot(*zip(*points.values(), strict=True), ".", color="0.8", label="other variants", zorder=1)
        best = [points[name] for name in front(points)]
        axes.step(*zip(*best, strict=True), where="post", color="0.6", linewidth=1, label="best for its cost")
        for name in named:
            errors = [own[name][1] for own in every[tensor] if own[name][1] > 0]
            cost, look = points[name][0], looks[name]
            if errors:
                axes.plot(
                    [cost, cost], [min(errors), max(errors)], color=look.color, linewidth=0.8, alpha=0.5
                )
            axes.plot(*points[name], look.marker, color=look.color, markersize=7, label=name, linestyle="")
        drawing.log_axis(axes.yaxis)
        axes.set_title(f"Error of {TITLES[tensor]}")
        axes.set_xlabel("cost in INT8 products of N × N × D (16-bit attention: 18)")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("relative L2")
    drawing.legend_below(figure, *panels[0][0].get_legend_handles_labels(), columns=3)
    figure.suptitle(
        f"Variants of SageBwd: error against cost, mean and range over {len(last)} runs", fontsize=11
    )
    return figure


def mean_points(panels: Sequence[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """(cost, geometric mean of the errors) by variant."""
    return {
        name: (cost, geometric_mean([max(panel[name][1], 1e-12) for panel in panels]))
        for name, (cost, _) in panels[0].items()
    }


def draw_progress(sources: Sequence[HeadSource], rows: Sequence[Row], tensor: str) -> Any:
    """The default's error of `tensor` and its parts over the tokens seen; a panel for each run."""
    runs = runs_with_progress(sources)
    columns = min(3, len(runs))
    figure, panels = drawing.grid(math.ceil(len(runs) / columns), columns, width=3.6, height=2.3, sharey=True)
    for axes, run in zip(panels.flat, runs, strict=False):
        of_run = sorted((s for s in sources if s.run == run), key=lambda source: source.tokens)
        tokens = [source.tokens for source in of_run]
        lines = [("variant", "default", ATTENTION["fpa"].color, "-")]
        parts = zip(PARTS[tensor], PART_STYLES, strict=True)
        lines += [("alone", part, look.color, look.dashes) for part, look in parts]
        for kind, name, color, dashes in lines:
            errors = [mean_error(chosen(rows, source=s.name, kind=kind, name=name), tensor) for s in of_run]
            width = 2 if kind == "variant" else 1.3
            label = "all roundings" if kind == "variant" else f"{name} alone"
            axes.plot(
                tokens, errors, marker="o", markersize=3, color=color, linestyle=dashes, linewidth=width,
                label=label,
            )  # fmt: skip
        drawing.log_axis(axes.yaxis)
        axes.set_title(run, fontsize=9)
        drawing.tokens_axis(axes)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3, which="both")
    for axes in panels.flat[len(runs) :]:
        axes.set_visible(False)
    for line in panels:
        line[0].set_ylabel("relative L2")
    drawing.legend_below(figure, *panels.flat[0].get_legend_handles_labels(), columns=5)
    figure.suptitle(f"Error of {TITLES[tensor]} and its parts during training, default settings", fontsize=11)
    return figure
