"""What must not go on unnoticed: NaN and Inf, ranks whose weights differ, and outliers of loss and gradient.

A run is not continued, saved or called finished whose loss, weights or moments are not finite, nor one whose
ranks have drifted apart: each has a copy of the weights and updates it by itself.
"""

import logging
import math
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from common.errors import TrainingError, first
from common.files import append_line
from trainer.distributed import CONTINUES, Ranks
from trainer.settings import SpikeSettings

log = logging.getLogger(__name__)

ADVICE = (
    "Try a lower optimizer.lr, a longer tps.warmup_steps or model.qk_norm=true, with a run_dir=… of its own"
)


class Guard:
    """Ends a run, as DIVERGED if not finite. All ranks make all calls; each raises TrainingError on all."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        note: Callable[[int], None],
    ):
        """note: is called on the main rank with the step that ends the run."""
        self.model, self.optimizer, self.ranks, self.note = model, optimizer, ranks, note

    def check_state(self, step: int) -> None:
        """Before weights and moments are saved after `step`: they must be finite, and copies the same."""
        self.check_copies(step)
        bad = not_finite(self.model, self.optimizer, self.ranks)
        if bad:
            self._end(
                step,
                f"after step {step}, {len(bad)} weights or moments are not finite: {first(bad)}\n"
                f"They are not saved. {ADVICE}",
            )

    def check_copies(self, step: int) -> None:
        """After `step`: the ranks' copies of the weights must be the same. Reads them once."""
        check_copies(self.model, self.ranks, step)

    def check_step(self, step: int, values: str, sequences: Sequence[int], *, skip: bool) -> None:
        """Report a step whose loss or gradient is not finite, before its update. Raises unless it is skipped.

        values: those of the step, for the message. A step is not skipped if the weights are not finite: every
        later one would have to be skipped, too.
        """
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        gradients = names_not_finite(named, self.ranks)
        state = not_finite(self.model, self.optimizer, self.ranks)
        diagnosis = (
            f"step {step} is not finite: {values}.\n"
            f"  - {len(gradients)} tensors with gradients that are not finite: {first(gradients)}\n"
            f"  - its training sequences: {first(sequences)}"
        )
        if state:
            self._end(
                step,
                f"{diagnosis}\n  - {len(state)} weights or moments are not finite: {first(state)}\n"
                f"An earlier step has spoiled them, so that no step can be trained. {ADVICE}",
            )
        if not skip:
            self._end(
                step,
                f"{diagnosis}\nThe weights are those from before this step. {ADVICE}; "
                "skip_nonfinite=true skips such steps and continues",
            )
        log.warning("%s\nThe step is skipped (skip_nonfinite=true).", diagnosis)

    def check_end(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Before the run is called finished: its last step and validation must be finite."""
        for key, name in (
            ("loss", "loss of the last step"),
            ("grad_norm", "gradient norm of the last step"),
            ("val_loss", "last validation loss"),
        ):
            values = [record[key] for record in records if key in record]
            if values and values[-1] is None:  # what metrics.jsonl has for NaN and Inf
                self._end(
                    step,
                    f"the {name} is not finite, so the run is not finished and its weights are not exported. "
                    f"{ADVICE}",
                )

    def _end(self, step: int, message: str) -> NoReturn:
        if self.ranks.is_main:
            self.note(step)
        raise TrainingError(message)


def check_copies(model: nn.Module, ranks: Ranks, step: int) -> None:
    """Raise TrainingError, on all ranks, if the weights that each has a copy of differ in a bit after `step`.

    A faulty device or file makes them differ. Reads the weights once. All ranks must call it.
    """
    copies = {name: p.detach() for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    if ranks.count == 1 or not copies:
        return
    sums = torch.stack([_checksum(weights) for weights in copies.values()])
    of_rank = ranks.gather(sums.to(ranks.device))
    for rank, differs in enumerate((of_rank != of_rank[0]).tolist()):
        if any(differs):
            names = [name for name, differ in zip(copies, differs, strict=True) if differ]
            raise TrainingError(
                f"after step {step}, {len(names)} weights of rank {rank} are not those of rank 0: "
                f"{first(names)}\n{CONTINUES}, where they were the same. If it happens again, a device or "
                "file of these ranks is faulty: use others"
            )


def not_finite(model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> list[str]:
    """Names of the weights and moments that have a NaN or Inf on any rank. All ranks must call it.

    If there are none it reads every number once, in a few kernels, and waits for the device once.
    """
    tensors = _named(model, optimizer)
    # The largest magnitude, unlike the sum of squares, is finite if all numbers are.
    local = map(_local, tensors.values())
    largest = get_total_norm([tensor for tensor in local if tensor.numel()], math.inf)
    return names_not_finite(tensors, ranks) if names_not_finite({"": largest}, ranks) else []


def names_not_finite(tensors: dict[str, Tensor], ranks: Ranks) -> list[str]:
    """Names of the tensors that have a NaN or Inf on any rank."""
    flags = torch.stack([(~_local(tensor).isfinite().all()).int() for tensor in tensors.values()])
    bad = ranks.maximum(flags.to(ranks.device)).tolist()
    return [name for name, is_bad in zip(tensors, bad, strict=True) if is_bad]


def _named(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            moments = optimizer.state.get(parameter, {})
            named |= {
                f"{name} ({key})": value
                for key, value in moments.items()
                if key != "step" and isinstance(value, Tensor)
            }
    return named


def _checksum(weights: Tensor) -> Tensor:
    """The sum of the bits of float32 numbers, in pairs: a CPU sums single ones at a tenth of the speed."""
    flat = weights.flatten()
    pairs = F.pad(flat, (0, 1)) if flat.numel() % 2 else flat
    return pairs.view(torch.int64).sum()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------------- outliers
#
# A value is an outlier if it is too far above the median of the last `window` steps, in units of their median
# absolute deviation (MAD). Both are robust: a spike would move a running mean and variance, and hide the next
# spike. While the loss still falls fast within a window, as at the start of a run, the deviation is large and
# few steps are outliers, so little is skipped. The state is the values themselves, so a resumed run judges
# exactly as one that was never stopped.

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

    def log(self, file: Path, place: dict[str, Any]) -> None:
        """Append a line to `file`, the spikes.jsonl in the run's directory, and warn.

        place: `step`, `tokens` after it, the `sequences` of all ranks, and whether its optimizer step was
        `skipped`.
        """
        typical = {f"typical_{name}": value for name, value in self.typical.items()}
        append_line(file, {**place, **self.values, **typical, "beyond": self.beyond})
        told = " and ".join(
            f"{name} {self.values[name]:.4g} (typical {self.typical[name]:.4g}, "
            f"limit {self.limits[name]:.4g})"
            for name in self.beyond
        )
        log.warning(
            "step %d is a spike: %s%s. Its training sequences: %s; to read them: "
            "python -m scripts.show_batch %s --step %d",
            place["step"],
            told,
            "; optimizer step skipped" if place["skipped"] else "",
            first(place["sequences"]),
            shlex.quote(str(file.parent)),
            place["step"],
        )


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
