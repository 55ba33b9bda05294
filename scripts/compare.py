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
    runs = {path.name: read_metrics(RunDirectory(path).metrics) for path in find_runs(arguments.runs)}
    if not runs:
        parser.error(f"no metrics.jsonl under {', '.join(map(str, arguments.runs))}; train something first")
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


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Losses of each run, as Markdown: the last held-out one, and the mean of the last tenth in training."""
    width = max(map(len, runs))
    lines = [
        f"| {'run':{width}} | steps | tokens | training loss | held-out loss | tokens/s |",
        f"| {'-' * width} | ----: | -----: | ------------: | ------------: | -------: |",
    ]
    for name, records in runs.items():
        tokens, losses = series(records, "loss")
        held_out = series(records, "val_loss")[1]
        speed = np.median(series(records, "tokens_per_second")[1]) if len(losses) else np.nan
        tail = losses[-max(len(losses) // 10, 1) :]
        cells = (
            f"{name:{width}}",
            f"{records[-1]['step'] if records else 0:5d}",
            f"{tokens[-1] if len(tokens) else 0:,.0f}",
            f"{tail.mean() if len(tail) else np.nan:13.4f}",
            f"{held_out[-1] if len(held_out) else np.nan:13.4f}",
            f"{speed:8,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
