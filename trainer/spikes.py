"""Steps whose loss or gradient norm stands out from the steps before, and which sequences they trained on.

What is typical is the median of the last `window` steps, and how far values usually are from it their median
absolute deviation (MAD). Both ignore a few wild values, while an average and a variance, running or not, are
moved by the very spike they should tell, and then hide the next. While the loss still falls fast within a
window, as in the first steps of a run, that fall counts as spread, so little stands out: skipping errs on the
side of training. And the state is the values themselves, so a run that continues from a checkpoint judges
exactly as one that was never stopped.
"""

import json
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.run_directory import RunDirectory
from trainer.settings import SpikeSettings

log = logging.getLogger(__name__)

MAD_TO_STD = 1.4826  # standard deviation of a normal distribution over its MAD
LEAST_DEVIATION = 1e-3  # of the typical value: where values hardly move, rounding is no spike
NAMES = ("loss", "grad_norm")


@dataclass(frozen=True)
class Spike:
    """A step that stands out; each dictionary has the keys "loss" and "grad_norm"."""

    values: dict[str, float]
    typical: dict[str, float]  # medians of the steps before
    limits: dict[str, float]  # what a value must exceed to stand out

    @property
    def beyond(self) -> list[str]:
        """Which of the two stand out."""
        return [name for name in NAMES if self.values[name] > self.limits[name]]

    def describe(self) -> str:
        titles = {"loss": "loss", "grad_norm": "gradient norm"}
        return " and ".join(
            f"{titles[name]} {self.values[name]:.4g} (typical {self.typical[name]:.4g}, limit "
            f"{self.limits[name]:.4g})"
            for name in self.beyond
        )

    def record(self) -> dict[str, Any]:
        """The line of spikes.jsonl, but for where in the run it was."""
        typical = {f"typical_{name}": value for name, value in self.typical.items()}
        return {**self.values, **typical, "beyond": self.beyond}


class SpikeDetector:
    """Judges each step by the `window` steps before it, from half of these on."""

    def __init__(self, settings: SpikeSettings, history: Iterable[Iterable[float]] = ()):
        """`history`: the `history` of the detector to go on from."""
        self._settings = settings
        self._recent = deque(map(tuple, history), maxlen=settings.window)

    @property
    def history(self) -> list[list[float]]:
        """(loss, gradient norm) of the recent steps, as JSON keeps them exactly."""
        return [list(pair) for pair in self._recent]

    def judge(self, loss: float, grad_norm: float) -> Spike | None:
        """The spike that this step is, if it is one; both values finite, and a part of what is typical next.

        Spikes count as well, so that after a lasting change of level the new one becomes typical.
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


def report(spike: Spike, directory: RunDirectory, place: dict[str, Any]) -> None:
    """Append a line to the run's spikes.jsonl, and warn.

    `place` says where in the run it was: `step`, `tokens` after it, the `sequences` it trained on, of all
    ranks, and whether its optimizer step was `skipped`.
    """
    with open(directory.spikes, "a") as file:
        file.write(json.dumps({**place, **spike.record()}) + "\n")
    first, more = place["sequences"][:6], len(place["sequences"]) > 6
    log.warning(
        "step %d stands out: %s%s. Its training sequences: %s%s; to read them: "
        "python -m scripts.show_batch %s --step %d",
        place["step"],
        spike.describe(),
        "; optimizer step left out" if place["skipped"] else "",
        ", ".join(map(str, first)),
        ", …" if more else "",
        directory.path,
        place["step"],
    )
