"""Tables of scripts.paper.gradient_error."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from scripts.output import align
from scripts.paper.attention_errors import TITLES
from scripts.paper.gradient_error_rows import (
    PARTS,
    HeadSource,
    Row,
    by_variant,
    chosen,
    costs_of,
    front,
    mean_error,
    points_of,
)
from scripts.paper.gradient_variants import STEPS

#: Variants whose bias along the exact gradient is shown, to tell it from the error's size.
BIAS_OF = ("default", "stochastic dS", "stochastic dS, mean of 8", "16-bit dQ, dK")


def to_markdown(sources: Sequence[HeadSource], rows: Sequence[Row]) -> str:
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


def cost_table(sources: Sequence[HeadSource], rows: Sequence[Row], tensor: str) -> list[str]:
    """Every variant, the cheap ones first; * marks those on the Pareto front."""
    costs = costs_of(rows)
    fronts = {source.name: front(points_of(rows, source, tensor)) for source in sources}
    grouped = by_variant(rows)
    cells = []
    for name in sorted(costs, key=costs.get):
        errors = []
        for source in sources:
            error = mean_error(grouped[source.name, "variant", name], tensor)
            errors.append(f"{error:.4f}" + ("*" if name in fronts[source.name] else " "))
        cells.append([name, f"{costs[name]:.2f}", *errors])
    return align(["variant", "cost", *(source.name for source in sources)], cells)


def step_table(sources: Sequence[HeadSource], rows: Sequence[Row], tensor: str) -> list[str]:
    grouped = by_variant(rows)
    cells = [
        [
            step,
            *(
                " / ".join(
                    f"{mean_error(grouped[source.name, kind, step], tensor):.4f}"
                    for kind in ("alone", "all but")
                )
                for source in sources
            ),
        ]
        for step in STEPS
    ]
    return align(["rounding", *(source.name for source in sources)], cells)


def layer_table(sources: Sequence[HeadSource], rows: Sequence[Row], tensor: str) -> list[str]:
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


def bias_table(sources: Sequence[HeadSource], rows: Sequence[Row]) -> list[str]:
    """Gain − 1: how much too long (or, negative, too short) dQ and dK are along the exact ones."""
    cells = []
    for name in BIAS_OF:
        for tensor in PARTS:
            of = [chosen(rows, source=source.name, kind="variant", name=name) for source in sources]
            biases = [fmean(row.gain[tensor] - 1 for row in found) for found in of]
            cells.append([f"{name}: gain of {TITLES[tensor]} − 1", *(f"{bias:+.5f}" for bias in biases)])
    return align(["", *(source.name for source in sources)], cells)
