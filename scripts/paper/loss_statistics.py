"""Final losses of training runs, compared over seeds: differences and how sure they are."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

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


def compare(runs: list[dict]) -> list[dict[str, Any]]:
    """The groups, each with its variants and the differences between all of them.

    Raises ValueError if one run is given twice.
    """
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["group"]), []).append(run)
    return [compare_group(json.loads(key), own) for key, own in groups.items()]


def compare_group(group: dict[str, Any], runs: list[dict]) -> dict[str, Any]:
    variants: dict[str, list[dict]] = {}
    for run in runs:
        variants.setdefault(run["variant"], []).append(run)
    for own in variants.values():
        check_runs(own)
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
        **differences(cells),
    }


def check_runs(runs: list[dict]) -> None:
    """Raise ValueError if a run is given twice; a repetition of a seed has a different curve."""
    for one, other in itertools.combinations(runs, 2):
        if one["seed"] == other["seed"] and one["curve"] == other["curve"]:
            raise ValueError(
                f"{one['name']} and {other['name']}, {one['variant']} with seed {one['seed']}, are the same "
                "run twice; leave one out"
            )


def summary(name: str, runs: list[dict]) -> dict[str, Any]:
    """A variant over its seeds. spread: largest minus smallest final loss of all runs."""
    whole = [run["final_loss"] for run in runs if run["final_loss"] is not None]
    return {
        "variant": name,
        "attention": runs[0]["attention"],
        "qk_norm": runs[0]["qk_norm"],
        "seeds": sorted({run["seed"] for run in runs}),
        "runs": len(runs),
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
