"""How much a query depends on later tokens, which the causal mask hides, through scales and means.

    python -m scripts.paper.causal_leak --help

All tokens after position i are drawn anew in Q, K, V and dO, and the change of O and dQ of the tokens up to i
is measured, relative L2: of the queries in the tile that holds i, and of those in earlier tiles. A tile here
is the larger of the blocks of queries and keys, so that only μ_K and μ_V reach earlier tiles. At a border i
is the last token of its tile, which then shares no scale with later tokens.

The error of the same queries against float64 attention is printed for comparison. A leak as large as the
error means that the error, which should be noise, largely depends on the future.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from data.files import write_json
from sagebwd import SageConfig, sage_attention
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from scripts.bench.measuring import describe_run
from scripts.command_line import command_parser, positive_int
from scripts.paper.attention_errors import add_input_options, draw_inputs, settings_of
from scripts.paper.result_files import OUT

PROGRAM = "python -m scripts.paper.causal_leak"

CONFIGS = {
    "default": SageConfig(),
    "paper": SageConfig.paper(),
    "smooth_k=False": SageConfig(smooth_k=False),
    "smooth_q=True": SageConfig(smooth_q=True),
    "smooth_v=True": SageConfig(smooth_v=True),
    "strictly_causal": SageConfig.strictly_causal(),
}
#: How the later tokens of all four tensors are drawn: (standard deviation, offset of channel 0).
REDRAWS = {"σ 1": (1.0, 0.0), "σ 3": (3.0, 0.0), "σ 10": (10.0, 0.0), "outlier channel": (1.0, 20.0)}
CUTS = (150, 200, 255, 300, 383, 420)
TENSORS = ("out", "dq")
REGIONS = ("same_tile", "earlier_tiles")


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and write it as JSON."""
    arguments = parse_arguments(argv)
    rows = measure(arguments)
    print_table(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, report(argv, arguments, rows))
    print(f"relative L2, mean over the positions, written to {arguments.out}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add_input_options(parser, tokens=512, heads=4)
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of Q and K (default 1)")
    parser.add_argument(
        "--cuts",
        type=positive_int,
        nargs="+",
        default=list(CUTS),
        metavar="I",
        help=f"positions after which tokens are drawn anew (default {' '.join(map(str, CUTS))})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT / "causal_leak.json",
        help="JSON file to write (default %(default)s)",
    )
    parser.set_defaults(device="cpu")  # of the reference
    arguments = parser.parse_args(argv)
    first = max(largest_tile(config, arguments.head_dim) for config in CONFIGS.values())
    for cut in arguments.cuts:
        if not first <= cut < arguments.tokens - 1:
            parser.error(
                f"--cuts {cut}: choose positions from {first}, so that there is an earlier tile, to "
                f"{arguments.tokens - 2}, so that there is a later token"
            )
    return arguments


def measure(arguments: argparse.Namespace) -> list[dict]:
    """One row for each setting, position and redraw: the leak, and the error of the same queries."""
    shape = (1, arguments.heads, arguments.tokens, arguments.head_dim)
    inputs = draw_inputs(
        arguments.sigma, shape, getattr(torch, arguments.dtype), seed=arguments.seed, device="cpu"
    )
    result = exact_attention(*inputs, is_causal=True)
    exact = result.out, result.dq
    rows = []
    for name, config in CONFIGS.items():
        tile = largest_tile(config, arguments.head_dim)
        before = out_and_dq(inputs, config)
        for cut in arguments.cuts:
            error = compare(before, exact, cut, tile)
            for redraw in REDRAWS:
                after = out_and_dq(redrawn(inputs, cut, redraw, arguments.seed), config)
                rows.append(
                    {
                        "config": name,
                        "redraw": redraw,
                        "position": cut,
                        "at_border": (cut + 1) % tile == 0,
                        "leak": compare(after, before, cut, tile),
                        "error": error,
                    }
                )
    return rows


def largest_tile(config: SageConfig, head_dim: int) -> int:
    return max(config.tile(head_dim))


def out_and_dq(inputs: list[Tensor], config: SageConfig) -> tuple[Tensor, Tensor]:
    """out and dq, each (1, heads, tokens, head size)."""
    q, k, v, grad_out = inputs
    q = q.detach().requires_grad_()
    out = sage_attention(q, k, v, is_causal=True, config=config, kernels="reference")
    return out.detach(), *torch.autograd.grad(out, q, grad_out)


def redrawn(inputs: list[Tensor], cut: int, redraw: str, seed: int) -> list[Tensor]:
    """The inputs with all tokens after position ``cut`` drawn anew, the same for every setting."""
    std, offset = REDRAWS[redraw]
    generator = torch.Generator().manual_seed(seed + 1 + cut)
    changed = []
    for x in inputs:
        later = std * torch.randn(x[..., cut + 1 :, :].shape, generator=generator)
        later[..., 0] += offset
        changed.append(torch.cat((x[..., : cut + 1, :], later.to(x)), -2))
    return changed


def compare(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], cut: int, tile: int) -> dict:
    """{tensor: {region: relative L2}} of the tokens up to position ``cut``."""
    start = cut // tile * tile
    regions = dict(zip(REGIONS, (slice(start, cut + 1), slice(0, start)), strict=True))
    return {
        tensor: {name: relative_l2(x[..., at, :], y[..., at, :]) for name, at in regions.items()}
        for tensor, x, y in zip(TENSORS, found, wanted, strict=True)
    }


def print_table(rows: list[dict]) -> None:
    """Means over the positions, those inside a tile and those at a border apart."""
    titles = [f"{tensor}, {where}" for tensor in ("O", "dQ") for where in ("same tile", "earlier")]
    print(f"{'setting':16} {'later tokens':16} {'position':8}" + "".join(f"{x:>15}" for x in titles))
    for config in CONFIGS:
        own = [row for row in rows if row["config"] == config]
        print_row(config, "(error)", "all", [row["error"] for row in own])
        for redraw in REDRAWS:
            for at_border, place in ((False, "inside"), (True, "border")):
                leaks = [
                    row["leak"] for row in own if (row["redraw"], row["at_border"]) == (redraw, at_border)
                ]
                if leaks:
                    print_row(config, redraw, place, leaks)


def print_row(config: str, redraw: str, place: str, values: list[dict]) -> None:
    means = (mean(value[tensor][region] for value in values) for tensor in TENSORS for region in REGIONS)
    print(f"{config:16} {redraw:16} {place:8}" + "".join(f"{x:15.5f}" for x in means))


def report(argv: list[str] | None, arguments: argparse.Namespace, rows: list[dict]) -> dict:
    """Everything that was measured, and what is needed to measure it again."""
    return {
        "table": "dependence of O and dQ on tokens that the causal mask hides",
        "values": "relative L2; leak: after against before the redraw, error: against float64 attention",
        **describe_run(PROGRAM, argv, arguments, ()),
        "configs": {name: settings_of(config, arguments.head_dim) for name, config in CONFIGS.items()},
        "redraws": {name: {"std": std, "offset": offset} for name, (std, offset) in REDRAWS.items()},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
