"""Make the pictures and tables of a folder of results again, from its JSON files and copied runs.

    python -m scripts.paper.render results                         # all of them
    python -m scripts.paper.render results table1.png layers.md    # some

The JSON files stay as they are. Pictures and tables of scripts.bench are left to its commands, the report to
scripts.paper.report.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data.files import write_text
from scripts.command_line import command_parser
from scripts.paper import (
    accuracy,
    drawing,
    equal_loss_tables,
    error_against_time,
    gradient_formats,
    large_logits,
    table1,
)
from scripts.paper.further_runs import ASSAYS
from scripts.paper.gradient_bias_tables import Row as BiasRow
from scripts.paper.gradient_bias_tables import draw as draw_bias
from scripts.paper.gradient_bias_tables import to_markdown as bias_markdown
from scripts.paper.gradient_error_pictures import draw_costs, draw_progress
from scripts.paper.gradient_error_rows import HeadSource, runs_with_progress
from scripts.paper.gradient_error_rows import Row as ErrorRow
from scripts.paper.gradient_error_tables import to_markdown as error_markdown
from scripts.paper.large_logits_pictures import draw as draw_large_logits
from scripts.paper.large_logits_tables import to_markdown as large_logits_markdown
from scripts.paper.layers_pictures import draw_layers, draw_smoothing
from scripts.paper.layers_tables import Row as LayerRow
from scripts.paper.layers_tables import to_markdown as layers_markdown
from scripts.paper.loss_pictures import TITLES
from scripts.paper.loss_pictures import draw as draw_losses
from scripts.paper.loss_statistics import compare
from scripts.paper.report.markdown import known
from scripts.paper.result_files import DamagedResult, Results
from scripts.paper.run_summary import stored_runs
from trainer.plot import plot_losses

#: What scripts.paper.gradient_bias measured: 35M models, and one of 325M with QK-norm and one without.
BIAS = ("gradient_bias", "gradient_bias_325m", "gradient_bias_325m_no_qk_norm")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    results = Results(arguments.folder)
    try:
        for name, make in files(results).items():
            if not arguments.files or name in arguments.files:
                make(arguments.folder / name)
                print(arguments.folder / name)
    except (DamagedResult, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser("python -m scripts.paper.render", __doc__)
    parser.add_argument("folder", type=Path, help="folder of results")
    parser.add_argument("files", nargs="*", metavar="FILE", help="pictures and tables to make (default: all)")
    arguments = parser.parse_args(argv)
    there = files(Results(arguments.folder))
    if absent := [name for name in arguments.files if name not in there]:
        parser.error(f"{absent[0]} cannot be made from {arguments.folder}; choose among {', '.join(there)}")
    return arguments


def files(results: Results) -> dict[str, Callable[[Path], None]]:
    """What makes each picture and table whose numbers are in the folder."""
    return pictures(results) | tables(results)


def tables(results: Results) -> dict[str, Callable[[Path], None]]:
    made: dict[str, Callable[[Path], None]] = {}

    def add(name: str, markdown: Callable[[dict[str, Any]], str]) -> None:
        if results.has(f"{name}.json"):
            made[f"{name}.md"] = lambda path: write_text(path, markdown(results.json(f"{name}.json")))

    add("accuracy", accuracy.to_markdown)
    add("layers", lambda data: layers_markdown(data, layer_rows(data)))
    add("gradient_error", lambda data: error_markdown(*study(data)))
    for name in BIAS:
        add(name, lambda data: bias_markdown(data, bias_rows(data)))
    for name in ASSAYS:
        add(name, lambda data: large_logits_markdown(data, large_logits.compare(data["runs"])))
    add("equal_loss", lambda data: equal_loss_tables.to_markdown(data, equal_loss_rows(data)))
    add("gradient_formats", lambda data: gradient_formats.to_markdown(data, gradient_formats.rows_of(data)))
    return made


def pictures(results: Results) -> dict[str, Callable[[Path], None]]:
    drawn: dict[str, Callable[[Path], None]] = {}

    def add(picture: str, source: str, figure: Callable[[dict[str, Any]], Any]) -> None:
        if results.has(source):
            drawn[picture] = lambda path: drawing.save(figure(results.json(source)), path)

    add("table1.png", "table1.json", lambda data: table1.draw(data["rows"]))
    for name, title in TITLES.items():
        add(f"{name}.png", f"{name}.json", lambda data, title=title: losses(data, title))
    add("layers.png", "layers.json", lambda data: draw_layers(data["runs"], layer_rows(data)))
    add("layers_smoothing.png", "layers.json", lambda data: draw_smoothing(layer_rows(data)))
    add("gradient_error.png", "gradient_error.json", lambda data: draw_costs(*study(data)))
    if results.has("gradient_error.json") and runs_with_progress(
        study(results.json("gradient_error.json"))[0]
    ):
        for tensor in ("dq", "dk"):
            add(
                f"gradient_error_progress_{tensor}.png",
                "gradient_error.json",
                lambda data, tensor=tensor: draw_progress(*study(data), tensor),
            )
    for name in BIAS:
        if results.has(f"{name}.json"):
            drawn[f"{name}.png"] = lambda path, name=name: draw_bias(
                bias_rows(results.json(f"{name}.json")), path
            )
    for name in ASSAYS:
        add(
            f"{name}.png",
            f"{name}.json",
            lambda data: draw_large_logits(
                large_logits.compare(data["runs"]), large_logits.curves_of(data["runs"])
            ),
        )
    add("equal_loss.png", "equal_loss.json", lambda data: equal_loss_tables.draw(equal_loss_rows(data)))
    add(
        "error_against_time.png",
        "error_against_time.json",
        lambda data: error_against_time.draw(data["rows"], data["settings"]["head_dim"]),
    )
    return drawn | copied_runs(results)


def losses(data: dict[str, Any], title: str) -> Any:
    finished = [run for run in stored_runs(data) if run["finished"] or run["diverged"]]
    return draw_losses(compare(finished), finished, title)


def bias_rows(data: dict[str, Any]) -> list[BiasRow]:
    return [BiasRow(**row) for row in data["rows"]]


def layer_rows(data: dict[str, Any]) -> list[LayerRow]:
    rows = [LayerRow(**row) for row in data["rows"]]
    for row in rows:
        for errors in row.errors.values():
            errors.update({name: known(value) for name, value in errors.items()})
    return rows


def equal_loss_rows(data: dict[str, Any]) -> list[equal_loss_tables.Row]:
    return [equal_loss_tables.Row(**row) for row in data["rows"]]


def study(data: dict[str, Any]) -> tuple[list[HeadSource], list[ErrorRow]]:
    rows = [
        ErrorRow(**row | {"relative_l2": {name: known(x) for name, x in row["relative_l2"].items()}})
        for row in data["rows"]
    ]
    return [HeadSource(**source) for source in data["sources"].values()], rows


def copied_runs(results: Results) -> dict[str, Callable[[Path], None]]:
    """Loss curves of the training runs whose directories were copied into the folder."""
    compared = {
        "quickstart.png": {name: f"quickstart/{name}" for name in ("fpa", "sagebwd")},
        "llama_325m_pair/comparison.png": {name: f"llama_325m_pair/{name}" for name in ("fpa", "sagebwd")},
        "llama_tiny_gpt2/comparison.png": {name: f"llama_tiny_gpt2/{name}" for name in ("fpa", "sagebwd")},
        "llama_325m_fpa/loss.png": {"fpa": "llama_325m_fpa"},
    }

    def draw(runs: dict[str, str], path: Path) -> None:
        plot_losses({name: results.run(run) for name, run in runs.items()}, path)
        drawing.save_with_palette(path.read_bytes(), path)

    return {
        picture: partial(draw, runs)
        for picture, runs in compared.items()
        if results.has(*(f"{run}/metrics.jsonl" for run in runs.values()))
    }


if __name__ == "__main__":
    main()
