"""A run is not continued, saved or called finished whose loss, weights or moments are not finite.

Nor one whose ranks have drifted apart: each has a copy of the weights and updates it by itself.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from common.errors import TrainingError, first
from trainer.distributed import CONTINUES, Ranks
from trainer.run_directory import RunDirectory

log = logging.getLogger(__name__)

ADVICE = (
    "Try a lower optimizer.lr, a longer tps.warmup_steps or model.qk_norm=true, with a run_dir=… of its own"
)


class Guard:
    """Ends a run, as DIVERGED if not finite. All ranks make all calls; each raises TrainingError on all."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, directory: RunDirectory
    ):
        self.model, self.optimizer, self.ranks, self.directory = model, optimizer, ranks, directory

    def check_state(self, step: int) -> None:
        """Before weights and moments are saved after `step`: they must be finite, and copies the same."""
        check_copies(self.model, self.ranks, step)
        bad = not_finite(self.model, self.optimizer, self.ranks)
        if bad:
            self._end(
                step,
                f"after step {step}, {len(bad)} weights or moments are not finite: {first(bad)}\n"
                f"They are not saved. {ADVICE}",
            )

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
            self.directory.note_divergence(step)
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
