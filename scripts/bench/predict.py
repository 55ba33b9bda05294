"""Predict what the Ampere kernels do on GPUs that we do not have, from their machine code. Needs no GPU.

    python -m scripts.bench.predict --help

Compiles the forward and the backward for each architecture, disassembles them, counts what the warps execute
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

The H200 is there to check the method: its predictions can be compared with times.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from data.files import write_json
from sagebwd import SageConfig, dispatch
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.ampere.shapes import THREADS, backward_source, cta_shape
from sagebwd.kernels.cuda.compile import compile_source, nvrtc_version
from scripts.bench.attention_peers import CONFIGS
from scripts.bench.gpu_rates import GPU, GPUS, cycles_of
from scripts.bench.measuring import describe_run
from scripts.bench.predict_tables import Kernel, Prediction, to_markdown
from scripts.bench.sass import disassemble
from scripts.bench.sass_loops import Program
from scripts.command_line import command_parser
from scripts.output import SCRATCH, with_ending, write_markdown

PROGRAM = "python -m scripts.bench.predict"
EXAMPLES = f"""examples:
  {PROGRAM}                                   all GPUs, default and paper(); 4 minutes
  {PROGRAM} --gpus "RTX 4090" --head-dims 64  one GPU and head size; 30 seconds
  {PROGRAM} --presets 16-bit-p                another setting
"""
LENGTHS = [1024 << power for power in range(6)]
#: Of the forward: a CTA has so many queries, whatever the tile of the settings.
FORWARD_QUERIES = 128
PASSES = ("forward", "backward")
#: Warps of each kind in a CTA, where there are several, in the order of Program.tile_loops.
KINDS_OF_WARPS = {"backward_dq_warps": (8, 4), "backward_64_keys_dq_warps": (8, 4)}
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


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Predict, print the tables and write them."""
    arguments = parse_arguments(argv)
    kernels, predictions = [], []
    axes = (arguments.gpus, arguments.presets, arguments.head_dims, arguments.masks)
    for name, preset, head_dim, mask in product(*axes):
        pair = [count_kernel(which, preset, head_dim, mask, GPUS[name]) for which in PASSES]
        kernels += pair
        predictions += [predict(GPUS[name], pair, tokens) for tokens in LENGTHS]
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
    presets = [name for name, (_, config, _) in CONFIGS.items() if is_taken(config)]
    text = f"settings: {', '.join(presets)} (default: default paper)"
    add("--presets", nargs="+", choices=presets, default=["default", "paper"], metavar="NAME", help=text)
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


def is_taken(config: SageConfig) -> bool:
    """Whether the Ampere kernels take these settings."""
    gpu = dispatch.ARCHITECTURES["8.9"]
    return not dispatch.obstacles("ampere", dispatch.Call("cuda", gpu, torch.bfloat16, 64, config))


def count_kernel(which: str, preset: str, head_dim: int, mask: str, gpu: GPU) -> Kernel:
    """Compile the kernel of a pass and count its cycles.

    Raises:
        ValueError: the machine code has another number of products or loops over tiles than a tile needs.
    """
    config = CONFIGS[preset][1]
    text = machine_code(which, preset, head_dim, mask, gpu.architecture)
    source = source_of(which, head_dim, config)
    warps = warps_of(source)
    program = Program(text, f"{source}_kernel", warps)
    tile = [program.per_iteration(kind) for kind in range(len(warps))]
    outside = [program.outside(kind) for kind in range(len(warps))]
    counts = of_all_warps(tile, warps)
    found, needed = products_found(counts), products_needed(which, head_dim, config)
    if found != needed:
        where = f"{which}, {preset}, D {head_dim}"
        raise ValueError(f"{where}: a tile needs {needed}, the machine code has {found}")
    cycles = cycles_of(counts, gpu)
    return Kernel(
        gpu.name, preset, which, tile_of(which, head_dim, config), head_dim, mask, warps,
        tuple(own.total() for own in tile), tuple(own.total() for own in outside),
        found, cycles.units, cycles.bound, cycles.without_overlap,
        cycles_of(of_all_warps(outside, warps), gpu).bound, dict(cycles.issue_only),
    )  # fmt: skip


@functools.cache
def machine_code(which: str, preset: str, head_dim: int, mask: str, architecture: str) -> str:
    """The SASS of the kernel of a pass, for bf16.

    Raises:
        FileNotFoundError: there is no nvdisasm.
        RuntimeError: the kernel does not compile.
    """
    config = CONFIGS[preset][1]
    tile, source = config.tile(head_dim), source_of(which, head_dim, config)
    product_of_p = "o" if which == "forward" else "dv"
    shape = {"p_16bit": not config.is_int8(product_of_p), "token_scales": config.operand_scales == "token"}
    cta = cta_shape(source, head_dim, tile, **shape)
    defines = {
        "HEAD_DIM": head_dim, "IS_CAUSAL": int(mask == "causal"), "IS_BF16": True,
        "LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes,
        "TILE_Q": tile[0], "TILE_KV": tile[1], "UNPACKED_16BIT": True, "P_16BIT": shape["p_16bit"],
        "TOKEN_SCALES": shape["token_scales"], "UNSIGNED_P": config.is_unsigned(product_of_p),
        "SCALES_OF_TILES": which == "backward" and config.granularity == "block",
    }  # fmt: skip
    return disassemble(compile_source(ampere.sources_for(architecture), source, defines)[0])


def source_of(which: str, head_dim: int, config: SageConfig) -> str:
    """The source of the kernel of a pass."""
    if which == "forward":
        return which
    return backward_source(config.tile(head_dim), head_dim, s_16bit=not config.is_int8("s_bwd"))


def warps_of(source: str) -> tuple[int, ...]:
    """The warps of a CTA, by the loop over tiles that they run."""
    return KINDS_OF_WARPS.get(source, (THREADS[source] // 32,))


def of_all_warps(counts: Sequence[Counter[str]], warps: Sequence[int]) -> Counter[str]:
    """What all warps of a CTA execute, from what one of each kind does."""
    found: Counter[str] = Counter()
    for own, number in zip(counts, warps, strict=True):
        found.update({opcode: number * count for opcode, count in own.items()})
    return found


def tile_of(which: str, head_dim: int, config: SageConfig) -> tuple[int, int]:
    """Queries and keys of one iteration of the loop over tiles."""
    queries, keys = config.tile(head_dim)
    return (FORWARD_QUERIES if which == "forward" else queries), keys


def products_found(counts: Counter[str]) -> dict[str, int]:
    """The tensor-core instructions among what all warps execute."""
    found: Counter[str] = Counter()
    for opcode, count in counts.items():
        if (base := opcode.split(".")[0]) in ("IMMA", "HMMA"):
            found[base] += count
    return dict(found)


def products_needed(which: str, head_dim: int, config: SageConfig) -> dict[str, int]:
    """Tensor-core instructions of a tile, by its shape: 16 x 8 results of 32 INT8 or 16 16-bit products each.

    Forward: S, O. Backward: S, dP, dV, dK, dQ. dP is in 16 bit, and so are others that are not INT8.
    """
    queries, keys = tile_of(which, head_dim, config)
    one = queries * keys * head_dim // (16 * 8)  # a product of the tile, in slices of depth 1
    names = ("s_fwd", "o") if which == "forward" else ("s_bwd", "dp", "dv", "dk", "dq")
    int8 = sum(map(config.is_int8, names))
    needed = {"IMMA": int8 * one // 32, "HMMA": (len(names) - int8) * one // 16}
    return {name: count for name, count in needed.items() if count}


# --- Predicting ---------------------------------------------------------------------------------------------


def predict(gpu: GPU, kernels: list[Kernel], tokens: int) -> Prediction:
    """Forward + backward of one head of ``tokens`` tokens, many of which fill the GPU."""
    kernel = kernels[0]
    pairs = tokens**2 * (0.5 if kernel.mask == "causal" else 1)
    flops = 3.5 * 4 * pairs * kernel.head_dim
    elements = tokens * kernel.head_dim
    packing = packing_bytes(CONFIGS[kernel.preset][1]) * elements / (PACKING_EFFICIENCY * gpu.bandwidth * 1e9)
    overlap = packing + sum(seconds(own, tokens, gpu, own.bound) for own in kernels)
    no_overlap = packing + sum(seconds(own, tokens, gpu, own.without_overlap) for own in kernels)
    at = (kernel.head_dim, kernel.mask)
    is_papers = gpu.name == "RTX 4090" and tokens in LENGTHS
    index = LENGTHS.index(tokens) if is_papers else 0
    return Prediction(
        gpu.name, kernel.preset, kernel.head_dim, kernel.mask, tokens,
        flash=PAPER_FLASH[at][index] if is_papers else gpu.flash * gpu.bf16_peak,
        paper=PAPER_SAGEBWD[at][index] if is_papers else None,
        overlap=flops / overlap / 1e12, no_overlap=flops / no_overlap / 1e12, packing_share=packing / overlap,
    )  # fmt: skip


def seconds(kernel: Kernel, tokens: int, gpu: GPU, cycles: float) -> float:
    """Time of a kernel for one head on the whole GPU, if a tile takes so many cycles of an SM."""
    tiles, ctas = work_of(kernel.kernel, kernel.tile, tokens, kernel.mask == "causal")
    return (tiles * cycles + ctas * kernel.outside_cycles) / (gpu.sms * gpu.clock_ghz * 1e9)


def work_of(which: str, tile: tuple[int, int], tokens: int, is_causal: bool) -> tuple[int, int]:
    """(tiles that have a visible pair, CTAs) of one head. A tile that a mask cuts counts as a whole one."""
    queries, keys = tile
    q_blocks, kv_blocks = -(-tokens // queries), -(-tokens // keys)
    seen = sum(-(-min((i + 1) * queries, tokens) // keys) for i in range(q_blocks))
    return seen if is_causal else q_blocks * kv_blocks, q_blocks if which == "forward" else kv_blocks


def packing_bytes(config: SageConfig) -> int:
    """Bytes that all packing kernels read and write for each element of Q, counted from packing.cu.

    Forward: the mean reads K; Q, K and V become INT8. Backward: Q in INT8, dO and O become Q and dO by
    columns. With 16-bit P, V and dO need no INT8.
    """
    forward = (4 + 2) if config.is_int8("o") else (2 + 1)
    backward = (1 + 4) + (2 if config.is_int8("dv") else 1)
    means = 2 * config.smooth_k + 2 * config.smooth_v
    return means + (2 + 1) + forward + backward


if __name__ == "__main__":
    main()
