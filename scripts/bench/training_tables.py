"""What scripts.bench.training measured, as rows, tables and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.bench.measuring import align, number, origin_of, save_figure

#: Rows say how many times as fast they are as these.
RIVALS = ("fpa-cudnn", "fpa-flash")
#: Classes of kernels.
ATTENTION, PRODUCTS, REST = "attention", "matrix products", "rest"


@dataclass
class Row:
    """A contestant at a context. What was not measured is None or empty."""

    contestant: str
    context: int
    micro_batch: int
    reason: str | None = None  # why it failed
    log: list[str] = field(default_factory=list)  # the last lines it printed before that
    step_ms: float | None = None  # median
    p10_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_second: float | None = None  # by the median
    mfu: float | None = None
    peak_memory_gib: float | None = None
    first_step_s: float | None = None  # compiles
    loss: float | None = None  # of the last timed step, in nats; ln(vocab_size) at best on random ids
    class_ms: dict[str, float] = field(default_factory=dict)  # by class of kernel, per step
    kernels: dict[str, float] = field(default_factory=dict)  # the longest, ms per step
    loader_ms: float | None = None  # host time for the batches of a step, copies to the GPU issued
    loader_step_ms: float | None = None  # median step that takes its batches from the loader
    log_ms: float | None = None  # host time for a line of metrics.jsonl and the progress bar
    speedup: dict[str, float] = field(default_factory=dict)  # rival: its step_ms over this one's


def shares(row: Row) -> dict[str, float | None]:
    """Fractions of the time in kernels by class, and the fraction of a step that is in kernels."""
    busy = sum(row.class_ms.values())
    if not busy:
        return dict.fromkeys((ATTENTION, PRODUCTS, REST, "busy"))
    parts = {kind: time_ms / busy for kind, time_ms in row.class_ms.items()}
    return parts | {"busy": min(busy / row.step_ms, 1.0)}


def to_markdown(result: dict, rows: list[Row]) -> str:
    settings = result["settings"]
    lines = [
        "# Speed of a training step",
        "",
        origin_of(result),
        "",
        f"{settings['model']}, {settings['tokens_per_micro_batch']} tokens per micro-batch, "
        f"{settings['accumulation']} per step; medians of {settings['steps']} steps; contestants measured: "
        f"{result['measured']}. Shares are of the time in kernels; busy: that time over the step's; "
        f"“× …”: how many times as fast as that one. `python -m scripts.bench.training --help` says more.",
        "",
        *tables(rows),
    ]
    return "\n".join(lines)


def tables(rows: list[Row]) -> list[str]:
    """A table for each context, then why contestants failed."""
    lines = []
    for context in dict.fromkeys(row.context for row in rows):
        lines += [*speed_table([row for row in rows if row.context == context]), ""]
    failed = [f"- {row.contestant}, context {row.context}: {row.reason}" for row in rows if row.reason]
    return [*lines, "Failed:", "", *failed, ""] if failed else lines


def speed_table(rows: list[Row]) -> list[str]:
    """Of the rows of one context."""
    context, batch = rows[0].context, rows[0].micro_batch
    header = [f"context {context}, micro-batch {batch}", "tokens/s", "MFU", "step, ms", "p10 – p90"]
    header += ["peak, GiB", "first step, s", ATTENTION, PRODUCTS, REST, "busy"]
    rivals = [name for name in RIVALS if any(name in row.speedup for row in rows)]
    with_loader = any(row.loader_ms for row in rows)
    table = []
    for row in rows:
        spread = "" if row.step_ms is None else f"{row.p10_ms:.1f} – {row.p90_ms:.1f}"
        cells = [row.contestant, "failed" if row.reason else number(row.tokens_per_second, ",.0f")]
        cells += [number(row.mfu, ".1%"), number(row.step_ms, ".1f"), spread]
        cells += [number(row.peak_memory_gib, ".1f"), number(row.first_step_s, ".1f")]
        cells += [number(share, ".1%") for share in shares(row).values()]
        cells += [number(row.speedup.get(name), ".3f") for name in rivals]
        loading = (row.loader_ms, row.loader_step_ms, row.log_ms)
        table.append(cells + [number(ms, ".2f") for ms in loading if with_loader])
    header += [f"× {name}" for name in rivals]
    return align(header + (["loader, ms", "step with it", "log, ms"] if with_loader else []), table)


def draw(rows: list[Row], path: Path, hardware: str) -> None:
    """A column for each context: tokens/s above, below it where the time of a step goes."""
    import matplotlib  # slow to import; only needed when all is measured

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contexts = list(dict.fromkeys(row.context for row in rows))
    size = (1.5 + 5.5 * len(contexts), 7)
    figure, grid = plt.subplots(2, len(contexts), figsize=size, squeeze=False, layout="constrained")
    for column, context in enumerate(contexts):
        timed = [row for row in rows if row.context == context and row.step_ms]
        speed, where = grid[:, column]
        names = [row.contestant for row in timed]
        bars = speed.bar(names, [row.tokens_per_second for row in timed], 0.7)
        speed.bar_label(bars, fmt="{:,.0f}")
        speed.set(title=f"context {context}", ylabel="tokens/s" if column == 0 else "")
        parts = {kind: [row.class_ms.get(kind, 0) for row in timed] for kind in (ATTENTION, PRODUCTS, REST)}
        parts["idle"] = [max(row.step_ms - sum(row.class_ms.values()), 0) for row in timed]
        bottom = np.zeros(len(timed))
        for (kind, heights), color in zip(parts.items(), ("C0", "C1", "C2", "lightgrey"), strict=True):
            where.bar(names, heights, 0.7, bottom, label=kind, color=color)
            bottom += heights
        where.set(ylabel="ms per step" if column == 0 else "")
        for axes in (speed, where):
            axes.tick_params("x", rotation=20)
            axes.spines[["top", "right"]].set_visible(False)
    handles = grid[1, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"A training step on {hardware}", fontsize=11)
    save_figure(figure, path)
    plt.close(figure)
