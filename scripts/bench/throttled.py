"""A stand-in for an RTX 4090: the Ampere kernels on an H200 whose tensor cores do each product several times.

    python -m scripts.bench.throttled

It needs an H200. Every product is followed by others with a zero left operand, which change no
bit of the result; the command compares. An SM of an H200 does 2,706 INT8 and 1,354 bf16 multiply-adds per
cycle with mma.sync (measured by hand), one of an RTX 4090 1,024 and 256. So 2.64 times as many INT8 products
and 5.29 times as many bf16 ones take as long as on an RTX 4090. Times are measured with 2 and 4, and with 3
and 6 times as many, and interpolated. FP32 lanes, special functions and shared memory of both are alike.

The predicted time is that of the attention kernels on the H200, in cycles of all SMs, at the SMs and clock of
the RTX 4090, and packing at 85% of its memory's bandwidth. Not corrected: issue slots that the repeated
products take, caches, the memory that K and V come from, and the clock under load.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from data.files import write_json
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.cuda.compile import Sources
from scripts.bench import attention
from scripts.bench.attention_peers import CONFIGS, Shape, build_sagebwd
from scripts.bench.attention_timing import draw_inputs, run_both
from scripts.bench.gpu_rates import GPUS
from scripts.bench.gpu_state import Monitor, describe_limits
from scripts.bench.measuring import (
    SCRATCH,
    align,
    command_parser,
    describe_run,
    number,
    with_ending,
    write_markdown,
)
from scripts.bench.predict import LENGTHS, PACKING_EFFICIENCY, PAPER_FLASH, packing_bytes

PROGRAM = "python -m scripts.bench.throttled"
TARGET = GPUS["RTX 4090"]
#: Multiply-adds per cycle and SM of an H200 with mma.sync, INT8 and bf16 with fp32 sums, as measured.
H200_INT8, H200_16BIT = 2706, 1354
#: How often each INT8 product is done. 16-bit products are done twice as often: on a GeForce they take four
#: times as long as INT8 ones, on an H200 twice.
TIMES = (2, 3)
#: Kernels of which the time counts.
KERNELS = (
    "forward_kernel",
    "backward_kernel",
    "backward_dq_warps_kernel",
    "backward_64_keys_kernel",
    "backward_64_keys_dq_warps_kernel",
)

HEADER = "ptx_sm80.cuh"
ORIGINAL = "ptx_sm80_original.cuh"
#: In the place of HEADER: the products of ORIGINAL, and further ones that add zero.
THROTTLED = """#pragma once
#define mma_int8 mma_int8_once
#define mma_16bit mma_16bit_once
#include "ptx_sm80_original.cuh"
#undef mma_int8
#undef mma_16bit

template <bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void mma_int8(int (&sum)[4], const u32* a, const u32* b) {
    const u32 zero[4] = {0, 0, 0, 0};
    mma_int8_once<LEFT_UNSIGNED>(sum, a, b);
#pragma unroll
    for (int i = 1; i < INT8_TIMES; ++i) mma_int8_once<LEFT_UNSIGNED>(sum, zero, b);
}

__device__ __forceinline__ void mma_16bit(float* sum, const u32* a, const u32* b) {
    const u32 zero[4] = {0, 0, 0, 0};
    mma_16bit_once(sum, a, b);
#pragma unroll
    for (int i = 1; i < 2 * INT8_TIMES; ++i) mma_16bit_once(sum, zero, b);
}
"""


@dataclass(frozen=True)
class Row:
    """Forward + backward at one shape.

    kernel_ms: on the H200, of the attention kernels alone, by how often INT8 products are done.
    same_bits: whether results were those without further products, at each.
    tflops: predicted for TARGET. flash: FlashAttention-2 there, as the paper measured it; None elsewhere.
    """

    head_dim: int
    mask: str
    tokens: int
    kernel_ms: dict[int, float]
    same_bits: bool
    tflops: float
    flash: float | None


# --- Sources ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def throttled(times: int) -> Iterator[None]:
    """While the block runs, the Ampere kernels do each INT8 product so often, 16-bit ones twice as often."""
    before = ampere.sources_for
    with tempfile.TemporaryDirectory() as folder:
        ampere.sources_for = functools.cache(
            lambda architecture: throttled_sources(before(architecture), times, Path(folder))
        )
        try:
            yield
        finally:
            ampere.sources_for = before


def throttled_sources(sources: Sources, times: int, folder: Path) -> Sources:
    """Copies of the sources, in ``folder``, with :data:`THROTTLED` in the place of its header."""
    copies = []
    for i, original in enumerate(sources.folders):
        copies.append(folder / f"{sources.architecture}-{i}")
        shutil.copytree(original, copies[-1], ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (copies[0] / HEADER).rename(copies[0] / ORIGINAL)
    text = THROTTLED.replace("INT8_TIMES", str(times))
    (copies[0] / HEADER).write_text(text, encoding="utf-8")
    return Sources(sources.architecture, tuple(copies))


# --- Measuring ----------------------------------------------------------------------------------------------


def measure(shape: Shape, arguments: Namespace, clock_ghz: float) -> Row:
    """One shape with every number of products."""
    inputs = draw_inputs(shape, torch.bfloat16, torch.device("cuda"), seed=0)
    attend = build_sagebwd(CONFIGS["default"][1], shape, kernels="ampere")
    exact = run_both(attend, inputs)
    times, same = {}, True
    for products in TIMES:
        with throttled(products):
            same &= all(map(torch.equal, run_both(attend, inputs), exact))
            times[products] = kernel_ms(attend, inputs, arguments.repetitions)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    tflops = predicted_tflops(shape, times, clock_ghz, sms)
    known = dict(zip(LENGTHS, PAPER_FLASH.get((shape.head_dim, shape.mask), ()), strict=False))
    flash = known.get(shape.tokens)
    return Row(shape.head_dim, shape.mask, shape.tokens, times, same, tflops, flash)


def kernel_ms(attend: Any, inputs: tuple[Tensor, ...], repetitions: int) -> float:
    """Mean time of the attention kernels of one forward and backward."""
    run_both(attend, inputs)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repetitions):
            run_both(attend, inputs)
        torch.cuda.synchronize()
    spent = sum(event.self_device_time_total for event in profiler.key_averages() if event.key in KERNELS)
    return spent / 1e3 / repetitions  # from µs


def predicted_tflops(shape: Shape, times: dict[int, float], clock_ghz: float, sms: int) -> float:
    """Forward + backward on TARGET, from times in ms of the attention kernels on a GPU with so many SMs.

    Args:
        times: by how often INT8 products are done, of :data:`TIMES`.
        clock_ghz: of the SMs while they ran.
    """
    few, many = TIMES
    wanted = H200_INT8 / TARGET.int8
    milliseconds = times[few] + (times[many] - times[few]) * (wanted - few) / (many - few)
    kernels = milliseconds * 1e-3 * (sms * clock_ghz) / (TARGET.sms * TARGET.clock_ghz)
    elements = shape.batch * shape.heads * shape.tokens * shape.head_dim
    packing = packing_bytes(CONFIGS["default"][1]) * elements / (PACKING_EFFICIENCY * TARGET.bandwidth * 1e9)
    return 3.5 * shape.flops / (kernels + packing) / 1e12


def clock_under_load(arguments: Namespace) -> float:
    """SM clock in GHz while the GPU computes. Raises RuntimeError if nvidia-smi does not tell it."""
    shape = attention.shapes_of(arguments)[0]
    inputs = draw_inputs(shape, torch.bfloat16, torch.device("cuda"), seed=0)
    attend = build_sagebwd(CONFIGS["default"][1], shape, kernels="ampere")
    with Monitor(torch.device("cuda")) as monitor:
        kernel_ms(attend, inputs, repetitions=2000)
    found = monitor.summary()["sm_clock_mhz"]
    if found is None:
        raise RuntimeError("nvidia-smi does not tell the SM clock; pass it as --clock-ghz")
    return found["median"] / 1e3


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure, predict, print a table and write the files."""
    arguments = parse_arguments(argv)
    clock = arguments.clock_ghz or clock_under_load(arguments)
    rows = [measure(shape, arguments, clock) for shape in attention.shapes_of(arguments)]
    result = describe_run(PROGRAM, argv, arguments, []) | {"sm_clock_ghz": clock}
    result["hardware"] |= describe_limits(torch.device("cuda"))
    result["values"] = f"predicted for an {TARGET.name} from a throttled H200; TFLOP/s of forward + backward"
    lines = ["# Predicted with throttled tensor cores", "", result["values"], "", *table(rows)]
    print("\n".join(lines))
    write_markdown(arguments.out, "\n".join([*lines, ""]))
    write_json(with_ending(arguments.out, ".json"), result | {"rows": [asdict(row) for row in rows]})


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser: ArgumentParser = command_parser(PROGRAM, __doc__)
    attention.add_shape_options(parser.add_argument)
    parser.add_argument("--repetitions", type=int, default=10, help="default %(default)s")
    parser.add_argument("--clock-ghz", type=float, help="of the SMs; by default it is measured")
    default = SCRATCH / "throttled"
    parser.add_argument("--out", type=Path, default=default, metavar="PREFIX", help=f"default {default}")
    parser.set_defaults(device="cuda")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("this needs an H200: rates of other tensor cores with mma.sync were not measured")
    return arguments


def table(rows: list[Row]) -> list[str]:
    header = [TARGET.name, "N", "predicted", "FlashAttention-2 (paper)", "speedup", "same bits"]
    cells = []
    for row in rows:
        speedup = row.flash and row.tflops / row.flash
        speeds = [number(row.tflops, ".0f"), number(row.flash, ".0f"), number(speedup, ".2f")]
        name = f"D {row.head_dim}, {row.mask}"
        cells.append([name, str(row.tokens), *speeds, "yes" if row.same_bits else "NO"])
    return align(header, cells)


if __name__ == "__main__":
    main()
