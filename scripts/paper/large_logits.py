"""Does INT8 attention cost loss when logits are large? Compares runs of scripts.paper.large_logits_runs.

    python -m scripts.paper.large_logits runs/large_logits --out runs/paper/large_logits

Give run directories, folders that hold some, or OUT.json.gz of this command, whose runs may be gone.
Unfinished runs are left out. Runs of one assay and one gain of QK-norm are compared with full precision:

    validation, training   loss at the end, nats per token; training: mean of the last tenth of the steps;
                           mean over seeds, with the 95% interval of that mean
    gap                    of the training loss, minus full precision. The runs of a seed share initialisation
                           and data, so a loss is modeled as setting + seed + noise, by least squares; 95%
                           interval from that noise. None for a setting of which a seed diverged
    mean gap               the same of the training loss's mean over the whole run
    logits, errors         from a run's last probe: the largest |S| of its layers, and relative L2 errors of
                           its own attention (full precision: of what attention=sagebwd would have), mean
                           over layers and seeds
    sees                   whether a positive control, with dP in INT8, ends above full precision or diverges.
                           If no interval lies above 0, the assay is blind at that gain
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagebwd.config import PAPER_INT8_MATMULS
from scripts.bench.measuring import describe_run
from scripts.command_line import command_parser
from scripts.output import with_ending
from scripts.paper import drawing
from scripts.paper.large_logits_pictures import draw, gap_curves
from scripts.paper.large_logits_tables import UNKNOWN, Interval, Row, lies_above_zero, to_markdown
from scripts.paper.loss_statistics import differences, quantile
from scripts.paper.result_files import OUT, write_result
from scripts.paper.run_summary import read
from scripts.paper.variants import FULL_PRECISION, variant_of
from trainer.run_directory import RunDirectory

PROGRAM = "python -m scripts.paper.large_logits"
ERRORS = ("o_l2", "dq_l2", "dk_l2", "dv_l2")
STATISTICS = ("p_rms", "dp_rms", "ds_rms", "q_gain", "k_gain")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        runs = unique(run for path in find_runs(arguments.runs) for run in read(path))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    settled = [run for run in runs if run["finished"] or run["diverged"]]
    if not settled:
        raise SystemExit(
            f"none of the {len(runs)} runs is finished; train them first: "
            "python -m scripts.paper.large_logits_runs"
        )
    rows = compare(settled)
    result = {**describe(argv, settled), "scale": arguments.scale, "runs": settled, "cells": cells_of(rows)}
    write_result(arguments.out, result, rows, to_markdown(result, rows))
    drawing.save(draw(rows, curves_of(settled)), with_ending(arguments.out, ".png"))
    print(f"{len(settled)} of {len(runs)} runs compared, written to {arguments.out}.json.gz, .md and .png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="runs, folders of runs, or OUT.json.gz of this command"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT / "large_logits", help="beginning of the files' names"
    )
    parser.add_argument("--scale", default="scaled", help="of the experiment (default %(default)s)")
    return parser.parse_args(argv)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Files as they are; of folders the run directories in them, or themselves."""
    found = []
    for path in paths:
        inside = [folder for folder in sorted(path.glob("*/")) if RunDirectory(folder).metrics.exists()]
        found += inside or [path]
    return found


def unique(runs: Iterable[dict]) -> list[dict]:
    """Each run once, although it lies in a folder and in an earlier comparison."""
    return list({(run["name"], tuple(run["curve"]["loss"])): run for run in runs}.values())


def describe(argv: list[str] | None, runs: list[dict]) -> dict[str, Any]:
    """What the numbers are; the hardware and commits are the runs' own."""
    return {
        "values": "losses in nats per token; mean ± half_width: 95% interval",
        **describe_run(PROGRAM, argv, Namespace(device="cpu"), ()),
        "trained_on": sorted({run["device"] for run in runs}),
        "trained_at": sorted({str(run["commit"]) for run in runs}),
        "text": sorted({str(run["group"]["text"]) for run in runs}),
    }


# --- What a run is ------------------------------------------------------------------------------------------


def assay_of(run: dict) -> str:
    return "one batch" if run["config"].get("train_sequences") else "fresh text"


def gain_of(run: dict) -> float:
    return float(run["config"]["model"].get("qk_norm_gain", 1.0))


def setting_of(run: dict) -> str:
    """The variant of a run, all products in INT8 and a kernel of full precision named for what they are."""
    config, attention = run["config"], run["config"]["attention"]
    if run["attention"] == "fpa":
        return f"{run['variant']}, {attention['sdpa']}" if attention.get("sdpa") else run["variant"]
    if not is_positive_control(run):
        return run["variant"]
    as_printed = attention | {"int8_matmuls": PAPER_INT8_MATMULS}
    return f"{variant_of(config | {'attention': as_printed})}, all INT8"


def is_positive_control(run: dict) -> bool:
    return "dp" in (run["config"]["attention"].get("int8_matmuls") or ())


# --- Comparing ----------------------------------------------------------------------------------------------


def compare(runs: list[dict]) -> list[Row]:
    """A row for every assay, gain and setting; gains in order, full precision first.

    Raises ValueError if runs of one assay and gain differ in more than attention and seed.
    """
    rows = []
    for (assay, gain), own in by_cell(runs).items():
        check_alike(own, assay, gain)
        rows += compare_cell(assay, gain, own)
    return rows


def by_cell(runs: list[dict]) -> dict[tuple[str, float], list[dict]]:
    """The runs of every assay and gain, in order of both."""
    cells: dict[tuple[str, float], list[dict]] = {}
    for run in runs:
        cells.setdefault((assay_of(run), gain_of(run)), []).append(run)
    return dict(sorted(cells.items()))


def by_setting(runs: list[dict]) -> dict[str, list[dict]]:
    """The runs of every setting, full precision first."""
    found: dict[str, list[dict]] = {}
    for run in sorted(runs, key=lambda run: (setting_of(run) != FULL_PRECISION, run["seed"])):
        found.setdefault(setting_of(run), []).append(run)
    return found


def curves_of(runs: list[dict]) -> dict[tuple[str, float], dict[str, Any]]:
    """Gaps in time of every gain with one batch; of the other assay if that has no runs."""
    curves = {cell: gap_curves(by_setting(own)) for cell, own in by_cell(runs).items()}
    return {cell: own for cell, own in curves.items() if cell[0] == "one batch"} or curves


def check_alike(runs: list[dict], assay: str, gain: float) -> None:
    for run in runs:
        if run["group"] != runs[0]["group"]:
            changed = {key: (value, run["group"].get(key)) for key, value in runs[0]["group"].items()}
            changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
            raise ValueError(
                f"{runs[0]['name']} and {run['name']} ({assay}, gain {gain:g}) are not alike: {changed}; "
                "compare them in separate commands"
            )


def compare_cell(assay: str, gain: float, runs: list[dict]) -> list[Row]:
    """The rows of one assay and gain."""
    settings = by_setting(runs)
    of_gap = gaps(settings, final_training)
    of_mean = gaps(settings, whole_training)
    return [
        Row(
            assay=assay,
            gain=gain,
            setting=setting,
            seeds=sorted({run["seed"] for run in own}),
            diverged=sum(bool(run["diverged"]) for run in own),
            validation=mean_of(own, final_validation),
            training=mean_of(own, final_training),
            gap=of_gap.get(setting, UNKNOWN),
            mean_gap=of_mean.get(setting, UNKNOWN),
            largest_logit=mean_or_none([max(values_of(run, "largest_logit"), default=None) for run in own]),
            probe={name: mean for name in ERRORS + STATISTICS if (mean := probed(own, name)) is not None},
            is_positive_control=is_positive_control(own[0]),
        )
        for setting, own in settings.items()
    ]


def final_validation(run: dict) -> float | None:
    return run["held_out_loss"]


def final_training(run: dict) -> float | None:
    return run["final_loss"]


def whole_training(run: dict) -> float | None:
    return float(np.mean(run["curve"]["loss"])) if run["curve"]["loss"] else None


def gaps(settings: dict[str, list[dict]], loss_of: Callable[[dict], float | None]) -> dict[str, Interval]:
    """By setting, the loss minus that of full precision; only of settings of which no run diverged."""
    cells = [
        (setting, run["seed"], loss_of(run))
        for setting, own in settings.items()
        if not any(run["diverged"] or loss_of(run) is None for run in own)
        for run in own
    ]
    return {
        pair["of"]: {"mean": pair["mean"], "half_width": pair["half_width"]}
        for pair in differences(cells)["differences"]
        if pair["minus"] == FULL_PRECISION
    }


def mean_of(runs: list[dict], loss_of: Callable[[dict], float | None]) -> Interval:
    """Mean over the runs that have a loss, with its 95% interval by Student's t."""
    losses = [loss for run in runs if not run["diverged"] and (loss := loss_of(run)) is not None]
    if not losses:
        return UNKNOWN
    half_width = None
    if len(losses) > 1:
        half_width = float(quantile(len(losses) - 1) * np.std(losses, ddof=1) / len(losses) ** 0.5)
    return {"mean": float(np.mean(losses)), "half_width": half_width}


def values_of(run: dict, name: str) -> list[float]:
    """A value of the last probe, of every layer that was measured."""
    return [
        value for key, value in run["last_probe"].items() if key.endswith(f"/{name}") and value is not None
    ]


def probed(runs: list[dict], name: str) -> float | None:
    return mean_or_none([value for run in runs for value in values_of(run, name)])


def mean_or_none(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def cells_of(rows: list[Row]) -> list[dict[str, Any]]:
    """For every assay and gain, whether a positive control shows in a gap; None: cannot tell."""
    found: dict[tuple[str, float], list[bool]] = {}
    for row in rows:
        seen = found.setdefault((row.assay, row.gain), [])
        if row.is_positive_control:
            above = lies_above_zero(row.gap)
            seen += [True] if row.diverged else [above] if above is not None else []
    return [
        {"assay": assay, "gain": gain, "sees": any(seen) if seen else None}
        for (assay, gain), seen in found.items()
    ]


if __name__ == "__main__":
    main()
