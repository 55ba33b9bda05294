"""Results of scripts.bench.training: rows, tables and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.looks import (
    STEP_PARTS,
    TRAINING_LOOKS,
    add_legend,
    fill,
    finish,
    look_of,
    new_figure,
    two_lines,
)
from scripts.bench.measuring import origin_of
from scripts.output import align, number

#: Each row has its speedup over these.
SPEEDUP_OVER = ("fpa-cudnn", "fpa-flash", "fpa-fa4")
#: Classes of kernels, as the JSON files name them; OTHER_KERNELS is shown as "other kernels".
ATTENTION, PRODUCTS, OTHER_KERNELS = "attention", "matrix products", "rest"


@dataclass
class Row:
    """A contestant at a context. None or empty: not measured."""

    contestant: str
    context: int
    micro_batch: int
    reason: str | None = None  # why it failed
    log: list[str] = field(default_factory=list)  # the last lines it printed, if it failed
    step_ms: float | None = None  # median
    p10_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_second: float | None = None  # from the median
    mfu: float | None = None
    peak_memory_gib: float | None = None
    first_step_s: float | None = None  # with compilation
    loss: float | None = None  # of the last timed step, in nats; ln(vocab_size) at best on random ids
    class_ms: dict[str, float] = field(default_factory=dict)  # by class of kernel, per step
    kernels: dict[str, float] = field(default_factory=dict)  # the longest, ms per step
    loader_ms: float | None = None  # host time to read the batches of a step and start their copies
    loader_step_ms: float | None = None  # median step with batches from the loader
    log_ms: float | None = None  # host time for a line of metrics.jsonl and the progress bar
    speedup: dict[str, float] = field(default_factory=dict)  # {other: its step_ms / this step_ms}


def shares(row: Row) -> dict[str, float | None]:
    """Shares of the time in kernels by class, and of a step in kernels ("busy")."""
    busy = sum(row.class_ms.values())
    if not busy:
        return dict.fromkeys((ATTENTION, PRODUCTS, OTHER_KERNELS, "busy"))
    parts = {kind: time_ms / busy for kind, time_ms in row.class_ms.items()}
    return parts | {"busy": min(busy / row.step_ms, 1.0)}


def to_markdown(result: dict, rows: list[Row]) -> str:
    settings = result["settings"]
    lines = [
        "# Speed of a training step",
        "",
        origin_of(result),
        "",
        f"{conditions(result)}. Medians of {settings['steps']} steps; rows measured: {result['measured']}. "
        "`python -m scripts.bench.training --help` explains rows and columns.",
        "",
        *tables(rows),
    ]
    return "\n".join(lines)


def conditions(result: dict) -> str:
    """Model and batch, for the top of tables and pictures."""
    settings = result["settings"]
    return (
        f"{settings['model']}, {settings['tokens_per_micro_batch']:,} tokens per micro-batch, "
        f"{settings['accumulation']} micro-batch{'es' * (settings['accumulation'] > 1)} per step"
    )


def tables(rows: list[Row]) -> list[str]:
    """A table for each context, then the reasons of failures."""
    lines = []
    for context in dict.fromkeys(row.context for row in rows):
        lines += [*speed_table([row for row in rows if row.context == context]), ""]
    failed = [f"- {row.contestant}, context {row.context}: {row.reason}" for row in rows if row.reason]
    return [*lines, "Failed:", "", *failed, ""] if failed else lines


def speed_table(rows: list[Row]) -> list[str]:
    """The table of the rows of one context."""
    context, batch = rows[0].context, rows[0].micro_batch
    header = [f"context {context}, micro-batch {batch}", "tokens/s", "MFU", "step, ms", "p10 – p90"]
    header += ["peak memory, GiB", "first step, s"]
    header += [*(STEP_PARTS[kind].title for kind in (ATTENTION, PRODUCTS, OTHER_KERNELS)), "GPU busy"]
    others = [name for name in SPEEDUP_OVER if any(name in row.speedup for row in rows)]
    with_loader = any(row.loader_ms for row in rows)
    table = []
    for row in rows:
        middle = "" if row.step_ms is None else f"{row.p10_ms:.1f} – {row.p90_ms:.1f}"
        cells = [row.contestant, "failed" if row.reason else number(row.tokens_per_second, ",.0f")]
        cells += [number(row.mfu, ".1%"), number(row.step_ms, ".1f"), middle]
        cells += [number(row.peak_memory_gib, ".1f"), number(row.first_step_s, ".1f")]
        cells += [number(share, ".1%") for share in shares(row).values()]
        cells += [number(row.speedup.get(name), ".3f") for name in others]
        loading = (row.loader_ms, row.loader_step_ms, row.log_ms)
        table.append(cells + [number(ms, ".2f") for ms in loading if with_loader])
    header += [f"speedup over {name}" for name in others]
    return align(header + (["loader, ms", "step with loader, ms", "log, ms"] if with_loader else []), table)


def draw(rows: list[Row], path: Path, result: dict) -> None:
    """A column of panels for each context: tokens/s above, the parts of a step below."""
    contexts = list(dict.fromkeys(row.context for row in rows))
    figure, grid = new_figure(2, len(contexts), (1 + 6.5 * len(contexts), 8))
    for column, context in enumerate(contexts):
        timed = [row for row in rows if row.context == context and row.step_ms]
        speed, parts = grid[:, column]
        draw_speed(speed, timed)
        draw_parts(parts, timed)
        speed.set_title(f"context {context:,}")
        for axes in (speed, parts):
            titles = [two_lines(look_of(row.contestant, TRAINING_LOOKS).title) for row in timed]
            axes.set_xticks(range(len(timed)), titles, fontsize=8.5)
            axes.yaxis.set_major_formatter("{x:,.0f}")
    grid[0, 0].set_ylabel("tokens/s")
    grid[1, 0].set_ylabel("ms per step")
    add_legend(figure, [*STEP_PARTS.values()], columns=len(STEP_PARTS))
    finish(figure, f"A training step on {result['hardware']['name']}", conditions(result), path)


def draw_speed(axes: Any, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        bar = axes.bar(place, row.tokens_per_second, 0.7, **fill(look_of(row.contestant, TRAINING_LOOKS)))
        axes.bar_label(bar, fmt="{:,.0f}", padding=2)
    axes.margins(y=0.1)  # room for the labels


def draw_parts(axes: Any, rows: list[Row]) -> None:
    """Stacked bars: the time of a step by class of kernel, and what is left of it."""
    parts = {
        kind: [row.class_ms.get(kind, 0) for row in rows] for kind in (ATTENTION, PRODUCTS, OTHER_KERNELS)
    }
    parts["idle"] = [max(row.step_ms - sum(row.class_ms.values()), 0) for row in rows]
    bottom = np.zeros(len(rows))
    for kind, heights in parts.items():
        axes.bar(range(len(rows)), heights, 0.7, bottom, **fill(STEP_PARTS[kind]))
        bottom += heights
