"""Single numbers that stand for a run's metrics: final loss, validation loss, speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.plot import series


def final_loss(records: list[dict[str, Any]], steps: int | None = None) -> float:
    """Mean training loss of the last `steps` logged steps; None: of the last tenth."""
    losses = series(records, "loss")[1][-steps:] if steps else last_tenth(records)
    return float(losses.mean())


def last_tenth(records: list[dict[str, Any]]) -> np.ndarray:
    """Training losses of the last tenth of the logged steps, at least one."""
    losses = series(records, "loss")[1]
    return losses[-max(len(losses) // 10, 1) :]


def validation_loss(records: list[dict[str, Any]]) -> float | None:
    """The last validation loss; None if there was no evaluation."""
    losses = series(records, "val_loss")[1]
    return float(losses[-1]) if len(losses) else None


def speed(records: list[dict[str, Any]]) -> float:
    """Median of the tokens per second."""
    return float(np.median(series(records, "tokens_per_second")[1]))
