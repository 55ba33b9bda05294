"""A stand-in for an RTX 4090: the Ampere kernels on an H100 or H200 whose tensor cores do more products.

    python -m scripts.bench.throttled

It needs an H100 or H200. Every product is followed by others with zero, which change no bit of the result;
the command compares. An SM of these GPUs does 2,706 INT8 and 1,354 bf16 multiply-adds per cycle with mma.sync
(measured by hand), one of an RTX 4090 1,024 and 256. So 2.64 times as many INT8 products and 5.29 times as
many bf16 ones take as long as on an RTX 4090. Times are measured with 2 and 4, and with 3 and 6 times as
many, and interpolated. FP32 lanes, special functions and shared memory of both are alike.

The further products are INT8, of which an instruction takes as long as of bf16. They go to sums that no
product of the moment needs, so they take the tensor cores' time but seldom make another product wait. A
product that continues a sum waits as long as on the GPU that runs, about 33 cycles. On an RTX 4090 that is
about 24 (INT8) or 33 (bf16).

The predicted time is that of the attention kernels, in cycles of all SMs, at the SMs and clock of the
RTX 4090, and packing at 85% of its memory's bandwidth. Not corrected: issue slots that the further products
and their zeros take, caches, the memory that K and V come from, and the clock under load.

The sources of the kernels know nothing of this: CALLS names the lines after which a copy gets the products.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from data.files import write_json
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.cuda.compile import Sources
from scripts.bench import attention
from scripts.bench.measuring import Monitor, describe_limits, describe_run
from scripts.bench.registry import CONFIGS, Attend, Shape, build_sagebwd
from scripts.bench.timing import draw_inputs, run_both
from scripts.command_line import command_parser
from scripts.output import SCRATCH, align, number, with_ending, write_markdown

PROGRAM = "python -m scripts.bench.throttled"

#: As published: multiply-adds of an SM per cycle, INT8 and bf16 with fp32 sums; bytes per second.
TARGET, TARGET_INT8, TARGET_16BIT = "RTX 4090", 1024, 256
TARGET_SMS, TARGET_CLOCK_GHZ, TARGET_BANDWIDTH = 128, 2.52, 1008e9
#: Multiply-adds per cycle and SM of an H100 or H200 with mma.sync, INT8 and bf16 with fp32 sums, as measured.
HOPPER_INT8, HOPPER_16BIT = 2706, 1354
#: How often each INT8 product is done. 16-bit products are done twice as often: on a GeForce they take four
#: times as long as INT8 ones, on an H100 or H200 twice.
TIMES = (2, 3)
#: Bytes that all packing kernels read and write for each element of Q with the default settings: 2 for the
#: mean of K, 3 for Q, 6 for K and V, 7 for the backward. And the share of the bandwidth that they reach.
PACKING_BYTES, PACKING_EFFICIENCY = 18, 0.85

#: FlashAttention-2 on an RTX 4090, TOPS of forward + backward at LENGTHS: the paper's Figures 2 and 3.
PAPER_FLASH = {
    (128, "full"): (114, 136, 146, 150, 153, 155),
    (128, "causal"): (81, 109, 130, 142, 148, 151),
    (64, "full"): (113, 133, 146, 151, 155, 157),
    (64, "causal"): (76, 103, 127, 143, 152, 155),
}

#: Kernels of which the time counts.
FORWARD_KERNELS = ("forward_kernel",)
BACKWARD_KERNELS = (
    "backward_kernel",
    "backward_dq_warps_kernel",
    "backward_64_keys_kernel",
    "backward_64_keys_dq_warps_kernel",
)


# --- Sources ------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The two products of a step of a loop: ``start`` is followed by ", b);" and " + 4, b + 2);".

    groups, sums: groups of four registers that further products can go to. product: how many products came
    before in the loop. own: the group of this product.
    """

    file: str
    start: str
    groups: str
    sums: str
    product: str
    own: str = "j"


CALLS = (
    Call("products.cuh", "mma_int8(x, a + 4 * step", "COLUMNS / 8", "sum", "j * (D / STEP) + step"),
    Call("products.cuh", "mma_int8(x, a", "COLUMNS / 8", "sum", "2 * j"),
    Call("products.cuh", "mma_16bit(sum + 4 * j, a + 4 * step", "COLUMNS / 8", "sum", "2 * j"),
    Call(
        *("products.cuh", "mma_int8<LEFT_UNSIGNED>(product, a + 4 * step"),
        *("CHANNELS / 8", "sum", "j * (TOKENS / STEP) + step"),
    ),
    Call("products.cuh", "mma_16bit(sum + 4 * j, a + token / 4", "D / 8", "sum", "2 * j"),
    Call("scores.cuh", "mma_16bit(dp + REGISTERS * j, v", "N / 4", "dp", "2 * j", "j * REGISTERS / 4"),
)
#: Other lines of a file, and what is in their place.
LINES = (
    ("products.cuh", '#include "layout.cuh"', '#include "throttled.cuh"\n#include "layout.cuh"'),
    (
        *("products.cuh", "int x[4] = {0, 0, 0, 0};"),
        "int x[4]; before_group<COLUMNS / 8>(x, sum, j);",
    ),
    (
        *("forward.cu", "mma_16bit(state.l_rounded, p + 4 * i, ones);"),
        "{ mma_16bit(state.l_rounded, p + 4 * i, ones); after_16bit<D / 8>(state.o, 0, i, p + 4 * i); }",
    ),
)

HEADER = "throttled.cuh"
#: INT8 products with zero. Added to any 32 bits, also an fp32 sum, they change none. They go to sums of
#: other columns: ptxas deletes a product whose sum nobody uses, and with the sum of the true product each
#: would wait for the one before.
FURTHER_PRODUCTS = """#pragma once

#include "ptx.cuh"

// x += b times zero. left, right: s8 or u8, before them what else makes products of another kind.
#define ADD_ZERO(left, right)                                                                             \\
    asm volatile("mma.sync.aligned.m16n8k32.row.col." left "." right ".s32 {%0, %1, %2, %3}, "            \\
        "{%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"                                                   \\
        : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])                                                  \\
        : "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(0))

// ptxas does products of the same kind and operands only once; and sums may all be zero at first.
__device__ __forceinline__ void add_zero(int (&x)[4], const u32* b, int kind) {
    if (kind == 0) ADD_ZERO("s32.s8", "s8");
    if (kind == 1) ADD_ZERO("s32.s8", "u8");
    if (kind == 2) ADD_ZERO("s32.u8", "s8");
    if (kind == 3) ADD_ZERO("s32.u8", "u8");
    if (kind == 4) ADD_ZERO("satfinite.s32.s8", "s8");
    if (kind == 5) ADD_ZERO("satfinite.s32.s8", "u8");
    if (kind == 6) ADD_ZERO("satfinite.s32.u8", "s8");
    if (kind == 7) ADD_ZERO("satfinite.s32.u8", "u8");
}

// The groups take turns, so that no product waits for the one before. Left out are `own` and, of many, its
// neighbors: true products need them now. b: any four registers.
template <int GROUPS, int PRODUCTS, class T>
__device__ __forceinline__ void multiply_zero(T* sums, int own, int product, const u32* b) {
    constexpr int NEAR = GROUPS < 8 ? 0 : 1, IDLE = GROUPS - 1 - 2 * NEAR;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        T* group = sums + (own + 1 + NEAR + (product * PRODUCTS + i) % IDLE) % GROUPS * 4;
        int x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = reinterpret_cast<const int&>(group[k]);
        add_zero(x, b, (product % 2 * PRODUCTS + i) % 8);
#pragma unroll
        for (int k = 0; k < 4; ++k) group[k] = reinterpret_cast<const T&>(x[k]);
    }
}

template <int GROUPS, class T>
__device__ __forceinline__ void after_int8(T* sums, int own, int product, const u32* b) {
    multiply_zero<GROUPS, INT8_TIMES - 1>(sums, own, product, b);
}

template <int GROUPS, class T>
__device__ __forceinline__ void after_16bit(T* sums, int own, int product, const u32* b) {
    multiply_zero<GROUPS, 2 * INT8_TIMES - 1>(sums, own, product, b);
}

// With fp16 sums products run at twice the rate on a GeForce.
template <int GROUPS>
__device__ __forceinline__ void after_16bit(u32* sums, int own, int product, const u32* b) {
    multiply_zero<GROUPS, INT8_TIMES - 1>(sums, own, product, b);
}

// All groups have values before the first product, and x begins with that of its own.
template <int GROUPS>
__device__ __forceinline__ void before_group(int (&x)[4], int* sums, int own) {
#pragma unroll
    for (int i = 0; i < 4 * GROUPS && own == 0; ++i) sums[i] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = sums[4 * own + i];
}
"""


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
    """Copies of the sources, in ``folder``, with further products after each.

    Raises:
        ValueError: a line of CALLS or LINES is not there exactly once.
    """
    copies = []
    for i, original in enumerate(sources.folders):
        copies.append(folder / f"{sources.architecture}-{i}")
        shutil.copytree(original, copies[-1], ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for file, line, instead in (*LINES, *(change for call in CALLS for change in changes_of(call))):
        path = copies[0] / file
        text = path.read_text(encoding="utf-8")
        if text.count(line) != 1:
            raise ValueError(f"{file} has the line {line!r} {text.count(line)} times, not once")
        path.write_text(text.replace(line, instead), encoding="utf-8")
    text = FURTHER_PRODUCTS.replace("INT8_TIMES", str(times))
    (copies[0] / HEADER).write_text(text, encoding="utf-8")
    return Sources(sources.architecture, tuple(copies))


def changes_of(call: Call) -> Iterator[tuple[str, str, str]]:
    """The two products of a call as entries of LINES."""
    after = "after_int8" if call.start.startswith("mma_int8") else "after_16bit"
    for second, operands in enumerate((", b);", " + 4, b + 2);")):
        product = f"{call.product} + 1" if second else call.product
        line = call.start + operands
        yield call.file, line, f"{line} {after}<{call.groups}>({call.sums}, {call.own}, {product}, b);"


# --- Measuring ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Forward + backward at one shape.

    forward_ms, backward_ms: measured, of the attention kernels alone, by how often INT8 products are done.
    same_bits: whether results were those without further products, at each.
    tflops: predicted for TARGET. flash: FlashAttention-2 there, as the paper measured it; None elsewhere.
    """

    head_dim: int
    mask: str
    tokens: int
    forward_ms: dict[int, float]
    backward_ms: dict[int, float]
    same_bits: bool
    tflops: float
    flash: float | None


def measure(shape: Shape, repetitions: int, clock_ghz: float) -> Row:
    """One shape with every number of products."""
    attend, inputs = prepare(shape)
    exact = run_both(attend, inputs)
    forward, backward, same = {}, {}, True
    for products in TIMES:
        with throttled(products):
            same &= all(map(torch.equal, run_both(attend, inputs), exact))
            forward[products], backward[products] = kernel_ms(attend, inputs, repetitions)
    times = {products: forward[products] + backward[products] for products in TIMES}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    tflops = predicted_tflops(shape, times, clock_ghz, sms)
    known = zip(attention.LENGTHS, PAPER_FLASH.get((shape.head_dim, shape.mask), ()), strict=False)
    flash = dict(known).get(shape.tokens)
    return Row(shape.head_dim, shape.mask, shape.tokens, forward, backward, same, tflops, flash)


def prepare(shape: Shape) -> tuple[Attend, tuple[Tensor, ...]]:
    """The Ampere kernels with default settings, and inputs."""
    device = torch.device("cuda")
    attend = build_sagebwd(CONFIGS["default"][1], shape, device, kernels="ampere")
    return attend, draw_inputs(shape, torch.bfloat16, device, seed=0)


def kernel_ms(attend: Attend, inputs: Any, repetitions: int) -> tuple[float, float]:
    """Mean times of the attention kernels of a forward and of a backward."""
    run_both(attend, inputs)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repetitions):
            run_both(attend, inputs)
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total for event in profiler.key_averages()}  # µs
    forward, backward = (
        sum(spent.get(name, 0.0) for name in names) / 1e3 / repetitions
        for names in (FORWARD_KERNELS, BACKWARD_KERNELS)
    )
    return forward, backward


def predicted_tflops(shape: Shape, times: dict[int, float], clock_ghz: float, sms: int) -> float:
    """Forward + backward on TARGET, from times in ms of the attention kernels on a GPU with so many SMs.

    Args:
        times: by how often INT8 products are done, of :data:`TIMES`.
        clock_ghz: of the SMs while they ran.
    """
    few, many = TIMES
    wanted = HOPPER_INT8 / TARGET_INT8
    milliseconds = times[few] + (times[many] - times[few]) * (wanted - few) / (many - few)
    kernels = milliseconds * 1e-3 * (sms * clock_ghz) / (TARGET_SMS * TARGET_CLOCK_GHZ)
    elements = shape.batch * shape.heads * shape.tokens * shape.head_dim
    packing = PACKING_BYTES * elements / (PACKING_EFFICIENCY * TARGET_BANDWIDTH)
    return 3.5 * shape.flops / (kernels + packing) / 1e12


def clock_under_load(shape: Shape) -> float:
    """SM clock in GHz while the GPU computes. Raises RuntimeError if nvidia-smi does not tell it."""
    attend, inputs = prepare(shape)
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
    shapes = attention.shapes_of(arguments)
    clock = arguments.clock_ghz or clock_under_load(shapes[0])
    rows = [measure(shape, arguments.repetitions, clock) for shape in shapes]
    result = describe_run(PROGRAM, argv, arguments, []) | {"sm_clock_ghz": clock}
    result["hardware"] |= describe_limits(torch.device("cuda"))
    result["values"] = (
        f"predicted for an {TARGET} from a throttled {torch.cuda.get_device_name()}; "
        "TFLOP/s of forward + backward"
    )
    lines = ["# Predicted with throttled tensor cores", "", result["values"], "", *table(rows)]
    print("\n".join(lines))
    write_markdown(arguments.out, "\n".join([*lines, ""]))
    write_json(with_ending(arguments.out, ".json"), result | {"rows": [asdict(row) for row in rows]})


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    attention.add_shape_options(parser.add_argument)
    parser.add_argument("--repetitions", type=int, default=10, help="default %(default)s")
    parser.add_argument("--clock-ghz", type=float, help="of the SMs; by default it is measured")
    default = SCRATCH / "throttled"
    parser.add_argument("--out", type=Path, default=default, metavar="PREFIX", help=f"default {default}")
    parser.set_defaults(device="cuda")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("this needs an H100 or H200: mma.sync was not measured on other tensor cores")
    return arguments


def table(rows: list[Row]) -> list[str]:
    header = [TARGET, "N", "predicted", "FlashAttention-2 (paper)", "speedup", "same bits"]
    cells = []
    for row in rows:
        speedup = row.flash and row.tflops / row.flash
        speeds = [number(row.tflops, ".0f"), number(row.flash, ".0f"), number(speedup, ".2f")]
        name = f"D {row.head_dim}, {row.mask}"
        cells.append([name, str(row.tokens), *speeds, "yes" if row.same_bits else "NO"])
    return align(header, cells)


if __name__ == "__main__":
    main()
