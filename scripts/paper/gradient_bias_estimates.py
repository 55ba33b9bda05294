"""From inner products of gradients to bias, noise and critical tokens, with jackknife intervals.

The symbols are those of :mod:`scripts.paper.gradient_bias`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.statistics import quantile
from scripts.output import finite

DIGITS = 4  # significant ones, in the JSON


@dataclass(frozen=True)
class Grams:
    """Inner products of n batches' gradients (n, n), float64: of d_i, d_j; of d_i, g_j; and of g_i, g_j."""

    dd: np.ndarray
    dg: np.ndarray
    gg: np.ndarray

    def __add__(self, other: Grams) -> Grams:
        """Those of two tensors together."""
        return Grams(self.dd + other.dd, self.dg + other.dg, self.gg + other.gg)


@dataclass(frozen=True)
class Moments:
    """What `Grams` estimate: first with all n batches, then n times with one left out; (n + 1,) each."""

    bias: np.ndarray  # |b|²
    along: np.ndarray  # ⟨b, G⟩
    gradient: np.ndarray  # |G|²
    quantization_noise: np.ndarray  # mean |d_i|² − |b|²
    minibatch_noise: np.ndarray  # mean |g_i|² − |G|²


def moments(grams: Grams) -> Moments:
    """The unbiased estimates. Needs three batches or more."""
    bias, gradient = cross_mean(grams.dd), cross_mean(grams.gg)
    return Moments(
        bias=bias,
        along=cross_mean(grams.dg),
        gradient=gradient,
        quantization_noise=own_mean(grams.dd) - bias,
        minibatch_noise=own_mean(grams.gg) - gradient,
    )


def cross_mean(gram: np.ndarray) -> np.ndarray:
    """Mean of the entries i ≠ j (n, n): of all batches, then without each of them; (n + 1,)."""
    n, own = len(gram), np.diag(gram)
    total = gram.sum() - own.sum()
    without = total - (gram.sum(0) + gram.sum(1) - 2 * own)
    return np.concatenate([[total / (n * (n - 1))], without / ((n - 1) * (n - 2))])


def own_mean(gram: np.ndarray) -> np.ndarray:
    """Mean of the diagonal: of all batches, then without each of them; (n + 1,)."""
    n, own = len(gram), np.diag(gram)
    return np.concatenate([[own.mean()], (own.sum() - own) / (n - 1)])


def jackknife(values: np.ndarray) -> tuple[float, float, float]:
    """Estimate and 95% interval of a statistic: `values` has it with all batches, then without each."""
    estimate, without = values[0], values[1:]
    n = len(without)
    error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    half = quantile(n - 1) * error
    return float(estimate), float(estimate - half), float(estimate + half)


def signed_root(squares: Sequence[float]) -> list[float]:
    """√x, or −√−x of a square whose estimate is negative, which means about zero."""
    return [float(np.sign(x) * np.sqrt(abs(x))) for x in squares]


def critical_tokens(bias_over_noise: Sequence[float], tokens_per_batch: int) -> list[float]:
    """T* with its interval from those of |b|² / noise of the minibatch of `tokens_per_batch`; ∞: no bias."""
    found = [np.nan if np.isnan(x) else tokens_per_batch / x if x > 0 else np.inf for x in bias_over_noise]
    estimate, low, high = found
    return [estimate, high, low]  # much bias: few tokens


def estimate_setting(found: Moments, tokens_per_batch: int) -> dict[str, list[float]]:
    """Estimate, lower and upper end of what a setting does to some weights; see `Row`."""
    return {
        "bias": signed_root(jackknife(ratio(found.bias, found.gradient))),
        "along": list(jackknife(ratio(found.along, found.gradient))),
        "noise": list(jackknife(ratio(found.quantization_noise, found.minibatch_noise))),
        "critical_tokens": critical_tokens(
            jackknife(ratio(found.bias, found.minibatch_noise)), tokens_per_batch
        ),
    }


def estimate_gradient(found: Moments, tokens_per_batch: int) -> dict[str, list[float]]:
    """Of the full-precision gradient: |G|, and the tokens at which |G|² equals the minibatch's noise."""
    return {
        "norm": signed_root(jackknife(found.gradient)),
        "noise_tokens": critical_tokens(
            jackknife(ratio(found.gradient, found.minibatch_noise)), tokens_per_batch
        ),
    }


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """above / below; NaN where `below`, which should be positive, was estimated as zero or negative."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def mean_and_interval(values: np.ndarray) -> list[float]:
    """Mean over batches and its 95% interval."""
    without = (values.sum() - values) / (len(values) - 1)
    return list(jackknife(np.concatenate([[values.mean()], without])))


def rounded(estimates: dict[str, list[float]]) -> dict[str, list[float | None]]:
    """Rounded to DIGITS significant digits; None for NaN and infinities, which JSON does not have."""
    return finite(
        {name: [float(f"{x:.{DIGITS - 1}e}") for x in values] for name, values in estimates.items()}
    )
