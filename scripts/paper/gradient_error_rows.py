"""What scripts.paper.gradient_error measures: rows, and means, costs and the Pareto front of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

#: The steps that make up the error of a gradient, without overlap.
PARTS = {"dq": ("S", "O and δ", "dS in dQ", "K in dQ"), "dk": ("S", "O and δ", "dS in dK", "Q in dK")}


@dataclass(frozen=True)
class HeadSource:
    """Where a head is from: a trace, or random numbers."""

    name: str
    run: str
    tokens: int | None  # seen in training; None for random numbers
    qk_norm: bool | None
    tokens_per_step: int | None = None
    is_last: bool = True  # of its run: measured with every variant


@dataclass(frozen=True)
class Row:
    """What one variant does to one head: by tensor, against float64.

    kind: "variant", or of the default's roundings "alone" and "all but".
    cost: in INT8 products of N × N × D; None for the latter.
    gain: ⟨x, exact⟩ / ⟨exact, exact⟩, less than 1 where the tensor is too short.
    """

    source: str
    layer: int
    head: int
    kind: str
    name: str
    cost: float | None
    relative_l2: dict[str, float]
    cosine: dict[str, float]
    gain: dict[str, float]


def chosen(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with these fields."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def by_variant(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of each (source, kind, name): one pass over all of them, where tables ask for thousands."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.source, row.kind, row.name), []).append(row)
    return found


def mean_error(rows: Sequence[Row], tensor: str) -> float:
    """Relative L2, mean over layers and heads."""
    return fmean(row.relative_l2[tensor] for row in rows)


def costs_of(rows: Sequence[Row]) -> dict[str, float]:
    return {row.name: row.cost for row in rows if row.kind == "variant" and row.cost is not None}


def points_of(rows: Sequence[Row], source: HeadSource, tensor: str) -> dict[str, tuple[float, float]]:
    """(cost, error) of every variant but means over draws, which no training step has."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.source == source.name and row.kind == "variant" and "mean of" not in row.name:
            by_name.setdefault(row.name, []).append(row)
    return {
        name: (own[0].cost, mean_error(own, tensor))
        for name, own in by_name.items()
        if own[0].cost is not None
    }


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Those that no other beats in cost and error, by cost: the Pareto front."""
    best, names = float("inf"), []
    for name, (_, error) in sorted(points.items(), key=lambda item: item[1]):
        if error < best:
            best = error
            names.append(name)
    return names


def runs_with_progress(sources: Sequence[HeadSource]) -> list[str]:
    """The runs with traces of several steps."""
    runs = [source.run for source in sources if source.tokens is not None]
    return sorted({run for run in runs if runs.count(run) > 1})
