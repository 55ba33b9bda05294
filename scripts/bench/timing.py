"""Accuracy, memory and time of attention at one shape. What is wrong is not timed."""

from __future__ import annotations

import hashlib
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import AttentionResult, exact_attention
from scripts.bench.registry import Attend, Implementation, Shape, explain
from scripts.bench.tables import BASELINES, FAILED, MODES, PASSED, REFUSED, TENSORS, Row

#: A second set of inputs is drawn if this many sets fit into memory: results and graphs need room, too.
SETS_THAT_MUST_FIT = 40


class Inputs(NamedTuple):
    """Each (B, H, N, D), stored as (B, N, H, D); q, k and v require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


def measure_shape(shape: Shape, implementations: list[Implementation], arguments: Namespace) -> list[Row]:
    """All rows of a shape: errors and memory of each implementation, then times in each mode."""
    if arguments.device.startswith("cuda"):
        torch.cuda.empty_cache()  # so that mem_get_info counts what other shapes no longer use
    try:
        sets = draw_sets(shape, arguments)
        exact = exact_result(shape, sets[0])
    except torch.OutOfMemoryError as error:
        sets = []
        trials = [(Row(x.name, shape, "both", REFUSED, explain(error)), None) for x in implementations]
    else:
        trials = [try_out(x, shape, sets[0], exact) for x in implementations]
    return [row for mode in arguments.modes for row in measure_mode(mode, trials, sets, arguments)]


# --- Inputs and exact results -------------------------------------------------------------------------------


def draw_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Standard Gaussian inputs, drawn as (B, N, H, D)."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    q, k, v, grad_out = (
        torch.randn(size, dtype=dtype, device=device, generator=generator).transpose(1, 2) for _ in range(4)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out)


def draw_sets(shape: Shape, arguments: Namespace) -> list[Inputs]:
    """Two sets to alternate between, if memory allows, so that no call finds its own inputs cached."""
    device = torch.device(arguments.device)
    draw_set = partial(draw_inputs, shape, getattr(torch, arguments.dtype), device)
    sets = [draw_set(arguments.seed)]
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] > SETS_THAT_MUST_FIT * total_bytes(sets[0]):
        sets.append(draw_set(arguments.seed + 1))
    return sets


def total_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def exact_result(shape: Shape, inputs: Inputs) -> AttentionResult:
    """Float64 attention of the heads of :func:`sample`."""
    window = (shape.left, shape.right)
    return exact_attention(*map(sample, inputs), is_causal=shape.causal, window_size=window)


def sample(x: Tensor) -> Tensor:
    """Last sequence, first and last head, (1, ≤ 2, N, D): where a wrong stride shows."""
    return x.detach()[-1:, sorted({0, x.shape[1] - 1})]


# --- Accuracy and memory ------------------------------------------------------------------------------------


def try_out(
    implementation: Implementation, shape: Shape, inputs: Inputs, exact: AttentionResult
) -> tuple[Row, Attend | None]:
    """Run once, which also compiles; compare with ``exact``; measure memory.

    Returns the row of forward and backward, without times, and what to time, None if it refused the shape.
    """
    row = Row(implementation.name, shape, "both")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend = implementation.build(shape, inputs.q.device)
            found = run_both(attend, inputs)
            row.errors, row.digest = errors_of(found, exact), digest_of(found)
            del found
            row.extra_memory = measure_memory(attend, inputs)
        except Exception as error:  # a peer may refuse a shape with any exception
            return Row(implementation.name, shape, "both", REFUSED, explain(error, caught)), None
    row.kernels = implementation.kernels_for(inputs.q)
    row.reason = find_excess(row.errors, implementation.bound)
    row.status = FAILED if row.reason else PASSED
    return row, attend


def errors_of(found: tuple[Tensor, ...], exact: AttentionResult) -> dict[str, tuple[float, float]]:
    """{tensor: (cosine similarity, relative L2)} of the sampled heads."""
    pairs = {name: (sample(x), getattr(exact, name)) for name, x in zip(TENSORS, found, strict=True)}
    return {name: (cosine_similarity(*pair), relative_l2(*pair)) for name, pair in pairs.items()}


def find_excess(errors: dict[str, tuple[float, float]], bound: float) -> str | None:
    """A message about the tensors whose relative L2 is above ``bound`` or NaN; None if there are none."""
    excess = [
        f"{TENSORS[name]} has relative L2 error {error:.3g}"
        for name, (_, error) in errors.items()
        if not error <= bound
    ]
    return f"{', '.join(excess)}; allowed: {bound:g}" if excess else None


def digest_of(tensors: tuple[Tensor, ...]) -> str:
    """A hash of all bits."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(torch.uint8).cpu().numpy())
    return found.hexdigest()[:16]


def measure_memory(attend: Attend, inputs: Inputs) -> float | None:
    """Peak memory of forward and backward beyond inputs and results, divided by that of q, k and v."""
    if inputs.q.device.type == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run_both(attend, inputs)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - total_bytes(results)
    return extra / total_bytes(inputs[:3])


# --- Modes --------------------------------------------------------------------------------------------------


def measure_mode(
    mode: str, trials: list[tuple[Row, Attend | None]], sets: list[Inputs], arguments: Namespace
) -> list[Row]:
    """A row for each trial, with times if it passed."""
    runners, rows = {}, []
    for tried, attend in trials:
        row = replace(tried, mode=mode)
        if row.status == PASSED:
            try:
                runners[row.implementation] = [make_runner(mode, attend, inputs) for inputs in sets]
            except Exception as error:  # out of memory, or an operator that cannot be captured
                row = replace(row, status=REFUSED, reason=explain(error))
        rows.append(row)
    device = torch.device(arguments.device)
    times = time_in_turn(runners, arguments.repetitions, arguments.warm_up, device)
    hosts = {name: host_time(calls[0], device) for name, calls in runners.items()}
    return add_times(rows, times, hosts)


def add_times(rows: list[Row], times: dict[str, list[float]], hosts: dict[str, float | None]) -> list[Row]:
    """Complete rows of one shape and mode by ``times`` and those of the host, {implementation: ms}."""
    medians = {name: float(np.median(values)) for name, values in times.items()}
    for row in (row for row in rows if row.implementation in times):
        row.median_ms = median = medians[row.implementation]
        row.p10_ms, row.p90_ms = np.percentile(times[row.implementation], (10, 90)).tolist()
        row.host_ms = hosts.get(row.implementation)
        row.tflops = row.shape.flops * MODES[row.mode].flops / (median * 1e-3) / 1e12
        row.speedup = {name: medians[name] / median for name in BASELINES if name in medians}
    return rows


def run_forward(attend: Attend, inputs: Inputs) -> tuple[Tensor, ...]:
    """(out,)."""
    with torch.no_grad():
        return (attend(*inputs[:3]),)


def run_both(attend: Attend, inputs: Inputs) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    out = attend(*inputs[:3])
    return (out, *torch.autograd.grad(out, inputs[:3], inputs.grad_out))


def make_runner(mode: str, attend: Attend, inputs: Inputs) -> Callable[[], object]:
    """The call that is timed in ``mode``; it has already run once."""
    if mode == "forward":
        runner = partial(run_forward, attend, inputs)
    elif mode == "backward":
        out = attend(*inputs[:3])
        runner = partial(torch.autograd.grad, out, inputs[:3], inputs.grad_out, retain_graph=True)
    elif mode == "both":
        runner = partial(run_both, attend, inputs)
    else:
        runner = capture(lambda: run_both(attend, fresh(inputs)))
    runner()
    synchronize(inputs.q.device)
    return runner


def fresh(inputs: Inputs) -> Inputs:
    """The same memory as new leaves, so that a capture meets no autograd graph of another stream."""
    return Inputs(*(x.detach().requires_grad_() for x in inputs[:3]), inputs.grad_out)


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """``call`` captured as a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()  # capturing needs a side stream, and so does its warm-up
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# --- Time ---------------------------------------------------------------------------------------------------


def time_in_turn(
    runners: dict[str, list[Callable[[], object]]], repetitions: int, warm_up: int, device: torch.device
) -> dict[str, list[float]]:
    """{name: [ms]}. Each repetition calls every runner once, alternating between its sets of inputs.

    There is no synchronization in between: as in training, the host runs ahead, and its time counts only
    when the GPU runs out of work.
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


def host_time(call: Callable[[], object], device: torch.device, repetitions: int = 5) -> float | None:
    """Median ms until ``call`` returns, the GPU being idle: no full queue delays it. None on a CPU."""
    if device.type == "cpu":
        return None
    times = []
    for _ in range(repetitions):
        synchronize(device)
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    synchronize(device)
    return float(np.median(times))


def mark(device: torch.device) -> torch.cuda.Event | float:
    """A point in time: on a GPU when the work queued so far is done, on a CPU now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Time between two marks; on a GPU, synchronize first."""
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
