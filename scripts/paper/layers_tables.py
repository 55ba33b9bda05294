"""What scripts.paper.layers measured, as rows, tables and pictures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.measuring import align, beside, origin_of, save_figure, write_tables
from scripts.paper import intermediates
from scripts.paper import published as paper
from trainer.plot import PROBED

#: The variants of Table 2, which have pictures of their own, too.
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
    """The layer whose dQ errs most under the variant; one with a NaN before all others."""
    return max(rows, key=lambda row: np.nan_to_num(row.errors[variant]["dq_l2"], nan=np.inf))


def write(out: Path, result: dict, rows: list[Row]) -> None:
    """OUT.json, OUT.md and the pictures."""
    write_tables(out, result, rows, to_markdown(result, rows))
    for variant in MAIN_VARIANTS:
        draw_runs(rows, variant, beside(out, f"_{variant}.png"))
    draw_variants(rows, beside(out, "_variants.png"))


def to_markdown(result: dict, rows: list[Row]) -> str:
    lines = [
        "# Attention by layer",
        "",
        origin_of(result),
        "",
        f"Held-out sequences: {result['settings']['sequences']} of each run. "
        "`python -m scripts.paper.layers --help` says what the variants are; the JSON has every layer.",
        "",
        "## SageBwd against exact attention",
        "",
        "Cosine similarity / relative L2, mean over layers; last, the layer whose dQ errs most.",
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
    """Table 2 of each run beside the paper's."""
    lines = [
        "## Table 2",
        "",
        "The reference in plain PyTorch against exact attention, cosine similarity / relative L2. Published: "
        "layer 11 of the paper's run with QK-norm at 2.1M tokens per step. Of runs here: the layer whose dQ "
        "errs most under the paper's algorithm.",
        "",
    ]
    for run, table in result["table2"].items():
        columns = [paper.TABLE_2, *(table[variant] for variant in MAIN_VARIANTS)]
        cells = [
            [title, *(pair(*column[name]) for column in columns)]
            for name, title in intermediates.TITLES.items()
        ]
        header = [f"{run}, layer {table['layer']}", "published", *(f"`{name}`" for name in MAIN_VARIANTS)]
        lines += [*align(header, cells), ""]
    return lines


def draw_runs(rows: list[Row], variant: str, path: Path) -> None:
    """Cosine similarity above, relative L2 below, by layer; a panel for each tensor, a line for each run."""
    plt = pyplot()
    figure, grid = plt.subplots(2, 4, figsize=(14, 6), sharex=True, sharey="row", layout="constrained")
    for kind, label, panels in zip(("cos", "l2"), ("cosine similarity", "relative L2"), grid, strict=True):
        for axes, (name, title) in zip(panels, PROBED.items(), strict=True):
            for run, layers in by_run(rows).items():
                draw_line(axes, layers, variant, f"{name}_{kind}", run)
            axes.set_title(title)
        panels[0].set_ylabel(label)
    finish(figure, grid, f"SageBwd ({variant}) against exact attention", path)
    plt.close(figure)


def draw_variants(rows: list[Row], path: Path) -> None:
    """Relative L2 by layer: a row for each run, a panel for each tensor, a line for each variant."""
    plt = pyplot()
    runs = by_run(rows)
    size = (14, 0.9 + 2.6 * len(runs))
    figure, grid = plt.subplots(
        len(runs), 4, figsize=size, squeeze=False, sharex="row", sharey="row", layout="constrained"
    )
    for (run, layers), panels in zip(runs.items(), grid, strict=True):
        for axes, (name, title) in zip(panels, PROBED.items(), strict=True):
            for variant in layers[0].errors:
                draw_line(axes, layers, variant, f"{name}_l2", variant)
            axes.set_title(title)
        name = run.replace("/", "/\n")  # as long as a panel is high
        panels[0].set_ylabel(f"{name}\nrelative L2", fontsize=8)
    finish(figure, grid, "Variants of SageBwd against exact attention", path)
    plt.close(figure)


def pyplot() -> Any:
    import matplotlib  # slow to import; only needed when there is something to draw

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw_line(axes: Any, layers: list[Row], variant: str, key: str, label: str) -> None:
    """One value by layer. Errors, which differ by orders of magnitude, on a logarithmic axis."""
    values = np.array([row.errors[variant][key] for row in layers])
    axes.plot([row.layer for row in layers], values, ".-", label=label)
    if key.endswith("_cos"):
        axes.ticklabel_format(axis="y", useOffset=False)
    elif (values > 0).any():
        axes.set_yscale("log")


def finish(figure: Any, grid: np.ndarray, title: str, path: Path) -> None:
    """Legend below, whole layers as ticks, title; and write it."""
    for axes in grid.flat:
        axes.grid(alpha=0.3, which="both")
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[-1]:
        axes.set_xlabel("layer")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
