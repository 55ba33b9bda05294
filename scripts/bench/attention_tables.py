"""Results of scripts.bench.attention: rows, tables and pictures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from model.backends.fpa import TITLES
from scripts.bench.attention_peers import Shape
from scripts.bench.looks import (
    ATTENTION_LOOKS,
    add_legend,
    fill,
    finish,
    look_of,
    new_figure,
)
from scripts.bench.measuring import origin_of
from scripts.output import align, number

DEFAULT = "sagebwd"  # the name of rows of the default settings
#: Each row has its speedup over these.
BASELINES = (TITLES["flash"], TITLES["cudnn"], TITLES["fa4"])
MASK_TITLES = {"causal": "causal", "full": "no mask"}
#: The results of attention and its backward, in the order of (out, dq, dk, dv), and their titles.
TENSORS = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
PASSED, FAILED, REFUSED = "passed", "failed accuracy", "refused"


class Mode(NamedTuple):
    """What is timed."""

    title: str
    flops: float  # as a multiple of the forward's
    tensors: tuple[str, ...]  # the results


MODES = {
    "both": Mode("Forward + backward", 3.5, tuple(TENSORS)),
    "both, graph": Mode("Forward + backward, replayed as a CUDA graph", 3.5, tuple(TENSORS)),
    "forward": Mode("Forward", 1.0, ("out",)),
    "backward": Mode("Backward", 2.5, ("dq", "dk", "dv")),
}


@dataclass
class Row:
    """One implementation at one shape in one mode. Times in ms; None: not measured."""

    implementation: str
    shape: Shape
    mode: str
    status: str = PASSED
    reason: str | None = None  # unless PASSED
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    host_ms: float | None = None  # until the call returns, the GPU being idle; None on a CPU
    tflops: float | None = None  # TFLOP/s, from the median
    speedup: dict[str, float] = field(default_factory=dict)  # {baseline: its median / this median}
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # {tensor: (cosine, relative L2)}
    extra_memory: float | None = None  # of both modes; bytes / bytes of Q, K, V


def rows_of(result: dict) -> list[Row]:
    """The rows of a result as JSON has them."""
    return [Row(**row | {"shape": Shape(**row["shape"])}) for row in result["rows"]]


def title(name: str) -> str:
    """What tables and pictures call an implementation; rows keep their names."""
    return look_of(name, ATTENTION_LOOKS).title


def relative_times(rows: list[dict], mode: str, head_dim: int, causal: bool) -> dict[str, dict[int, float]]:
    """{implementation: {tokens: time / time of SageBwd's default}}, of rows as JSON has them."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        shape = row["shape"]
        is_wanted = (row["mode"], shape["head_dim"], shape["causal"]) == (mode, head_dim, causal)
        has_window = max(shape.get("left", -1), shape.get("right", -1)) >= 0
        if is_wanted and not has_window and row["median_ms"]:
            times.setdefault(row["implementation"], {})[shape["tokens"]] = row["median_ms"]
    default = times.get(DEFAULT, {})
    found = {
        name: {tokens: ms / default[tokens] for tokens, ms in own.items() if tokens in default}
        for name, own in times.items()
    }
    return {name: own for name, own in found.items() if own}


# --- Tables -------------------------------------------------------------------------------------------------


def to_markdown(result: dict, rows: list[Row]) -> str:
    """An overview, what was not measured, then a table for each mode, mask and head size."""
    lines = [
        "# Speed of attention",
        "",
        origin_of(result),
        "",
        f"{conditions(result)}. Medians of {result['settings']['repetitions']} repetitions; shapes measured: "
        f"{result['shapes']}.",
        "",
        *host_note(rows),
        "- O, dQ, dK, dV: relative L2 error against float64 attention, inputs standard Gaussian",
        "- cosine: the smallest cosine similarity of these tensors to float64",
        "- extra memory: peak of forward and backward beyond Q, K, V, dO, O, dQ, dK, dV, divided by the "
        "bytes of Q, K and V",
        "",
        "## TFLOP/s",
        "",
        *overview(rows),
        *not_measured(result["absent"], rows),
    ]
    for key, own in grouped(rows).items():
        lines += [f"## {heading(*key)}", "", *detail_table(own), ""]
    return "\n".join(lines)


def host_note(rows: list[Row]) -> list[str]:
    """What the column of the host says, and how many times are the host's."""
    known = [row for row in rows if row.host_ms is not None and row.median_ms is not None]
    if not known:
        return []
    bound = sum(row.host_ms > row.median_ms for row in known)
    return [
        "- host: ms until the call returns to Python, the GPU being idle. It runs ahead of the GPU; where it "
        f"takes longer, the time is the host's ({bound} of {len(known)} rows)"
    ]


def conditions(result: dict) -> str:
    """Data type and shapes, for the top of tables and pictures."""
    settings = result["settings"]
    return (
        f"{settings['dtype']}, {settings['tokens']:,} tokens per call (or one sequence if that is longer), "
        f"heads × head size = {settings['width']:,}"
    )


def grouped(rows: list[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Rows by (mode, mask, head size), in the order of MODES."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: [*MODES].index(row.mode)):
        groups.setdefault((row.mode, row.shape.mask, row.shape.head_dim), []).append(row)
    return groups


def heading(mode: str, mask: str, head_dim: int) -> str:
    return f"{MODES[mode].title}, {mask}, D {head_dim}"


def overview(rows: list[Row]) -> list[str]:
    """TFLOP/s of each implementation over N, a table for each mode, mask and head size."""
    lines = []
    for key, own in grouped(rows).items():
        lengths = dict.fromkeys(row.shape.tokens for row in own)
        cells: dict[str, dict[int, str]] = {}
        for row in own:
            cells.setdefault(title(row.implementation), {})[row.shape.tokens] = speed(row, digits=0)
        table = [[name, *(values[tokens] for tokens in lengths)] for name, values in cells.items()]
        lines += [*align([heading(*key), *(f"N {tokens}" for tokens in lengths)], table), ""]
    return lines


def speed(row: Row, digits: int) -> str:
    """TFLOP/s, or the status of a row that has none."""
    if row.tflops is None:
        return row.status
    return f"{row.tflops:.{digits}f}" if row.tflops >= 10 else f"{row.tflops:.2g}"


def not_measured(absent: dict[str, str], rows: list[Row]) -> list[str]:
    """A list of implementations, or single rows, that have no speed, with the reason."""
    reasons: dict[tuple[str, str], list[str]] = {(name, reason): [] for name, reason in absent.items()}
    for row in rows:
        if row.status != PASSED:
            where = reasons.setdefault((row.implementation, f"{row.status}: {row.reason}"), [])
            where.append(f"{row.mode}, {row.shape}")
    if not reasons:
        return []
    lines = []
    for (name, reason), where in reasons.items():
        count = f" ({len(where)} rows; first: {where[0]})" if where else ""
        lines.append(f"- {title(name)}: {reason}{count}")
    return ["Not measured:", "", *lines, ""]


def detail_table(rows: list[Row]) -> list[str]:
    """Speed and accuracy of ``rows``, which have one mode: a line for each length and implementation."""
    mode = rows[0].mode
    baselines = [name for name in BASELINES if any(name in row.speedup for row in rows)]
    with_memory = mode == "both" and any(row.extra_memory is not None for row in rows)
    with_host = any(row.host_ms is not None for row in rows)
    header = ["implementation", "N", "TFLOP/s", "ms", "p10 – p90"]
    header += ["host"] if with_host else []
    header += [*(f"speedup over {name}" for name in baselines)]
    header += [*(TENSORS[name] for name in MODES[mode].tensors), "cosine"]
    header += ["extra memory"] if with_memory else []
    table = []
    for row in rows:
        cells = [title(row.implementation), str(row.shape.tokens), speed(row, digits=1)]
        cells.append(number(row.median_ms, ".3f"))
        cells.append("" if row.median_ms is None else f"{row.p10_ms:.3f} – {row.p90_ms:.3f}")
        cells += [number(row.host_ms, ".3f")] if with_host else []
        cells += [number(row.speedup.get(name), ".2f") for name in baselines]
        errors = [row.errors.get(name, (None, None)) for name in MODES[mode].tensors]
        cells += [number(error, ".4f") for _, error in errors]
        cosines = [cosine for cosine, _ in errors if cosine is not None]
        cells.append(number(min(cosines, default=None), ".4f"))
        cells += [number(row.extra_memory, ".2f")] if with_memory else []
        table.append(cells)
    return align(header, table)


# --- Pictures -----------------------------------------------------------------------------------------------


def draw(rows: list[Row], mode: str, path: Path, result: dict) -> None:
    """TFLOP/s over N as grouped bars, as in the paper: panels for masks (down) and head sizes (across)."""
    panels = {key[1:]: own for key, own in grouped(rows).items() if key[0] == mode}
    names = names_with_speed([row for own in panels.values() for row in own])
    masks, head_dims = (list(dict.fromkeys(values)) for values in zip(*panels, strict=True))
    size = (7 * len(head_dims), 1.1 + 3.2 * len(masks))
    figure, grid = new_figure(len(masks), len(head_dims), size, sharey=True)
    for (i, mask), (j, head_dim) in itertools.product(enumerate(masks), enumerate(head_dims)):
        axes = grid[i, j]
        draw_panel(axes, panels[mask, head_dim], names)
        axes.set_title(f"{MASK_TITLES.get(mask, mask)}, head size {head_dim}", fontsize=10)
        axes.set_xlabel("sequence length" if i == len(masks) - 1 else "")
        axes.set_ylabel("TFLOP/s" if j == 0 else "")
    if names:
        looks = [look_of(name, ATTENTION_LOOKS) for name in names]
        add_legend(figure, looks, columns=min(len(names), 3 * len(head_dims)))
    hardware = result["hardware"]["name"]
    finish(figure, f"Attention, {MODES[mode].title.lower()}, on {hardware}", conditions(result), path)


def names_with_speed(rows: list[Row]) -> list[str]:
    """Implementations that were timed at any shape, in the order of ATTENTION_LOOKS, unknown ones last."""
    order = [*ATTENTION_LOOKS]
    timed = dict.fromkeys(row.implementation for row in rows if row.tflops is not None)
    return sorted(timed, key=lambda name: order.index(name) if name in order else len(order))


def draw_panel(axes: Any, rows: list[Row], names: list[str]) -> None:
    """A group of bars for each length; an implementation without a speed leaves a gap."""
    lengths = list(dict.fromkeys(row.shape.tokens for row in rows))
    width = 0.88 / max(len(names), 1)
    for index, name in enumerate(names):
        own = [row for row in rows if row.implementation == name and row.tflops is not None]
        places = [lengths.index(row.shape.tokens) + (index - (len(names) - 1) / 2) * width for row in own]
        look = look_of(name, ATTENTION_LOOKS)
        bars = axes.bar(places, [row.tflops for row in own], 0.92 * width, **fill(look))
        axes.bar_label(bars, fmt="{:.3g}", rotation=90, fontsize=7, padding=2)
    axes.set_xticks(range(len(lengths)), [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
    axes.margins(y=0.16)  # room for the labels of the bars
