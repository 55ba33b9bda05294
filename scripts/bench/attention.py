"""Speed of attention beside its accuracy: SageBwd and what one would use instead (the paper's Figures 2, 3).

    python -m scripts.bench.attention --help

Forward, backward and both, over sequence lengths, head sizes and masks, of sagebwd and of every peer that
this machine has: FlashAttention-2 and cuDNN (PyTorch's scaled_dot_product_attention), FlexAttention, and the
packages flash_attn (2 and 3) and sageattention (forward only). A peer that is absent, or refuses a shape, is
listed with its reason.

What is timed: from 16-bit Q, K, V (and dO) in memory to 16-bit O (and dQ, dK, dV) in memory, with everything
in between: quantization, smoothing, δ. Q, K and V lie token by token, as projections leave them. In each
repetition every implementation runs once, in turn, so that a drift of the clock meets all alike. The tables
give the median of these times, and their 10th and 90th percentile.

    both         forward with gradients recorded, then the backward
    both, graph  the same, replayed as a CUDA graph: without what the host does (--graphs)
    forward      the call under torch.no_grad()
    backward     the backward alone, on a graph that is kept

TFLOP/s follow the usual count: 4·B·H·N²·D for the forward, half of it if causal; 2.5 times that for the
backward, 3.5 times for both. Before anything is timed, each implementation's results are compared with
float64 attention, on the first and the last head of the last sequence: one that is off is reported as such,
without a speed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from scripts.bench.attention_peers import (
    CONFIGS,
    PEERS,
    Attend,
    Implementation,
    Shape,
    explain,
    find_implementations,
)
from scripts.bench.attention_tables import (
    BASELINES,
    FAILED,
    MODES,
    PASSED,
    REFUSED,
    Row,
    draw,
    not_measured,
    overview,
    to_markdown,
)
from scripts.bench.measuring import beside, describe_run, mark, milliseconds, synchronize, write_tables
from scripts.paper.arguments import positive_int
from scripts.paper.attention_errors import TENSORS, compare, settings_of
from scripts.paper.attention_errors import TITLES as TENSOR_TITLES

PROGRAM = "python -m scripts.bench.attention"

#: Float64 attention is computed for so many queries at a time that a tile of S is no larger than this.
EXACT_BYTES = 256 << 20
#: A second set of inputs is drawn if so many would fit: results and graphs of all peers take memory, too.
SETS_THAT_MUST_FIT = 40

EXAMPLES = """
examples:
  all of it; --graphs adds the times without the host's part
      python -m scripts.bench.attention --graphs
  the model of the paper: head size 64, causal, context 4096
      python -m scripts.bench.attention --head-dims 64 --masks causal --lengths 4096
  our three settings beside each other, without FlexAttention, whose compilation takes the most time
      python -m scripts.bench.attention --configs default strictly-causal paper --without flex
  a look at the files without a GPU; the times are those of the plain PyTorch reference
      python -m scripts.bench.attention --device cpu --lengths 64 128 --tokens 256 --width 128 --repetitions 3

written, with --out results/bench_attention:
  results/bench_attention.json          everything: rows, errors, memory, settings, hardware, versions
  results/bench_attention.md            tables, one for each mode, mask and head size
  results/bench_attention.png           forward + backward, TFLOP/s over N, as in Figures 2 and 3
  results/bench_attention_forward.png   forward alone
The first two are renewed after every shape, so that a run that is cut short leaves what it measured.
"""


def flops(shape: Shape, mode: str) -> float:
    """Floating-point operations of ``mode`` by the usual count."""
    return shape.flops * MODES[mode].flops


class Inputs(NamedTuple):
    """Each (B, H, N, D), in memory token by token; q, k and v record gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


@dataclass(frozen=True)
class Trial:
    """What became of an implementation at a shape before it is timed."""

    implementation: Implementation
    attend: Attend | None = None
    status: str = PASSED
    reason: str | None = None
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    extra_memory: float | None = None


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure every shape, print an overview and write the files."""
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # packages without a device argument launch on the current one
    implementations, absent = find_implementations(arguments)
    result = describe_results(argv, arguments) | {"absent": absent}
    shapes = shapes_of(arguments)
    rows: list[Row] = []
    progress = tqdm(shapes, desc="shapes", disable=None)
    for done, shape in enumerate(progress, start=1):
        progress.set_postfix_str(str(shape))
        rows += measure_shape(shape, implementations, arguments)
        result |= {"shapes": f"{done} of {len(shapes)}"}
        write_tables(arguments.out, result, rows, to_markdown(result, rows))
    for mode, ending in (("both", ".png"), ("forward", "_forward.png")):
        draw(rows, mode, beside(arguments.out, ending), result["hardware"]["name"])
    print("\n".join(["", *overview(rows), *not_measured(absent, rows)]))
    print(f"written to {arguments.out}.json, .md, .png and {arguments.out.name}_forward.png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_options(parser.add_argument_group("shapes").add_argument)
    add_implementation_options(parser.add_argument_group("implementations").add_argument)
    add_timing_options(parser.add_argument_group("timing").add_argument)
    arguments = parser.parse_args(argv)
    check(arguments, parser)
    return arguments


def add_shape_options(add: Callable[..., Any]) -> None:
    sizes = {"type": positive_int, "nargs": "+"}
    doubling = [1024 << power for power in range(6)]
    add("--lengths", **sizes, default=doubling, metavar="N", help="default 1024 … 32768, doubling")
    add("--head-dims", **sizes, default=[64, 128], metavar="D", help="default 64 128")
    add("--masks", nargs="+", choices=("causal", "full"), default=["causal", "full"], help="default both")
    add("--tokens", type=positive_int, default=16384, help="B·N, where N is no longer (default %(default)s)")
    add("--width", type=positive_int, default=2048, help="H·D (default %(default)s)")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default %(default)s")
    add("--seed", type=int, default=0, help="of the random inputs (default %(default)s)")


def add_implementation_options(add: Callable[..., Any]) -> None:
    several = {"nargs": "+", "metavar": "NAME"}
    settings = f"settings of sagebwd: {', '.join(CONFIGS)} (default: default)"
    add("--configs", **several, choices=CONFIGS, default=["default"], help=settings)
    add("--without", **several, choices=PEERS, default=[], help=f"leave out: {', '.join(PEERS)}")


def add_timing_options(add: Callable[..., Any]) -> None:
    count = {"type": positive_int, "metavar": "TIMES"}
    add("--repetitions", **count, default=30, help="of each implementation (default %(default)s)")
    add("--warm-up", **count, default=5, help="repetitions before that (default %(default)s)")
    add("--graphs", action="store_true", help="also time both as a replayed CUDA graph")
    add("--device", default="cuda", help="cuda (the default), cuda:1, …, or cpu for tiny shapes")
    out = Path("results/bench_attention")
    add("--out", type=Path, default=out, help="what the files' names begin with (default %(default)s)")


def check(arguments: Namespace, parser: argparse.ArgumentParser) -> None:
    """Stop with a message, and exit code 2, if the arguments do not fit together or this machine."""
    on_gpu = arguments.device.startswith("cuda")
    if not on_gpu and arguments.device != "cpu":
        parser.error(f"--device {arguments.device}: give cuda, cuda:<number> or cpu")
    if on_gpu and not torch.cuda.is_available():
        parser.error(
            f"--device {arguments.device}: torch sees no GPU; run this where there is one, or try "
            "--device cpu with tiny shapes, as in --help"
        )
    if arguments.graphs and not on_gpu:
        parser.error("--graphs: CUDA graphs need a GPU; leave it out")
    for head_dim in arguments.head_dims:
        if arguments.width % head_dim:
            parser.error(f"--width {arguments.width} is no multiple of head size {head_dim}; choose one")


def shapes_of(arguments: Namespace) -> list[Shape]:
    """Every combination, the lengths of one mask and head size one after the other."""
    combinations = itertools.product(arguments.masks, arguments.head_dims, arguments.lengths)
    return [
        Shape(max(arguments.tokens // n, 1), arguments.width // head_dim, n, head_dim, mask == "causal")
        for mask, head_dim, n in dict.fromkeys(combinations)
    ]


# --- Inputs and exact results -------------------------------------------------------------------------------


def draw_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Standard Gaussians. Drawn as (B, N, H, D), the memory order of a projection's output."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    q, k, v, grad_out = (
        torch.randn(size, dtype=dtype, device=device, generator=generator).transpose(1, 2) for _ in range(4)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out)


def draw_sets(shape: Shape, arguments: Namespace) -> list[Inputs]:
    """Two sets that take turns, where memory allows, so that no call finds its own inputs in a cache."""
    device = torch.device(arguments.device)
    draw_set = partial(draw_inputs, shape, getattr(torch, arguments.dtype), device)
    sets = [draw_set(arguments.seed)]
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] > SETS_THAT_MUST_FIT * total_bytes(sets[0]):
        sets.append(draw_set(arguments.seed + 1))
    return sets


def total_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def sample(x: Tensor) -> Tensor:
    """Last sequence, first and last head: (1, at most 2, N, D). A wrong stride shows there first."""
    return x.detach()[-1:, sorted({0, x.shape[1] - 1})]


def exact_attention(inputs: Inputs, causal: bool, chunk_bytes: int = EXACT_BYTES) -> dict[str, Tensor]:
    """Float64 attention and its gradients, a chunk of queries at a time: {out, dq, dk, dv}, as q.

    No tensor over queries and keys takes more than ``chunk_bytes``, or more than one row of queries does.
    """
    q, k, v, grad_out = (x.detach().double() for x in inputs)
    tokens, scale = q.shape[-2], q.shape[-1] ** -0.5
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    chunk = max(chunk_bytes // (8 * q[..., 0].numel()), 1)
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        queries, keys = slice(start, stop), slice(0, stop if causal else tokens)
        q_i, grad_i = q[..., queries, :], grad_out[..., queries, :]
        k_j, v_j = k[..., keys, :], v[..., keys, :]
        s = q_i @ k_j.mT * scale
        if causal:
            later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(start + 1)
            s.masked_fill_(later, -math.inf)
        p = s.softmax(-1)
        out[..., queries, :] = p @ v_j
        dv[..., keys, :] += p.mT @ grad_i
        delta = (grad_i * out[..., queries, :]).sum(-1, keepdim=True)
        ds = p * (grad_i @ v_j.mT - delta)
        dq[..., queries, :] = ds @ k_j * scale
        dk[..., keys, :] += ds.mT @ q_i * scale
    return dict(zip(TENSORS, (out, dq, dk, dv), strict=True))


# --- Measuring one shape ------------------------------------------------------------------------------------


def measure_shape(shape: Shape, implementations: list[Implementation], arguments: Namespace) -> list[Row]:
    """All rows of a shape: accuracy and memory of each implementation, then the times of all."""
    if arguments.device.startswith("cuda"):
        torch.cuda.empty_cache()  # what is free for this shape
    try:
        sets = draw_sets(shape, arguments)
        exact = exact_attention(Inputs(*map(sample, sets[0])), shape.causal)
    except torch.OutOfMemoryError as error:
        sets = []
        trials = [Trial(x, status=REFUSED, reason=explain(error)) for x in implementations]
    else:
        trials = [try_out(x, shape, sets[0], exact) for x in implementations]
    modes = [mode for mode in MODES if mode != "both, graph" or arguments.graphs]
    return [row for mode in modes for row in measure_mode(mode, shape, trials, sets, arguments)]


def try_out(implementation: Implementation, shape: Shape, inputs: Inputs, exact: dict[str, Tensor]) -> Trial:
    """Run once, which also compiles, and compare with ``exact``; then measure memory."""
    trial = Trial(implementation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend = implementation.build(shape)
            errors = measure_errors(implementation, attend, inputs, exact)
            memory = measure_memory(attend, inputs) if implementation.has_backward else None
        except Exception as error:  # whatever way a peer has to say that it cannot
            return replace(trial, status=REFUSED, reason=explain(error, caught))
    trial = replace(trial, attend=attend, errors=errors, extra_memory=memory)
    excess = find_excess(errors, implementation.bound)
    return trial if excess is None else replace(trial, status=FAILED, reason=excess)


def measure_errors(
    implementation: Implementation, attend: Attend, inputs: Inputs, exact: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """(cosine similarity, relative L2) of each result."""
    found = run_both(attend, inputs) if implementation.has_backward else [run_forward(attend, inputs)]
    return {name: compare(sample(x), exact[name]) for name, x in zip(TENSORS, found, strict=False)}


def find_excess(errors: dict[str, tuple[float, float]], bound: float) -> str | None:
    """The results whose relative L2 is not within ``bound``, in words; a NaN is not."""
    excess = [
        f"{TENSOR_TITLES[name]} is off by {error:.3g}"
        for name, (_, error) in errors.items()
        if not error <= bound
    ]
    return f"{', '.join(excess)}; the bound is {bound:g}" if excess else None


def measure_memory(attend: Attend, inputs: Inputs) -> float | None:
    """Peak memory of forward and backward beyond inputs and results, in multiples of q, k and v."""
    if inputs.q.device.type == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run_both(attend, inputs)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - total_bytes(results)
    return extra / total_bytes(inputs[:3])


def measure_mode(
    mode: str, shape: Shape, trials: list[Trial], sets: list[Inputs], arguments: Namespace
) -> list[Row]:
    """A row for each trial: times of those that passed."""
    runners, rows = {}, []
    for trial in trials:
        row = Row(
            trial.implementation.name,
            shape,
            mode,
            trial.status,
            trial.reason,
            errors=trial.errors,
            extra_memory=trial.extra_memory,
        )
        if row.status == PASSED and mode != "forward" and not trial.implementation.has_backward:
            row = replace(row, status=REFUSED, reason="it has no backward")
        elif row.status == PASSED:
            try:
                runners[row.implementation] = [make_runner(mode, trial, inputs) for inputs in sets]
            except Exception as error:  # out of memory, or an operator that no CUDA graph takes
                row = replace(row, status=REFUSED, reason=explain(error))
        rows.append(row)
    times = time_in_turn(runners, arguments.repetitions, arguments.warm_up, torch.device(arguments.device))
    return add_times(rows, times)


def add_times(rows: list[Row], times: dict[str, list[float]]) -> list[Row]:
    """Rows of one shape and mode with what follows from ``times``: by implementation, in ms."""
    medians = {name: float(np.median(values)) for name, values in times.items()}
    timed = []
    for row in rows:
        if row.implementation in times:
            median = medians[row.implementation]
            p10, p90 = np.percentile(times[row.implementation], (10, 90)).tolist()
            row = replace(
                row,
                median_ms=median,
                p10_ms=p10,
                p90_ms=p90,
                tflops=flops(row.shape, row.mode) / (median * 1e-3) / 1e12,
                speedup={name: medians[name] / median for name in BASELINES if name in medians},
            )
        timed.append(row)
    return timed


# --- Running and timing -------------------------------------------------------------------------------------


def run_forward(attend: Attend, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return attend(*inputs[:3])


def run_both(attend: Attend, inputs: Inputs) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    out = attend(*inputs[:3])
    return (out, *torch.autograd.grad(out, inputs[:3], inputs.grad_out))


def make_runner(mode: str, trial: Trial, inputs: Inputs) -> Callable[[], object]:
    """What is timed in ``mode``; it has run once, to the end."""
    if mode == "forward":
        runner = partial(run_forward, trial.attend, inputs)
    elif mode == "backward":
        out = trial.attend(*inputs[:3])
        runner = partial(torch.autograd.grad, out, inputs[:3], inputs.grad_out, retain_graph=True)
    elif mode == "both":
        runner = partial(run_both, trial.attend, inputs)
    else:
        runner = capture(lambda: run_both(trial.attend, fresh(inputs)))
    runner()
    synchronize(inputs.q.device)
    return runner


def fresh(inputs: Inputs) -> Inputs:
    """The same memory as leaves of their own, so that a capture meets nothing of another stream's graphs."""
    return Inputs(*(x.detach().requires_grad_() for x in inputs[:3]), inputs.grad_out)


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """Replay of ``call`` as a CUDA graph."""
    stream = torch.cuda.Stream()  # a capture is never on the default stream, nor should its warm-up be
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_in_turn(
    runners: dict[str, list[Callable[[], object]]], repetitions: int, warm_up: int, device: torch.device
) -> dict[str, list[float]]:
    """Times in ms by name: each repetition calls every runner once, with one of its sets of inputs.

    On a GPU nothing waits in between: the host runs ahead, as it does in training, and its work counts only
    where the GPU runs out of its own.
    """
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runners}
    for repetition in range(-warm_up, repetitions):
        for name, calls in runners.items():
            begin = mark(device)
            calls[repetition % len(calls)]()
            end = mark(device)
            if repetition >= 0:
                marks[name].append((begin, end))
    synchronize(device)
    return {name: [milliseconds(*pair) for pair in pairs] for name, pairs in marks.items()}


# --- What it ran on -----------------------------------------------------------------------------------------


def describe_results(argv: list[str] | None, arguments: Namespace) -> dict[str, Any]:
    """What the numbers are, and what is needed to measure them again."""
    return {
        "figure": "SageBwd (arXiv 2603.02170), Figures 2 and 3",
        "values": "ms, TFLOP/s; errors: [cosine similarity, relative L2] against float64 attention; speedup: "
        "the other's median over this one's; extra_memory: multiples of the bytes of Q, K and V",
        **describe_run(PROGRAM, argv, arguments, ("flash-attn", "sageattention")),
        "configs": {
            title: {f"D {head_dim}": settings_of(config, head_dim) for head_dim in arguments.head_dims}
            for title, config, _ in (CONFIGS[name] for name in arguments.configs)
        },
    }


if __name__ == "__main__":
    main()
