"""Loss curves as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plot_losses(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw training loss (thin, smoothed thick) and held-out loss (dots) over tokens, one colour a run.

    `runs` maps a label to the records of its metrics.jsonl.
    """
    import matplotlib  # slow to import; only needed when a run ends

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for index, (label, records) in enumerate(runs.items()):
        colour = f"C{index}"
        tokens, loss = series(records, "loss")
        axes.plot(tokens, loss, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(tokens, smooth(loss), color=colour, linewidth=1.8, label=label)
        axes.plot(*series(records, "val_loss"), "o", color=colour, markersize=4, markeredgecolor="white")
    axes.set_xlabel("tokens")
    axes.set_ylabel("cross-entropy loss (line: training, dots: held-out)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def series(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and values of the records that have `key`."""
    chosen = [(record["tokens"], record[key]) for record in records if record.get(key) is not None]
    tokens, values = zip(*chosen, strict=True) if chosen else ((), ())
    return np.array(tokens, dtype=float), np.array(values, dtype=float)


def smooth(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """Exponential moving average over about `share` of the curve, unbiased at its start."""
    decay = 1 - 1 / max(share * len(values), 1)
    smoothed, average, weight = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed[index] = average / weight
    return smoothed
