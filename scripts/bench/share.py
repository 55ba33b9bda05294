"""How fast is SageBwd on your GPU? Measure it in ten minutes at most, and send us the file.

    python -m scripts.bench.share

Compares results with float64 attention first. What is wrong is reported, and not timed. Then times forward
and backward of SageBwd and of everything else that is installed, the most common shapes first, until the time
is over. If something else is faster on this GPU, the end says what to use instead.

It also runs those kernels of SageBwd that are not the first choice on this GPU: the choice rests on
measurements of an H200, and yours may be the first GPU of its kind. Should something hang, end the command:
what was measured is kept. --kernels without a name leaves the other kernels out.

The file holds the GPU, its limits and clocks, versions of driver and packages, settings, times and errors. It
holds no names of users, machines or folders. To send it: add it to results/gpus/ in a pull request, or
attach it to an issue. A result that is slower than the alternatives is as welcome as one that is faster.
"""

from __future__ import annotations

import re
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common.files import write_json
from common.redaction import redact
from common.terminal import command_parser, positive_int
from sagebwd import dispatch
from scripts.bench import attention
from scripts.bench.measuring import Monitor, describe_limits, describe_run, installed
from scripts.bench.registry import CONFIGS, PEERS, Implementation, Shape, find_implementations
from scripts.bench.submissions import SUBMITTED, fault_of
from scripts.bench.tables import FAILED, Row, draw, not_measured, overview, verdicts
from scripts.bench.timing import draw_inputs, exact_result, measure_shape, try_out
from scripts.output import SCRATCH, finite, with_ending, write_markdown

PROGRAM = "python -m scripts.bench.share"
EXAMPLES = f"""examples:
  only what is common, in three minutes
      {PROGRAM} --lengths 4096 --head-dims 128 --minutes 3
  only the kernels that calls run by default
      {PROGRAM} --kernels
  try the command without a GPU: times are those of the plain PyTorch reference
      {PROGRAM} --device cpu --lengths 64 --tokens 128 --width 128 --repetitions 3
"""
#: The most common first.
LENGTHS = [4096, 16384, 1024]
#: Tokens of the inputs that are compared with float64 before anything is timed: no multiple of any tile.
CHECKED_TOKENS = 333
#: Two or more folders at the beginning of a path.
FOLDERS = re.compile(r"(?<![\w/\\])(?:[A-Za-z]:)?(?:[/\\][^/\\\s'\":]+)+[/\\]")


def main(argv: list[str] | None = None) -> None:
    """Check, measure, tell, and write the files."""
    started = time.monotonic()
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    result = describe(argv, arguments)
    out = arguments.out or SCRATCH / "share" / file_name(result["hardware"]["name"])
    found, absent = find_implementations(arguments)
    result |= {"absent": absent}
    print("comparing results with float64 attention …")
    right, wrong = leave_out_wrong(found, arguments)
    for name, reason in wrong.items():
        print(f"  {name}: {reason}")
    print(f"{len(right)} of {len(found)} are right")
    with Monitor(device) as monitor:
        rows = measure(right, wrong, arguments, started, result, out)
    result |= {"state": monitor.medians()}
    write(out, result, rows)
    tell(rows, result, out)


def leave_out_wrong(
    implementations: list[Implementation], arguments: Namespace
) -> tuple[list[Implementation], dict[str, str]]:
    """Those that are right at every head size and mask, and {name: what is wrong} of the others.

    One that refuses these inputs stays: its rows will say why.
    """
    shapes = {
        Shape(1, 2, CHECKED_TOKENS, shape.head_dim, shape.causal, shape.left, shape.right)
        for shape in attention.shapes_of(arguments)
    }
    wrong: dict[str, str] = {}
    for shape in sorted(shapes, key=str):
        dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
        inputs = draw_inputs(shape, dtype, device, arguments.seed)
        exact = exact_result(shape, inputs)
        for implementation in implementations:
            row, _ = try_out(implementation, shape, inputs, exact)
            if row.status == FAILED:
                wrong.setdefault(implementation.name, f"{FAILED}: {row.reason} at {shape}")
    return [x for x in implementations if x.name not in wrong], wrong


def measure(
    right: list[Implementation],
    wrong: dict[str, str],
    arguments: Namespace,
    started: float,
    result: dict[str, Any],
    out: Path,
) -> list[Row]:
    """Time every shape for which there is time. The files are written after each."""
    rows: list[Row] = []
    shapes = sorted(attention.shapes_of(arguments), key=lambda shape: arguments.lengths.index(shape.tokens))
    longest = 0.0
    for done, shape in enumerate(shapes, start=1):
        before = time.monotonic()
        if rows and before - started + longest > 60 * arguments.minutes:
            print(f"the {arguments.minutes} minutes are over: {len(shapes) - done + 1} shapes are left out")
            break
        print(f"measuring {shape} …")
        rows += measure_shape(shape, right, arguments)
        rows += [Row(name, shape, mode, FAILED, wrong[name]) for name in wrong for mode in arguments.modes]
        longest = max(longest, time.monotonic() - before)
        result |= {"shapes": f"{done} of {len(shapes)}"}
        write(out, result, rows)
    return rows


def tell(rows: list[Row], result: dict[str, Any], out: Path) -> None:
    """Print the tables and what follows from them, draw the picture, say how to send the file."""
    lines = [*overview(rows), *not_measured(result["absent"], rows), *verdicts(rows)]
    print("\n".join(["", *lines]))
    draw(rows, with_ending(out, ".png"), result)
    file = with_ending(out, ".json")
    print(f"\nwritten: {file}, {with_ending(out, '.md')}, {with_ending(out, '.png')}")
    if problem := fault_of(to_share(result, rows)):
        print(f"it cannot be shared: {problem}")
    else:
        print(f"to share it, add {file} to {SUBMITTED}/ in a pull request, or attach it to an issue")


def write(out: Path, result: dict[str, Any], rows: list[Row]) -> None:
    """OUT.json and OUT.md."""
    lines = [f"# SageBwd on {result['hardware']['name']}", "", *overview(rows), *verdicts(rows), ""]
    write_markdown(out, "\n".join([*lines, *not_measured(result["absent"], rows)]))
    write_json(with_ending(out, ".json"), to_share(result, rows))


def to_share(result: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """What the file holds: nothing that JSON does not have, no secrets and no folders."""
    return without_folders(redact(finite(result | {"rows": [asdict(row) for row in rows]})))


def without_folders(value: Any) -> Any:
    """The same with … for folders, which may be named after a person; messages of errors hold some."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return FOLDERS.sub("…/", value) if isinstance(value, str) else value


# --- Arguments, and the record of the run -------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments; those of scripts.bench.attention with other defaults, and fewer. May end the command."""
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    parser.add_argument("--minutes", type=positive_int, default=10, help="at most (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help=f"default {SCRATCH}/share/NAME-OF-THE-GPU")
    attention.add_shape_options(parser.add_argument, LENGTHS)
    attention.add_timing_options(parser.add_argument)
    names = {"nargs": "*", "metavar": "NAME", "choices": dispatch.KERNEL_SETS}
    text = "also measure these kernels of SageBwd (default: ampere, triton, unless they are the first choice)"
    parser.add_argument("--kernels", **names, help=text)
    text = f"leave out: {', '.join(PEERS)} (default: flex, which compiles for minutes)"
    parser.add_argument("--without", nargs="*", metavar="NAME", choices=PEERS, default=["flex"], help=text)
    parser.set_defaults(repetitions=20, warm_up=3, configs=["default", "paper"])
    arguments = parser.parse_args(argv)
    attention.check(arguments, parser)
    if arguments.kernels is None:
        arguments.kernels = kernels_to_try(torch.device(arguments.device), parser)
    return arguments


def kernels_to_try(device: torch.device, parser: ArgumentParser) -> list[str]:
    """Kernel sets that are not chosen but can run, the reference aside. Ends the command if none can."""
    if device.type != "cuda":
        return []
    gpu = dispatch.gpu_of(device.index or 0)
    call = dispatch.Call("cuda", gpu, torch.bfloat16, 64, CONFIGS["default"][1])
    chosen = dispatch.explain_call(call).kernels
    others = [x for x in ("ampere", "triton") if x != chosen and not dispatch.obstacles(x, call)]
    if chosen == "none" and not others:
        parser.error(dispatch.describe(dispatch.obstacles("triton", call)))
    return others


def describe(argv: list[str] | None, arguments: Namespace) -> dict[str, Any]:
    """Everything about the run but its rows."""
    result = describe_run(PROGRAM, argv, arguments, attention.PACKAGES)
    result["command"] = without_out(result["command"])
    result["hardware"] |= describe_limits(torch.device(arguments.device))
    return {"version": installed("sagebwd"), **result}


def without_out(command: str) -> str:
    """The command without --out, which may name a user."""
    return re.sub(r" --out(=| )('[^']*'|\S+)", "", command)


def file_name(gpu: str) -> str:
    """A name for a file of this GPU, of letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


if __name__ == "__main__":
    main()
