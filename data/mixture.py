"""Several texts read in fixed proportions, or one.

Which source sample k of a run comes from is a function of the weights and k alone. After any number of
samples, each source has given its share of them to within one: less than one too many or too few.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from data.order import shuffled
from data.tokens import TokenShards

LONGEST_PERIOD = 1_000_000  # samples after which a mixture repeats; its schedule is a table of this length


def whole_weights(sources: dict[str, Any]) -> dict[str, int]:
    """The weights of data.sources as the smallest whole numbers in the same proportions, sorted by name.

    Raises ValueError for what is no weight, and if their sum exceeds LONGEST_PERIOD.
    """
    given = {name: _weight(name, entry) for name, entry in sorted(sources.items())}
    multiple = math.lcm(*(weight.denominator for weight in given.values()))
    whole = {name: int(weight * multiple) for name, weight in given.items()}
    divisor = math.gcd(*whole.values())
    whole = {name: weight // divisor for name, weight in whole.items()}
    if sum(whole.values()) > LONGEST_PERIOD:
        raise ValueError(
            f"the weights of data.sources are in proportions of {':'.join(map(str, whole.values()))}, which "
            f"need a schedule of more than {LONGEST_PERIOD:,} sequences; use weights of fewer digits"
        )
    return whole


def _weight(name: str, entry: Any) -> Fraction:
    given = entry.get("weight") if isinstance(entry, dict) else None
    try:
        weight = Fraction(str(given))  # as it is written: 0.1 is a tenth
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0:
        found = "" if given is None else f", not {given}"
        raise ValueError(
            f"data.sources.{name} needs data.sources.{name}.weight=NUMBER, its part of the mixture{found}"
        )
    return weight


class Schedule:
    """Which source each sample comes from. It repeats after sum(weights) samples.

    Of the sources that have not yet given their share of the samples up to and including this one, that
    source is next whose next sample is due first: without it, its share would be ahead of it by one. This is
    earliest-deadline-first scheduling of jobs of unit length, which meets all deadlines if any order does.
    """

    def __init__(self, weights: Sequence[int]):
        """weights: whole numbers, at least 1, best without a common divisor."""
        self.weights = np.array(weights, np.int64)
        self.period = int(self.weights.sum())
        self._sources = _one_period(weights)
        self._before = np.empty(self.period, np.int64)  # samples of the same source before, in this period
        for source, weight in enumerate(weights):
            self._before[self._sources == source] = np.arange(weight)

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and how many samples came from that source before; int64, (N,)."""
        periods, places = np.divmod(samples, self.period)
        sources = self._sources[places]
        return sources, periods * self.weights[sources] + self._before[places]

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each source; int64, (sources,)."""
        periods, places = divmod(samples, self.period)
        return periods * self.weights + np.bincount(self._sources[:places], minlength=len(self.weights))


def _one_period(weights: Sequence[int]) -> np.ndarray:
    """The source of each sample of a period, int64."""
    period = sum(weights)
    given = [0] * len(weights)
    release = [0] * len(weights)  # the first sample at which the source is no longer ahead
    due = [-(-period // weight) for weight in weights]  # the number of samples after which it is one behind
    order = np.empty(period, np.int64)
    for sample in range(period):
        ready = [source for source, first in enumerate(release) if first <= sample]
        source = min(ready, key=due.__getitem__)
        given[source] += 1
        release[source] = given[source] * period // weights[source]
        due[source] = -(-(given[source] + 1) * period // weights[source])
        order[sample] = source
    return order


@dataclass(frozen=True)
class Mixture:
    """The training text of a run with several sources."""

    names: tuple[str | None, ...]  # None: a run's only text
    weights: tuple[int, ...]
    texts: tuple[TokenShards, ...]


class MixedTokens:
    """The texts one behind the other, such that sequence i begins at token i · context in all of them."""

    def __init__(self, texts: Sequence[TokenShards], counts: Sequence[int], context: int):
        self._texts = texts
        self._starts = np.cumsum([0, *counts[:-1]], dtype=np.int64) * context

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` tokens of the text that has token `start`. A text's last sequence has one token more."""
        text = int(np.searchsorted(self._starts, start, side="right")) - 1
        return self._texts[text].window(start - int(self._starts[text]), length)


class MixedOrder:
    """The order of all sequences of a mixture, numbered one source after the other.

    Sample k of a run is the k-th sequence that it reads, counted from 0.
    """

    def __init__(self, mixture: Mixture, counts: Sequence[int], *, seed: int):
        self.names = mixture.names
        self.sequences = sum(counts)
        self.counts = np.array(counts, np.int64)
        self.schedule = Schedule(mixture.weights)
        self.seeds = [seed ^ (_hash(name) if name else 0) for name in mixture.names]
        self._starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Which sequence each sample is; int64, (N,)."""
        found = np.empty_like(samples)
        sources, own = self.schedule(samples)
        for source in np.unique(sources):
            there = sources == source
            indices = shuffled(own[there], int(self.counts[source]), seed=self.seeds[source])
            found[there] = self._starts[source] + indices
        return found

    def epochs(self, samples: np.ndarray) -> np.ndarray:
        """How often each sample's sequence was read before."""
        sources, own = self.schedule(samples)
        return own // self.counts[sources]

    def epochs_of_sources(self, samples: int) -> list[float]:
        """Epochs of each source after so many samples of the mixture."""
        return (self.schedule.counts(samples) / self.counts).tolist()

    def text_of(self, index: int) -> str | None:
        """The name of the source of a sequence, if it has one."""
        return self.names[int(np.searchsorted(self._starts, index, side="right")) - 1]

    def description(self, samples: int, *, context: int) -> list[str]:
        """A line for each source that has a name: its share, and how much of it so many samples read."""
        weights, counts = self.schedule.weights, self.schedule.counts(samples)
        rows = zip(self.names, weights / weights.sum(), counts, self.epochs_of_sources(samples), strict=True)
        return [
            f"{name}: {share:.4g} of the sequences, {count * context:,} tokens; it is read {epochs:.3g} times"
            for name, share, count, epochs in rows
            if name
        ]


def _hash(name: str) -> int:
    """So that sources with as many sequences are not read in the same order."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
