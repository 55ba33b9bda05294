"""What scripts.bench.attention measured, as rows, tables and pictures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from model.backends.fpa import TITLES
from scripts.bench.attention_peers import Shape
from scripts.bench.measuring import align, number, origin_of, save_figure
from scripts.paper.attention_errors import TENSORS
from scripts.paper.attention_errors import TITLES as TENSOR_TITLES

DEFAULT = "sagebwd"  # what rows of the default settings are called
#: Rows say how many times as fast they are as these.
BASELINES = (TITLES["flash"], TITLES["cudnn"])
PASSED, FAILED, REFUSED = "passed", "failed accuracy", "refused"


class Mode(NamedTuple):
    """What is timed."""

    title: str
    flops: float  # as a multiple of the forward's
    tensors: tuple[str, ...]  # what it computes


MODES = {
    "both": Mode("Forward + backward", 3.5, TENSORS),
    "both, graph": Mode("Forward + backward, replayed as a CUDA graph", 3.5, TENSORS),
    "forward": Mode("Forward", 1.0, TENSORS[:1]),
    "backward": Mode("Backward", 2.5, TENSORS[1:]),
}


@dataclass
class Row:
    """One implementation at one shape in one mode. Times in ms; what was not measured is None."""

    implementation: str
    shape: Shape
    mode: str
    status: str = PASSED
    reason: str | None = None  # why it is not PASSED
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    tflops: float | None = None  # by the median, in TFLOP/s
    speedup: dict[str, float] = field(default_factory=dict)  # baseline: its median / this one's
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # tensor: (cosine, relative L2)
    extra_memory: float | None = None  # of both, beyond inputs and results, in multiples of Q, K and V


def relative_times(rows: list[dict], mode: str, head_dim: int, causal: bool) -> dict[str, dict[int, float]]:
    """{implementation: {tokens: its time as a multiple of SageBwd's default}}, of rows as JSON has them."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        shape = row["shape"]
        if (row["mode"], shape["head_dim"], shape["causal"]) == (mode, head_dim, causal) and row["median_ms"]:
            times.setdefault(row["implementation"], {})[shape["tokens"]] = row["median_ms"]
    default = times.get(DEFAULT, {})
    found = {
        name: {tokens: ms / default[tokens] for tokens, ms in own.items() if tokens in default}
        for name, own in times.items()
    }
    return {name: own for name, own in found.items() if own}


# --- Tables -------------------------------------------------------------------------------------------------


def to_markdown(result: dict, rows: list[Row]) -> str:
    """Overview, what could not be measured, then a table for each mode, mask and head size."""
    settings = result["settings"]
    what = f"{settings['dtype']}, B·N = {settings['tokens']} (more if N is), H·D = {settings['width']}"
    lines = [
        "# Speed of attention",
        "",
        origin_of(result),
        "",
        f"{what}; medians of {settings['repetitions']} repetitions; shapes measured: {result['shapes']}. "
        "“× …”: how many times as fast as that one. O, dQ, dK, dV: relative L2 against float64, inputs from "
        "standard Gaussians; cosine: the smallest of their cosine similarities. Extra memory: the peak of "
        "forward and backward beyond Q, K, V, dO, O, dQ, dK, dV, as a multiple of what Q, K and V take.",
        "",
        "## TFLOP/s",
        "",
        *overview(rows),
        *not_measured(result["absent"], rows),
    ]
    for key, own in grouped(rows).items():
        lines += [f"## {title_of(*key)}", "", *detail_table(own), ""]
    return "\n".join(lines)


def grouped(rows: list[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Rows by (mode, mask, head size), modes in their order."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: [*MODES].index(row.mode)):
        groups.setdefault((row.mode, row.shape.mask, row.shape.head_dim), []).append(row)
    return groups


def title_of(mode: str, mask: str, head_dim: int) -> str:
    return f"{MODES[mode].title}, {mask}, D {head_dim}"


def overview(rows: list[Row]) -> list[str]:
    """TFLOP/s of each implementation over N, a table for each mode, mask and head size."""
    lines = []
    for key, own in grouped(rows).items():
        lengths = dict.fromkeys(row.shape.tokens for row in own)
        cells: dict[str, dict[int, str]] = {}
        for row in own:
            cells.setdefault(row.implementation, {})[row.shape.tokens] = speed(row, digits=0)
        table = [[name, *(values[tokens] for tokens in lengths)] for name, values in cells.items()]
        lines += [*align([title_of(*key), *(f"N {tokens}" for tokens in lengths)], table), ""]
    return lines


def speed(row: Row, digits: int) -> str:
    """TFLOP/s, or why there are none."""
    if row.tflops is None:
        return row.status
    return f"{row.tflops:.{digits}f}" if row.tflops >= 10 else f"{row.tflops:.2g}"


def not_measured(absent: dict[str, str], rows: list[Row]) -> list[str]:
    """Why implementations, or some of their rows, have no speed."""
    reasons: dict[tuple[str, str], list[str]] = {(name, reason): [] for name, reason in absent.items()}
    for row in rows:
        if row.status != PASSED:
            where = reasons.setdefault((row.implementation, f"{row.status}: {row.reason}"), [])
            where.append(f"{row.mode} ({row.shape})")
    if not reasons:
        return []
    lines = []
    for (name, reason), where in reasons.items():
        count = f" [{len(where)} rows, the first {where[0]}]" if where else ""
        lines.append(f"- {name}: {reason}{count}")
    return ["Not measured:", "", *lines, ""]


def detail_table(rows: list[Row]) -> list[str]:
    """Speed beside accuracy, a row for each length and implementation; ``rows`` have one mode."""
    mode = rows[0].mode
    baselines = [name for name in BASELINES if any(name in row.speedup for row in rows)]
    with_memory = mode == "both" and any(row.extra_memory is not None for row in rows)
    header = ["implementation", "N", "TFLOP/s", "ms", "p10 – p90", *(f"× {name}" for name in baselines)]
    header += [*(TENSOR_TITLES[name] for name in MODES[mode].tensors), "cosine"]
    header += ["extra memory"] if with_memory else []
    table = []
    for row in rows:
        cells = [row.implementation, str(row.shape.tokens), speed(row, digits=1)]
        cells.append(number(row.median_ms, ".3f"))
        cells.append("" if row.median_ms is None else f"{row.p10_ms:.3f} – {row.p90_ms:.3f}")
        cells += [number(row.speedup.get(name), ".2f") for name in baselines]
        errors = [row.errors.get(name, (None, None)) for name in MODES[mode].tensors]
        cells += [number(error, ".4f") for _, error in errors]
        cosines = [cosine for cosine, _ in errors if cosine is not None]
        cells.append(number(min(cosines, default=None), ".4f"))
        cells += [number(row.extra_memory, ".2f")] if with_memory else []
        table.append(cells)
    return align(header, table)


# --- Pictures -----------------------------------------------------------------------------------------------


def draw(rows: list[Row], mode: str, path: Path, hardware: str) -> None:
    """TFLOP/s over N as grouped bars, as in the paper: panels for masks (down) and head sizes (across)."""
    import matplotlib  # slow to import; only needed when all is measured

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {key[1:]: own for key, own in grouped(rows).items() if key[0] == mode}
    names = names_with_speed([row for own in panels.values() for row in own])
    masks, head_dims = (list(dict.fromkeys(values)) for values in zip(*panels, strict=True))
    figure, grid = plt.subplots(
        len(masks),
        len(head_dims),
        figsize=(7 * len(head_dims), 0.6 + 3.2 * len(masks)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for (i, mask), (j, head_dim) in itertools.product(enumerate(masks), enumerate(head_dims)):
        axes = grid[i, j]
        draw_panel(axes, panels[mask, head_dim], names)
        axes.set_title(f"{mask}, head size {head_dim}", fontsize=10)
        axes.set_xlabel("sequence length" if i == len(masks) - 1 else "")
        axes.set_ylabel("TFLOP/s" if j == 0 else "")
    figure.suptitle(f"{MODES[mode].title} on {hardware}", fontsize=11)
    if names:
        handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{index}") for index in range(len(names))]
        columns = min(len(names), 4 * len(head_dims))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    save_figure(figure, path)
    plt.close(figure)


def names_with_speed(rows: list[Row]) -> list[str]:
    """Implementations that were timed anywhere, in the order of all, so that each keeps its colour."""
    timed = {row.implementation for row in rows if row.tflops is not None}
    return [name for name in dict.fromkeys(row.implementation for row in rows) if name in timed]


def draw_panel(axes: Any, rows: list[Row], names: list[str]) -> None:
    """Groups of bars, one group a length; what has no speed leaves a gap."""
    lengths = list(dict.fromkeys(row.shape.tokens for row in rows))
    width = 0.86 / max(len(names), 1)
    for index, name in enumerate(names):
        own = [row for row in rows if row.implementation == name and row.tflops is not None]
        places = [lengths.index(row.shape.tokens) + (index - (len(names) - 1) / 2) * width for row in own]
        bars = axes.bar(places, [row.tflops for row in own], 0.92 * width, color=f"C{index}")
        axes.bar_label(bars, fmt="{:.3g}", rotation=90, fontsize=6, padding=2)
    axes.set_xticks(range(len(lengths)), [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
    axes.margins(y=0.16)  # room for the numbers
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
