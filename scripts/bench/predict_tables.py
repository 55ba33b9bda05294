"""Results of scripts.bench.predict: rows and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.output import align, number


@dataclass(frozen=True)
class Kernel:
    """A kernel on a GPU. Cycles are those of one SM.

    kernel: forward or backward. tile: its queries and keys, of one iteration of the loop.
    warps: of each kind. instructions: of one warp of each kind, for a tile; outside: before and after the
    loop over tiles. products, no_unit: instructions of all warps, for a tile.
    cycles: for a tile, by unit. outside_cycles: of a CTA, before and after the loop.
    """

    gpu: str
    preset: str
    kernel: str
    tile: tuple[int, int]
    head_dim: int
    mask: str
    warps: tuple[int, ...]
    instructions: tuple[int, ...]
    outside: tuple[int, ...]
    products: dict[str, int]
    cycles: dict[str, float]
    bound: float
    without_overlap: float
    outside_cycles: float
    no_unit: dict[str, int]


@dataclass(frozen=True)
class Prediction:
    """Forward + backward at one shape, in TFLOP/s; speedups over FlashAttention-2."""

    gpu: str
    preset: str
    head_dim: int
    mask: str
    tokens: int
    flash: float
    paper: float | None
    overlap: float
    no_overlap: float
    packing_share: float  # of the time with overlap

    @property
    def speedups(self) -> tuple[float, float]:
        return self.overlap / self.flash, self.no_overlap / self.flash


def to_markdown(result: dict[str, Any], kernels: list[Kernel], predictions: list[Prediction]) -> str:
    versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items() if text is not None)
    lines = [
        "# Predicted speed of the Ampere kernels",
        "",
        f"`{result['command']}`, {result['date']}, commit {result['commit'] or 'unknown'}. {versions}.",
        "",
        "**Predictions, not measurements.** They come from machine code and published rates; "
        "`python -m scripts.bench.predict --help` says how, and what they leave out.",
        "",
        "## Cycles of an SM for a tile",
        "",
        *kernel_table([kernel for kernel in kernels if kernel.mask == kernels[0].mask]),
        "",
        "## Forward + backward, TFLOP/s",
        "",
        "FlashAttention-2 and the paper's SageBwd on an RTX 4090 are the paper's measurements. On other GPUs "
        "FlashAttention-2 is set to 92.5% (GeForce) or 73% (others) of the bf16 peak.",
        "",
    ]
    for key in dict.fromkeys((row.gpu, row.preset) for row in predictions):
        lines += [*prediction_table([row for row in predictions if (row.gpu, row.preset) == key]), ""]
    return "\n".join(lines)


def kernel_table(kernels: list[Kernel]) -> list[str]:
    units = [*kernels[0].cycles]
    header = ["GPU", "preset", "kernel", "tile", "D", "warps × instructions", *units, "overlap", "no overlap"]
    table = [
        [kernel.gpu, kernel.preset, kernel.kernel, "{} × {}".format(*kernel.tile), str(kernel.head_dim)]
        + [" + ".join(f"{n} × {own:,}" for n, own in zip(kernel.warps, kernel.instructions, strict=True))]
        + [number(kernel.cycles[unit], ",.0f") for unit in units]
        + [number(cycles, ",.0f") for cycles in (kernel.bound, kernel.without_overlap)]
        for kernel in kernels
    ]
    return align(header, table)


def prediction_table(rows: list[Prediction]) -> list[str]:
    header = [
        f"{rows[0].gpu}, {rows[0].preset}",
        "N",
        "FlashAttention-2",
        "paper's SageBwd",
        "overlap",
        "no overlap",
        "packing",
    ]
    header += ["speedup, overlap", "speedup, no overlap", "paper's speedup"]
    table = [
        [f"D {row.head_dim}, {row.mask}", str(row.tokens), number(row.flash, ".0f"), number(row.paper, ".0f")]
        + [number(row.overlap, ".0f"), number(row.no_overlap, ".0f"), number(row.packing_share, ".0%")]
        + [number(speedup, ".2f") for speedup in row.speedups]
        + [number(row.paper and row.paper / row.flash, ".2f")]
        for row in rows
    ]
    return align(header, table)
