"""Speed and accuracy of attention on one GPU: SageBwd and its alternatives (the paper's Figures 2 and 3).

    python -m scripts.bench.attention --help

Measures forward, backward and both, over sequence lengths, head sizes and masks, for SageBwd and everything
else that is installed: FlashAttention-2 and cuDNN (PyTorch's scaled_dot_product_attention), FlexAttention,
and the packages flash_attn (2 and 3) and flash-attn-4. An implementation that is missing, or refuses a
shape, is listed with its reason. scripts/bench/registry.py names them all.

With --graphs and three settings of SageBwd this takes about 15 minutes of one H200.

Modes:
  both         forward with autograd, then backward
  both, graph  the same, replayed as a CUDA graph: no host time (only with --graphs)
  forward      the call under torch.no_grad()
  backward     the backward alone, repeated on one autograd graph

What a time covers: 16-bit Q, K, V (and dO) in memory to 16-bit O (and dQ, dK, dV) in memory, including
quantization and smoothing. Implementations take turns within each repetition, so a drifting clock affects
all alike. Tables have the median and the 10th and 90th percentile.

TFLOP/s: 4·B·H·N²·D for the forward, half of it if causal, with a window what it shows of it; 2.5 times that
for the backward, 3.5 for both.

Before timing, results are compared with float64 attention (first and last head of the last sequence). An
implementation whose error is too large is reported as such, without a speed.

With --base, SageBwd of another checkout and of this one take turns, each in a process of its own. The table
has both times, and says whether results have the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.files import write_json
from common.terminal import available_device, command_parser, positive_int
from sagebwd.dispatch import KERNEL_SETS
from scripts.bench.measuring import describe_config, describe_run, origin_of, read_line
from scripts.bench.registry import (
    CONFIGS,
    PEERS,
    Implementation,
    Shape,
    find_implementations,
)
from scripts.bench.tables import (
    GRAPH,
    MODES,
    Row,
    draw,
    look_of,
    not_measured,
    overview,
    rows_of,
    to_markdown,
)
from scripts.bench.timing import measure_shape
from scripts.output import SCRATCH, align, finite, number, with_ending, write_markdown, write_tables

PROGRAM = "python -m scripts.bench.attention"
ROOT = Path(__file__).parents[2]
LENGTHS = tuple(1024 << power for power in range(6))
PACKAGES = ("flash-attn", "flash-attn-4")

EXAMPLES = """
examples:
  everything
      python -m scripts.bench.attention --graphs
  the paper's model: head size 64, causal, context 4096
      python -m scripts.bench.attention --head-dims 64 --masks causal --lengths 4096
  presets of SageBwd compared, without the slow compilation of FlexAttention
      python -m scripts.bench.attention --configs default consistent paper --without flex
  the kernels for GPUs since Ampere on any of them, compared with FlashAttention-2
      python -m scripts.bench.attention --kernels ampere --configs default consistent --without flex cudnn
  a sliding window: each query sees its own key and the 1024 before it; compared with no window
      python -m scripts.bench.attention --masks causal 1024,0 --lengths 4096 16384
  is a change to the kernels faster, and are the bits the same?
      git worktree add ../before HEAD~1
      python -m scripts.bench.attention --base ../before --lengths 4096 --configs default int8-scores
  try the command without a GPU: times are those of the plain PyTorch reference
      python -m scripts.bench.attention --device cpu --lengths 64 128 --tokens 256 --width 128 --repetitions 3

files, with --out PREFIX:
  PREFIX.json   rows with times, errors and memory; settings, hardware, versions
  PREFIX.md     tables, one for each mode, mask and head size
  PREFIX.png    forward + backward, TFLOP/s over N, as in Figures 2 and 3 (not with --base)
The first two are written after every shape, so an interrupted run keeps what it measured.
"""


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure every shape, print an overview and write the files; with --base a comparison."""
    arguments = parse_arguments(argv)
    if arguments.base:
        compare_checkouts(argv, arguments)
        return
    implementations, absent = find_implementations(arguments)
    result = describe_results(argv, arguments) | {"absent": absent}
    rows, total = [], len(shapes_of(arguments))
    for done, new in enumerate(measure_shapes(implementations, arguments), start=1):
        rows += new
        result |= {"shapes": f"{done} of {total}"}
        write_tables(arguments.out, result, rows, to_markdown(result, rows))
    print("\n".join(["", *overview(rows), *not_measured(absent, rows)]))
    draw(rows, with_ending(arguments.out, ".png"), result)
    print(f"written: {arguments.out}.json, {arguments.out}.md, {arguments.out}.png")


def measure_shapes(implementations: list[Implementation], arguments: Namespace) -> Iterator[list[Row]]:
    """The rows of each shape, as soon as they are there."""
    device = torch.device(arguments.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # packages without a device argument launch on the current one
    for shape in (progress := tqdm(shapes_of(arguments), desc="shapes", disable=None)):
        progress.set_postfix_str(str(shape))
        yield measure_shape(shape, implementations, arguments)


def describe_results(argv: list[str] | None, arguments: Namespace) -> dict[str, Any]:
    """The meaning of the values, and how to repeat the measurement."""
    return {
        "figure": "SageBwd (arXiv 2603.02170), Figures 2 and 3",
        "values": "ms, TFLOP/s; errors: [cosine similarity, relative L2] against float64 attention; speedup: "
        "median of the baseline / this median; extra_memory: bytes / bytes of Q, K and V",
        **describe_run(PROGRAM, argv, arguments, PACKAGES),
        "configs": {
            title: {f"D {head_dim}": describe_config(config, head_dim) for head_dim in arguments.head_dims}
            for title, config, _ in (CONFIGS[name] for name in arguments.configs)
        },
    }


# --- Arguments ----------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if they cannot work here."""
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    add_shape_options(parser.add_argument_group("shapes").add_argument)
    add_implementation_options(parser.add_argument_group("implementations").add_argument)
    add_timing_options(parser.add_argument_group("timing").add_argument)
    add = parser.add_argument_group("two checkouts").add_argument
    add("--base", type=Path, metavar="FOLDER", help="compare with SageBwd of this checkout; without peers")
    add("--rounds", type=positive_int, default=2, help="processes for each (default %(default)s)")
    out = SCRATCH / "attention"
    text = f"write PREFIX.json, .md and .png (default {out})"
    parser.add_argument("--out", type=Path, metavar="PREFIX", default=out, help=text)
    arguments = parser.parse_args(argv)
    if arguments.base and not (arguments.base / "sagebwd").is_dir():
        parser.error(
            f"--base {arguments.base} holds no sagebwd/; make one: git worktree add ../before HEAD~1"
        )
    check(arguments, parser)
    return arguments


def add_shape_options(add: Callable[..., Any], lengths: Sequence[int] = LENGTHS) -> None:
    """Options of :func:`shapes_of`; ``lengths`` are the default."""
    sizes = {"type": positive_int, "nargs": "+"}
    text = f"default {' '.join(map(str, lengths))}"
    add("--lengths", **sizes, default=[*lengths], metavar="N", help=text)
    add("--head-dims", **sizes, default=[64, 128], metavar="D", help="default 64 128")
    masks = (
        "causal, full, or a sliding window LEFT,RIGHT, where 1024, has no right limit (default causal full)"
    )
    add("--masks", nargs="+", type=mask_of, default=["causal", "full"], metavar="MASK", help=masks)
    add("--tokens", type=positive_int, default=16384, help="B·N; B is 1 if N is larger (default %(default)s)")
    add("--width", type=positive_int, default=2048, help="H·D (default %(default)s)")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default %(default)s")
    add("--seed", type=int, default=0, help="seed of the random inputs (default %(default)s)")


def add_implementation_options(add: Callable[..., Any]) -> None:
    several = {"nargs": "+", "metavar": "NAME"}
    settings = f"settings of SageBwd: {', '.join(CONFIGS)} (default: default)"
    add("--configs", **several, choices=CONFIGS, default=["default"], help=settings)
    forced = "also measure SageBwd with these kernels, by name, whatever would be chosen: "
    add("--kernels", **several, choices=KERNEL_SETS, default=[], help=forced + ", ".join(KERNEL_SETS))
    add("--without", **several, choices=PEERS, default=[], help=f"leave out: {', '.join(PEERS)}")


def add_timing_options(add: Callable[..., Any]) -> None:
    count = {"type": positive_int, "metavar": "TIMES"}
    modes = [mode for mode in MODES if mode != GRAPH]
    add("--modes", nargs="+", choices=modes, default=modes, metavar="MODE", help=f"default {' '.join(modes)}")
    add("--graphs", action="store_true", help="also time forward + backward as a CUDA graph")
    add("--repetitions", **count, default=30, help="timed calls of each implementation (default %(default)s)")
    add("--warm-up", **count, default=5, help="untimed repetitions first (default %(default)s)")
    text = "cuda (the default), cuda:1, …, or cpu for tiny shapes"
    add("--device", type=available_device, default="cuda", help=text)


def check(arguments: Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse arguments that do not fit together. Puts the modes in order."""
    if arguments.graphs and arguments.device == "cpu":
        parser.error("--graphs: CUDA graphs need a GPU; leave --graphs out")
    for head_dim in arguments.head_dims:
        if arguments.width % head_dim:
            parser.error(f"--width {arguments.width} is not a multiple of head size {head_dim}")
    chosen = [*arguments.modes, *([GRAPH] if arguments.graphs else [])]
    arguments.modes = [mode for mode in MODES if mode in chosen]


def shapes_of(arguments: Namespace) -> list[Shape]:
    """Every combination of mask, head size and length."""
    axes = (arguments.masks, arguments.head_dims, arguments.lengths)
    return [
        Shape(
            max(arguments.tokens // n, 1),
            arguments.width // head_dim,
            n,
            head_dim,
            mask == "causal",
            *window_of(mask),
        )
        for mask, head_dim, n in dict.fromkeys(itertools.product(*axes))
    ]


def mask_of(text: str) -> str:
    """A mask as --masks takes it. Raises ArgumentTypeError, which argparse prints."""
    if text in ("causal", "full") or re.fullmatch(r"\d+,\d*|,\d+", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}; use causal, full or a window such as 1024,0")


def window_of(mask: str) -> tuple[int, int]:
    """(left, right) of a mask of :func:`mask_of`; −1 is no limit."""
    if mask in ("causal", "full"):
        return -1, -1
    left, right = (int(limit) if limit else -1 for limit in mask.split(","))
    return left, right


# --- Two checkouts ------------------------------------------------------------------------------------------

#: Arguments: the checkout whose sagebwd is imported, and those of the benchmark as JSON. All other modules
#: are of this checkout.
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import sagebwd
assert sagebwd.__file__.startswith(sys.argv[1]), sagebwd.__file__
del sys.path[0]
from scripts.bench import attention
attention.print_rows(sys.argv[2])
"""


def compare_checkouts(argv: list[str] | None, arguments: Namespace) -> None:
    """Measure SageBwd of both checkouts in turn, print the table and write it."""
    arguments.base, arguments.without = str(arguments.base.resolve()), [*PEERS]
    trees = (arguments.base, str(ROOT)) * arguments.rounds
    found = [measure_tree(tree, arguments) for tree in tqdm(trees, desc="checkouts", disable=None)]
    pairs = [pair_up(rows[::2], rows[1::2]) for rows in zip(*found, strict=True)]
    result = describe_run(PROGRAM, argv, arguments, ())
    result["base_commit"] = read_line("git", "-C", arguments.base, "rev-parse", "HEAD")
    header = ["", "base, ms", "here, ms", "base / here", "bits"]
    lines = align(header, [cells_of(pair) for pair in pairs])
    text = ["# Two checkouts compared", "", f"{origin_of(result)} Base: {result['base_commit']}.", "", *lines]
    print("\n".join(["", *lines]))
    write_markdown(arguments.out, "\n".join([*text, ""]))
    write_json(with_ending(arguments.out, ".json"), finite(result | {"rows": pairs}))
    print(f"written: {arguments.out}.json, {arguments.out}.md")


def measure_tree(tree: str, arguments: Namespace) -> list[Row]:
    """The rows that the SageBwd of a checkout gives in a process of its own."""
    command = [sys.executable, "-c", CHILD, tree, json.dumps(vars(arguments), default=str)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"measuring {tree} failed; its message is above")
    return rows_of({"rows": json.loads(done.stdout.splitlines()[-1])})


def print_rows(text: str) -> None:
    """What the process of :func:`measure_tree` does, with the arguments as JSON."""
    arguments = Namespace(**json.loads(text))
    implementations, _ = find_implementations(arguments)
    rows = [asdict(row) for new in measure_shapes(implementations, arguments) for row in new]
    print(json.dumps(finite(rows)))


def pair_up(base: Sequence[Row], here: Sequence[Row]) -> dict[str, Any]:
    """The rows of all rounds at one place as one: the smallest median of each, and whether bits agree."""
    times = [[row.median_ms for row in rows if row.median_ms] for rows in (base, here)]
    base_ms, here_ms = (min(own, default=None) for own in times)
    digests = [{row.digest for row in rows} for rows in (base, here)]
    repeats = all(len(own) == 1 for own in digests)
    row = here[0]
    return {
        "implementation": row.implementation,
        "shape": asdict(row.shape),
        "mode": row.mode,
        "reason": next((each.reason for each in (*base, *here) if each.reason), None),
        "base_ms": base_ms,
        "here_ms": here_ms,
        "bits": ("same" if digests[0] == digests[1] else "differ") if repeats else "do not repeat",
    }


def cells_of(pair: dict[str, Any]) -> list[str]:
    """A line of the table of :func:`compare_checkouts`."""
    name = f"{look_of(pair['implementation']).title}, {Shape(**pair['shape'])}, {pair['mode']}"
    base, here = pair["base_ms"], pair["here_ms"]
    times = [number(base, ".3f"), number(here, ".3f"), number(base / here if base and here else None, ".3f")]
    return [name, *times, pair["reason"] or pair["bits"]]


if __name__ == "__main__":
    main()
