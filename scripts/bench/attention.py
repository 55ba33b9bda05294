"""Speed and accuracy of attention on one GPU: SageBwd and its alternatives (the paper's Figures 2 and 3).

    python -m scripts.bench.attention --help

Measures forward, backward and both, over sequence lengths, head sizes and masks, for SageBwd and everything
else that is installed: FlashAttention-2 and cuDNN (PyTorch's scaled_dot_product_attention), FlexAttention,
and the packages flash_attn (2 and 3), flash-attn-4 and sageattention (forward only). An implementation
that is missing, or refuses a shape, is listed with its reason.

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
"""

from __future__ import annotations

import argparse
import itertools
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from sagebwd import SageConfig
from sagebwd.dispatch import KERNEL_SETS
from scripts.bench.attention_peers import CONFIGS, PEERS, Shape, find_implementations
from scripts.bench.attention_tables import Row, draw, not_measured, overview, rows_of, to_markdown
from scripts.bench.attention_timing import measure_shape
from scripts.bench.measuring import describe_run
from scripts.command_line import command_parser, positive_int
from scripts.output import (
    add_output_options,
    read_result,
    resolve_out,
    say_written,
    with_ending,
    write_markdown,
    write_tables,
)

PROGRAM = "python -m scripts.bench.attention"
LENGTHS = tuple(1024 << power for power in range(6))
PICTURES = {"both": ".png", "forward": "_forward.png"}

EXAMPLES = """
examples:
  everything
      python -m scripts.bench.attention --graphs
  the paper's model: head size 64, causal, context 4096
      python -m scripts.bench.attention --head-dims 64 --masks causal --lengths 4096
  presets of SageBwd compared, without the slow compilation of FlexAttention
      python -m scripts.bench.attention --configs default consistent paper --without flex
  the kernels for GPUs since Ampere, which are not chosen yet, compared with FlashAttention-2
      python -m scripts.bench.attention --kernels ampere --configs default consistent --without flex cudnn
  dQ in 16 bit instead of INT8: on a Hopper GPU one backward kernel instead of two
      python -m scripts.bench.attention --configs default 16-bit-dq --kernels hopper
  a sliding window: each query sees its own key and the 1024 before it; compared with no window
      python -m scripts.bench.attention --masks causal 1024,0 --lengths 4096 16384
  try the command without a GPU: times are those of the plain PyTorch reference
      python -m scripts.bench.attention --device cpu --lengths 64 128 --tokens 256 --width 128 --repetitions 3
  draw committed results again, without a GPU
      python -m scripts.bench.attention --draw results/bench_attention.json.gz

files, with --out PREFIX:
  PREFIX.json          rows with times, errors and memory; settings, hardware, versions
  PREFIX.md            tables, one for each mode, mask and head size
  PREFIX.png           forward + backward, TFLOP/s over N, as in Figures 2 and 3
  PREFIX_forward.png   forward alone
The first two are written after every shape, so an interrupted run keeps what it measured.
"""


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure every shape, print an overview and write the files; or draw those of --draw again."""
    arguments = parse_arguments(argv)
    if arguments.draw:
        result = read_result(arguments.draw)
        rows = rows_of(result)
        write_markdown(arguments.out, to_markdown(result, rows))
        draw_pictures(rows, result, arguments)
        return
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
    print("\n".join(["", *overview(rows), *not_measured(absent, rows)]))
    draw_pictures(rows, result, arguments)


def draw_pictures(rows: list[Row], result: dict[str, Any], arguments: Namespace) -> None:
    """Draw the modes that have a picture, and say where all files are."""
    for mode, ending in PICTURES.items():
        draw(rows, mode, with_ending(arguments.out, ending), result)
    say_written(arguments, ".json", ".md", *PICTURES.values())


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if they cannot work here."""
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    add_shape_options(parser.add_argument_group("shapes").add_argument)
    add_implementation_options(parser.add_argument_group("implementations").add_argument)
    add_timing_options(parser.add_argument_group("timing").add_argument)
    add_output_options(parser.add_argument_group("output").add_argument, "attention")
    arguments = parser.parse_args(argv)
    resolve_out(arguments, "attention", parser)
    if arguments.draw is None:
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
    add("--repetitions", **count, default=30, help="timed calls of each implementation (default %(default)s)")
    add("--warm-up", **count, default=5, help="untimed repetitions first (default %(default)s)")
    add("--graphs", action="store_true", help="also time forward + backward as a CUDA graph")
    add("--device", default="cuda", help="cuda (the default), cuda:1, …, or cpu for tiny shapes")


def check(arguments: Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse arguments that do not fit together, or need a GPU that is not there."""
    on_gpu = arguments.device.startswith("cuda")
    if not on_gpu and arguments.device != "cpu":
        parser.error(f"--device {arguments.device}: use cuda, cuda:<number> or cpu")
    if on_gpu and not torch.cuda.is_available():
        parser.error(
            f"--device {arguments.device}: torch sees no GPU; run this where there is one, or use "
            "--device cpu with tiny shapes, as in --help"
        )
    if arguments.graphs and not on_gpu:
        parser.error("--graphs: CUDA graphs need a GPU; leave --graphs out")
    for head_dim in arguments.head_dims:
        if arguments.width % head_dim:
            parser.error(f"--width {arguments.width} is not a multiple of head size {head_dim}")


def shapes_of(arguments: Namespace) -> list[Shape]:
    """Every combination of mask, head size and length."""
    combinations = itertools.product(arguments.masks, arguments.head_dims, arguments.lengths)
    return [
        Shape(
            max(arguments.tokens // n, 1),
            arguments.width // head_dim,
            n,
            head_dim,
            mask == "causal",
            *window_of(mask),
        )
        for mask, head_dim, n in dict.fromkeys(combinations)
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


def describe_results(argv: list[str] | None, arguments: Namespace) -> dict[str, Any]:
    """The meaning of the values, and how to repeat the measurement."""
    return {
        "figure": "SageBwd (arXiv 2603.02170), Figures 2 and 3",
        "values": "ms, TFLOP/s; errors: [cosine similarity, relative L2] against float64 attention; speedup: "
        "median of the baseline / this median; extra_memory: bytes / bytes of Q, K and V",
        **describe_run(PROGRAM, argv, arguments, ("flash-attn", "sageattention")),
        "configs": {
            title: {f"D {head_dim}": with_tile(config, head_dim) for head_dim in arguments.head_dims}
            for title, config, _ in (CONFIGS[name] for name in arguments.configs)
        },
    }


def with_tile(config: SageConfig, head_dim: int) -> dict[str, Any]:
    """Every setting, with the tile that this head size gets."""
    return asdict(config) | dict(zip(("block_q", "block_kv"), config.tile(head_dim), strict=True))


if __name__ == "__main__":
    main()
