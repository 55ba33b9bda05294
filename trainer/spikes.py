"""Steps with an outlier loss or gradient norm, and the sequences they trained on.

A value is an outlier if it is too far above the median of the last `window` steps, in units of their median
absolute deviation (MAD). Both are robust: a spike would move a running mean and variance, and hide the next
spike. While the loss still falls fast within a window, as at the start of a run, the deviation is large and
few steps are outliers, so little is skipped. The state is the values themselves, so a resumed run judges
exactly as one that was never stopped.
"""

import logging
import shlex
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import first
from trainer.run_directory import RunDirectory, append_line
from trainer.settings import SpikeSettings

log = logging.getLogger(__name__)

MAD_TO_STD = 1.4826  # standard deviation of a normal distribution over its MAD
LEAST_DEVIATION = 1e-3  # relative to the median: where values hardly change, rounding is not a spike
NAMES = ("loss", "grad_norm")


@dataclass(frozen=True)
class Spike:
    """An outlier step; each dictionary has the keys "loss" and "grad_norm"."""

    values: dict[str, float]
    typical: dict[str, float]  # medians of the previous steps
    limits: dict[str, float]  # a value above this is an outlier

    @property
    def beyond(self) -> list[str]:
        """Which of the two are outliers."""
        return [name for name in NAMES if self.values[name] > self.limits[name]]


class SpikeDetector:
    """Judges each step by the previous `window` steps, once half of them are done."""

    def __init__(self, settings: SpikeSettings, history: Iterable[Iterable[float]] = ()):
        """history: the `history` of the detector that this one continues."""
        self._settings = settings
        self._recent = deque(map(tuple, history), maxlen=settings.window)

    @property
    def history(self) -> list[list[float]]:
        """(loss, gradient norm) of the recent steps; JSON stores them exactly."""
        return [list(pair) for pair in self._recent]

    def judge(self, loss: float, grad_norm: float) -> Spike | None:
        """The spike, if this step is one, else None; then add it to the history. Both values must be finite.

        Spikes join the history, too, so that after a lasting change of level the new level becomes typical.
        """
        spike = self._spike(loss, grad_norm) if len(self._recent) >= self._settings.window // 2 else None
        self._recent.append((loss, grad_norm))
        return spike

    def _spike(self, loss: float, grad_norm: float) -> Spike | None:
        if self._settings.threshold is None:
            return None
        recent = np.array(self._recent)
        medians = np.median(recent, axis=0)
        deviations = MAD_TO_STD * np.median(np.abs(recent - medians), axis=0)
        deviations = np.maximum(deviations, LEAST_DEVIATION * np.abs(medians))
        limits = medians + self._settings.threshold * deviations
        spike = Spike(
            dict(zip(NAMES, (loss, grad_norm), strict=True)),
            dict(zip(NAMES, medians.tolist(), strict=True)),
            dict(zip(NAMES, limits.tolist(), strict=True)),
        )
        return spike if spike.beyond else None


def log_spike(spike: Spike, directory: RunDirectory, place: dict[str, Any]) -> None:
    """Append a line to the run's spikes.jsonl, and warn.

    place: `step`, `tokens` after it, the `sequences` of all ranks, and whether its optimizer step was
    `skipped`.
    """
    typical = {f"typical_{name}": value for name, value in spike.typical.items()}
    append_line(directory.spikes, {**place, **spike.values, **typical, "beyond": spike.beyond})
    told = " and ".join(
        f"{name} {spike.values[name]:.4g} (typical {spike.typical[name]:.4g}, limit {spike.limits[name]:.4g})"
        for name in spike.beyond
    )
    log.warning(
        "step %d is a spike: %s%s. Its training sequences: %s; to read them: "
        "python -m scripts.show_batch %s --step %d",
        place["step"],
        told,
        "; optimizer step skipped" if place["skipped"] else "",
        first(place["sequences"]),
        shlex.quote(str(directory.path)),
        place["step"],
    )
