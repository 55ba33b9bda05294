"""Errors on random inputs: Table 1, accuracy of the kernels, what a masked token can still change."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from scripts.paper import published as paper
from scripts.paper.attention_errors import TENSORS, TITLES
from scripts.paper.report.markdown import commit_of, decimal, hardware, table, tile
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import Shape, compare_table1, table1_verdict
from scripts.paper.result_files import Results

TABLE_1_VARIANTS = {
    "paper": "paper",
    "block": "`block`: the printed pseudo-code, `paper()`",
    "row": "`row`: P and dS scaled per output row",
    "default": "default of `SageConfig`",
}


def table1(results: Results) -> Section:
    data = results.json("table1.json")
    settings, rows = data["settings"], data["rows"]
    lines = [
        [f"{row['sigma']:g}", TABLE_1_VARIANTS[row["variant"]], *(decimal(row[name][1]) for name in TENSORS)]
        for row in rows
    ]
    header = ["σ", "", *TITLES.values()]
    smallest = f"{min(row['sigma'] for row in rows):g}"
    tiles = data["variants"]
    setting = (
        f"{hardware(data)}, {commit_of(data)}. Shape: {shape_name(settings)}, {settings['heads']} heads, "
        f"chosen because the paper gives none. Tiles {tile(tiles['block'])} (`block`, `row`) and "
        f"{tile(tiles['default'])} (default), not published either. Gaussian inputs, one seed."
    )
    shapes = {variant: table1_shapes(results, variant) for variant in ("row", "block")}
    chosen = {
        variant: compare_table1(shape_name(settings), [r for r in rows if r["variant"] == variant], TITLES)
        for variant in shapes
    }
    tables = {"Relative L2 against float64 attention, Gaussian inputs": table(header, lines, left=2)}
    if shapes["row"]:
        tables[SHAPES_CAPTION] = shapes_table(shapes)
    return Section(
        setting,
        tables,
        [table1_verdict(variant, chosen[variant], shapes[variant]) for variant in shapes],
        {
            "small": table(header, [line for line in lines if line[0] == smallest], left=2),
            "shapes": shapes_table(shapes) if shapes["row"] else "",
            **{f"share.{name}": f"{own.same} of {own.entries}" for name, own in chosen.items()},
            **{
                f"shapes_that_agree.{name}": f"{sum(shape.agrees for shape in own)} of {len(own)}"
                for name, own in shapes.items()
            },
        },
    )


SHAPES_CAPTION = "Entries of Table 1 within the tolerance, by shape; kernels (`accuracy.json`)"


def shape_name(settings: dict[str, Any]) -> str:
    """Of a row of accuracy.json, or of the settings of table1.json."""
    mask = "causal" if settings["causal"] else "full"
    return f"N {settings['tokens']}, D {settings['head_dim']}, {mask}"


def table1_shapes(results: Results, variant: str) -> list[Shape]:
    """Table 1 of a variant at every shape of accuracy.json that has all its σ."""
    if not results.has("accuracy.json"):
        return []
    by_shape: dict[str, list[dict]] = {}
    for row in results.json("accuracy.json")["shapes"]:
        if row["variant"] == variant and row["sigma"] in paper.TABLE_1:
            by_shape.setdefault(shape_name(row), []).append(row)
    return [
        compare_table1(name, rows, TITLES)
        for name, rows in by_shape.items()
        if {row["sigma"] for row in rows} == paper.TABLE_1.keys()
    ]


def shapes_table(shapes: dict[str, list[Shape]]) -> str:
    rows = [
        [of_shape[0].name, *(f"{shape.same} of {shape.entries}" for shape in of_shape)]
        for of_shape in zip(*shapes.values(), strict=True)
    ]
    return table(["shape", *(f"`{variant}`" for variant in shapes)], rows)


def accuracy(results: Results) -> Section:
    data = results.json("accuracy.json")
    settings, rows = data["settings"], data["int8"]
    low, high = min(settings["sigmas"]), sorted(settings["sigmas"])[len(settings["sigmas"]) // 2]
    found = {(row["int8"], row["sigma"]): row for row in rows}
    names = list(dict.fromkeys(row["int8"] for row in rows))
    lines = [
        [name, *(decimal(found[name, sigma][tensor][1]) for sigma in (low, high) for tensor in TENSORS)]
        for name in names
    ]
    header = ["in INT8"]
    header += [f"{TITLES[name]}, σ {sigma:g}" for sigma in (low, high) for name in TENSORS]
    six, seven = (found[name, low]["dq"] for name in ("the paper's six", "all seven"))
    cosines = [
        ["SageAttention3, Table 1c, real tensors", *(decimal(paper.S3_DP[x][0]) for x in ("fp16", "int8"))],
        [f"here, Gaussian inputs, σ {low:g}", decimal(six[0]), decimal(seven[0])],
    ]
    shape = f"D {rows[0]['head_dim']}, {rows[0]['tokens']} tokens, causal, default settings"
    return Section(
        f"{data['implementation']}, {hardware(data)}, torch {data['versions']['torch']}, "
        f"{settings['dtype']}, {settings['heads']} heads, {commit_of(data)}",
        {
            f"Products in INT8, relative L2, {shape}": table(header, lines),
            "Cosine similarity of dQ": table(["", "16-bit dP", "INT8 dP"], cosines),
        },
        fields={"dp_factor": f"{seven[1] / six[1]:.2f}", "sigma": f"{low:g}"},
    )


def causal_leak(results: Results) -> Section:
    data = results.json("causal_leak.json")
    settings, rows = data["settings"], data["rows"]
    lines, short = [], []
    for config in dict.fromkeys(row["config"] for row in rows):
        own = [row for row in rows if row["config"] == config]
        lines.append([f"`{config}`", "(error)", *leak_cells(own, "error")])
        short.append([f"`{config}`", lines[-1][2]])
        for redraw in data["redraws"]:
            inside = [row for row in own if row["redraw"] == redraw and not row["at_border"]]
            lines.append(["", f"{redraw}, inside", *leak_cells(inside, "leak")])
            short[-1].append(lines[-1][2])
        border = [row for row in own if row["at_border"]]
        if border:
            lines.append(["", "any, at a border", *leak_cells(border, "leak", max)])
    header = [
        "setting",
        "later tokens",
        "O, same tile",
        "O, earlier tiles",
        "dQ, same tile",
        "dQ, earlier tiles",
    ]
    caption = (
        "Change of O and dQ of earlier queries when all later tokens are drawn again, relative L2, mean over "
        f"the positions {', '.join(map(str, settings['cuts']))}; at a border: the largest"
    )
    setting = (
        f"reference, {hardware(data)}, N {settings['tokens']}, D {settings['head_dim']}, "
        f"{settings['heads']} heads, causal, σ {settings['sigma']:g}, {commit_of(data)}"
    )
    small = table(["setting", "error", *(f"later tokens {name}" for name in data["redraws"])], short)
    return Section(setting, {caption: table(header, lines, left=2)}, fields={"small": small})


def leak_cells(rows: list[dict], key: str, over_rows: Callable[..., float] = mean) -> list[str]:
    regions = ("same_tile", "earlier_tiles")
    values = [over_rows(row[key][name][r] for row in rows) for name in ("out", "dq") for r in regions]
    return ["0" if value == 0 else decimal(value) for value in values]


SECTIONS: dict[str, Callable[[Results], Section]] = {
    "table1": table1,
    "accuracy": accuracy,
    "causal_leak": causal_leak,
}
