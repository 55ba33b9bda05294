"""Results of scripts.bench.attention: rows, Markdown tables, a picture, and what follows from the times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from common import pictures
from common.pictures import ATTENTION
from sagebwd.config import PRESETS
from sagebwd.dispatch import architectures
from scripts.bench.measuring import origin_of
from scripts.bench.registry import CONFIGS, Shape
from scripts.output import align, number, read_json, save_figure

DEFAULT = "sagebwd"  # the name of rows of the default settings
#: Each row has its speedup over these.
BASELINES = ("FlashAttention-2", "cuDNN", "FlashAttention-4")
#: The results of attention and its backward, in the order of (out, dq, dk, dv), and their titles.
TENSORS = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
PASSED, FAILED, REFUSED = "passed", "failed accuracy", "refused"


class Mode(NamedTuple):
    """What is timed."""

    title: str
    flops: float  # as a multiple of the forward's
    tensors: tuple[str, ...]  # the results


GRAPH = "both, graph"
MODES = {
    "both": Mode("Forward + backward", 3.5, tuple(TENSORS)),
    GRAPH: Mode("Forward + backward, replayed as a CUDA graph", 3.5, tuple(TENSORS)),
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
    digest: str | None = None  # of the bits of the results
    kernels: str | None = None  # the kernel set of SageBwd that ran; None: another implementation, or unknown


def rows_of(result: dict) -> list[Row]:
    """The rows of a result as JSON has them. Some in results/ also record a layout, which is "dense"."""
    names = [field.name for field in fields(Shape)]
    shapes = [{name: row["shape"][name] for name in names if name in row["shape"]} for row in result["rows"]]
    return [Row(**row | {"shape": Shape(**own)}) for row, own in zip(result["rows"], shapes, strict=True)]


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
        "- O, dQ, dK, dV: relative L2 error against float64 attention, inputs standard Gaussian",
        "- cosine: the smallest cosine similarity of these tensors to float64",
        "- host: ms until the call returns to Python, the GPU being idle. It runs ahead of the GPU; where it "
        "takes longer, the time is the host's",
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
            cells.setdefault(look_of(row.implementation).title, {})[row.shape.tokens] = speed(row, digits=0)
        table = [[name, *(values.get(n, "") for n in lengths)] for name, values in cells.items()]
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
    lines = []
    for (name, reason), where in reasons.items():
        count = f" ({len(where)} rows; first: {where[0]})" if where else ""
        lines.append(f"- {look_of(name).title}: {reason}{count}")
    return ["Not measured:", "", *lines, ""] if lines else []


def detail_table(rows: list[Row]) -> list[str]:
    """Speed and accuracy of ``rows``, which have one mode: a line for each length and implementation."""
    tensors = MODES[rows[0].mode].tensors
    baselines = [name for name in BASELINES if any(name in row.speedup for row in rows)]
    header = ["implementation", "N", "TFLOP/s", "ms", "p10 – p90", "host"]
    header += [*(f"speedup over {name}" for name in baselines)]
    header += [*(TENSORS[name] for name in tensors), "cosine", "extra memory"]
    table = []
    for row in rows:
        errors = [row.errors.get(name, (None, None)) for name in tensors]
        cosines = [cosine for cosine, _ in errors if cosine is not None]
        cells = [look_of(row.implementation).title, str(row.shape.tokens), speed(row, digits=1)]
        cells.append(number(row.median_ms, ".3f"))
        cells.append("" if row.median_ms is None else f"{row.p10_ms:.3f} – {row.p90_ms:.3f}")
        cells.append(number(row.host_ms, ".3f"))
        cells += [number(row.speedup.get(name), ".2f") for name in baselines]
        cells += [number(error, ".4f") for _, error in errors]
        cells += [number(min(cosines, default=None), ".4f"), number(row.extra_memory, ".2f")]
        table.append(cells)
    return align(header, table)


# --- Classes of speed ---------------------------------------------------------------------------------------

#: What FlashAttention-2 must be exceeded by for "faster", and the tokens from which on it counts: with fewer,
#: times are often the host's.
MARGIN, FROM_TOKENS = 1.1, 4096
#: Rows of files that do not record the kernel set, and ran Triton's where another set runs now.
RAN_TRITON = {
    "bench_32_kernels_h100": ("sagebwd",),
    "bench_ampere_h100": ("sagebwd paper",),
    "bench_ampere_h200": ("sagebwd paper",),
}


class Kind(NamedTuple):
    """What has one speed: a preset with a kernel set, on GPUs of a compute capability."""

    preset: str
    kernels: str
    capability: str
    head_dim: int


def speeds(folder: Path) -> dict[Kind, list[float]]:
    """Speed over FlashAttention-2, forward + backward, of all benchmarks of attention in ``folder``.

    Causal and full attention, from FROM_TOKENS tokens on. Of a shape that was measured several times on a
    GPU, the newest counts.
    """
    newest: dict[Any, tuple[Kind, float]] = {}
    paths = [*folder.glob("speed/bench_*.json*"), *folder.glob("gpus/*.json")]
    names = sorted(path.with_name(path.name.removesuffix(".gz")) for path in paths)
    results = [(path, result) for path in names if is_benchmark(result := read_json(path))]
    for path, result in sorted(results, key=lambda found: found[1]["date"]):
        for row in rows_of(result):
            over = row.speedup.get("FlashAttention-2")
            kind = kind_of(row, path.stem, result["hardware"]["compute_capability"])
            if kind and over and row.mode == "both" and row.shape.tokens >= FROM_TOKENS:
                newest[kind, row.shape, result["hardware"]["name"]] = kind, over
    found: dict[Kind, list[float]] = {}
    for kind, over in newest.values():
        found.setdefault(kind, []).append(over)
    return found


def is_benchmark(result: dict) -> bool:
    """Whether it is of scripts.bench.attention, on a GPU, and with all that is needed here."""
    rows = result.get("rows") or [{}]
    return isinstance(rows[0].get("shape"), dict) and "compute_capability" in result.get("hardware", {})


def kind_of(row: Row, file: str, capability: str) -> Kind | None:
    """None for what is no preset of SageBwd, and with a window."""
    title, _, forced = row.implementation.removesuffix(")").partition(" (")
    preset = next((name.replace("-", "_") for name, (own, *_) in CONFIGS.items() if own == title), None)
    if preset not in PRESETS or row.shape.mask not in ("causal", "full"):
        return None
    kernels = row.kernels or forced or ("triton" if title in RAN_TRITON.get(file, ()) else None)
    kernels = kernels or architectures(PRESETS[preset], row.shape.head_dim)[capability].kernels
    return Kind(preset, kernels, capability, row.shape.head_dim)


def speed_class(over: Sequence[float]) -> str:
    """Than FlashAttention-2: "faster", "as fast" or "slower", or from one of these to another."""
    if not over:
        return "not measured"
    names = ["slower" if x < 1 / MARGIN else "faster" if x >= MARGIN else "as fast" for x in sorted(over)]
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"


# --- Verdicts -----------------------------------------------------------------------------------------------

#: How to use an implementation in full precision, by the name of its rows.
HOW = {
    "cuDNN": "torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)",
    "FlashAttention-2": "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
    "FlexAttention": "torch.nn.attention.flex_attention",
    "flash_attn package": "flash_attn.flash_attn_func",
    "FlashAttention-3": "flash_attn_interface.flash_attn_func",
    "FlashAttention-4": "flash_attn.cute.flash_attn_func",
    "SDPA math": "torch.nn.functional.scaled_dot_product_attention",
}


def verdicts(rows: list[Row]) -> list[str]:
    """Lines about forward + backward, for each mask and head size: what is fastest at which length."""
    timed = [row for row in rows if row.mode == "both" and row.status == PASSED and row.median_ms]
    groups: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for row in timed:
        times = groups.setdefault((row.shape.mask, row.shape.head_dim), {}).setdefault(row.shape.tokens, {})
        times[row.implementation] = row.median_ms
    lines = [
        f"{mask}, D {head_dim}: {line}"
        for (mask, head_dim), by_length in groups.items()
        for line in _compare(by_length)
    ]
    if not any(row.implementation == DEFAULT for row in timed):
        reasons = dict.fromkeys(row.reason or row.status for row in rows if row.implementation == DEFAULT)
        why = "; ".join(reasons) or "it was wrong, or there was no time"
        lines.append(f"{look_of(DEFAULT).title} was not timed: {why}")
    return lines


def _compare(by_length: dict[int, dict[str, float]]) -> list[str]:
    """The verdict on {tokens: {implementation: ms}}."""
    default = look_of(DEFAULT).title
    faster, slower, forced, instead = [], [], [], []
    for tokens, times in sorted(by_length.items()):
        others = [name for name in times if not name.startswith(DEFAULT)]
        own = [name for name in times if name == DEFAULT or name.startswith(f"{DEFAULT} (")]
        if DEFAULT not in times or not others:
            continue
        best_own, best = (min(names, key=times.__getitem__) for names in (own, others))
        speedup, title = times[best] / times[DEFAULT], look_of(best).title
        (faster if speedup >= 1 else slower).append(f"{speedup:.2f} × {title} (N {tokens})")
        if best_own != DEFAULT:
            over_default, over_best = (times[name] / times[best_own] for name in (DEFAULT, best))
            kernels = best_own.removeprefix(f"{DEFAULT} (").rstrip(")")
            speedups = f"{over_default:.2f} × what runs by default, {over_best:.2f} × {title}"
            forced.append(f'with kernels="{kernels}" {speedups} (N {tokens})')
        if times[best] < times[best_own]:
            instead.append(f"{title}, {HOW.get(best, best)}")
    lines = [f"{default} is the fastest, {', '.join(faster)}"] if faster else []
    lines += [f"{default} is slower, {', '.join(slower)}"] if slower else []
    lines += forced
    return [*lines, f"use instead: {' or '.join(dict.fromkeys(instead))}"] if instead else lines


# --- The picture --------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How an implementation is called in tables and legends, and the fill of its bars."""

    title: str
    color: str
    hatch: str


def _preset(title: str, name: str) -> Look:
    """A preset of SageBwd, by its name in ``configs/attention/``."""
    return Look(title, ATTENTION[name].color, ATTENTION[name].hatch)


#: By the names of rows. SageBwd has the colours of :mod:`common.pictures`; all that is in full precision is
#: black or grey, with a hatch for each library.
LOOKS = {
    "sagebwd": _preset("SageBwd", "sagebwd"),
    "sagebwd low bias": _preset("SageBwd, low bias", "sagebwd_low_bias"),
    "sagebwd paper": _preset("SageBwd, paper", "sagebwd_paper"),
    "sagebwd consistent": _preset("SageBwd, consistent", "sagebwd_consistent"),
    "sagebwd strictly causal": _preset("SageBwd, strictly causal", "sagebwd_strictly_causal"),
    "sagebwd S alone in INT8": _preset("SageBwd, S alone in INT8", "sagebwd_int8_scores"),
    "sagebwd P in 16 bit": Look("SageBwd, 16-bit P", ATTENTION["sagebwd_low_bias"].color, "+++"),
    "cuDNN": Look("cuDNN", ATTENTION["fpa"].color, ""),
    "FlashAttention-2": Look("FlashAttention-2", "#7f7f7f", "///"),
    "FlashAttention-4": Look("FlashAttention-4", "#3c3c3c", "\\\\\\"),
    "FlexAttention": Look("FlexAttention", "#c8c8c8", "..."),
    "FlashAttention-3": Look("FlashAttention-3", "#585858", "xxx"),
    "flash_attn package": Look("flash_attn package", "#9a9a9a", "|||"),
    "SDPA math": Look("PyTorch, math", "#b0b0b0", "---"),
}


def look_of(name: str) -> Look:
    """The look of a row's name; one that is unknown, as in an old file, is shown under its own name."""
    return LOOKS.get(name, Look(name.replace("sagebwd", "SageBwd"), "#f0f0f0", "\\\\\\"))


def draw(rows: list[Row], path: Path, result: dict) -> None:
    """Forward + backward, TFLOP/s over N as grouped bars, as in the paper: masks down, head sizes across."""
    from matplotlib.patches import Patch  # slow to import; only needed for pictures

    panels = {key[1:]: own for key, own in grouped(rows).items() if key[0] == "both"}
    if not panels:
        return
    timed = {row.implementation for own in panels.values() for row in own if row.tflops}
    names = [name for name in LOOKS if name in timed] + sorted(timed - LOOKS.keys())
    masks, head_dims = (list(dict.fromkeys(values)) for values in zip(*panels, strict=True))
    figure, grid = pictures.grid(len(masks), len(head_dims), width=7, height=3.6, sharey=True)
    for (i, mask), (j, head_dim) in itertools.product(enumerate(masks), enumerate(head_dims)):
        grid[i, j].set_title(f"{mask}, head size {head_dim}", fontsize=10)
        _draw_panel(grid[i, j], panels.get((mask, head_dim), []), names)
    looks = [look_of(name) for name in names]
    boxes, titles = [Patch(**_fill(look)) for look in looks], [look.title for look in looks]
    pictures.legend_below(figure, boxes, titles, columns=max(1, min(len(names), 3 * len(head_dims))))
    hardware = result["hardware"]["name"]
    figure.suptitle(f"Attention, forward + backward, on {hardware}\n{conditions(result)}", fontsize=11)
    save_figure(figure, path)


def _draw_panel(axes: Any, rows: list[Row], names: list[str]) -> None:
    """A group of bars for each length; an implementation without a speed leaves a gap."""
    lengths = list(dict.fromkeys(row.shape.tokens for row in rows))
    width = 0.88 / max(len(names), 1)
    for index, name in enumerate(names):
        own = [row for row in rows if row.implementation == name and row.tflops]
        places = [lengths.index(row.shape.tokens) + (index - (len(names) - 1) / 2) * width for row in own]
        bars = axes.bar(places, [row.tflops for row in own], 0.92 * width, **_fill(look_of(name)))
        axes.bar_label(bars, fmt="{:.3g}", rotation=90, fontsize=7, padding=2)
    axes.set_xticks(range(len(lengths)), [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
    axes.set_ylabel("TFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.16)  # room for the labels of the bars


def _fill(look: Look) -> dict[str, Any]:
    """The keyword arguments of a bar: the hatch is white on dark colours, black on light ones."""
    red, green, blue = (int(look.color[start : start + 2], 16) for start in (1, 3, 5))
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#303030"
    return {"facecolor": look.color, "hatch": look.hatch, "edgecolor": ink, "linewidth": 0}
