"""All differences of losses in one table, each beside its null.

    python -m scripts.paper.losses results/losses --out results/losses/losses

Reads the comparisons that scripts.paper.curves stored (configs/paper/losses.yaml names them) and writes
OUT.json and OUT.md. Runs with one model, text and schedule are compared, whichever file they lie in, and
share one estimate of the noise. An algorithm is compared with full precision, a change of smoothing with the
setting without it.

The null is full precision with a second kernel, or repeated, at the same seed. In the fit it is one more run
of full precision: what the two differ by is noise. A difference is minus the mean of both.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common.files import write_json
from common.statistics import (
    DEGREES_OF_95,
    Cell,
    Estimate,
    by_seed,
    difference_of,
    fit,
    permutation_p,
    quantile,
)
from common.terminal import command_parser
from scripts.bench.measuring import describe_run
from scripts.output import finite, read_json, stored, table, with_ending, write_markdown
from scripts.paper.experiments import read_yaml
from scripts.paper.variants import FULL_PRECISION, base_of, is_null
from trainer.identity import flat, may_change

PROGRAM = "python -m scripts.paper.losses"
#: A smaller model stands for the paper's.
PAPER_PARAMETERS = 300_000_000
NAMES_OF_TOKENS = {262_144: "260k", 1_048_576: "1m", 2_097_152: "2.1m"}


# --- What is stored of a comparison ----------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference of losses over seeds, in nats per token. mean ± half_width: None without any noise.

    degrees: of freedom of that interval. by_seed: the difference at each seed. p: how often labels exchanged
    within seeds give as large a difference.
    """

    mean: float
    half_width: float | None
    degrees: int
    by_seed: dict[str, float]
    p: float | None

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.mean, self.half_width, self.degrees)

    def __str__(self) -> str:
        """ "+0.0013 ± 0.0084 (2 seeds)", with the degrees of freedom where these are few."""
        count = len(self.by_seed)
        few = f", {self.degrees} d.f." if 0 < self.degrees < DEGREES_OF_95 else ""
        digits = 4 if self.half_width is None or self.half_width >= 5e-4 else 5
        width = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        mean = round(self.mean, digits) + 0.0  # which turns −0 into 0
        return f"{mean:+.{digits}f}{width} ({count} seed{'s' if count > 1 else ''}{few})"


@dataclass(frozen=True)
class Row:
    """A variant minus another in one setup. kind: difference, null, or interaction (of two setups).

    proxy: a smaller model than the paper's stands for it. losses: by what was compared, "training" and
    "validation", or "validation NAME".
    """

    setup: str
    group: dict[str, Any]
    variant: str
    minus: str
    kind: str
    proxy: bool
    has_null: bool  # full precision ran twice, at every seed of this difference
    losses: dict[str, Difference] = field(default_factory=dict)


def read_rows(result: dict[str, Any]) -> list[Row]:
    """The rows of OUT.json."""
    return [
        Row(**row | {"losses": {name: Difference(**found) for name, found in row["losses"].items()}})
        for row in result["rows"]
    ]


# --- Which runs count ---------------------------------------------------------------------------------------


def of_one_code(runs: Sequence[dict]) -> list[dict]:
    """The runs that count: a repetition shows the noise only if nothing but chance differs.

    Of a variant and seed that was run by several commits, or with several settings, those runs count whose
    commit most of the runs have; of equally many the first.
    """
    share = Counter(run["commit"] for run in runs)
    cells: dict[tuple[str, int], list[dict]] = {}
    for run in runs:
        cells.setdefault((run["variant"], run["seed"]), []).append(run)
    first = {cell: max(own, key=lambda run: share[run["commit"]]) for cell, own in cells.items()}
    return [run for run in runs if is_repetition(run, first[run["variant"], run["seed"]])]


def is_repetition(one: dict, other: dict) -> bool:
    """Whether two runs of a variant and seed differ by chance alone."""
    return one["commit"] == other["commit"] and computed(one["config"]) == computed(other["config"])


def computed(config: dict[str, Any]) -> dict[str, Any]:
    """{dotted name: value} of the settings that say what a run computes, not how it executes or reports."""
    return {name: value for name, value in flat(config).items() if not may_change(name)}


# --- Comparing ----------------------------------------------------------------------------------------------


def compare(runs: Iterable[dict]) -> list[Row]:
    """The differences in every group of runs; each run once, in whichever files it is."""
    groups: dict[str, dict[tuple, dict]] = {}
    for run in runs:
        same_run = run["variant"], run["seed"], run["commit"], run["final_loss"]
        groups.setdefault(json.dumps(run["group"]), {})[same_run] = run
    names = names_of([next(iter(own.values()))["group"] for own in groups.values()])
    rows = [
        row
        for name, own in zip(names, groups.values(), strict=True)
        for row in compare_group(name, list(own.values()))
    ]
    return rows + interactions(rows)


def names_of(groups: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each group; of several with one name, all but the first add their steps, or their text."""
    first: dict[str, dict[str, Any]] = {}
    names = []
    for group in groups:
        name = setup_of(group)
        named = first.setdefault(name, group)
        if named is not group:
            is_longer = named["steps"] != group["steps"] and named["text"] == group["text"]
            steps = group["steps"] - group.get("branch_step", 0)
            name += f", {steps} steps" if is_longer else f", text {group['text'][:10]}"
        names.append(name)
    return names


def compare_group(setup: str, runs: list[dict]) -> list[Row]:
    kept = of_one_code(runs)
    broken = {run["variant"] for run in kept if run["diverged"]}  # it has no mean to compare
    kept = [run for run in kept if run["variant"] not in broken]
    metrics = losses_of(kept)
    group = runs[0]["group"]
    proxy = group["parameters"] < PAPER_PARAMETERS
    compared = difference_of_branches if "branch_step" in group else difference
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in kept):
        base = base_of(variant)
        found = {name: compared(cells, variant, base) for name, cells in metrics.items()}
        found = {name: own for name, own in found.items() if own}
        if not found:
            continue
        kind = "null" if is_null(variant) or variant == base else "difference"
        minus = f"{base}, the first run" if variant == base else base
        null = kind == "null" or has_null(metrics["training"], variant)
        rows.append(Row(setup, group, variant, minus, kind, proxy, null, found))
    return rows


def losses_of(runs: Sequence[dict]) -> dict[str, list[Cell]]:
    """The losses to compare: training, and each validation set that runs have."""
    found: dict[str, list[Cell]] = {"training": []}
    for run in runs:
        if run["final_loss"] is not None:
            found["training"].append(Cell(run["variant"], run["seed"], run["final_loss"]))
        for name, last in run["validation"].items():
            cells = found.setdefault(f"validation {name}".strip(), [])
            cells.append(Cell(run["variant"], run["seed"], last["loss"]))
    return found


def difference(cells: Sequence[Cell], variant: str, base: str) -> Difference | None:
    """None if the two have no seed in common. Of full precision, how far its two runs at a seed lie apart."""
    gaps, fitted = gaps_of(cells, variant, base), fit(pooled(cells))
    if not gaps:
        return None
    if not (is_null(variant) or variant == base):
        estimate = fitted.difference(variant, base)
        return Difference(*estimate, named(gaps), permutation_p(pooled(cells), variant, base))
    width = None
    if fitted.noise is not None:
        width = quantile(fitted.degrees) * fitted.noise * (2 / len(gaps)) ** 0.5
    return Difference(fmean(gaps.values()), width, fitted.degrees, named(gaps), None)


def difference_of_branches(cells: Sequence[Cell], variant: str, base: str) -> Difference | None:
    """As `difference`, with Student's t of this variant's own differences over the seeds; none for one seed.

    Branches of one model have hardly any chance in them. What is left is how a difference varies from one
    starting model to another, and for some variants that is a hundred times as much as for others.
    """
    whole, gaps = difference(cells, variant, base), gaps_of(cells, variant, base)
    degrees = len(gaps) - 1
    width = quantile(degrees) * stdev(gaps.values()) / len(gaps) ** 0.5 if degrees > 0 else None
    return whole and replace(whole, mean=fmean(gaps.values()), half_width=width, degrees=degrees)


def gaps_of(cells: Sequence[Cell], variant: str, base: str) -> dict[int | str, float]:
    """By seed, the loss of a variant minus its base's; of full precision its second run minus the first."""
    if variant == base:
        return repetitions(cells, base)
    return by_seed(cells if is_null(variant) else pooled(cells), variant, base)


def pooled(cells: Sequence[Cell]) -> list[Cell]:
    """Full precision by any kernel under one name."""
    return [cell._replace(variant=counted_as(cell.variant)) for cell in cells]


def counted_as(variant: str) -> str:
    """Full precision with a second kernel is one more run of full precision."""
    return base_of(variant) if is_null(variant) else variant


def repetitions(cells: Sequence[Cell], variant: str) -> dict[int | str, float]:
    """By seed, the second run of a variant minus the first."""
    runs: dict[int | str, list[float]] = {}
    for cell in cells:
        if cell.variant == variant and variant.startswith(FULL_PRECISION):
            runs.setdefault(cell.seed, []).append(cell.loss)
    return {seed: losses[1] - losses[0] for seed, losses in runs.items() if len(losses) > 1}


def named(gaps: dict[int | str, float]) -> dict[str, float]:
    return {str(seed): round(gap, 5) for seed, gap in gaps.items()}


def has_null(cells: Sequence[Cell], variant: str) -> bool:
    """Whether full precision ran twice at every seed of the variant, also of a change of smoothing."""
    seeds = {cell.seed for cell in cells if cell.variant == variant}
    full_precision = base_of(base_of(variant))
    baseline = [cell.seed for cell in cells if counted_as(cell.variant) == full_precision]
    return all(baseline.count(seed) > 1 for seed in seeds)


def interactions(rows: Sequence[Row]) -> list[Row]:
    """What more tokens per step add to a difference: of setups with the same model, text, rate and tokens."""
    found = []
    whole = [row for row in rows if row.kind == "difference" and row.minus.startswith(FULL_PRECISION)]
    for large in whole:
        for small in whole:
            if large.variant != small.variant or shared(large.group) != shared(small.group):
                continue
            if large.group["tokens_per_step"] <= small.group["tokens_per_step"]:
                continue
            gaps = {
                name: Difference(*difference_of(gap.estimate, small.losses[name].estimate), gap.by_seed, None)
                for name, gap in large.losses.items()
                if name in small.losses and None not in (gap.half_width, small.losses[name].half_width)
            }
            setup = f"{large.setup} − {small.setup}"
            null = large.has_null and small.has_null
            found.append(
                Row(setup, large.group, large.variant, large.minus, "interaction", large.proxy, null, gaps)
            )
    return found


def shared(group: dict[str, Any]) -> dict[str, Any]:
    schedule = ("tokens_per_step", "steps", "warmup_steps")
    same = {key: value for key, value in group.items() if key not in schedule}
    return same | {"tokens": group["tokens_per_step"] * group["steps"]}


def setup_of(group: dict[str, Any]) -> str:
    """A short name: "325m-260k, steps 130–152", "325m-8k, fine-tuned", "35m-131k, gain 4, branches"."""
    tokens = group["tokens_per_step"]
    name = f"{group['parameters'] / 1e6:.0f}m-{NAMES_OF_TOKENS.get(tokens, f'{tokens // 1000}k')}"
    name = name.replace("324m", "325m")  # as the paper calls it
    if group.get("init_from"):
        return f"{name}, fine-tuned"
    if group["lr"] != 1e-3:
        name += f", lr {group['lr']:g}"
    if "qk_norm_gain" in group:
        name += f", gain {group['qk_norm_gain']:g}"
    if "branch_step" in group:
        name += ", branches"
    if "window" in group:
        name += ", steps {}–{}".format(*group["window"])
    return f"{name}, {group['label']}" if "label" in group else name


def losses_table(rows: Iterable[Row]) -> str:
    """Every difference with its null, as Markdown; what more tokens per step add comes last."""
    columns = {
        "training loss": "training",
        "validation loss": "validation",
        "OpenWebText": "validation openwebtext",
    }
    cells = []
    for row in rows:
        base = "itself" if row.kind == "null" else row.minus.replace("full precision", "full")
        found = [str(row.losses.get(name, "")) for name in columns.values()]
        p = row.losses["training"].p
        null = {"null": "is one"}.get(row.kind, "yes" if row.has_null else "no")
        setup = f"{row.setup} (proxy)" if row.proxy else row.setup
        cells.append([setup, row.variant, base, *found, "" if p is None else f"{p:.2f}", null])
    return table(["setup", "attention", "minus", *columns, "p", "null"], cells)


# --- Command ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    chosen = read_yaml("losses")
    names = [name for name in chosen["sources"] if stored(arguments.folder / f"{name}.json").exists()]
    runs = [
        run
        for name in names
        for run in read_json(arguments.folder / f"{name}.json")["runs"]
        if (run["finished"] or run["diverged"]) and run["group"]["lr"] not in chosen["without_lr"]
    ]
    if not runs:
        raise SystemExit(f"{arguments.folder} holds none of {', '.join(chosen['sources'])} (.json, .json.gz)")
    rows = compare(runs)
    described = describe_run(PROGRAM, argv, Namespace(device="cpu"), ())
    result = {
        "values": "differences of losses in nats per token",
        "command": described["command"],
        "commit": described["commit"],
        "sources": names,
        "rows": [as_dict(row) for row in rows],
    }
    differences = losses_table(read_rows(result))  # the rounded ones, as others read them
    explained = "Nats per token; [the report](../README.md#whole-runs) explains them."
    write_markdown(arguments.out, f"# All differences of losses\n\n{explained}\n\n{differences}\n")
    write_json(with_ending(arguments.out, ".json"), finite(result))
    print(differences)
    print(f"written to {arguments.out}.json and .md")


def as_dict(row: Row) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(row)), parse_float=lambda text: round(float(text), 7))


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument("folder", type=Path, help="folder of results")
    parser.add_argument("--out", type=Path, default=Path("runs/paper/losses"), help="default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
