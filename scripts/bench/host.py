"""The host's time of a forward and backward: how long Python and the driver take to enqueue one, by part.

    python -m scripts.bench.host --help

On a GPU SageBwd is measured beside PyTorch's cuDNN and FlashAttention-2, in turn in one process: several
calls are enqueued without waiting, few enough that the GPU's queue does not fill. Without a GPU the Hopper
kernels' host code runs with a driver that returns at once.

The first call compiles what $SAGEBWD_CACHE_DIR does not hold: with an empty folder, all its kernels.

Parts are of the first preset at the first shape, and exclude each other. They are measured by themselves,
with clocks around the functions of each part, and scaled to the whole; the engine's is what is left.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from threading import local
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.files import write_json
from common.terminal import available_device, command_parser, positive_int
from sagebwd import attention, dispatch, sage_attention
from sagebwd.config import PRESETS
from sagebwd.integrations.sdpa import patch_sdpa
from sagebwd.kernels.cuda import launch, plan
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper import tensor_map
from scripts.bench.measuring import describe_run
from scripts.output import SCRATCH, align, with_ending

PROGRAM = "python -m scripts.bench.host"
PASSES = ("forward", "backward", "both")
SHAPES = ((2, 16, 128, 64), (16, 16, 1024, 128), (1, 24, 512, 128))
#: Without a GPU, where memory of the host is allocated, which takes longer if it is large.
SMALL_SHAPES = ((1, 2, 128, 64), (1, 2, 128, 128))
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
#: Functions by part. Time in a function of another part that they call counts there.
PARTS = {
    "checks and the choice of kernels": (
        "sagebwd.attention._signature",
        "sagebwd.attention.check_backward_mode",
        "sagebwd.attention.check_documents",
    ),
    "autograd's forward, and what is saved": (
        "sagebwd.kernels.ops.attend",
        "sagebwd.kernels.ops._save_for_backward",
        "sagebwd.kernels.ops._forward_with_lse",
    ),
    "looking up the plan": (
        "sagebwd.kernels.cuda.plan.prepared",
        "sagebwd.kernels.cuda.plan.KeptResult.gradients",
    ),
    "allocations": ("torch.empty", "torch.empty_strided"),
    "addresses": ("sagebwd.kernels.cuda.plan.Plan.run",),
    "launches": ("sagebwd.kernels.cuda.launch.Kernel.start",),
}
REST = "autograd's engine, and what reads what was saved"


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables and write them."""
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    with nullcontext() if device.type == "cuda" else stand_in_driver():
        inputs = draw(arguments.shapes[0], device)
        call = sagebwd_call(arguments.presets[0])
        first = dict(zip(("forward", "backward"), both(call, inputs), strict=True))
        rows = [row for shape in arguments.shapes for row in measure(shape, device, arguments)]
        parts = measure_parts(lambda: both(call, inputs), arguments, device)
    result = describe_run(PROGRAM, argv, arguments, ()) | {"values": "µs"}
    result |= {"first call": first, "rows": rows, "parts": parts}
    header = ["batch, heads, tokens, head size", "attention", "forward, µs", "backward, µs", "both, µs"]
    cells = [
        [", ".join(map(str, row["shape"])), row["name"], *(f"{row[x]:.0f}" for x in PASSES)] for row in rows
    ]
    of_parts = [[name, f"{found['calls']:.0f}", f"{found['us']:.1f}"] for name, found in parts.items()]
    print("\n".join([*align(header, cells), "", *align(["part", "calls", "µs"], of_parts)]))
    print("\nfirst call, s:", *(f"{name} {us / 1e6:.2f}" for name, us in first.items()))
    path = with_ending(arguments.out, ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    print(f"written: {path}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    text = "cuda, or cpu for a driver that returns at once (default: a GPU if there is one)"
    add("--device", type=available_device, default="", help=text)
    text = "batch,heads,tokens,head size (default: three short ones, tiny ones without a GPU)"
    add("--shapes", nargs="+", type=shape_of, metavar="B,H,N,D", help=text)
    text = f"of SageBwd: {', '.join(PRESETS)} (default: default)"
    add("--presets", nargs="+", choices=PRESETS, default=["default"], metavar="NAME", help=text)
    add("--calls", type=positive_int, default=20, help="enqueued without waiting (default %(default)s)")
    add("--rounds", type=positive_int, default=30, help="of each, in turn (default %(default)s)")
    out = SCRATCH / "host"
    add("--out", type=Path, metavar="PREFIX", default=out, help=f"write PREFIX.json (default {out})")
    arguments = parser.parse_args(argv)
    is_gpu = arguments.device.startswith("cuda")
    arguments.shapes = arguments.shapes or [*(SHAPES if is_gpu else SMALL_SHAPES)]
    return arguments


def shape_of(text: str) -> tuple[int, ...]:
    """Four sizes. Raises ArgumentTypeError, which argparse prints."""
    sizes = text.split(",")
    if len(sizes) != 4 or not all(x.isdecimal() and int(x) for x in sizes):
        raise ArgumentTypeError(f"{text!r}; give batch,heads,tokens,head size, such as 2,16,128,64")
    return tuple(map(int, sizes))


# --- What is measured --------------------------------------------------------------------------------------


def draw(shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, bf16, stored token by token."""
    b, h, n, d = shape
    made = [torch.randn(b, n, h, d, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def sagebwd_call(preset: str) -> Callable[..., torch.Tensor]:
    config = PRESETS[preset]
    return lambda *qkv: sage_attention(*qkv, is_causal=True, config=config)


def patched_call(*qkv: torch.Tensor) -> torch.Tensor:
    """By the name under which it was patched."""
    return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)


def both(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Microseconds until a forward was enqueued, and from there until its backward was."""
    *qkv, grad_out = inputs
    begin = time.perf_counter()
    out = call(*qkv)
    middle = time.perf_counter()
    gradients = torch.autograd.grad(out, qkv, grad_out)
    end = time.perf_counter()
    del gradients
    return 1e6 * (middle - begin), 1e6 * (end - middle)


def measure(shape: tuple[int, ...], device: torch.device, arguments: Namespace) -> list[dict[str, Any]]:
    """Medians of SageBwd by preset, of the patched operator of torch and, on a GPU, of its peers."""
    inputs = draw(shape, device)
    ways = {f"SageBwd {name}": (sagebwd_call(name), nullcontext) for name in arguments.presets}
    ways["SageBwd for sdpa"] = (patched_call, patch_sdpa)
    if device.type == "cuda":
        call = lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True)  # noqa: E731
        ways |= {name: (call, lambda backend=x: sdpa_kernel(backend)) for name, x in PEERS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repetition in range(arguments.rounds + 3):
        for name, (call, context) in ways.items():
            wait(device)
            with context():
                found = [both(call, inputs) for _ in range(arguments.calls)]
            times[name] += found if repetition >= 3 else []
    wait(device)
    rows = []
    for name, pairs in times.items():
        forward, backward = (statistics.median(x) for x in zip(*pairs, strict=True))
        whole = statistics.median(map(sum, pairs))
        rows.append(
            {"shape": shape, "name": name, **dict(zip(PASSES, (forward, backward, whole), strict=True))}
        )
    return rows


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def stand_in_driver() -> Iterator[None]:
    """CPU tensors run the Hopper kernels' host code; nothing is computed."""
    driver = launch.Driver(lambda *_: (0,), lambda device: 0, lambda device: None)

    def start_loading(sources: Any, source: str, name: str, *_: Any, **__: Any) -> launch.Loader:
        return lambda: launch.Kernel(name, None, 0, 0, driver)

    with ExitStack() as stack:
        for module, name, value in (
            (launch, "start_loading", start_loading),
            (attention, "_calls", {}),
            (dispatch, "_choose_once", lambda *_: "hopper"),
            (hopper, "_multiprocessors", lambda device: 132),
            (tensor_map, "encode", lambda *_: bytes(128)),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


# --- Parts -------------------------------------------------------------------------------------------------


class Clocks(local):
    """The time in functions of each part, without that in functions that they call; of one thread."""

    def __init__(self) -> None:
        self.inner = [0.0]


def measure_parts(run: Callable[[], Any], arguments: Namespace, device: torch.device) -> dict[str, Any]:
    """Microseconds and calls of each part of :data:`PARTS`, for each ``run``."""
    count = arguments.calls * arguments.rounds
    whole = statistics.median(sum(run()) for _ in range(count))
    wait(device)
    clocks, spent, calls = Clocks(), Counter[str](), Counter[str]()

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            clocks.inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                passed = time.perf_counter() - begin
                spent[part] += 1e6 * (passed - clocks.inner.pop())
                clocks.inner[-1] += passed
                calls[part] += 1

        return call

    with ExitStack() as stack:
        for part, names in PARTS.items():
            for name in names:
                stack.enter_context(patch(name, timed(part, resolve_name(name))))
        plan.plan_of.cache_clear()  # they hold functions without clocks
        run()
        spent.clear()
        calls.clear()
        with_clocks = 0.0
        for i in range(count):
            with_clocks += sum(run()) / count
            if i % arguments.calls == 0:
                wait(device)
    plan.plan_of.cache_clear()
    scale = whole / with_clocks
    parts = {x: {"us": scale * spent[x] / count, "calls": calls[x] / count} for x in PARTS}
    parts[REST] = {"us": whole - sum(x["us"] for x in parts.values()), "calls": 1}
    return parts | {"whole": {"us": whole, "calls": 1}}


if __name__ == "__main__":
    main()
