"""Final losses of training runs, compared over seeds: differences and how sure they are."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.identity import may_change

#: 97.5% quantiles of Student's t for 1, 2, … degrees of freedom, and of the normal distribution.
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
NORMAL = 1.96


class Estimate(NamedTuple):
    """A number with its 95% interval, mean ± half_width; degrees: of freedom of the noise behind it."""

    mean: float
    half_width: float
    degrees: int

    @property
    def standard_error(self) -> float:
        return self.half_width / quantile(self.degrees)


def compare(runs: list[dict]) -> list[dict[str, Any]]:
    """The groups, each with its variants and the differences between all of them.

    Raises ValueError if one run is given twice.
    """
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["group"]), []).append(run)
    return [compare_group(json.loads(key), own) for key, own in groups.items()]


def compare_group(group: dict[str, Any], runs: list[dict]) -> dict[str, Any]:
    """The variants of a group and their differences. Raises ValueError if one run is given twice.

    left_out: the runs that do not count, see `of_one_code`. commits: of the others.
    """
    for one, other in itertools.combinations(runs, 2):
        if is_same_run(one, other):
            raise ValueError(
                f"{one['name']} and {other['name']}, {one['variant']} with seed {one['seed']}, are the same "
                "run twice; leave one out"
            )
    kept, left_out = of_one_code(runs)
    variants: dict[str, list[dict]] = {}
    for run in kept:
        variants.setdefault(run["variant"], []).append(run)
    # A variant of which one seed diverged has no mean to compare.
    cells = [
        (name, run["seed"], run["final_loss"])
        for name, own in variants.items()
        if not any(run["diverged"] for run in own)
        for run in own
    ]
    return {
        **group,
        "variants": [summary(name, own) for name, own in variants.items()],
        "commits": commits_of(kept),
        "left_out": [{key: run[key] for key in ("name", "variant", "commit")} for run in left_out],
        **differences(cells),
    }


def is_same_run(one: dict, other: dict) -> bool:
    """Whether two entries are of one run; a repetition of a seed has a different curve."""
    return all(one[key] == other[key] for key in ("variant", "seed", "commit", "curve"))


def of_one_code(runs: list[dict]) -> tuple[list[dict], list[dict]]:
    """The runs that count, and the others.

    A repetition shows the noise only if nothing but chance differs. Of a variant and seed that was run by
    several commits, or with several settings, those runs count whose commit most of the group's runs have;
    of equally many the first.
    """
    share = Counter(run["commit"] for run in runs)
    cells: dict[tuple[str, int], list[dict]] = {}
    for run in runs:
        cells.setdefault((run["variant"], run["seed"]), []).append(run)
    first = {cell: max(own, key=lambda run: share[run["commit"]]) for cell, own in cells.items()}
    counts = [is_repetition(run, first[run["variant"], run["seed"]]) for run in runs]
    return (
        [run for run, counted in zip(runs, counts, strict=True) if counted],
        [run for run, counted in zip(runs, counts, strict=True) if not counted],
    )


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


def commits_of(runs: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(short(run["commit"]) for run in runs))


def short(commit: str | None) -> str:
    return commit[:7] if commit else "unknown commit"


def summary(name: str, runs: list[dict]) -> dict[str, Any]:
    """A variant over its seeds. spread: largest minus smallest final loss of all runs."""
    whole = [run["final_loss"] for run in runs if run["final_loss"] is not None]
    return {
        "variant": name,
        "attention": runs[0]["attention"],
        "qk_norm": runs[0]["qk_norm"],
        "seeds": sorted({run["seed"] for run in runs}),
        "runs": len(runs),
        "commits": commits_of(runs),
        "diverged": sum(bool(run["diverged"]) for run in runs),
        "final_loss": mean_over_seeds(runs, "final_loss"),
        "spread": max(whole) - min(whole) if len(whole) > 1 else None,
        "held_out_loss": mean_over_seeds(runs, "held_out_loss"),
    }


def mean_over_seeds(runs: list[dict], loss: str) -> float | None:
    """A seed that was repeated counts once, with its mean."""
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        if run[loss] is not None:
            by_seed.setdefault(run["seed"], []).append(run[loss])
    return mean_or_none([float(np.mean(losses)) for losses in by_seed.values()])


def mean_or_none(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def differences(cells: list[tuple[str, int, float]]) -> dict[str, Any]:
    """Differences of all pairs of variants that have a seed in common, and the noise.

    cells: variant, seed and loss of each run. Loss = variant + seed + noise is fitted by least squares, so
    that a run that is missing costs a degree of freedom and not the comparison of the others.
    """
    seeds_of: dict[str, set[int]] = {}
    for variant, seed, _ in cells:
        seeds_of.setdefault(variant, set()).add(seed)
    variants, seeds = list(seeds_of), sorted({seed for _, seed, _ in cells})
    design = np.array(
        [[name in (variant, seed) for name in (*variants, *seeds)] for variant, seed, _ in cells], dtype=float
    )
    values = np.array([loss for *_, loss in cells])
    if not cells:
        return {"noise": None, "degrees_of_freedom": 0, "differences": []}
    covariance = np.linalg.pinv(design.T @ design)  # of the effects, in units of the noise's variance
    effects = covariance @ design.T @ values
    degrees = len(cells) - int(np.linalg.matrix_rank(design))
    noise = None
    if degrees:
        noise = float(np.sqrt(np.square(values - design @ effects).sum() / degrees))

    def difference(i: int, j: int) -> dict[str, Any]:
        variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
        return {
            "of": variants[i],
            "minus": variants[j],
            "mean": float(effects[i] - effects[j]),
            "half_width": None if noise is None else quantile(degrees) * noise * float(variance) ** 0.5,
            "seeds": len(seeds_of[variants[i]] & seeds_of[variants[j]]),
        }

    pairs = [difference(i, j) for i, j in itertools.permutations(range(len(variants)), 2)]
    return {
        "noise": noise,
        "degrees_of_freedom": degrees,
        "differences": [pair for pair in pairs if pair["seeds"]],
    }


def quantile(degrees: int) -> float:
    """97.5% quantile of Student's t."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * degrees)  # its expansion in 1 / degrees, right to 1%


def difference_of(one: Estimate, other: Estimate) -> Estimate:
    """one − other, of independent noise, with the degrees of freedom of Welch and Satterthwaite.

    Rounded down, which makes the interval wider, not narrower.
    """
    variances = [one.standard_error**2, other.standard_error**2]
    variance = sum(variances)
    spread = sum(v**2 / n for v, n in zip(variances, (one.degrees, other.degrees), strict=True))
    degrees = math.floor(variance**2 / spread + 1e-9) if spread else one.degrees + other.degrees
    return Estimate(one.mean - other.mean, quantile(degrees) * math.sqrt(variance), degrees)
