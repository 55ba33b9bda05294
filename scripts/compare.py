"""Compare finished or running runs: a table of their losses, and a picture of their curves.

python -m scripts.compare runs/attention-fpa runs/attention-sagebwd --out comparison.png
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from trainer.plot import plot_losses, series
from trainer.run_directory import RunDirectory, read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders that hold some")
    parser.add_argument(
        "--out", type=Path, default=Path("comparison.png"), help="the picture (default: %(default)s)"
    )
    arguments = parser.parse_args()
    paths = find_runs(arguments.runs)
    if not paths:
        parser.error(f"no metrics.jsonl under {', '.join(map(str, arguments.runs))}; train something first")
    labels = distinct([path.name for path in paths])
    runs = {
        label: read_metrics(RunDirectory(path).metrics) for label, path in zip(labels, paths, strict=True)
    }
    print(table(runs))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plot_losses(runs, arguments.out)
    print(f"\ncurves: {arguments.out}")


def find_runs(paths: list[Path]) -> list[Path]:
    """The run directories among `paths` and directly below them."""
    found = []
    for path in paths:
        candidates = [path, *sorted(path.glob("*/"))]
        found += [folder for folder in candidates if RunDirectory(folder).metrics.exists()]
    return found


def distinct(names: list[str]) -> list[str]:
    """The names without the overrides that all runs share."""
    parts = [name.split("+") for name in names]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return ["+".join(part for part in name if part not in shared) or "+".join(name) for name in parts]


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Losses of each run, as Markdown: the last held-out one, and the mean of the last tenth in training."""
    rows = [("run", "steps", "tokens", "training loss", "held-out loss", "tokens/s")]
    for name, records in runs.items():
        tokens, losses = series(records, "loss")
        held_out = series(records, "val_loss")[1]
        speed = series(records, "tokens_per_second")[1]
        tail = losses[-max(len(losses) // 10, 1) :]
        cells = (
            f"{records[-1]['step']}" if records else "0",
            f"{tokens[-1]:,.0f}" if len(tokens) else "0",
            f"{tail.mean():.4f}" if len(tail) else "",
            f"{held_out[-1]:.4f}" if len(held_out) else "",
            f"{np.median(speed):,.0f}" if len(speed) else "",
        )
        rows.append((name, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])))
    return "\n".join(
        f"| {row[0]:{widths[0]}} | "
        + " | ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        + " |"
        for row in rows
    )


if __name__ == "__main__":
    main()
