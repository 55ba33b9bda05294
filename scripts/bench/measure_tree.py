"""Times attention of whichever sagebwd is found first; :mod:`scripts.bench.changes` runs it in two checkouts.

It reads a list of cases (JSON) from standard input and writes as many results to standard output. It imports
nothing of the repository but sagebwd, so that it runs in checkouts of other commits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from sagebwd import SageConfig, sage_attention

WARM_UP = 3


def main() -> None:
    results = []
    for case in json.load(sys.stdin):
        try:
            results.append(measure(case))
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds forward and backward, a digest of O, dQ, dK, dV, and whether the backward repeats it.

    Args:
        case: batch, heads, length, head_dim, is_causal, dtype, device, kernels; config (arguments of
            SageConfig); repetitions, 0 only compiles.
    """
    generator = torch.Generator(case["device"]).manual_seed(0)
    shape = (case["batch"], case["heads"], case["length"], case["head_dim"])
    options = {"generator": generator, "device": case["device"], "dtype": getattr(torch, case["dtype"])}
    *leaves, grad_out = (torch.randn(shape, **options) for _ in range(4))
    for x in leaves:
        x.requires_grad_()
    settings = {"is_causal": case["is_causal"], "kernels": case["kernels"]}

    def forward() -> torch.Tensor:
        return sage_attention(*leaves, **settings, config=SageConfig(**case["config"]))

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    out = forward()
    first = backward()
    if not case["repetitions"]:
        return {}
    times = {
        name: median(time_in_ms(call, case["repetitions"], case["device"]))
        for name, call in (("forward", forward), ("backward", backward))
    }
    repeats = all(map(torch.equal, first, backward()))
    return {**times, "digest": digest((out.detach(), *first)), "repeats": repeats}


def time_in_ms(call: Callable[[], object], repetitions: int, device: str) -> list[float]:
    """Milliseconds of each call; on a GPU the host runs ahead of it."""
    for _ in range(WARM_UP):
        call()
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(repetitions):
            call()
            marks.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in pairwise(marks)]
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host queues calls
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def digest(tensors: tuple[torch.Tensor, ...]) -> str:
    """The same for the same bits."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
