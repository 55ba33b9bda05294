"""INT8 against FP8 in attention's backward: the error of dQ, dK and dV (SageAttention3, arXiv 2505.11594).

    python -m scripts.paper.gradient_formats runs/NAME/traces [more traces]
    python -m scripts.paper.gradient_formats                                           on Gaussians

Traces, which `python -m scripts.paper.layers --traces` writes, hold q, k, v and dO of a trained model. For
each head, causal attention is computed in float64, and again with 8-bit operands in the backward:

    int8   round(x / s), s = max|x| / 127
    e4m3   x / s in FP8 with 3 bits of mantissa, s = max|x| / 448
    e5m2   x / s in FP8 with 2 bits of mantissa, s = max|x| / 57344

with the same scales: one per block of tokens for Q, K, V and dO; for P and dS one per tile ("block") or one
per output row of the product within a tile ("row"). K is smoothed. dP = dO·Vᵀ stays 16-bit, as in the paper,
or is 8-bit as well. S is that of the forward, so that P has the error of its 8 bits and rows that
sum to one; O = PV is exact, which leaves the errors of the backward alone.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from sagebwd.metrics import cosine_similarity, relative_l1, relative_l2
from sagebwd.reference import exact_attention
from scripts.bench.measuring import describe_run, origin_of
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.output import align
from scripts.paper import published as paper
from scripts.paper.attention_errors import draw_inputs
from scripts.paper.result_files import OUT, write_result
from scripts.paper.roundings import inverse
from scripts.paper.traces import Layer, Origin, find_traces, load_trace

PROGRAM = "python -m scripts.paper.gradient_formats"

GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}
MEASURES = {"l1": relative_l1, "l2": relative_l2, "cos": cosine_similarity}

#: Of dQ, as SageAttention3 prints it: relative L1 over the layers of CogVideoX-2B, and its Table 1c, where
#: only dP differs. Its tensors differ from those here, so ratios can be compared and absolute values cannot.
PUBLISHED = {
    "INT8 gradients": {"l1": paper.S3_FORMATS["int8"]},
    "FP8 gradients": {"l1": paper.S3_FORMATS["fp8"]},
    **{
        f"dP in {name.upper()} (Table 1c)": {"l1": l1, "cos": cosine}
        for name, (cosine, l1) in paper.S3_DP.items()
    },
}


@dataclass(frozen=True)
class Format:
    """An 8-bit format: its largest magnitude, and rounding to the nearest representable value."""

    largest: float
    round: Callable[[Tensor], Tensor]


FORMATS = {
    "int8": Format(127, torch.round),
    "e4m3": Format(448, lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
    "e5m2": Format(57344, lambda x: x.to(torch.float8_e5m2).to(x.dtype)),
}

#: The axes of (tiles, rows, tiles, columns) along which a scale is shared.
PER_TILE, PER_ROW, PER_COLUMN = (1, 3), (3,), (1,)


@dataclass(frozen=True)
class StorageScheme:
    """How the backward's operands are stored. tile: (queries, keys)."""

    format: str
    dp_bits: int  # 16: dP = dO·Vᵀ is exact; 8: dO and V have the format there, too
    granularity: str  # of the scales of P and dS: "block" or "row"
    tile: tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One layer of one trace under one scheme. errors: of dq, dk and dv, the values of MEASURES."""

    trace: str
    layer: int
    scheme: StorageScheme
    errors: dict[str, dict[str, float]]


def main(argv: list[str] | None = None) -> None:
    """Measure every layer under every scheme and write the tables."""
    arguments = parse_arguments(argv)
    try:
        arguments.traces = [str(file) for file in find_traces([Path(path) for path in arguments.traces])]
        inputs = list(read_inputs(arguments))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    result = describe_run(PROGRAM, argv, arguments, ("numpy",)) | {
        "values": "l1, l2: relative, cos: cosine similarity; against float64, over all heads of a layer",
        "published": PUBLISHED,
        "sources": {origin.name: asdict(origin) for _, _, _, origin in inputs if origin},
    }
    rows: list[Row] = []
    for trace, layer, tensors, _ in tqdm(inputs, desc="layers", disable=None):
        rows += measure(trace, layer, tensors, arguments)
    text = to_markdown(result, rows)
    write_result(Path(arguments.out), result, rows, text)
    print(text)
    print(f"written to {arguments.out}.json.gz and .md")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        help="of python -m scripts.paper.layers, or folders of them (default: Gaussians)",
    )
    parser.add_argument(
        "--granularity", nargs="+", choices=("block", "row"), default=["block", "row"], help="(default both)"
    )
    parser.add_argument(
        "--tile", type=positive_int, nargs=2, default=[128, 64], help="queries and keys (default 128 64)"
    )
    gaussians = parser.add_argument_group("Gaussians, where there is no trace; V and dO have σ = 1")
    gaussians.add_argument("--sigmas", type=float, nargs="+", default=[1, 3, 5], help="σ of Q and K (1 3 5)")
    gaussians.add_argument("--tokens", type=positive_int, default=1024, help="N (default 1024)")
    gaussians.add_argument("--head-dim", type=positive_int, default=64, help="D (default 64)")
    gaussians.add_argument("--heads", type=positive_int, default=4, help="(default 4)")
    gaussians.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if available)")
    parser.add_argument(
        "--out",
        default=str(OUT / "gradient_formats"),
        help="beginning of the files' names (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.device = choose_device(arguments.device, parser)
    return arguments


class Input(NamedTuple):
    """One layer. origin: where a trace is from; None for Gaussians."""

    trace: str
    layer: int
    tensors: Layer
    origin: Origin | None


def read_inputs(arguments: Namespace) -> Iterator[Input]:
    """Every layer of the traces, or Gaussians.

    Raises ValueError for a file that is not a trace, FileNotFoundError for one that is not there.
    """
    for path in arguments.traces:
        origin, layers = load_trace(Path(path), arguments.device)
        for layer, tensors in layers.items():
            yield Input(origin.name, layer, tensors, origin)
    if not arguments.traces:
        for sigma in arguments.sigmas:
            yield Input(f"Gaussian, σ = {sigma:g}", 0, draw(sigma, arguments), None)


def draw(sigma: float, arguments: Namespace) -> Layer:
    """Gaussian q, k, v, dO in bfloat16, as those of a trace."""
    shape = (1, arguments.heads, arguments.tokens, arguments.head_dim)
    return Layer(*draw_inputs(sigma, shape, torch.bfloat16, seed=arguments.seed, device=arguments.device))


# --- Attention ----------------------------------------------------------------------------------------------


def measure(trace: str, layer: int, tensors: Layer, arguments: Namespace) -> list[Row]:
    """One layer under every scheme."""
    exact = exact_attention(*tensors, is_causal=True)
    rows = []
    for form, dp_bits, granularity in itertools.product(FORMATS, (16, 8), arguments.granularity):
        scheme = StorageScheme(form, dp_bits, granularity, tuple(arguments.tile))
        found = layer_gradients(tensors, scheme)
        errors = {
            name: {measure: f(found[name], getattr(exact, name)) for measure, f in MEASURES.items()}
            for name in GRADIENTS
        }
        rows.append(Row(trace, layer, scheme, errors))
    return rows


def layer_gradients(layer: Layer, scheme: StorageScheme) -> dict[str, Tensor]:
    """dq (B, H, N, D), dk and dv (B, G, N, D), float32, computed head by head."""
    group = layer.q.shape[1] // layer.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (layer.k, layer.v))
    heads = (x.float().flatten(0, 1) for x in (layer.q, k, v, layer.grad_out))
    gradients = [head_gradients(*head, scheme) for head in zip(*heads, strict=True)]
    dq, dk, dv = (torch.stack(x).view_as(layer.q) for x in zip(*gradients, strict=True))
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return {"dq": dq, "dk": dk, "dv": dv}


def head_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scheme: StorageScheme
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv (N, D) of causal attention of one head (N, D)."""
    operands = Operands(scheme)
    scale = q.shape[-1] ** -0.5
    k = k - k.mean(0)
    q_low, do_low = operands.queries(q), operands.queries(grad_out)
    k_low = operands.keys(k)

    later = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
    p = (q_low @ k_low.mT * scale).masked_fill_(later, -torch.inf).softmax(-1)
    delta = (grad_out * (p @ v)).sum(-1, keepdim=True)
    dp = do_low @ operands.keys(v).mT if operands.dp_is_low else grad_out @ v.mT
    ds = p * (dp - delta)

    dv = operands.scores(p, PER_COLUMN).mT @ do_low
    dq = operands.scores(ds, PER_ROW) @ k_low * scale
    dk = operands.scores(ds, PER_COLUMN).mT @ q_low * scale
    return dq, dk, dv


class Operands:
    """Operands of the backward as a scheme stores them."""

    def __init__(self, scheme: StorageScheme):
        self.scheme = scheme
        self.dp_is_low = scheme.dp_bits == 8

    def queries(self, x: Tensor) -> Tensor:
        """Q or dO (N, D): a scale per block of tokens."""
        return self._store(x, (self.scheme.tile[0], x.shape[1]), PER_TILE)

    def keys(self, x: Tensor) -> Tensor:
        """K or V (N, D): a scale per block of tokens."""
        return self._store(x, (self.scheme.tile[1], x.shape[1]), PER_TILE)

    def scores(self, x: Tensor, row: tuple[int, ...]) -> Tensor:
        """P or dS (N, N); row: the axes of a tile that an output row of the product sums over."""
        return self._store(x, self.scheme.tile, row if self.scheme.granularity == "row" else PER_TILE)

    def _store(self, x: Tensor, tile: tuple[int, int], shared: tuple[int, ...]) -> Tensor:
        return quantize(x, FORMATS[self.scheme.format], tile, shared)


def quantize(x: Tensor, form: Format, tile: tuple[int, int], shared: tuple[int, ...]) -> Tensor:
    """x (M, N) rounded to values of the format times a scale, max|x| / form.largest.

    tile: rows and columns of a tile. shared: along which of its axes the scale is shared, one of PER_TILE,
    PER_ROW and PER_COLUMN.
    """
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles = padded.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    scale = tiles.abs().amax(shared, keepdim=True) / form.largest
    rounded = form.round(tiles * inverse(scale)) * scale
    return rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def rows_of(result: dict) -> list[Row]:
    """The rows of a JSON file of this command."""
    return [
        Row(**row | {"scheme": StorageScheme(**row["scheme"] | {"tile": tuple(row["scheme"]["tile"])})})
        for row in result["rows"]
    ]


# --- Tables -------------------------------------------------------------------------------------------------


def to_markdown(result: dict, rows: list[Row]) -> str:
    lines = [
        "# INT8 and FP8 gradients",
        "",
        origin_of(result),
        "",
        "Relative L1 / relative L2 / cosine similarity against float64, mean over layers. "
        f"`{PROGRAM} --help` says what is compared.",
        "",
        "Published of dQ (SageAttention3, other tensors): "
        + "; ".join(
            f"{name}: " + ", ".join(f"{measure} {value:g}" for measure, value in values.items())
            for name, values in PUBLISHED.items()
        )
        + ".",
        "",
    ]
    for trace in dict.fromkeys(row.trace for row in rows):
        lines += [*trace_table(trace, [row for row in rows if row.trace == trace]), ""]
    return "\n".join(lines)


def trace_table(trace: str, rows: list[Row]) -> list[str]:
    """A line for each scheme, mean over layers."""
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        found = [row.errors for row in rows if row.scheme == scheme]
        means = {
            name: [statistics.fmean(errors[name][measure] for errors in found) for measure in MEASURES]
            for name in GRADIENTS
        }
        label = f"{scheme.format}, dP {scheme.dp_bits} bit, {scheme.granularity}"
        lines.append([label, *(" / ".join(f"{value:.4f}" for value in means[name]) for name in GRADIENTS)])
    layers = len({row.layer for row in rows})
    return align([f"{trace} ({layers} layer{'s' * (layers > 1)})", *GRADIENTS.values()], lines)


if __name__ == "__main__":
    main()
