"""Where the error of dQ and dK comes from in INT8 attention, and what mends it, on traces of trained models.

    python -m scripts.paper.layers --help          # writes traces of a run
    python -m scripts.paper.gradient_error runs/NAME/traces --out results/gradient_error
    python -m scripts.paper.gradient_error --sigmas 1 3 5 10      # Gaussians, as in the paper's Table 1

Every query head of every layer is computed again, alone, with each variant of
`scripts.paper.gradient_variants`,
and compared with float64 attention. Where there are traces of several steps of a run, that is done at the
last one; before it there are the default and its roundings. Writes

    OUT.json              every number, by trace, layer, head and variant
    OUT.md                tables: error against cost, the error's parts, the same layer by layer
    OUT.png               error of dQ and dK against cost, with the variants that none beats in both
    OUT_progress.png      the error and its parts over the tokens seen, if a run has several traces

The errors are those of the algorithm, emulated in float32 (`scripts.paper.attention_emulation`); no kernel
runs. A
head of 1024 tokens takes 6 seconds on one CPU core, one of 4096 a minute or two; a GPU is faster, and
`--heads 2` looks at two heads per layer only.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sagebwd.metrics import cosine_similarity, relative_l2
from scripts.bench.measuring import align, beside, choose_device, describe_run, save_figure, write_tables
from scripts.paper.attention_emulation import Head, Result, Scheme, emulate
from scripts.paper.gradient_variants import STEPS, Variant, ladder, variants
from scripts.paper.table1 import exact_attention, positive_int
from scripts.paper.traces import Layer, find_traces, load_trace

TITLES = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}

#: The steps that make up the error of a gradient, without overlap.
PARTS = {"dq": ("S", "O and δ", "dS in dQ", "K in dQ"), "dk": ("S", "O and δ", "dS in dK", "Q in dK")}

#: Variants whose bias along the exact gradient is shown, to tell it from the error's size.
BIAS_OF = ("default", "stochastic dS", "stochastic dS, mean of 8", "16-bit dQ, dK")


@dataclass(frozen=True)
class Source:
    """Where a head is from: a trace, or random numbers."""

    name: str
    run: str
    tokens: int | None  # seen in training; None for random numbers
    qk_norm: bool | None
    tokens_per_step: int | None = None
    is_last: bool = True  # of its run: measured with every variant


@dataclass(frozen=True)
class Row:
    """What one variant does to one head: by tensor, against float64.

    kind: "variant", or of the default's roundings "alone" and "all but".
    cost: in INT8 products of N × N × D; None for the latter.
    gain: ⟨x, exact⟩ / ⟨exact, exact⟩, less than 1 where the tensor is too short.
    """

    source: str
    layer: int
    head: int
    kind: str
    name: str
    cost: float | None
    relative_l2: dict[str, float]
    cosine: dict[str, float]
    gain: dict[str, float]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write everything."""
    arguments = parse_arguments(argv)
    torch.manual_seed(arguments.seed)  # of stochastic rounding
    try:
        sources, heads = find_heads(arguments)
    except ValueError as error:
        raise SystemExit(f"gradient_error: {error}") from error
    rows = []
    for source, layer, head, tensors in tqdm(heads, desc="heads", disable=None):
        rows += measure(source, layer, head, tensors)
    result = {
        "values": "against float64 attention, of single query heads",
        **describe_run("python -m scripts.paper.gradient_error", argv, shown(arguments), ["matplotlib"]),
        "sources": {source.name: vars(source) for source in sources},
    }
    markdown = to_markdown(sources, rows)
    write_tables(arguments.out, result, rows, markdown)
    save(plot_costs([source for source in sources if source.is_last], rows), beside(arguments.out, ".png"))
    if runs_with_progress(sources):
        save(plot_progress(sources, rows), beside(arguments.out, "_progress.png"))
    print(markdown)
    print(f"written to {beside(arguments.out, '.json')}, .md and .png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.paper.gradient_error",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="of python -m scripts.paper.layers, or folders of them",
    )
    parser.add_argument(
        "--sigmas", type=float, nargs="+", default=[], help="also Gaussian heads, with these σ of Q and K"
    )
    parser.add_argument("--layers", type=int, nargs="+", help="only these layers (default: all)")
    parser.add_argument("--heads", type=positive_int, help="only so many heads of each layer (default: all)")
    parser.add_argument("--tokens", type=positive_int, help="only the first tokens (default: all; σ: 1024)")
    parser.add_argument("--head-dim", type=positive_int, default=64, help="of Gaussian heads (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default 0)")
    parser.add_argument("--device", help="where to compute: cpu or cuda (default: cuda if there is)")
    parser.add_argument("--out", type=Path, default=Path("results/gradient_error"), help="files to write")
    arguments = parser.parse_args(argv)
    if not arguments.traces and not arguments.sigmas:
        parser.error(
            "nothing to measure; name traces (python -m scripts.paper.layers writes them), or --sigmas 1 3"
        )
    arguments.device = choose_device(arguments.device, parser)
    return arguments


def shown(arguments: Namespace) -> Namespace:
    """The arguments with paths as text, for JSON."""
    return Namespace(**{**vars(arguments), "traces": [str(path) for path in arguments.traces]})


# --- Heads --------------------------------------------------------------------------------------------------

Heads = list[tuple[Source, int, int, Head]]


def find_heads(arguments: Namespace) -> tuple[list[Source], Heads]:
    """Every source, and every head to compute: (source, layer, head, tensors).

    Raises:
        ValueError: a file is not there or no trace, lacks a layer that was asked for, or is of a run and step
            that another one is of.
    """
    sources, heads = [], []
    for path in find_traces(arguments.traces):
        origin, layers = load_trace(path, arguments.device)
        absent = [str(number) for number in arguments.layers or () if number not in layers]
        if absent:
            raise ValueError(f"{path} has no layer {', '.join(absent)}, only {', '.join(map(str, layers))}")
        if origin.name in (source.name for source in sources):
            raise ValueError(f"{path} is another trace of {origin.name}; leave one out")
        sources.append(Source(origin.name, origin.run, origin.tokens, origin.qk_norm, origin.tokens_per_step))
        for number in arguments.layers or layers:
            kept = origin.heads or range(layers[number].q.shape[1])
            cut = heads_of(layers[number], arguments.tokens)
            heads += [
                (sources[-1], number, head, tensors)
                for head, tensors in list(zip(kept, cut, strict=True))[: arguments.heads]
            ]
    for sigma in arguments.sigmas:
        sources.append(Source(f"Gaussian, σ {sigma:g}", "Gaussian", None, None))
        heads.append((sources[-1], 0, 0, gaussian(sigma, arguments)))
    marked = {source.name: replace(source, is_last=is_last(source, sources)) for source in sources}
    return list(marked.values()), [(marked[source.name], *rest) for source, *rest in heads]


def is_last(source: Source, sources: list[Source]) -> bool:
    """Whether no other trace of the run is of a later step. Random numbers are a run each."""
    return source.tokens is None or all(
        source.tokens >= other.tokens for other in sources if other.run == source.run
    )


def heads_of(layer: Layer, tokens: int | None) -> Iterator[Head]:
    """The query heads of the first sequence, each with its key head; the first tokens see no later ones."""
    group = layer.q.shape[1] // layer.k.shape[1]
    for head in range(layer.q.shape[1]):
        places = (head, head // group, head // group, head)
        yield Head(*(x[0, place, :tokens].float() for x, place in zip(layer, places, strict=True)))


def gaussian(sigma: float, arguments: Namespace) -> Head:
    """Q and K of standard deviation `sigma`, V and dO of 1, in numbers that bf16 has."""
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = (arguments.tokens or 1024, arguments.head_dim)
    draws = (std * torch.randn(shape, generator=generator) for std in (sigma, sigma, 1.0, 1.0))
    return Head(*(x.bfloat16().float().to(arguments.device) for x in draws))


# --- Measuring ----------------------------------------------------------------------------------------------


def measure(source: Source, layer: int, number: int, head: Head) -> list[Row]:
    """Every step and every variant on one head; before a run's last trace the default and single steps."""
    exact = Result(*(x[0, 0] for x in exact_attention(*(x[None, None] for x in head), is_causal=True)))
    head_dim, dtype = head.q.shape[-1], torch.bfloat16
    schemes: dict[tuple[str, str], Variant | Scheme] = {
        ("variant", name): variant for name, variant in variants(head_dim, dtype).items()
    } | ladder(head_dim, dtype)
    rows = []
    for (kind, name), scheme in schemes.items():
        if not (source.is_last or (kind, name) == ("variant", "default") or kind == "alone"):
            continue
        variant = scheme if isinstance(scheme, Variant) else Variant(scheme, cost=None)
        errors = compare(mean_of_draws(head, variant), exact)
        rows.append(Row(source.name, layer, number, kind, name, variant.cost, **errors))
    return rows


def mean_of_draws(head: Head, variant: Variant) -> Result:
    draws = [emulate(head, variant.scheme) for _ in range(variant.draws)]
    return Result(*(sum(tensors) / len(draws) for tensors in zip(*draws, strict=True)))


def compare(found: Result, exact: Result) -> dict[str, dict[str, float]]:
    measures = {"relative_l2": relative_l2, "cosine": cosine_similarity, "gain": gain}
    return {
        name: {key: six_digits(measure(getattr(found, key), getattr(exact, key))) for key in TITLES}
        for name, measure in measures.items()
    }


def six_digits(value: float) -> float:
    """Files of many heads get large."""
    return float(f"{value:.6g}")


def gain(x: Tensor, exact: Tensor) -> float:
    """⟨x, exact⟩ / ⟨exact, exact⟩: 1 if the error has no part along the exact tensor, NaN if that is zero."""
    x, exact = x.double().flatten(), exact.double().flatten()
    return (x @ exact / (exact @ exact)).item()


# --- Tables -------------------------------------------------------------------------------------------------


def chosen(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with these fields."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def mean_error(rows: Sequence[Row], tensor: str) -> float:
    """Relative L2, mean over layers and heads."""
    return fmean(row.relative_l2[tensor] for row in rows)


def to_markdown(sources: Sequence[Source], rows: Sequence[Row]) -> str:
    last = [source for source in sources if source.is_last]
    lines = [
        "# Error of the gradients",
        "",
        "Relative L2 to float64 attention, mean over layers and heads. Cost in INT8 products of N × N × D;",
        "16-bit attention costs 18 (`scripts/paper/gradient_variants.py`). *: none is better in both.",
    ]
    for tensor, title in TITLES.items():
        lines += ["", f"## {title}: error against cost", "", *cost_table(last, rows, tensor)]
    for tensor in PARTS:
        lines += ["", f"## {TITLES[tensor]}: what each rounding of the default does", ""]
        lines += ["Alone / with all others but this one.", "", *step_table(last, rows, tensor)]
        lines += ["", f"## {TITLES[tensor]} layer by layer", ""]
        lines += ["The default's error, and each part alone.", "", *layer_table(sources, rows, tensor)]
    lines += ["", "## Stochastic rounding of dS", "", *bias_table(last, rows)]
    return "\n".join([*lines, ""])


def cost_table(sources: Sequence[Source], rows: Sequence[Row], tensor: str) -> list[str]:
    """Every variant, the cheap ones first; * marks those on the Pareto front."""
    costs = costs_of(rows)
    fronts = {source.name: front(points_of(rows, source, tensor)) for source in sources}
    cells = []
    for name in sorted(costs, key=costs.get):
        errors = []
        for source in sources:
            error = mean_error(chosen(rows, source=source.name, kind="variant", name=name), tensor)
            errors.append(f"{error:.4f}" + ("*" if name in fronts[source.name] else " "))
        cells.append([name, f"{costs[name]:.2f}", *errors])
    return align(["variant", "cost", *(source.name for source in sources)], cells)


def step_table(sources: Sequence[Source], rows: Sequence[Row], tensor: str) -> list[str]:
    cells = [
        [
            step,
            *(
                " / ".join(
                    f"{mean_error(chosen(rows, source=source.name, kind=kind, name=step), tensor):.4f}"
                    for kind in ("alone", "all but")
                )
                for source in sources
            ),
        ]
        for step in STEPS
    ]
    return align(["rounding", *(source.name for source in sources)], cells)


def layer_table(sources: Sequence[Source], rows: Sequence[Row], tensor: str) -> list[str]:
    cells = []
    for source in sources:
        own = chosen(rows, source=source.name)
        for layer in sorted({row.layer for row in own}):
            of_layer = chosen(own, layer=layer)
            errors = [mean_error(chosen(of_layer, kind="variant", name="default"), tensor)]
            errors += [
                mean_error(chosen(of_layer, kind="alone", name=part), tensor) for part in PARTS[tensor]
            ]
            cells.append([source.name, str(layer), *(f"{error:.4f}" for error in errors)])
    return align(["source", "layer", "default", *PARTS[tensor]], cells)


def bias_table(sources: Sequence[Source], rows: Sequence[Row]) -> list[str]:
    """Gain − 1: how much too long (or, negative, too short) dQ and dK are along the exact ones."""
    cells = []
    for name in BIAS_OF:
        for tensor in PARTS:
            of = [chosen(rows, source=source.name, kind="variant", name=name) for source in sources]
            biases = [fmean(row.gain[tensor] - 1 for row in found) for found in of]
            cells.append([f"{name}: gain of {TITLES[tensor]} − 1", *(f"{bias:+.5f}" for bias in biases)])
    return align(["", *(source.name for source in sources)], cells)


def costs_of(rows: Sequence[Row]) -> dict[str, float]:
    return {row.name: row.cost for row in rows if row.kind == "variant" and row.cost is not None}


def points_of(rows: Sequence[Row], source: Source, tensor: str) -> dict[str, tuple[float, float]]:
    """(cost, error) of every variant but means over draws, which no training step has."""
    own = chosen(rows, source=source.name, kind="variant")
    return {
        name: (cost, mean_error(chosen(own, name=name), tensor))
        for name, cost in costs_of(own).items()
        if "mean of" not in name
    }


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Those that no other beats in cost and error, by cost: the Pareto front."""
    best, names = float("inf"), []
    for name, (_, error) in sorted(points.items(), key=lambda item: item[1]):
        if error < best:
            best = error
            names.append(name)
    return names


# --- Pictures -----------------------------------------------------------------------------------------------


def plot_costs(sources: Sequence[Source], rows: Sequence[Row]) -> Any:
    """Error of dQ (left) and dK (right) against cost, a line for each source."""
    figure, panels = new_figure(len(sources), len(PARTS), width=7.5, height=3.4)
    for line, source in zip(panels, sources, strict=True):
        for axes, tensor in zip(line, PARTS, strict=True):
            points = points_of(rows, source, tensor)
            best = {name: points[name] for name in front(points)}
            axes.plot(*zip(*points.values(), strict=True), "o", color="0.75", markersize=4)
            axes.step(*zip(*best.values(), strict=True), where="post", color="0.4", linewidth=1)
            for name, point in best.items():
                axes.plot(*point, "o", markersize=6, label=name)
            axes.plot(*points["default"], "s", color="black", label="default")
            axes.set(yscale="log", title=source.name, xlabel="cost (INT8 products)")
            axes.set_ylabel(f"relative L2 of {TITLES[tensor]}")
            axes.grid(alpha=0.3, which="both")
            axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def runs_with_progress(sources: Sequence[Source]) -> list[str]:
    """The runs with traces of several steps."""
    runs = [source.run for source in sources if source.tokens is not None]
    return sorted({run for run in runs if runs.count(run) > 1})


def plot_progress(sources: Sequence[Source], rows: Sequence[Row]) -> Any:
    """The default's error of dQ and dK and its parts over the tokens seen; a line for each run."""
    runs = runs_with_progress(sources)
    figure, panels = new_figure(len(runs), len(PARTS), width=5.5, height=2.8, sharey=True)
    for line, run in zip(panels, runs, strict=True):
        of_run = sorted((s for s in sources if s.run == run), key=lambda source: source.tokens)
        for axes, tensor in zip(line, PARTS, strict=True):
            plot_parts(axes, of_run, rows, tensor)
            axes.set(xscale="log", yscale="log", title=run, xlabel="tokens seen")
            axes.set_ylabel(f"relative L2 of {TITLES[tensor]}")
            axes.grid(alpha=0.3, which="both")
    for axes in panels[0]:
        axes.legend(fontsize=7)
    return figure


def plot_parts(axes: Any, of_run: Sequence[Source], rows: Sequence[Row], tensor: str) -> None:
    """The default's error of `tensor`, and each part alone, over the traces of a run."""
    tokens = [source.tokens for source in of_run]
    for kind, name in [("variant", "default"), *(("alone", part) for part in PARTS[tensor])]:
        errors = [mean_error(chosen(rows, source=s.name, kind=kind, name=name), tensor) for s in of_run]
        style = {"color": "black", "linewidth": 2} if kind == "variant" else {}
        axes.plot(tokens, errors, "o-", label=name, **style)


def new_figure(
    rows: int, columns: int, *, width: float, height: float, sharey: bool | str = False
) -> tuple[Any, Any]:
    import matplotlib  # slow to import; only needed at the end

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, sharey=sharey, squeeze=False, layout="constrained")


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    save_figure(figure, path)
    plt.close(figure)


if __name__ == "__main__":
    main()
