"""Compare runs, finished or still training: a table of losses and speed, and a picture of the loss curves.

    python -m scripts.compare runs/attention-fpa runs/attention-sagebwd
    python -m scripts.compare runs/quickstart --out quickstart.png
    python -m scripts.compare runs --baseline attention-fpa

Give run directories, or folders that hold some, at any depth. Columns of the table:

  training loss     mean over the last tenth of the logged steps, in nats per token
  validation loss   of the last evaluation, in nats per token; named validation sets have a column each
  tokens/s          median

Runs that differ only in `seed=N` are grouped, followed by their mean ± standard deviation. A run is named
after the overrides that not all runs share. A run that ended because it was not finite has DIVERGED and the
step in place of its losses, and counts in no mean. In the picture, the seeds of a group are their mean, with
a band from the lowest to the highest. Takes seconds and no GPU.

--baseline adds a table of the differences to one group: loss = group + seed + noise, by least squares, with
the 95% interval of that noise. One seed per group, not repeated, gives no interval.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.command_line import command_parser
from scripts.output import align, number, printable
from scripts.paper.statistics import Cell, Estimate, fit
from scripts.runs import find_runs, labels_of
from trainer.plot import SET, named_sets, plot_losses, series
from trainer.run_directory import RunDirectory

#: Nothing is written below this folder unless --out says so.
RESULTS = Path(__file__).parents[1] / "results"
SEED = re.compile(r"(^|[+-])seed[-=]?(\d+)(?=\+|$)")
PICTURES = (".png", ".pdf", ".svg")

Records = list[dict[str, Any]]  # of a metrics.jsonl


def main(argv: list[str] | None = None) -> None:
    """Print the tables and draw the picture."""
    arguments = parse_arguments(argv)
    paths = find_runs(arguments.runs)
    labels = labels_of(paths)
    if arguments.baseline is not None:
        baseline = group_called(arguments.baseline, labels, paths)
        order = sorted(range(len(paths)), key=lambda index: without_seed(labels[index]) != baseline)
        paths, labels = [paths[index] for index in order], [labels[index] for index in order]
    runs = dict(zip(labels, map(read, paths), strict=True))
    diverged = {
        label: step
        for label, path in zip(runs, paths, strict=True)
        if (step := diverged_at(path)) is not None
    }
    print(table(runs, diverged))
    if arguments.baseline is not None:
        print(f"\n{difference_table(runs, baseline, diverged)}")
    out = arguments.out or default_out(paths)
    groups = {label: without_seed(label) or "all seeds" for label in runs}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        written = plot_losses(runs, out, groups=groups) or [out]
    except OSError as error:
        sys.exit(printable(f"cannot write {out}: {error.strerror}; give another place with --out FILE.png"))
    print(f"\nwritten: {printable(', '.join(map(str, written)))}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if a path holds no run."""
    parser = command_parser("python -m scripts.compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders that hold some")
    baseline = "the run, or group of seeds, that the others are compared with: a path, or a name in the table"
    parser.add_argument("--baseline", metavar="RUN", help=baseline)
    where = (
        "the picture, or a folder for comparison.png (default: next to the runs; runs/comparison.png if they "
        "lie apart)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help=where)
    arguments = parser.parse_args(argv)
    for path in arguments.runs:
        if not find_runs([path]):
            parser.error(
                f"{path} holds no run: there is no metrics.jsonl in it or below it; give the "
                "directory of a run, for instance runs/NAME"
            )
    if arguments.out is not None and (arguments.out.is_dir() or not arguments.out.suffix):
        arguments.out /= "comparison.png"
    if arguments.out is not None and arguments.out.suffix not in PICTURES:
        parser.error(
            f"--out {arguments.out} is no picture: end it in {', '.join(PICTURES)}, or name a folder"
        )
    return arguments


def group_called(name: str, labels: Sequence[str], paths: Sequence[Path]) -> str:
    """The group that `name` means: its own name, or a run's path, label or directory's name. Or ends."""
    groups = [without_seed(label) for label in labels]
    for group, label, path in zip(groups, labels, paths, strict=True):
        if name in (label, group) or Path(name).resolve() == path.resolve():
            return group
    of_directories = {group for group, path in zip(groups, paths, strict=True) if path.name == name}
    if len(of_directories) == 1:
        return of_directories.pop()
    known = dict.fromkeys(without_seed(label) or label for label in labels)
    sys.exit(f"--baseline {name} is none of the runs; give the path of a run, or one of {', '.join(known)}")


def read(path: Path) -> Records:
    """The records of a run. Ends with a message if they are damaged."""
    try:
        records = RunDirectory(path).records()
    except (ValueError, OSError) as error:
        sys.exit(printable(f"{error}; or leave this run out"))
    return [{printable(key): value for key, value in record.items()} for record in records]


def diverged_at(path: Path) -> int | None:
    """The step that ended the run because it was not finite, or None. Ends with a message if damaged."""
    try:
        return RunDirectory(path).diverged_at()
    except ValueError as error:
        what = f"{path}/DIVERGED is damaged ({error}); it should hold the number of a step: correct it"
        sys.exit(printable(what))


def default_out(paths: Sequence[Path]) -> Path:
    """comparison.png next to the runs; in runs/ if they have no common folder, or it belongs to results/."""
    folders = {path.resolve().parent for path in paths}
    folder = paths[0].parent
    if len(folders) > 1 or folder.resolve().is_relative_to(RESULTS):
        folder = Path("runs")
    return folder / "comparison.png"


def without_seed(label: str) -> str:
    """What runs share that differ only in the seed."""
    return SEED.sub("", label).lstrip("+")


def seed_of(label: str) -> str:
    """The seed in a label; empty where it has none, as in all runs of a comparison with one seed."""
    match = SEED.search(label)
    return match[2] if match else ""


class Summary(NamedTuple):
    """What the table says about a run; None where metrics.jsonl says nothing, NaN for what is not finite."""

    steps: int
    tokens: float
    training_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    sets: dict[str, float | None]  # loss on each named validation set that the run has


NO_LOSSES = {"training_loss": None, "validation_loss": None, "sets": {}}


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
        {name: last(records, SET + name) for name in named_sets([records])},
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
    sets = named_sets(runs.values())
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
            named = [number(run.sets.get(name), ".4f") for name in sets]
            rows.append([label, *counts, *losses, *named, number(run.tokens_per_second, ",.0f")])
        if len(labels) > 1:
            losses = [
                mean_and_deviation([getattr(run, name) for run in summaries])
                for name in ("training_loss", "validation_loss")
            ]
            named = [mean_and_deviation([run.sets.get(name) for run in summaries]) for name in sets]
            name = f"{group}: " if group else ""
            rows.append([f"{name}mean ± std of {len(labels)} seeds", "", "", *losses, *named, ""])
    head = [
        "run",
        "steps",
        "tokens",
        "training loss",
        "validation loss",
        *(SET + name for name in sets),
        "tokens/s",
    ]
    return "\n".join(align(head, rows))


def difference_table(runs: dict[str, Records], baseline: str, diverged: dict[str, int]) -> str:
    """Losses of each group minus those of the group `baseline`, with 95% intervals, as Markdown."""
    summaries = {label: summarize(records) for label, records in runs.items()}
    broken = {without_seed(label) for label in diverged}  # a group that lost a seed has no mean
    rows: dict[str, list[str]] = {without_seed(label): [] for label in runs}
    del rows[baseline]
    columns = {
        "training loss": lambda run: run.training_loss,
        "validation loss": lambda run: run.validation_loss,
        **{SET + name: lambda run, name=name: run.sets.get(name) for name in named_sets(runs.values())},
    }
    for loss_of in columns.values():
        cells = [
            Cell(without_seed(label), seed_of(label), loss)
            for label, summary in summaries.items()
            if without_seed(label) not in broken
            and (loss := loss_of(summary)) is not None
            and np.isfinite(loss)
        ]
        fitted = fit(cells)
        for group, row in rows.items():
            row.append(_in_words(fitted.difference(group, baseline)))
    head = [f"minus {baseline or 'all seeds'}", *columns]
    return "\n".join(align(head, [[group or "all seeds", *row] for group, row in rows.items()]))


def _in_words(difference: Estimate | None) -> str:
    """Mean ± half width of the 95% interval; empty without a seed that both groups have."""
    if difference is None:
        return ""
    width = "" if difference.half_width is None else f" ± {difference.half_width:.4f}"
    mean = round(difference.mean, 4) + 0.0  # which turns −0, whose sign depends on the processor, into 0
    return f"{mean:+.4f}{width}"


def mean_and_deviation(values: list[float | None]) -> str:
    """Mean ± sample standard deviation; empty if a run has no value, or one that is not finite."""
    if not all(value is not None and np.isfinite(value) for value in values):
        return ""
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


if __name__ == "__main__":
    main()
