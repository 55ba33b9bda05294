"""Speed of attention under a padding mask on one GPU: SageBwd with and without it, and its alternatives.

    python -m scripts.bench.masks --help

Sequences are padded on the right; their lengths are drawn between half of N and N. Rows:

  no mask               SageBwd without a mask, which computes the padding, too
  mask of ones          SageBwd with a key_padding_mask that hides nothing: what the mask itself costs
  mask                  SageBwd with the key_padding_mask
  FlexAttention         the same mask as a BlockMask, which is made before
  FlashAttention-2      torch.nn.attention.varlen on the visible tokens; where they are is found out before
  SDPA efficient        scaled_dot_product_attention with attn_mask (batch, 1, 1, keys)

Times, inputs and turns are those of scripts.bench.attention. Before timing, the output is compared with
float64 attention on the visible tokens of the last sequence. An alternative that is missing or fails is
listed with its reason.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd import sage_attention
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from scripts.bench.attention_peers import BOUND_INT8, Attend, Shape, explain
from scripts.bench.attention_timing import (
    Inputs,
    draw_sets,
    run_both,
    run_forward,
    sample,
    synchronize,
    time_in_turn,
)
from scripts.bench.measuring import describe_run, origin_of
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.output import (
    add_output_options,
    align,
    number,
    read_result,
    resolve_out,
    say_written,
    write_markdown,
    write_tables,
)

PROGRAM = "python -m scripts.bench.masks"
UNMASKED = "no mask"
MODES = {"both": run_both, "forward": run_forward}


@dataclass(frozen=True)
class Row:
    """One implementation at one shape. Times in ms; ``error`` is the relative L2 of the output."""

    implementation: str
    shape: str
    mode: str
    visible: float
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    error: float | None = None
    reason: str | None = None


# --- Implementations ----------------------------------------------------------------------------------------


def sagebwd(shape: Shape, mask: Tensor | None) -> Attend:
    return partial(sage_attention, is_causal=shape.causal, key_padding_mask=mask)


def flex(shape: Shape, mask: Tensor) -> Attend:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # or PyTorch stops compiling after a few shapes
    torch._functorch.config.donated_buffer = False

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[batch, key] & (key <= query) if shape.causal else mask[batch, key]

    sizes = (shape.batch, None, shape.tokens, shape.tokens)
    blocks = create_block_mask(is_visible, *sizes, device=mask.device)
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks)


def flash(shape: Shape, mask: Tensor) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    lengths = mask.sum(1)
    longest = int(lengths.max())
    tokens = mask.flatten().nonzero().squeeze(1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    window = (-1, 0) if shape.causal else (-1, -1)

    def attend(*inputs: Tensor) -> Tensor:
        packed = (x.transpose(1, 2).flatten(0, 1).index_select(0, tokens) for x in inputs)
        found = varlen_attn(*packed, cu_seqlens, cu_seqlens, longest, longest, window_size=window)
        out = found.new_zeros(mask.numel(), *found.shape[1:]).index_copy(0, tokens, found)
        return out.unflatten(0, mask.shape).transpose(1, 2)

    return attend


def efficient(shape: Shape, mask: Tensor) -> Attend:
    visible = mask[:, None, None]
    if shape.causal:
        visible = (
            visible & torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=mask.device).tril()
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    return attend


#: By row: what is measured, and whether it sees the padding.
IMPLEMENTATIONS: dict[str, Callable[[Shape, Tensor], Attend]] = {
    UNMASKED: lambda shape, mask: sagebwd(shape, None),
    "mask of ones": lambda shape, mask: sagebwd(shape, torch.ones_like(mask)),
    "mask": sagebwd,
    "FlexAttention": flex,
    "FlashAttention-2": flash,
    "SDPA efficient": efficient,
}
SEES_PADDING = (UNMASKED, "mask of ones")


# --- Measuring ----------------------------------------------------------------------------------------------


def draw_mask(shape: Shape, device: str, seed: int) -> Tensor:
    """(B, N) bool: each sequence's first tokens, between half of them and all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shape.tokens // 2, shape.tokens + 1, (shape.batch, 1), generator=generator)
    return (torch.arange(shape.tokens) < lengths).to(device)


def measure_shape(shape: Shape, arguments: Namespace) -> list[Row]:
    """Rows of all implementations and modes at a shape."""
    mask = draw_mask(shape, arguments.device, arguments.seed)
    sets = draw_sets(shape, arguments)
    rows, attends = {}, {}
    for name in arguments.implementations:
        visible = torch.ones_like(mask) if name in SEES_PADDING else mask
        share = visible.float().mean().item()
        try:
            attends[name] = IMPLEMENTATIONS[name](shape, mask)
            error = output_error(attends[name], shape, visible, sets[0])
            run_both(attends[name], sets[0])
        except Exception as failure:  # an alternative may raise anything
            attends.pop(name, None)
            rows[name] = {"visible": share, "reason": explain(failure)}
        else:
            rows[name] = {"visible": share, "error": error}
            if not error <= BOUND_INT8:
                attends.pop(name)
                rows[name]["reason"] = f"relative L2 error {error:.3g}; allowed: {BOUND_INT8:g}"
    synchronize(torch.device(arguments.device))
    found = []
    for mode, run in MODES.items():
        runners = {name: [partial(run, attend, x) for x in sets] for name, attend in attends.items()}
        times = time_in_turn(
            runners, arguments.repetitions, arguments.warm_up, torch.device(arguments.device)
        )
        for name, row in rows.items():
            found.append(Row(name, str(shape), mode, **row, **percentiles(times.get(name))))
    return found


def output_error(attend: Attend, shape: Shape, visible: Tensor, inputs: Inputs) -> float:
    """Relative L2 on the visible tokens of the last sequence, first and last head."""
    keys = visible[-1]
    found = sample(run_forward(attend, inputs))[:, :, keys]
    exact = exact_attention(*(sample(x)[:, :, keys] for x in inputs[:3]), is_causal=shape.causal)
    return relative_l2(found, exact.out)


def percentiles(times: list[float] | None) -> dict[str, float]:
    if times is None:
        return {}
    return dict(
        zip(("p10_ms", "median_ms", "p90_ms"), np.percentile(times, (10, 50, 90)).tolist(), strict=True)
    )


# --- The command --------------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any], rows: list[Row]) -> str:
    """A table for each mode: median time in ms, and the time relative to SageBwd without a mask."""
    lines = ["# Attention under a padding mask", "", origin_of(result), ""]
    for mode in MODES:
        of_mode = [row for row in rows if row.mode == mode]
        table = []
        for shape, group in itertools.groupby(of_mode, key=lambda row: row.shape):
            group = list(group)
            base = next((row.median_ms for row in group if row.implementation == UNMASKED), None)
            for row in group:
                ratio = row.median_ms / base if row.median_ms and base else None
                cells = (number(row.median_ms, ".3f"), number(ratio, ".2f"), f"{row.visible:.2f}")
                table.append([shape, row.implementation, *cells, number(row.error, ".4f"), row.reason or ""])
        header = ["shape", "implementation", "ms", "time / no mask", "visible", "error of O", "not measured"]
        lines += [f"## {mode}", "", *align(header, table), ""]
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if they cannot work here."""
    parser = command_parser(PROGRAM, __doc__)
    add, sizes = parser.add_argument, {"type": positive_int, "nargs": "+"}
    add("--lengths", **sizes, default=[1024, 4096, 16384], help="N (default 1024 4096 16384)")
    add("--head-dims", **sizes, default=[64, 128], help="D (default 64 128)")
    add("--tokens", type=positive_int, default=32768, help="B·N (default %(default)s)")
    add("--width", type=positive_int, default=2048, help="H·D (default %(default)s)")
    names = {"nargs": "+", "choices": IMPLEMENTATIONS, "metavar": "NAME"}
    add("--implementations", **names, default=[*IMPLEMENTATIONS], help="rows to measure (default all)")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default %(default)s")
    add("--repetitions", type=positive_int, default=30, help="timed calls of each (default %(default)s)")
    add("--warm-up", type=positive_int, default=5, help="untimed calls first (default %(default)s)")
    add("--seed", type=int, default=0, help="of inputs and lengths (default %(default)s)")
    add("--device", default="cuda", help="cuda (the default), cuda:1, …, or cpu for small sizes")
    add_output_options(add, "masks")
    arguments = parser.parse_args(argv)
    resolve_out(arguments, "masks", parser)
    if not arguments.draw:
        arguments.device = choose_device(arguments.device, parser)
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Measure every shape and write the tables, or write those of --draw again."""
    arguments = parse_arguments(argv)
    if arguments.draw:
        result = read_result(arguments.draw)
        write_markdown(arguments.out, to_markdown(result, [Row(**row) for row in result["rows"]]))
        say_written(arguments, ".md")
        return
    result = describe_run(PROGRAM, argv, arguments, ())
    rows: list[Row] = []
    for causal, head_dim, n in itertools.product((False, True), arguments.head_dims, arguments.lengths):
        heads = max(arguments.width // head_dim, 1)
        rows += measure_shape(Shape(max(arguments.tokens // n, 1), heads, n, head_dim, causal), arguments)
        write_tables(arguments.out, result, rows, to_markdown(result, rows))
    print(to_markdown(result, rows))
    say_written(arguments, ".json", ".md")


if __name__ == "__main__":
    main()
