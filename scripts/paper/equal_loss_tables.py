"""What scripts.paper.equal_loss measured, as rows, tables and a picture, and errors read at a given loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from scripts.bench.measuring import origin_of
from scripts.output import align
from scripts.paper import drawing


@dataclass(frozen=True)
class Row:
    """One layer of a run at a checkpoint.

    loss: of the whole model there, validation, nats per token. errors: by variant, those of
    trainer.probe.errors. statistics: those of trainer.probe.explanations, and k_mean.
    """

    run: str
    step: int
    tokens: int
    loss: float
    layer: int
    errors: dict[str, dict[str, float]]
    statistics: dict[str, float]


# --- Reading ------------------------------------------------------------------------------------------------


def runs_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.run for row in rows))


def steps_of(rows: Sequence[Row], run: str) -> list[int]:
    return sorted({row.step for row in rows if row.run == run})


def at(rows: Sequence[Row], run: str, step: int | None = None) -> list[Row]:
    """The layers of a run at a step, in order; by default at its end."""
    step = steps_of(rows, run)[-1] if step is None else step
    return sorted((row for row in rows if (row.run, row.step) == (run, step)), key=lambda row: row.layer)


def gradient_error(layers: Sequence[Row], variant: str = "paper") -> float:
    """Relative L2 of dQ and dK, mean over layers."""
    return fmean(row.errors[variant][f"{name}_l2"] for row in layers for name in ("dq", "dk"))


def curve(rows: Sequence[Row], run: str, variant: str = "paper") -> list[tuple[float, float]]:
    """(loss, error of dQ and dK) of every checkpoint, in order of steps."""
    layers = [at(rows, run, step) for step in steps_of(rows, run)]
    return [(own[0].loss, gradient_error(own, variant)) for own in layers]


def error_at(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """The error where the loss first falls to `loss`, log-linear between checkpoints; None: it never does.

    None as well where the first checkpoint is below it already.
    """
    for (before, first), (after, second) in pairwise(points):
        if before >= loss >= after and before > after:
            share = (before - loss) / (before - after)
            return float(np.exp((1 - share) * np.log(first) + share * np.log(second)))
    return None


def common_loss(*curves: Sequence[tuple[float, float]]) -> float:
    """The lowest loss that all of the runs reach."""
    return max(min(loss for loss, _ in own) for own in curves)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's, of values without ties; None of fewer than three."""
    if len(x) < 3:
        return None
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def smoothing_gain(row: Row, name: str = "dq") -> float:
    """By how much the error of dQ is larger without K-smoothing."""
    return row.errors["smooth-none"][f"{name}_l2"] / row.errors["default"][f"{name}_l2"]


# --- Showing ------------------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any], rows: Sequence[Row]) -> str:
    lines = ["# Errors in the layers at equal loss", "", origin_of(result), ""]
    lines += ["`python -m scripts.paper.equal_loss --help` says what is measured.", ""]
    for run in runs_of(rows):
        lines += [f"## {run}", "", *progress_table(rows, run), "", *depth_table(at(rows, run)), ""]
    return "\n".join(lines)


def progress_table(rows: Sequence[Row], run: str) -> list[str]:
    """A line for each checkpoint."""
    lines = []
    for step in steps_of(rows, run):
        layers = at(rows, run, step)
        found = [f"{gradient_error(layers, variant):.4f}" for variant in ("paper", "default")]
        k_mean = fmean(row.statistics["k_mean"] for row in layers)
        lines.append([f"{step:,}", f"{layers[0].tokens:,}", f"{layers[0].loss:.4f}", *found, f"{k_mean:.3f}"])
    return align(
        ["step", "tokens", "loss", "dQ and dK, paper", "dQ and dK, default", "‖μ_K‖ / spread"], lines
    )


def depth_table(layers: Sequence[Row]) -> list[str]:
    """A line for each layer, at the end of the run."""
    lines = [
        [
            str(row.layer),
            *(f"{row.errors['paper'][f'{name}_l2']:.4f}" for name in ("o", "dq", "dk", "dv")),
            f"{row.statistics['k_mean']:.3f}",
            f"{smoothing_gain(row):.2f}",
        ]
        for row in layers
    ]
    return align(["layer", "O", "dQ", "dK", "dV", "‖μ_K‖ / spread", "dQ without K-smoothing / with"], lines)


def draw(rows: Sequence[Row]) -> Any:
    """Error against loss along each run, error and mean of K by depth at its end."""
    runs = runs_of(rows)
    looks = drawing.styles(runs)
    figure, [panels] = drawing.grid(1, 3, width=4, height=3)
    for run in runs:
        end, look = at(rows, run), looks[run]
        depth = [row.layer for row in end]
        lines = (
            tuple(zip(*curve(rows, run), strict=True)),
            (depth, [row.errors["paper"]["dq_l2"] for row in end]),
            (depth, [row.statistics["k_mean"] for row in end]),
        )
        for axes, (x, y) in zip(panels, lines, strict=True):
            axes.plot(
                x, y, color=look.color, linestyle=look.dashes, marker=look.marker, markersize=3, label=run
            )
    titles = (
        "error of dQ and dK, paper()",
        "error of dQ, paper(), at the end",
        "‖μ_K‖ / spread of K, at the end",
    )
    for axes, title, below in zip(panels, titles, ("validation loss", "layer", "layer"), strict=True):
        axes.set(title=title, xlabel=below)
        axes.grid(alpha=0.3)
    panels[0].invert_xaxis()
    panels[0].set_yscale("log")
    drawing.legend_below(figure, *panels[0].get_legend_handles_labels())
    return figure
