"""What scripts.paper.layers measured, as rows, tables and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import pictures
from common.pictures import CYCLE
from scripts.bench.measuring import origin_of
from scripts.output import align
from scripts.paper import intermediates
from scripts.paper import published as paper
from scripts.paper.pictures import styles
from trainer.plot import PROBED

#: The variants of Table 2 and of the picture of all layers.
MAIN_VARIANTS = ("paper", "default")
LABELS = {"paper": "paper()", "default": "default"}
SMOOTHINGS = {
    "smooth-none": "no smoothing",
    "default": "K smoothed (default)",
    "smooth-qk": "Q and K smoothed",
}


@dataclass(frozen=True)
class Row:
    """One layer of a run.

    errors: by variant, those of trainer.probe.errors. statistics: those of trainer.probe.exact_layer, and
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
        ]
        header = [f"{run}, layer {table['layer']}", "published", *(f"`{name}`" for name in MAIN_VARIANTS)]
        lines += [*align(header, cells), ""]
    return lines


# --- Pictures -----------------------------------------------------------------------------------------------


def draw_layers(runs: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> Any:
    """Relative L2 by layer; a row for each group of runs, a panel for each tensor.

    A group: runs of one model, tokens per step and learning rate. Solid with QK-norm, dashed without; the
    band is the range over the group's runs.
    """
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        groups.setdefault(title_of(run), []).append(name)
    figure, panels = pictures.grid(len(groups), 4, width=2.7, height=2.1, sharex="row", sharey="row")
    looks = styles(MAIN_VARIANTS)
    shown: dict[str, Any] = {}
    for line, (title, names) in zip(panels, groups.items(), strict=True):
        for axes, (tensor, tensor_title) in zip(line, PROBED.items(), strict=True):
            for variant in MAIN_VARIANTS:
                for qk_norm in (True, False):
                    own = [
                        by_layer(rows, name, variant, f"{tensor}_l2")
                        for name in names
                        if runs[name]["qk_norm"] == qk_norm
                    ]
                    if own:
                        label = f"{LABELS[variant]}{'' if qk_norm else ', no QK-norm'}"
                        shown[label] = draw_range(axes, own, looks[variant].color, "-" if qk_norm else "--")
            axes.set_title(tensor_title, fontsize=9)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3, which="both")
        line[0].set_ylabel(f"{title}\nrelative L2", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    pictures.legend_below(figure, list(shown.values()), list(shown))
    figure.suptitle("Error of SageBwd by layer of trained models; bands: range over runs", fontsize=11)
    return figure


def title_of(run: Mapping[str, Any]) -> str:
    """What the runs of a group share."""
    return (
        f"{run['model']['n_layers']} layers,\n{run['tokens_per_step']:,} tokens per step,\nlr {run['lr']:g}"
    )


def by_layer(rows: Iterable[Row], run: str, variant: str, key: str) -> dict[int, float]:
    return {row.layer: row.errors[variant][key] for row in rows if row.run == run}


def draw_range(axes: Any, runs: Sequence[dict[int, float]], color: str, dashes: str) -> Any:
    """The mean over runs, their range as a band, on a logarithmic axis."""
    layers = sorted(runs[0])
    values = [[run.get(layer, math.nan) for run in runs] for layer in layers]
    if len(runs) > 1:
        axes.fill_between(
            layers, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.2, lw=0
        )
    means = [statistics.fmean(v) for v in values]
    if any(mean > 0 for mean in means):
        pictures.log_axis(axes.yaxis)
    return axes.plot(layers, means, marker=".", color=color, linestyle=dashes, linewidth=1.3)[0]


def draw_smoothing(rows: Sequence[Row]) -> Any:
    """Mean relative L2 of dQ and dK over layers; a line of points for each run."""
    runs = list(dict.fromkeys(row.run for row in rows))
    figure, panels = pictures.grid(1, 2, width=4.5, height=1.6 + 0.25 * len(runs), sharey=True)
    looks = {
        "smooth-none": CYCLE[-1],
        "default": styles(["default"])["default"],
        "smooth-qk": CYCLE[5],
    }
    for axes, tensor in zip(panels[0], ("dq", "dk"), strict=True):
        for variant, title in SMOOTHINGS.items():
            means = [statistics.fmean(by_layer(rows, run, variant, f"{tensor}_l2").values()) for run in runs]
            look = looks[variant]
            axes.plot(means, range(len(runs)), look.marker, color=look.color, label=title, markersize=6)
        pictures.log_axis(axes.xaxis)
        axes.set_title(f"Error of {PROBED[tensor]}")
        axes.set_xlabel("relative L2, mean over layers")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_yticks(range(len(runs)), runs, fontsize=8)
    panels[0][0].invert_yaxis()
    pictures.legend_below(figure, *panels[0][0].get_legend_handles_labels())
    figure.suptitle("What smoothing changes in the layers of trained models", fontsize=11)
    return figure
