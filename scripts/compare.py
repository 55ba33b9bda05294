"""Compare runs, finished or still training: a table of losses and speed, and a picture of the loss curves.

    python -m scripts.compare runs/attention-fpa runs/attention-sagebwd
    python -m scripts.compare runs/quickstart --out quickstart.png
    python -m scripts.compare runs --baseline runs/attention-sagebwd

Give run directories, or folders that hold some, at any depth. A run is named after the settings that not all
runs share. Columns of the table:

  training loss     mean over the last tenth of the logged steps, in nats per token
  validation loss   of the last evaluation, in nats per token; named validation sets have a column each
  difference        of the loss before it, minus that of the baseline at the same seed
  tokens/s          median

The baseline of a run is the full-precision run of the same other settings, or for all runs the one given with
--baseline. Runs that differ only in the seed are grouped, followed by their mean ± standard deviation and the
mean difference ± its 95% interval: loss = group + seed + noise, by least squares over the runs that share a
baseline. One seed per group, not repeated, gives no interval. Losses are subtracted and averaged after the
last tokens that all of these runs have, marked "(step N)" if one of them has later ones. A run that ended
because it was not finite has DIVERGED and the step in place of its losses, and counts in no mean. Takes
seconds and no GPU.

The picture has the training loss, smoothed, as lines and the validation loss as markers, below them the
differences of the training loss to the baseline. Seeds are their mean, with a band from lowest to highest.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.statistics import Cell, Estimate, fit, last_tenth
from common.terminal import command_parser
from model import backends
from scripts.output import align, number, printable
from scripts.runs import comparable_settings, differing, find_runs, places
from trainer.identity import may_change
from trainer.plot import SET, named_sets, plot_losses, series
from trainer.run_directory import RunDirectory

#: Nothing is written below this folder unless --out says so.
RESULTS = Path(__file__).parents[1] / "results"
PICTURES = (".png", ".pdf", ".svg")

#: Keys of metrics.jsonl that are columns under another name.
TITLES = {"loss": "training loss", "val_loss": "validation loss"}

Records = list[dict[str, Any]]  # of a metrics.jsonl


def main(argv: list[str] | None = None) -> None:
    """Print the table and draw the picture."""
    arguments = parse_arguments(argv)
    runs = read_runs(find_runs(arguments.runs))
    if arguments.baseline is None:
        baselines, baseline = own_baselines(runs), "the full-precision run of the same other settings"
    else:
        baseline = group_called(arguments.baseline, runs)
        baselines = {run.group: baseline for run in runs if run.group != baseline}
    runs = families(runs, baselines)
    print(table(runs, baselines))
    if baselines:
        print(f"\ndifference: loss minus that of {baseline}, at the same seed")
        print("".join(f"{line}\n" for line in unlike_baselines(runs, baselines)), end="")
    out = arguments.out or default_out([run.path for run in runs])
    groups: dict[str, list[Records]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run.records)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        written = plot_losses(groups, out, baselines=baselines) or [out]
    except OSError as error:
        sys.exit(printable(f"cannot write {out}: {error.strerror}; give another place with --out FILE.png"))
    print(f"\nwritten: {printable(', '.join(map(str, written)))}")
    below = "; below: training loss minus the baseline's" if baselines else ""
    print(f"lines: training loss, smoothed; markers: validation loss{below}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if a path holds no run."""
    parser = command_parser("python -m scripts.compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders that hold some")
    baseline = "the run, or group of seeds, that all others are compared with: a path, or a name in the table"
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


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True, eq=False)
class Run:
    """A run of a comparison."""

    path: Path
    label: str
    group: str  # the label without the seed
    settings: dict[str, Any]
    records: Records
    diverged_at: int | None  # the step

    @property
    def seed(self) -> str:
        return str(self.settings.get("seed"))

    @property
    def is_full_precision(self) -> bool:
        return self.settings.get("attention.backend") == backends.FULL_PRECISION["backend"]

    @property
    def tokens_per_step(self) -> float | None:
        counts = ((one.get("tokens"), one["step"]) for one in self.records)
        return next((tokens / step for tokens, step in counts if tokens and step), None)

    @functools.cached_property
    def curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Tokens and losses, by key of metrics.jsonl."""
        return {key: series(self.records, key) for key in keys_of([self.records])}

    @functools.cached_property
    def losses(self) -> dict[str, float]:
        """At its end, by key: NaN if it is not finite. Of a run that diverged there are none."""
        found: dict[str, float] = {}
        if self.diverged_at is not None:
            return found
        for key, (_, losses) in self.curves.items():
            values = [record[key] for record in self.records if key in record]
            if values:
                found[key] = np.nan if values[-1] is None or not len(losses) else end_of(key, losses)
        return found

    def has(self, key: str) -> bool:
        """Whether it has a loss that can be averaged and subtracted."""
        return bool(np.isfinite(self.losses.get(key, np.nan)))

    def loss_at(self, key: str, tokens: float) -> float | None:
        """The loss that it had as its last after so many tokens; None if it has none there."""
        counts, losses = self.curves[key]
        return end_of(key, losses[counts <= tokens]) if tokens in counts else None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of these directories. Ends with a message if one is damaged."""
    try:
        settings = [comparable_settings(path) for path in paths]
        records = [RunDirectory(path).records() for path in paths]
        diverged = [RunDirectory(path).diverged_at() for path in paths]
    except (ValueError, OSError) as error:
        sys.exit(printable(f"{error}; or leave this run out"))
    records = [[{printable(k): v for k, v in line.items()} for line in lines] for lines in records]
    names = names_of(differing(settings), paths)
    found = zip(paths, names, settings, records, diverged, strict=True)
    return [Run(path, *name, *others) for path, name, *others in found]


def keys_of(runs: Iterable[Records]) -> list[str]:
    """The losses in metrics.jsonl, each a column of the table."""
    return [*TITLES, *(SET + name for name in named_sets(runs))]


def end_of(key: str, losses: np.ndarray) -> float:
    """The last loss, of training the mean over the last tenth."""
    return last_tenth(losses).mean() if key == "loss" else losses[-1]


def names_of(settings: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[tuple[str, str]]:
    """A label for each run, no two the same, and that label without the seed: "attention=fpa seed=1".

    Runs of the same settings, or of none, are told apart by their folders.
    """

    def named(left_out: str, folders: Sequence[str]) -> list[str]:
        words = (" ".join(f"{n}={_text(v)}" for n, v in own.items() if n != left_out) for own in settings)
        pairs = zip(map(printable, words), folders, strict=True)
        return [f"{own} ({folder})" if own and folder else own or folder for own, folder in pairs]

    none, parents = [""] * len(paths), places([path.parent for path in paths])
    for folders in (none, parents if len({*parents}) > 1 else none, places(paths)):
        labels = named("", folders)
        if "" not in labels and len({*labels}) == len(labels):
            break
    return [
        (label, group or "all seeds") for label, group in zip(labels, named("seed", folders), strict=True)
    ]


def _text(value: Any) -> str:
    """As it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def own_baselines(runs: Sequence[Run]) -> dict[str, str]:
    """{group: the first full-precision group that trains the same}, for all but those themselves."""
    found: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: not run.is_full_precision):
        same = (one for one in runs if one.is_full_precision and one.group not in found)
        baseline = next((one for one in same if not unlike(run, one)), run)
        if baseline.group != run.group:
            found[run.group] = baseline.group
    return found


def unlike(run: Run, other: Run) -> set[str]:
    """The settings, besides attention and seed, that make the two train something else."""
    is_known = "text" in run.settings and "text" in other.settings  # then it may come from another place
    left_out = ("attention", "seed", "data.validation", *(() if is_known else ("text",)))
    return {
        name
        for name in {**run.settings, **other.settings}
        if run.settings.get(name) != other.settings.get(name)
        and not name.startswith(left_out)
        and (not may_change(name) or (name.startswith("data.") and not is_known))
    }


def unlike_baselines(runs: Sequence[Run], baselines: dict[str, str]) -> Iterator[str]:
    """A line for each group whose difference to its baseline is not of attention alone."""
    first = {run.group: run for run in reversed(runs)}
    for one, other in ((first[group], first[baseline]) for group, baseline in baselines.items()):
        names, shared = unlike(one, other), one.settings.keys() & other.settings.keys()
        found = ["data"] if any(name == "text" or name.startswith("data.") for name in names) else []
        found += ["context"] if "context" in names else []
        found += ["tokens per step"] if one.tokens_per_step != other.tokens_per_step else []
        validated = [name for name in shared if name.startswith(("data.validation.", "eval_sequences"))]
        found += sorted(name for name in validated if one.settings[name] != other.settings[name])
        if found:
            names = printable(", ".join(found))
            yield f"not like for like: {one.group} and {other.group} have different {names}"


def families(runs: Sequence[Run], baselines: dict[str, str]) -> list[Run]:
    """The runs in order, but each baseline followed by the groups that are compared with it."""
    groups = list(dict.fromkeys(run.group for run in runs))
    heads = list(dict.fromkeys(baselines.get(group, group) for group in groups))

    def place(run: Run) -> tuple[int, bool, int]:
        head = baselines.get(run.group, run.group)
        return heads.index(head), run.group != head, groups.index(run.group)

    return sorted(runs, key=place)


def group_called(name: str, runs: Sequence[Run]) -> str:
    """The group that `name` means: its own name, or a run's path, label or directory's name. Or ends."""
    for run in runs:
        if name in (run.label, run.group) or Path(name).resolve() == run.path.resolve():
            return run.group
    of_directories = {run.group for run in runs if run.path.name == name}
    if len(of_directories) == 1:
        return of_directories.pop()
    known = dict.fromkeys(run.group for run in runs)
    sys.exit(f"--baseline {name} is none of the runs; give the path of a run, or one of {', '.join(known)}")


def default_out(paths: Sequence[Path]) -> Path:
    """comparison.png next to the runs; in runs/ if they have no common folder, or it belongs to results/."""
    folders = {path.resolve().parent for path in paths}
    folder = paths[0].parent
    if len(folders) > 1 or folder.resolve().is_relative_to(RESULTS):
        folder = Path("runs")
    return folder / "comparison.png"


# ---------------------------------------------------------------------- the table


def table(runs: Sequence[Run], baselines: dict[str, str]) -> str:
    """A row for each run and one for each group of seeds, as Markdown. baselines: {group: its baseline}."""
    columns = keys_of(run.records for run in runs)
    by_seed = {(run.group, run.seed): run for run in runs}

    def row(first: list[str], cells: list[str], minus: list[str], last: str) -> list[str]:
        pairs = zip(cells, minus, strict=True)
        return [*first, *([cell for pair in pairs for cell in pair] if baselines else cells), last]

    rows = []
    for group in dict.fromkeys(run.group for run in runs):
        members = [run for run in runs if run.group == group]
        of_group = [difference(runs, column, group, baselines) for column in columns]
        for run in members:
            cells = [number(run.losses.get(column), ".4f") for column in columns]
            if run.diverged_at is not None:
                cells[0] = f"DIVERGED at step {run.diverged_at}"
            base = by_seed.get((baselines.get(group), run.seed))
            minus = [at_last_shared([run, base], column, _minus) if base else "" for column in columns]
            steps = run.records[-1]["step"] if run.records else 0
            tokens = series(run.records, "loss")[0].max(initial=0)
            speed = series(run.records, "tokens_per_second")[1]
            first = [run.label, str(steps), f"{tokens:,.0f}"]
            last = number(np.median(speed) if len(speed) else None, ",.0f")
            rows.append(row(first, cells, of_group if len(members) == 1 else minus, last))
        if len(members) > 1:
            means = [at_last_shared(members, column, mean_and_deviation) for column in columns]
            rows.append(row([f"{group}: mean ± std of {len(members)} seeds", "", ""], means, of_group, ""))
    titles = [TITLES.get(column, column) for column in columns]
    head = row(["run", "steps", "tokens"], titles, ["difference"] * len(columns), "tokens/s")
    return "\n".join(align(head, rows))


def difference(runs: Sequence[Run], column: str, group: str, baselines: dict[str, str]) -> str:
    """A group's loss minus its baseline's, with the 95% interval of all groups that share the baseline."""
    if (baseline := baselines.get(group)) is None:
        return ""
    broken = {run.group for run in runs if run.diverged_at is not None}  # without a seed there is no mean
    names = {baseline, *(one for one in baselines if baselines[one] == baseline)} - broken
    family = [run for run in runs if run.group in names and run.has(column)]
    own, base = ([run for run in family if run.group == name] for name in (group, baseline))
    seeds = {run.seed for run in own} & {run.seed for run in base}

    def words(tokens: float, _: list[float]) -> str:
        losses = [(run, run.loss_at(column, tokens)) for run in family]
        cells = [Cell(run.group, run.seed, loss) for run, loss in losses if loss is not None]
        return _in_words(fit(cells).difference(group, baseline))

    return at_last_shared([run for run in [*own, *base] if run.seed in seeds], column, words)


def at_last_shared(runs: Sequence[Run], column: str, words: Callable[[float, list[float]], str]) -> str:
    """words(the last tokens at which all runs have this loss, the losses there); empty if there are none.

    With the step, if one of the runs has later ones.
    """
    if not (runs and all(run.has(column) for run in runs)):
        return ""
    counts = [run.curves[column][0] for run in runs]
    shared = functools.reduce(np.intersect1d, counts)
    if not len(shared):
        return ""
    tokens = shared.max()
    step = next(record["step"] for record in runs[0].records if record.get("tokens") == tokens)
    mark = "" if all(one.max() == tokens for one in counts) else f" (step {step})"
    return words(tokens, [run.loss_at(column, tokens) for run in runs]) + mark


def _in_words(difference: Estimate) -> str:
    """Mean ± half width of the 95% interval."""
    width = "" if difference.half_width is None else f" ± {difference.half_width:.4f}"
    return _signed(difference.mean) + width


def _signed(difference: float) -> str:
    return (
        f"{round(difference, 4) + 0.0:+.4f}"  # adding 0 turns −0, whose sign depends on the processor, into 0
    )


def mean_and_deviation(tokens: float, losses: list[float]) -> str:
    return f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"


def _minus(tokens: float, losses: list[float]) -> str:
    return _signed(losses[0] - losses[1])


if __name__ == "__main__":
    main()
