"""Compare runs, finished or still training: a table of losses and speed, and a picture of the loss curves.

    python -m scripts.compare runs/attention-fpa runs/attention-sagebwd
    python -m scripts.compare runs/quickstart --out quickstart.png

Give run directories, or folders that hold some. Columns of the table:

  training loss     mean over the last tenth of the logged steps, in nats per token
  validation loss   of the last evaluation, in nats per token
  tokens/s          median

Runs that differ only in `seed=N` are grouped, followed by their mean ± standard deviation. A run is named
after the overrides that not all runs share. A run that ended because it was not finite has DIVERGED and the
step in place of its losses, and counts in no mean. Takes seconds and no GPU.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.measuring import align, command_parser, number
from trainer.plot import plot_losses, series
from trainer.run_directory import RunDirectory, read_metrics

#: Nothing is written below this folder unless --out says so.
RESULTS = Path(__file__).parents[1] / "results"
SEED = re.compile(r"(^|[+-])seed[-=]?\d+(?=\+|$)")

Records = list[dict[str, Any]]  # of a metrics.jsonl


def main(argv: list[str] | None = None) -> None:
    """Print the table and draw the picture."""
    arguments = parse_arguments(argv)
    paths = [*{path.resolve(): path for path in find_runs(arguments.runs)}.values()]
    runs = dict(zip(labels_of(paths), map(read, paths), strict=True))
    diverged = {
        label: step
        for label, path in zip(runs, paths, strict=True)
        if (step := diverged_at(path)) is not None
    }
    print(table(runs, diverged))
    out = arguments.out or default_out(paths)
    out.parent.mkdir(parents=True, exist_ok=True)
    written = plot_losses(runs, out) or [out]
    print(f"\nwritten: {', '.join(map(str, written))}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if a path holds no run."""
    parser = command_parser("python -m scripts.compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders that hold some")
    where = "the picture (default: comparison.png next to the runs; runs/comparison.png if they lie apart)"
    parser.add_argument("--out", type=Path, metavar="FILE.png", help=where)
    arguments = parser.parse_args(argv)
    for path in arguments.runs:
        if not find_runs([path]):
            parser.error(
                f"{path} holds no run: there is no metrics.jsonl in it or one folder below it; give the "
                "directory of a run, for instance runs/NAME"
            )
    return arguments


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among `paths` and directly below them."""
    folders = [folder for path in paths for folder in (path, *sorted(path.glob("*/")))]
    return [folder for folder in folders if RunDirectory(folder).metrics.exists()]


def read(path: Path) -> Records:
    """The records of a run. Ends with a message if they are damaged."""
    metrics = RunDirectory(path).metrics
    try:
        return read_metrics(metrics)
    except ValueError as error:
        sys.exit(f"{error}; or leave this run out")


def diverged_at(path: Path) -> int | None:
    """The step that ended the run because it was not finite, or None. Ends with a message if damaged."""
    try:
        return RunDirectory(path).diverged_at()
    except ValueError as error:
        sys.exit(f"{path}/DIVERGED is damaged ({error}); it should hold the number of a step: correct it")


def default_out(paths: Sequence[Path]) -> Path:
    """comparison.png next to the runs; in runs/ if they have no common folder, or it belongs to results/."""
    folders = {path.resolve().parent for path in paths}
    folder = paths[0].parent
    if len(folders) > 1 or folder.resolve().is_relative_to(RESULTS):
        folder = Path("runs")
    return folder / "comparison.png"


def labels_of(paths: Sequence[Path]) -> list[str]:
    """A name for each run: its path below the folder that all share, without the overrides that all share."""
    paths = [path.resolve() for path in paths]
    shared = os.path.commonpath([path.parent for path in paths])
    return distinct([path.relative_to(shared).as_posix() for path in paths])


def distinct(names: list[str]) -> list[str]:
    """The names without the overrides that all runs share."""
    parts = [name.split("+") for name in names]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return ["+".join(part for part in name if part not in shared) or "+".join(name) for name in parts]


def without_seed(label: str) -> str:
    """What runs share that differ only in the seed."""
    return SEED.sub("", label).lstrip("+")


class Summary(NamedTuple):
    """What the table says about a run; None where metrics.jsonl says nothing, NaN for what is not finite."""

    steps: int
    tokens: float
    training_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None


NO_LOSSES = {"training_loss": None, "validation_loss": None}


def summarize(records: Records) -> Summary:
    tokens, losses = series(records, "loss")
    speed = series(records, "tokens_per_second")[1]
    last_loss = last(records, "loss")
    tail = losses[-max(len(losses) // 10, 1) :]
    return Summary(
        records[-1]["step"] if records else 0,
        tokens[-1] if len(tokens) else 0,
        tail.mean() if len(tail) and np.isfinite(last_loss) else last_loss,
        last(records, "val_loss"),
        np.median(speed) if len(speed) else None,
    )


def last(records: Records, key: str) -> float | None:
    """The last value of `key`, NaN if it was not finite, None if there is none."""
    values = [record[key] for record in records if key in record]
    if not values:
        return None
    return float("nan") if values[-1] is None else values[-1]


def table(runs: dict[str, Records], diverged: dict[str, int] | None = None) -> str:
    """A row for each run and one for each group of seeds, as Markdown. diverged: by label, the step."""
    diverged = diverged or {}
    groups: dict[str, list[str]] = {}
    for label in runs:
        groups.setdefault(without_seed(label), []).append(label)
    rows = []
    for group, labels in groups.items():
        summaries = [
            summarize(runs[label])._replace(**(NO_LOSSES if label in diverged else {})) for label in labels
        ]
        for label, run in zip(labels, summaries, strict=True):
            losses = [number(loss, ".4f") for loss in (run.training_loss, run.validation_loss)]
            if label in diverged:
                losses = [f"DIVERGED at step {diverged[label]}", ""]
            counts = [str(run.steps), f"{run.tokens:,.0f}"]
            rows.append([label, *counts, *losses, number(run.tokens_per_second, ",.0f")])
        if len(labels) > 1:
            losses = [
                mean_and_deviation([getattr(run, name) for run in summaries])
                for name in ("training_loss", "validation_loss")
            ]
            name = f"{group}: " if group else ""
            rows.append([f"{name}mean ± std of {len(labels)} seeds", "", "", *losses, ""])
    return "\n".join(align(["run", "steps", "tokens", "training loss", "validation loss", "tokens/s"], rows))


def mean_and_deviation(values: list[float | None]) -> str:
    """Mean ± sample standard deviation; empty if a run has no value, or one that is not finite."""
    if not all(value is not None and np.isfinite(value) for value in values):
        return ""
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


if __name__ == "__main__":
    main()
