"""Predict what the Ampere kernels do on GPUs that we do not have, from their machine code. Needs no GPU.

    python -m scripts.bench.predict --help

Compiles the forward and the backward for each architecture, disassembles them, counts what a warp executes
for one tile (scripts.bench.sass_loops), and divides by the rates that NVIDIA publishes
(scripts.bench.gpu_rates). Nothing here is measured, except the paper's values for an RTX 4090 that stand
beside the predictions.

Cycles of an SM for a tile, by unit. Two numbers follow:
  overlap       the busiest unit, or the schedulers, decide: a bound that is not reached
  no overlap    tensor cores, then the busiest of all others; latencies and barriers could make it slower

A time covers every tile that a mask leaves, what a CTA executes before and after its loop, and packing at 85%
of the memory's bandwidth, as if no cache held anything. Not covered: latencies, waiting at barriers and for
the turn to add dQ, launches, an uneven end, bank conflicts, clocks below or above the published boost clock.
TFLOP/s count as in scripts.bench.attention.

FlashAttention-2 on an RTX 4090 has the speed that the paper measured. On other GPUs it is set to a share of
the bf16 peak at all lengths: 92.5% on a GeForce, as in the paper's long sequences, 73% on others, which its
own paper gives as the most on an A100.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from data.files import write_json
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.cuda.compile import compile_source, nvrtc_version
from scripts.bench.gpu_rates import GPU, GPUS, cycles_of
from scripts.bench.measuring import (
    SCRATCH,
    align,
    command_parser,
    describe_run,
    number,
    with_ending,
    write_markdown,
)
from scripts.bench.sass import disassemble
from scripts.bench.sass_loops import Program

PROGRAM = "python -m scripts.bench.predict"
EXAMPLES = f"""examples:
  {PROGRAM}                                   all GPUs, the default settings; 2 minutes
  {PROGRAM} --gpus "RTX 4090" --head-dims 64  one GPU and head size; 20 seconds
  {PROGRAM} --macro P_16BIT                   kernels with 16-bit P
"""
LENGTHS = [1024 << power for power in range(6)]
#: The tile of one iteration of each kernel's loop: queries, keys.
TILES = {"forward": (128, 128), "backward": (64, 128)}
#: Of the memory's bandwidth, for packing: as on an H200, docs/log.md.
PACKING_EFFICIENCY = 0.85

#: The paper's Figures 2 and 3 on an RTX 4090, TOPS of forward + backward at LENGTHS, by head size and mask.
PAPER_FLASH = {
    (128, "full"): (114, 136, 146, 150, 153, 155),
    (128, "causal"): (81, 109, 130, 142, 148, 151),
    (64, "full"): (113, 133, 146, 151, 155, 157),
    (64, "causal"): (76, 103, 127, 143, 152, 155),
}
PAPER_SAGEBWD = {
    (128, "full"): (112, 175, 195, 201, 221, 231),
    (128, "causal"): (110, 128, 190, 206, 214, 224),
    (64, "full"): (174, 185, 243, 260, 265, 263),
    (64, "causal"): (114, 116, 190, 248, 255, 263),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel on a GPU. Cycles are those of one SM.

    instructions: of a warp, for a tile; outside: before and after the loop over tiles.
    cycles: for a tile, by unit. outside_cycles: of a CTA, before and after the loop.
    """

    gpu: str
    kernel: str
    head_dim: int
    mask: str
    instructions: int
    outside: int
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


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Predict, print the tables and write them."""
    arguments = parse_arguments(argv)
    kernels, predictions = [], []
    for name, head_dim, mask in product(arguments.gpus, arguments.head_dims, arguments.masks):
        pair = {source: count_kernel(source, head_dim, mask, GPUS[name], arguments.macro) for source in TILES}
        kernels += pair.values()
        predictions += [predict(GPUS[name], pair, tokens, arguments.macro) for tokens in LENGTHS]
    result = describe(argv, arguments)
    text = to_markdown(result, kernels, predictions)
    print(text)
    write_markdown(arguments.out, text)
    rows = {"kernels": [asdict(kernel) for kernel in kernels], "rows": [asdict(row) for row in predictions]}
    write_json(with_ending(arguments.out, ".json"), result | rows)
    print(f"written: {', '.join(str(with_ending(arguments.out, ending)) for ending in ('.json', '.md'))}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--gpus", nargs="+", choices=GPUS, default=[*GPUS], metavar="NAME", help=", ".join(GPUS))
    add("--head-dims", nargs="+", type=int, choices=(64, 128), default=[64, 128])
    add("--masks", nargs="+", choices=("causal", "full"), default=["causal", "full"])
    macros = sorted({macro for _, _, macro in ampere.CTA_SHAPES})
    add("--macro", choices=macros, default="", help="settings of the kernels as CTA_SHAPES calls them")
    default = SCRATCH / "predict"
    add("--out", type=Path, default=default, metavar="PREFIX", help=f"default {default}")
    parser.set_defaults(device="cpu")
    return parser.parse_args(argv)


def describe(argv: list[str] | None, arguments: Namespace) -> dict[str, Any]:
    """How to repeat it, and what it is."""
    found = describe_run(PROGRAM, argv, arguments, ["nvidia-cuda-nvrtc", "nvidia-cuda-nvdisasm"])
    found["versions"]["nvrtc"] = ".".join(map(str, nvrtc_version()))
    values = "predicted from machine code and published rates, not run on a GPU; TFLOP/s, cycles of an SM"
    return {"values": values, **found, "gpus": {name: asdict(GPUS[name]) for name in arguments.gpus}}


# --- Counting -----------------------------------------------------------------------------------------------


def count_kernel(source: str, head_dim: int, mask: str, gpu: GPU, macro: str = "") -> Kernel:
    """Compile a kernel and count its cycles.

    Raises:
        ValueError: the machine code has another number of products than a tile needs.
    """
    program = Program(machine_code(source, head_dim, mask, gpu.architecture, macro), f"{source}_kernel")
    warps = ampere.CTA_SHAPES[source, head_dim, macro].threads // 32
    counts, outside = program.per_iteration(), program.outside()
    found = products_found(counts, warps)
    if (needed := products_needed(source, head_dim, macro)) != found:
        raise ValueError(
            f"{source}.cu, D {head_dim}: a tile needs {needed}, the machine code has {found}; see TILES"
        )
    cycles = cycles_of(counts, warps, gpu)
    return Kernel(
        gpu.name, source, head_dim, mask, counts.total(), outside.total(), found, cycles.units, cycles.bound,
        cycles.without_overlap, cycles_of(outside, warps, gpu).bound, dict(cycles.issue_only),
    )  # fmt: skip


@functools.cache
def machine_code(source: str, head_dim: int, mask: str, architecture: str, macro: str = "") -> str:
    """The SASS of a kernel, bf16.

    Raises:
        FileNotFoundError: there is no nvdisasm.
        RuntimeError: the kernel does not compile.
    """
    cta = ampere.CTA_SHAPES[source, head_dim, macro]
    defines = {"HEAD_DIM": head_dim, "IS_CAUSAL": int(mask == "causal"), "IS_BF16": True}
    defines |= {"LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes}
    defines |= {macro: True} if macro else {}
    return disassemble(compile_source(ampere.sources_for(architecture), source, defines)[0])


def products_found(counts: Counter[str], warps: int) -> dict[str, int]:
    """Tensor-core instructions of all warps."""
    found: Counter[str] = Counter()
    for opcode, count in counts.items():
        if (base := opcode.split(".")[0]) in ("IMMA", "HMMA"):
            found[base] += warps * count
    return dict(found)


def products_needed(source: str, head_dim: int, macro: str = "") -> dict[str, int]:
    """Tensor-core instructions of a tile, by its shape: 16 x 8 results of 32 INT8 or 16 16-bit products each.

    Forward: S, O. Backward: S, dV, dK, dQ in INT8, dP in 16 bit. With P_16BIT O or dV, too.
    """
    queries, keys = TILES[source]
    one = queries * keys * head_dim // (16 * 8)  # a product of the tile, in slices of depth 1
    int8, bits16 = (2, 0) if source == "forward" else (4, 1)
    if macro == "P_16BIT":
        int8, bits16 = int8 - 1, bits16 + 1
    needed = {"IMMA": int8 * one // 32, "HMMA": bits16 * one // 16}
    return {name: count for name, count in needed.items() if count}


# --- Predicting ---------------------------------------------------------------------------------------------


def predict(gpu: GPU, kernels: dict[str, Kernel], tokens: int, macro: str = "") -> Prediction:
    """Forward + backward of one head of ``tokens`` tokens, many of which fill the GPU."""
    kernel = kernels["forward"]
    pairs = tokens**2 * (0.5 if kernel.mask == "causal" else 1)
    flops = 3.5 * 4 * pairs * kernel.head_dim
    packing = packing_bytes(macro) * tokens * kernel.head_dim / (PACKING_EFFICIENCY * gpu.bandwidth * 1e9)
    both = kernels.values()
    overlap = packing + sum(seconds(own, tokens, gpu, own.bound) for own in both)
    no_overlap = packing + sum(seconds(own, tokens, gpu, own.without_overlap) for own in both)
    at = (kernel.head_dim, kernel.mask)
    is_papers = gpu.name == "RTX 4090" and tokens in LENGTHS
    index = LENGTHS.index(tokens) if is_papers else 0
    return Prediction(
        gpu.name, kernel.head_dim, kernel.mask, tokens,
        flash=PAPER_FLASH[at][index] if is_papers else gpu.flash * gpu.bf16_peak,
        paper=PAPER_SAGEBWD[at][index] if is_papers else None,
        overlap=flops / overlap / 1e12, no_overlap=flops / no_overlap / 1e12, packing_share=packing / overlap,
    )  # fmt: skip


def seconds(kernel: Kernel, tokens: int, gpu: GPU, cycles: float) -> float:
    """Time of a kernel for one head on the whole GPU, if a tile takes so many cycles of an SM."""
    tiles, ctas = work_of(kernel.kernel, tokens, kernel.mask == "causal")
    return (tiles * cycles + ctas * kernel.outside_cycles) / (gpu.sms * gpu.clock_ghz * 1e9)


def work_of(source: str, tokens: int, is_causal: bool) -> tuple[int, int]:
    """(tiles that have a visible pair, CTAs) of one head. A tile that a mask cuts counts as a whole one."""
    queries, keys = TILES[source]
    q_blocks, kv_blocks = -(-tokens // queries), -(-tokens // keys)
    seen = sum(-(-min((i + 1) * queries, tokens) // keys) for i in range(q_blocks))
    return seen if is_causal else q_blocks * kv_blocks, q_blocks if source == "forward" else kv_blocks


def packing_bytes(macro: str = "") -> int:
    """Bytes that all packing kernels read and write for each element of Q, counted from packing.cu.

    Forward: the mean reads K; Q becomes INT8; K and V become INT8, and once more K in INT8 and V in 16 bit
    for the backward. Backward: K by columns; Q, dO and O become Q in INT8, dO in 16 bit, and both by columns.
    """
    if macro == "P_16BIT":
        return 2 + (2 + 1) + (4 + 3) + (1 + 1) + (6 + 4)
    return 2 + (2 + 1) + (4 + 2 + 3) + (1 + 1) + (6 + 5)


# --- Tables -------------------------------------------------------------------------------------------------


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
        "Forward: 128 queries and 128 keys. Backward: 64 queries and 128 keys.",
        "",
        *kernel_table([kernel for kernel in kernels if kernel.mask == kernels[0].mask]),
        "",
        "## Forward + backward, TFLOP/s",
        "",
        "FlashAttention-2 and the paper's SageBwd on an RTX 4090 are the paper's measurements. On other GPUs "
        "FlashAttention-2 is set to 92.5% (GeForce) or 73% (others) of the bf16 peak.",
        "",
    ]
    for gpu in dict.fromkeys(row.gpu for row in predictions):
        lines += [*prediction_table([row for row in predictions if row.gpu == gpu]), ""]
    return "\n".join(lines)


def kernel_table(kernels: list[Kernel]) -> list[str]:
    units = [*kernels[0].cycles]
    header = ["GPU", "kernel", "D", "instructions", *units, "overlap", "no overlap"]
    table = [
        [kernel.gpu, kernel.kernel, str(kernel.head_dim), str(kernel.instructions)]
        + [number(kernel.cycles[unit], ",.0f") for unit in units]
        + [number(cycles, ",.0f") for cycles in (kernel.bound, kernel.without_overlap)]
        for kernel in kernels
    ]
    return align(header, table)


def prediction_table(rows: list[Prediction]) -> list[str]:
    header = [rows[0].gpu, "N", "FlashAttention-2", "paper's SageBwd", "overlap", "no overlap", "packing"]
    header += ["speedup, overlap", "speedup, no overlap", "paper's speedup"]
    table = [
        [f"D {row.head_dim}, {row.mask}", str(row.tokens), number(row.flash, ".0f"), number(row.paper, ".0f")]
        + [number(row.overlap, ".0f"), number(row.no_overlap, ".0f"), number(row.packing_share, ".0%")]
        + [number(speedup, ".2f") for speedup in row.speedups]
        + [number(row.paper and row.paper / row.flash, ".2f")]
        for row in rows
    ]
    return align(header, table)


if __name__ == "__main__":
    main()
