"""Table 1 of SageBwd (arXiv 2603.02170): error of O, dQ, dK and dV on Gaussian inputs as logits grow.

    python -m scripts.paper.table1 --help

Q and K are drawn with standard deviation σ, V and dO with 1. Three variants, each against float64 attention:

    block    the paper's pseudo-code: one scale per tile for P and dS in the backward
    row      the same with one scale per output row, which is what reproduces the table
    default  what sage_attention uses

On a CPU that is the plain PyTorch reference, with `--device cuda` the kernels.

Writes a JSON file, and next to it a picture of the relative L2.

The paper gives neither the sequence length nor the head size, the tile or the mask of its table. With the
defaults here, "row" comes within 7% of every relative L2 but one: dV at σ = 1 is .0204, not .0159. Scaling P
per query instead of per key gives .0164, but dV sums over queries, so such scales rule out an INT8 product.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from data.files import write_json
from scripts.bench.measuring import describe_run
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.paper import drawing
from scripts.paper.attention_errors import TENSORS, TITLES, VARIANTS, add_input_options, measure, settings_of
from scripts.paper.published import TABLE_1
from scripts.paper.result_files import OUT
from trainer.style import Style

PROGRAM = "python -m scripts.paper.table1"

LABELS = {
    "block": "block: the printed pseudo-code, paper()",
    "row": "row: P and dS scaled per output row",
    "default": "default of SageConfig",
    "paper": "numbers in the paper",
}
#: Published numbers: points without a line.
PAPER_STYLE = Style("#000000", "", "_", "")


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and write it as JSON."""
    arguments = parse_arguments(argv)
    rows = []
    print(f"{'σ':>3} {'variant':8}" + "".join(f"{name:>16}" for name in TITLES.values()))
    for sigma in TABLE_1:
        rows.append({"sigma": sigma, "variant": "paper", **dict(zip(TENSORS, TABLE_1[sigma], strict=True))})
        print_row(rows[-1])
        for variant, errors in measure(sigma, arguments).items():
            rows.append({"sigma": sigma, "variant": variant, **errors})
            print_row(rows[-1])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    picture = arguments.out.with_suffix(".png")
    write_json(arguments.out, report(argv, arguments, rows))
    drawing.save(draw(rows), picture)
    print(f"cosine similarity / relative L2, written to {arguments.out} and {picture}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add_input_options(parser, tokens=1024, heads=8)
    parser.add_argument("--batch", type=positive_int, default=1, help="sequences (default 1)")
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=True, help="mask later tokens (default)"
    )
    parser.add_argument("--device", default="cpu", help="where to compute: cpu or cuda (default cpu)")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT / "table1.json",
        help="JSON file to write, with a picture next to it (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.device = choose_device(arguments.device, parser)
    if arguments.device.startswith("cuda") and arguments.dtype == "float32":
        parser.error("--dtype float32: the kernels take float16 and bfloat16; use --device cpu")
    return arguments


def print_row(row: dict) -> None:
    cells = "".join(f"   {row[name][0]:.4f}/{row[name][1]:.4f}" for name in TENSORS)
    print(f"{row['sigma']:>3} {row['variant']:8}{cells}", flush=True)


def report(argv: list[str] | None, arguments: argparse.Namespace, rows: list[dict]) -> dict:
    """Everything that was measured, and what is needed to measure it again."""
    return {
        "table": "SageBwd (arXiv 2603.02170), Table 1",
        "values": "[cosine similarity, relative L2] against float64 attention",
        **describe_run(PROGRAM, argv, arguments, ()),
        "variants": {name: settings_of(config, arguments.head_dim) for name, config in VARIANTS.items()},
        "rows": rows,
    }


def draw(rows: list[dict]) -> Any:
    """Relative L2 over σ, a panel for each tensor and a line for each variant."""
    figure, panels = drawing.grid(1, len(TITLES), width=2.7, height=3.2, sharey=True)
    looks = drawing.styles(tuple(VARIANTS)) | {"paper": PAPER_STYLE}
    for axes, (tensor, title) in zip(panels[0], TITLES.items(), strict=True):
        for variant in VARIANTS | {"paper": None}:
            points = [(row["sigma"], row[tensor][1]) for row in rows if row["variant"] == variant]
            look = looks[variant]
            axes.plot(
                *zip(*points, strict=True), color=look.color, linestyle=look.dashes, marker=look.marker,
                label=LABELS[variant], markersize=5, linewidth=1.2,
            )  # fmt: skip
        drawing.log_axis(axes.yaxis)
        axes.set_title(title)
        axes.set_xlabel("σ of Q and K")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("relative L2 error")
    drawing.legend_below(figure, *panels[0][0].get_legend_handles_labels())
    figure.suptitle("Table 1: error against float64 attention, Gaussian inputs", fontsize=11)
    return figure


if __name__ == "__main__":
    main()
