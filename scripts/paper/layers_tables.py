"""What scripts.paper.layers measured, as rows and tables."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from scripts.bench.measuring import origin_of
from scripts.output import align
from scripts.paper import intermediates
from scripts.paper import published as paper
from trainer.plot import PROBED

#: The variants of Table 2 and of the picture of all layers.
MAIN_VARIANTS = ("paper", "default")


@dataclass(frozen=True)
class Row:
    """One layer of a run.

    errors: by variant, those of trainer.probe.errors. statistics: those of trainer.probe.explanations, and
    (`_in_step`) the RMS of dP and dS where the loss is the mean over a training step.
    """

    run: str
    layer: int
    errors: dict[str, dict[str, float]]
    statistics: dict[str, float]


def most_error_prone(rows: list[Row], variant: str) -> Row:
    """The layer with the largest error of dQ under the variant; one with a NaN before all others."""
    return max(rows, key=lambda row: np.nan_to_num(row.errors[variant]["dq_l2"], nan=np.inf))


def to_markdown(result: dict, rows: list[Row]) -> str:
    lines = [
        "# Attention by layer",
        "",
        origin_of(result),
        "",
        f"Validation sequences: {result['settings']['sequences']} of each run. "
        "`python -m scripts.paper.layers --help` says what the variants are; the JSON has every layer.",
        "",
        "## SageBwd against exact attention",
        "",
        "Cosine similarity / relative L2, mean over layers; last, the layer with the largest error of dQ.",
        "",
        *error_table(rows),
        "",
        "## RMS of P, dP and dS",
        "",
        f"Mean over layers; of the largest logit, the largest. {result['normalisation']}",
        "",
        *rms_table(result, rows),
        "",
        *table2_section(result),
    ]
    return "\n".join(lines)


def by_run(rows: list[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.run == name] for name in dict.fromkeys(r.run for r in rows)}


def error_table(rows: list[Row]) -> list[str]:
    """A line for each run and variant."""
    lines = []
    for run, layers in by_run(rows).items():
        for variant in layers[0].errors:
            found = [row.errors[variant] for row in layers]
            cells = [pair(mean(found, f"{name}_cos"), mean(found, f"{name}_l2")) for name in PROBED]
            worst = most_error_prone(layers, variant)
            lines.append(
                [f"{run}, {variant}", *cells, f"{worst.errors[variant]['dq_l2']:.4f} ({worst.layer})"]
            )
    return align(["run, variant", *PROBED.values(), "worst dQ (layer)"], lines)


def mean(found: list[dict[str, float]], key: str) -> float:
    return statistics.fmean(values[key] for values in found)


def pair(cosine: float, l2: float) -> str:
    return f"{cosine:.4f} / {l2:.4f}"


def rms_table(result: dict, rows: list[Row]) -> list[str]:
    """A line for the paper and one for each run."""
    header = ["", "N", "P", "dP", "dS", "dP in step", "dS in step", "largest logit"]
    lines = [["paper", "4096", *(f"{value:.1e}" for value in result["paper_rms"].values()), "", "", ""]]
    for run, layers in by_run(rows).items():
        found = [row.statistics for row in layers]
        means = [
            f"{mean(found, name):.1e}" for name in (*result["paper_rms"], "dp_rms_in_step", "ds_rms_in_step")
        ]
        largest = max(values["largest_logit"] for values in found)
        lines.append([run, f"{result['runs'][run]['context']}", *means, f"{largest:.1f}"])
    return align(header, lines)


def table2_section(result: dict) -> list[str]:
    """Table 2 of each run, with the paper's."""
    lines = [
        "## Table 2",
        "",
        "The reference in plain PyTorch against exact attention, cosine similarity / relative L2. Published: "
        "layer 11 of the paper's run with QK-norm at 2.1M tokens per step. Of runs here: the layer with the "
        "largest error of dQ under the paper's algorithm.",
        "",
    ]
    for run, table in result["table2"].items():
        printed = paper.TABLE_2 | intermediates.rounded_too(paper.TABLE_2)
        columns = [printed, *(table[variant] for variant in MAIN_VARIANTS)]
        cells = [
            [title, *(pair(*column[name]) for column in columns)]
            for name, title in intermediates.TITLES.items()
            if all(name in column for column in columns)  # older results lack P and dS after their rounding
        ]
        header = [f"{run}, layer {table['layer']}", "published", *(f"`{name}`" for name in MAIN_VARIANTS)]
        lines += [*align(header, cells), ""]
    return lines
