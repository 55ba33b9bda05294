"""Which training runs are compared, and what is stored of a comparison of their losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.statistics import DEGREES_OF_95, Estimate
from trainer.identity import may_change

# --- Which runs count ---------------------------------------------------------------------------------------


def of_one_code(runs: Sequence[dict]) -> list[dict]:
    """The runs that count: a repetition shows the noise only if nothing but chance differs.

    Of a variant and seed that was run by several commits, or with several settings, those runs count whose
    commit most of the runs have; of equally many the first.
    """
    share = Counter(run["commit"] for run in runs)
    cells: dict[tuple[str, int], list[dict]] = {}
    for run in runs:
        cells.setdefault((run["variant"], run["seed"]), []).append(run)
    first = {cell: max(own, key=lambda run: share[run["commit"]]) for cell, own in cells.items()}
    return [run for run in runs if is_repetition(run, first[run["variant"], run["seed"]])]


def is_repetition(one: dict, other: dict) -> bool:
    """Whether two runs of a variant and seed differ by chance alone."""
    return one["commit"] == other["commit"] and computed(one["config"]) == computed(other["config"])


def computed(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted name: value} of the settings that say what a run computes, not how it executes or reports."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= computed(value, f"{name}.")
        elif not may_change(name):
            found[name] = value
    return found


# --- What is stored of a comparison ----------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference of losses over seeds, in nats per token. mean ± half_width: None without any noise.

    degrees: of freedom of that interval. by_seed: the difference at each seed. p: how often labels exchanged
    within seeds give as large a difference.
    """

    mean: float
    half_width: float | None
    degrees: int
    by_seed: dict[str, float]
    p: float | None

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.mean, self.half_width, self.degrees)

    def __str__(self) -> str:
        """ "+0.0013 ± 0.0084 (2 seeds)", with the degrees of freedom where these are few."""
        count = len(self.by_seed)
        few = f", {self.degrees} d.f." if 0 < self.degrees < DEGREES_OF_95 else ""
        digits = 4 if self.half_width is None or self.half_width >= 5e-4 else 5
        width = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        mean = round(self.mean, digits) + 0.0  # which turns −0 into 0
        return f"{mean:+.{digits}f}{width} ({count} seed{'s' if count > 1 else ''}{few})"


@dataclass(frozen=True)
class Row:
    """A variant minus another in one setup. kind: difference, null, or interaction (of two setups).

    proxy: a smaller model than the paper's stands for it. losses: by what was compared, "training" and
    "validation", or "validation NAME".
    """

    setup: str
    group: dict[str, Any]
    variant: str
    minus: str
    kind: str
    proxy: bool
    has_null: bool  # full precision ran twice, at every seed of this difference
    losses: dict[str, Difference] = field(default_factory=dict)


def read_rows(result: dict[str, Any]) -> list[Row]:
    """The rows of OUT.json."""
    return [
        Row(**row | {"losses": {name: Difference(**found) for name, found in row["losses"].items()}})
        for row in result["rows"]
    ]
