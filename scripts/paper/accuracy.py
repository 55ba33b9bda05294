"""Error of SageBwd over shapes, and product by product: which of the seven matrix products may be INT8?

    python -m scripts.paper.accuracy --help

Two parts, both against float64 attention on Gaussian inputs, as in Table 1 (`scripts.paper.table1`):

    shapes   Table 1 for head sizes 64 and 128, causal and full, 1024 and 4096 tokens
    int8     one product at a time in INT8, the paper's six, and all seven

On a CPU the plain PyTorch reference is measured, with `--device cuda` the kernels. Writes JSON and Markdown.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from data.files import write_json
from sagebwd import SageConfig
from sagebwd.config import MATMULS, PAPER_INT8_MATMULS
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.paper import published as paper
from scripts.paper.attention_errors import TENSORS, TITLES, VARIANTS, measure, settings_of
from scripts.paper.result_files import OUT

#: Named sets of products in INT8; an S in the backward is that of the forward.
INT8_SETS = {
    "none": (),
    "S": ("s_fwd", "s_bwd"),
    "O": ("o",),
    "dV": ("dv",),
    "dP": ("dp",),
    "dQ": ("dq",),
    "dK": ("dk",),
    "the paper's six": PAPER_INT8_MATMULS,
    "all seven": MATMULS,
}

#: SageAttention3, Table 1c: cosine similarity of dQ with INT8 and 16-bit dP. It is of real tensors, so
#: the difference of the two compares with ours, the values do not.
PAPER_DQ_COSINE = {"all seven": paper.S3_DP["int8"][0], "the paper's six": paper.S3_DP["fp16"][0]}


def main(argv: list[str] | None = None) -> None:
    """Measure both parts and write them."""
    arguments = parse_arguments(argv)
    on_gpu = arguments.device.startswith("cuda")
    result = {
        "values": "[cosine similarity, relative L2] against float64 attention",
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "implementation": "kernels" if on_gpu else "reference",
        "hardware": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {
            "torch": torch.__version__,
            "triton": version("triton") if on_gpu else None,
            "python": sys.version.split()[0],
        },
        "paper": paper.TABLE_1,
        "shapes": measure_shapes(arguments),
        "int8": measure_int8(arguments),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, result)
    text = to_markdown(result)
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {arguments.out} and {arguments.out.with_suffix('.md')}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser("python -m scripts.paper.accuracy", __doc__)
    parser.add_argument(
        "--tokens", type=positive_int, nargs="+", default=[1024, 4096], help="sequence lengths"
    )
    parser.add_argument("--head-dims", type=positive_int, nargs="+", default=[64, 128], help="head sizes")
    parser.add_argument("--heads", type=positive_int, default=8, help="heads (default 8)")
    parser.add_argument("--sigmas", type=float, nargs="+", default=list(paper.TABLE_1), help="σ of Q and K")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default float16")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu: the reference; cuda: the kernels (default cpu)")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT / "accuracy.json",
        help="JSON file to write, with tables next to it (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.device = choose_device(arguments.device, parser)
    return arguments


def measure_shapes(arguments: Namespace) -> list[dict]:
    """Table 1 at every shape: one row for each shape, σ and variant."""
    shapes = list(itertools.product(arguments.head_dims, (True, False), arguments.tokens, arguments.sigmas))
    rows = []
    for head_dim, causal, tokens, sigma in tqdm(shapes, desc="shapes", disable=None):
        errors = measure(sigma, case(arguments, tokens, head_dim, causal))
        for variant, values in errors.items():
            shape = {"head_dim": head_dim, "causal": causal, "tokens": tokens, "sigma": sigma}
            settings = settings_of(VARIANTS[variant], head_dim)
            rows.append({**shape, "variant": variant, **values, "config": settings})
    return rows


def measure_int8(arguments: Namespace) -> list[dict]:
    """The longest causal sequence at the smallest head size, for each set of products in INT8."""
    tokens, head_dim = max(arguments.tokens), min(arguments.head_dims)
    configs = {name: replace(SageConfig(), int8_matmuls=products) for name, products in INT8_SETS.items()}
    rows = []
    for sigma in tqdm(arguments.sigmas, desc="int8", disable=None):
        errors = measure(sigma, case(arguments, tokens, head_dim, True), configs)
        for name, values in errors.items():
            rows.append({"sigma": sigma, "int8": name, "tokens": tokens, "head_dim": head_dim, **values})
    return rows


def case(arguments: Namespace, tokens: int, head_dim: int, causal: bool) -> Namespace:
    """The arguments of :func:`scripts.paper.attention_errors.measure` for one shape."""
    common = {name: getattr(arguments, name) for name in ("heads", "dtype", "seed", "device")}
    return Namespace(batch=1, tokens=tokens, head_dim=head_dim, causal=causal, **common)


def to_markdown(result: dict) -> str:
    """Both parts as tables of relative L2, with the paper's numbers."""
    origin = f"{result['implementation']} on {result['hardware']}, torch {result['versions']['torch']}"
    settings = result["settings"]
    origin += f", {settings['dtype']}, {settings['heads']} heads, seed {settings['seed']}"
    lines = ["# Accuracy of SageBwd", "", f"Relative L2 against float64 attention; {origin}.", ""]
    lines += ["## Table 1 over shapes", "", *shape_table(result), ""]
    lines += ["## Which products may be INT8", "", *int8_table(result), ""]
    lines += [
        "Cosine similarity of dQ in SageAttention3's Table 1c, with INT8 and 16-bit dP, real tensors: "
        + ", ".join(f"{value} ({name})" for name, value in PAPER_DQ_COSINE.items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def shape_table(result: dict) -> list[str]:
    header = ["σ", "variant", "D", "mask", "N", *TITLES.values()]
    lines = ["| " + " | ".join(header) + " |", "| ---: | --- | ---: | --- | ---: " + "| ---: " * 4 + "|"]
    for sigma in dict.fromkeys(row["sigma"] for row in result["shapes"]):
        if sigma in paper.TABLE_1:
            lines.append(
                f"| {sigma:g} | paper | | | |"
                + "".join(f" {error:.4f} |" for _, error in paper.TABLE_1[sigma])
            )
        for row in (row for row in result["shapes"] if row["sigma"] == sigma):
            mask = "causal" if row["causal"] else "full"
            lines.append(
                f"| {sigma:g} | {row['variant']} | {row['head_dim']} | {mask} | {row['tokens']} |{cells(row)}"
            )
    return lines


def int8_table(result: dict) -> list[str]:
    header = ["σ", "in INT8", *TITLES.values(), "cosine of dQ"]
    lines = ["| " + " | ".join(header) + " |", "| ---: | --- " + "| ---: " * 5 + "|"]
    for row in result["int8"]:
        lines.append(f"| {row['sigma']:g} | {row['int8']} |" + cells(row) + f" {row['dq'][0]:.4f} |")
    return lines


def cells(row: dict) -> str:
    return "".join(f" {row[name][1]:.4f} |" for name in TENSORS)


if __name__ == "__main__":
    main()
