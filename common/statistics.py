"""Losses of training runs compared over seeds: differences, how sure they are, and what chance alone gives.

Runs of one seed share initialisation and the order of the data. So a loss is modeled as variant + seed +
noise, by least squares. Full precision with a second kernel, or repeated, is one more run of full precision
at its seed: how far the two lie apart is noise, and the null that any other difference has to stand beside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: 97.5% quantiles of Student's t for 1, 2, … degrees of freedom, and of the normal distribution.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131),
)
NORMAL = 1.96
#: An interval from fewer degrees of freedom is not called a 95% interval.
DEGREES_OF_95 = 4


def last_tenth(losses: np.ndarray) -> np.ndarray:
    """The end of a curve, whose mean is the loss of a run: of fewer than twenty values the last."""
    return losses[-max(len(losses) // 10, 1) :]


class Cell(NamedTuple):
    """The loss of a run."""

    variant: str
    seed: int | str
    loss: float


class Estimate(NamedTuple):
    """mean ± half_width, from noise with so many degrees of freedom; half_width None: no noise is known."""

    mean: float
    half_width: float | None
    degrees: int

    @property
    def standard_error(self) -> float:
        return self.half_width / quantile(self.degrees)


def quantile(degrees: int) -> float:
    """97.5% quantile of Student's t."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * degrees)  # its expansion in 1 / degrees, right to 1%


@dataclass(frozen=True)
class Fit:
    """Effects of variants by least squares. covariance: of the effects, in units of the noise's variance.

    noise: standard deviation of a run's loss; None without a degree of freedom.
    """

    variants: list[str]
    seeds: dict[str, set[int | str]]
    effects: np.ndarray
    covariance: np.ndarray
    noise: float | None
    degrees: int

    def difference(self, of: str, minus: str) -> Estimate | None:
        """None unless both variants have a seed in common."""
        if not self.seeds.get(of, set()) & self.seeds.get(minus, set()):
            return None
        i, j = self.variants.index(of), self.variants.index(minus)
        variance = self.covariance[i, i] + self.covariance[j, j] - 2 * self.covariance[i, j]
        width = None if self.noise is None else quantile(self.degrees) * self.noise * float(variance) ** 0.5
        return Estimate(float(self.effects[i] - self.effects[j]), width, self.degrees)


def fit(cells: Sequence[Cell]) -> Fit:
    """A run that is missing costs a degree of freedom, and not the comparison of the others."""
    seeds_of: dict[str, set[int | str]] = {}
    for cell in cells:
        seeds_of.setdefault(cell.variant, set()).add(cell.seed)
    variants, seeds = list(seeds_of), list(dict.fromkeys(cell.seed for cell in cells))
    design = np.array(
        [
            [*(cell.variant == name for name in variants), *(cell.seed == seed for seed in seeds)]
            for cell in cells
        ],
        dtype=float,
    ).reshape(len(cells), len(variants) + len(seeds))
    losses = np.array([cell.loss for cell in cells])
    covariance = np.linalg.pinv(design.T @ design)
    effects = covariance @ design.T @ losses
    degrees = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    noise = None
    if degrees:
        noise = float(np.sqrt(np.square(losses - design @ effects).sum() / degrees))
    return Fit(variants, seeds_of, effects, covariance, noise, degrees)


def difference_of(one: Estimate, other: Estimate) -> Estimate:
    """one − other, of independent noise, with the degrees of freedom of Welch and Satterthwaite.

    Rounded down, which makes the interval wider, not narrower.
    """
    variances = [one.standard_error**2, other.standard_error**2]
    variance = sum(variances)
    spread = sum(v**2 / n for v, n in zip(variances, (one.degrees, other.degrees), strict=True))
    degrees = math.floor(variance**2 / spread + 1e-9) if spread else one.degrees + other.degrees
    return Estimate(one.mean - other.mean, quantile(degrees) * math.sqrt(variance), degrees)


def by_seed(cells: Sequence[Cell], of: str, minus: str) -> dict[int | str, float]:
    """The difference at each seed that both have; a seed with several runs counts with their mean."""
    found = {}
    for seed in dict.fromkeys(cell.seed for cell in cells):
        one, other = ([c.loss for c in cells if (c.variant, c.seed) == (name, seed)] for name in (of, minus))
        if one and other:
            found[seed] = float(np.mean(one) - np.mean(other))
    return found


def permutation_p(cells: Sequence[Cell], of: str, minus: str) -> float | None:
    """How often chance gives such a difference: labels exchanged within each seed, all ways.

    Two-sided, of the mean over seeds of `of` minus `minus`; exact. None without a seed that both have.
    """
    shuffled = []  # by seed, the differences under every assignment of the labels; the true one first
    for seed in dict.fromkeys(cell.seed for cell in cells):
        one, other = ([c.loss for c in cells if (c.variant, c.seed) == (name, seed)] for name in (of, minus))
        if one and other:
            losses = np.array(one + other)
            every = itertools.combinations(range(len(losses)), len(one))
            shuffled.append(np.array([contrast(losses, list(chosen)) for chosen in every]))
    if not shuffled:
        return None
    sums = shuffled[0]
    for differences in shuffled[1:]:
        sums = np.add.outer(sums, differences).ravel()
    return float(np.mean(np.abs(sums) >= abs(sums[0]) - 1e-12))


def contrast(losses: np.ndarray, chosen: list[int]) -> float:
    others = np.delete(losses, chosen)
    return float(losses[chosen].mean() - others.mean())
