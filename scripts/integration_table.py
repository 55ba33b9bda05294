"""Try model families of other libraries with SageBwd, and write the table in docs/models.md.

Each family is built at tiny size with random weights, so nothing is downloaded. It makes one training step on
the CPU in full precision, one with SageBwd where it may fall back to full precision, one where it may not,
and one with nothing in INT8. That takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.files import read_json, write_json
from scripts.bench.measuring import describe_run
from scripts.command_line import command_parser
from scripts.families import Row

PROGRAM = "python -m scripts.integration_table"
EXAMPLES = f"""examples:
  {PROGRAM}                                 all families of the libraries that are installed
  {PROGRAM} --library transformers --family Llama T5
  {PROGRAM} --draw                          write the table from the JSON file again
"""
ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "results/integrations.json", ROOT / "docs/models.md"

#: By library, a module with ``families(names: list[str] | None) -> list[Row]``.
LIBRARIES = {"transformers": "scripts.families.transformers", "diffusers": "scripts.families.diffusers"}

HEAD = (
    "| family | class | attention | cosine of gradients | of those of attention | 1 − cosine without INT8 "
    "| in full precision |\n| --- | --- | --- | ---: | ---: | ---: | --- |\n"
)


def main(argv: list[str] | None = None) -> None:
    """Try, print, and unless only some families were asked for, write the JSON file and the table."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)  # more would only wait for each other at these sizes
    results = read_json(RESULT) or {}
    for library in [] if arguments.draw else arguments.library:
        rows = try_library(library, arguments.family)
        print(table(rows) + "\n" + refusals(rows))
        results[library] = describe_run(PROGRAM, argv, arguments, [library]) | {"rows": [*map(asdict, rows)]}
    if arguments.family is None:
        write_json(RESULT, results)
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
        print(f"written to {RESULT} and {PAGE}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    parser.set_defaults(device="cpu")
    installed = [library for library in LIBRARIES if importlib.util.find_spec(library)]
    parser.add_argument(
        "--library", nargs="+", choices=LIBRARIES, default=installed, help="default: those that are installed"
    )
    parser.add_argument("--family", nargs="+", metavar="NAME", help="try only these, and write nothing")
    parser.add_argument("--draw", action="store_true", help="try nothing: write the table again")
    arguments = parser.parse_args(argv)
    missing = [library for library in arguments.library if library not in installed]
    if missing and not arguments.draw:
        parser.error(f"{', '.join(missing)} is not installed; pip install {' '.join(missing)}")
    return arguments


def try_library(library: str, names: list[str] | None) -> list[Row]:
    """The rows of a library, without the families that ``names`` leaves out."""
    return importlib.import_module(LIBRARIES[library]).families(names)


def renewed(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with the tables of ``results`` between its marks."""
    for library, result in results.items():
        begin, end = f"<!-- {library} table: begin -->\n", f"<!-- {library} table: end -->\n"
        before, rest = page.split(begin)
        rows = [Row(**row) for row in result["rows"]]
        made = f"\n{summary(rows)}\n\n{table(rows)}\n{refusals(rows)}\n"
        page = before + begin + made + end + rest.split(end)[1]
    return page


def summary(rows: list[Row]) -> str:
    """How many families there are of each outcome, in a line."""
    outcomes = [row.outcome for row in rows]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
    models = len({row.model for row in rows})
    in_ways = f", {len(rows)} rows" if len(rows) > models else ""
    return f"{rows[0].library}, {models} families{in_ways}: {counts}."


def table(rows: list[Row]) -> str:
    """A row for each family, in Markdown."""
    return HEAD + "".join(
        f"| {row.family} | `{row.model}` | {_calls(row)} | {_cosine(row.cosine)} "
        f"| {_cosine(row.attention_cosine)} | {_distance(row.exact_cosine)} | {row.fallback} |\n"
        for row in rows
    )


def refusals(rows: list[Row]) -> str:
    """What a family is refused with where it may not fall back, in Markdown; one line for a message."""
    families: dict[str, list[str]] = {}
    for row in rows:
        if row.refusal:
            families.setdefault(row.refusal.split(": ", 1)[-1], []).append(row.family)
    lines = (f"| {message} | {', '.join(names)} |\n" for message, names in families.items())
    return "| refused with | families |\n| --- | --- |\n" + "".join(lines)


def _calls(row: Row) -> str:
    if row.outcome != "INT8 in part":
        return row.outcome
    return f"INT8 in {row.int8_calls} of {row.int8_calls + row.full_calls} calls"


def _cosine(x: float | None) -> str:
    return "–" if x is None else f"{x:.5f}"


def _distance(cosine: float | None) -> str:
    return "–" if cosine is None else f"{max(1 - cosine, 0):.0e}"


if __name__ == "__main__":
    main()
