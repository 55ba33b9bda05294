"""Loss curves, and the probe's, as pictures."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PROBED = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}  # as the probe names them, and as the paper does
_LAYER = re.compile(r"probe/layer_(\d+)/")


def plot_losses(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw training loss (thin, smoothed thick) and held-out loss (dots) over tokens, one colour a run.

    Below, if there are several runs, how far each one's training loss lies from the first run's.
    `runs` maps a label to the records of its metrics.jsonl.
    """
    import matplotlib  # slow to import; only needed when a run ends

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    several = len(runs) > 1
    figure, (losses, differences) = plt.subplots(
        2,
        figsize=(8, 6 if several else 5),
        sharex=True,
        layout="constrained",
        height_ratios=(3, several or 1e-6),
    )
    for index, (label, records) in enumerate(runs.items()):
        tokens, loss = series(records, "loss")
        losses.plot(tokens, loss, color=f"C{index}", alpha=0.25, linewidth=0.8)
        losses.plot(tokens, smooth(loss), color=f"C{index}", linewidth=1.8, label=label)
        losses.plot(
            *series(records, "val_loss"), "o", color=f"C{index}", markersize=5, markeredgecolor="white"
        )
    losses.set_ylabel("cross-entropy loss\n(line: training, dots: held-out)")
    losses.legend()

    first, *others = runs
    for index, label in enumerate(others, start=1):
        differences.plot(*_difference(runs[label], runs[first]), color=f"C{index}", linewidth=1.2)
    differences.axhline(0, color="C0", linewidth=1)
    differences.set_ylabel(f"minus\n{first}")
    differences.set_visible(several)

    bottom = differences if several else losses
    bottom.set_xlabel("tokens")
    bottom.xaxis.set_major_formatter(EngFormatter(sep=""))
    losses.xaxis.set_tick_params(labelbottom=not several)
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_probe(records: list[dict[str, Any]], path: Path) -> None:
    """Draw what the probe measured over steps: relative L2 errors of O, dQ, dK and dV, one line a layer.

    Draws nothing, and leaves no picture, if `records` (of a metrics.jsonl) hold no measurement.
    """
    measured = [record for record in records if "probe/seconds" in record]
    if not measured:
        return
    import matplotlib  # slow to import; only needed when a run ends

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = sorted({int(match[1]) for record in measured for key in record if (match := _LAYER.match(key))})
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.6), sharex=True, sharey=True, layout="constrained")
    for axes, (name, title) in zip(panels, PROBED.items(), strict=True):
        for index, layer in enumerate(layers):
            key = f"probe/layer_{layer}/{name}_l2"
            points = [(record["step"], record[key]) for record in measured if record.get(key)]
            if points:
                axes.plot(*zip(*points, strict=True), ".-", color=f"C{index}", label=f"layer {layer}")
                axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("relative L2 error of SageBwd")
    if panels[0].lines:
        panels[0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _difference(
    records: list[dict[str, Any]], baseline: list[dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and smoothed training loss minus the baseline's, where both runs have a value."""
    loss, base = (dict(zip(*series(r, "loss"), strict=True)) for r in (records, baseline))
    tokens = np.array([count for count in loss if count in base])
    return tokens, smooth(np.array([loss[count] - base[count] for count in tokens]))


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
