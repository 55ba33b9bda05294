"""Results that people sent in: what a file must hold, and the page that shows them all.

python -m scripts.bench.submissions                    write docs/gpus.md from results/submitted/*.json
python -m scripts.bench.submissions --check FILE.json  say what is wrong with a file of scripts.bench.share
python -m scripts.bench.submissions --convert BENCH.json --out results/submitted/NAME.json
                                                       from a file of scripts.bench.attention
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from data.files import write_json, write_text
from scripts.bench.attention_tables import Row, rows_of, title
from scripts.bench.attention_verdicts import verdicts
from scripts.bench.submission_schema import SCHEMA, check
from scripts.command_line import command_parser
from scripts.output import align, number, read_result

PROGRAM = "python -m scripts.bench.submissions"
SUBMITTED = Path("results/submitted")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpus.md"
BEGIN, END = "<!-- submitted results: begin -->\n", "<!-- submitted results: end -->\n"
#: What is kept of a longer benchmark: lengths and modes, those of scripts.bench.share.
LENGTHS, KEPT = (1024, 4096, 16384), ("both", "forward", "backward")

# --- Converting ---------------------------------------------------------------------------------------------


def convert(result: dict[str, Any], source: str) -> dict[str, Any]:
    """A file of scripts.bench.attention as one to submit: null for what it did not record, fewer lengths."""
    unknown = {"power_limit_watts": None, "max_sm_clock_mhz": None}
    rows = [row for row in result["rows"] if row["shape"]["tokens"] in LENGTHS and row["mode"] in KEPT]
    kept = {name: result[name] for name in ("command", "date", "commit", "versions", "settings", "absent")}
    note = f"from {source}; its command recorded neither power limit nor clocks"
    return {
        "schema": SCHEMA,
        "version": None,
        **kept,
        "hardware": unknown | result["hardware"],
        "kernels": None,
        "state": None,
        "note": note,
        "rows": rows,
    }


# --- The page -----------------------------------------------------------------------------------------------


def page_of(results: dict[str, dict[str, Any]]) -> str:
    """The generated part of docs/gpus.md, from {file name: result}."""
    header = [
        "GPU",
        "compute capability",
        "power limit, W",
        "SM clock, MHz",
        "driver",
        "torch",
        "date",
        "file",
    ]
    table = [_machine(name, result) for name, result in results.items()]
    parts = ["\n".join(align(header, table))]
    for name, result in results.items():
        rows = rows_of(result)
        lines = [f"## {result['hardware']['name']}, {result['date'][:10]}", "", *_speeds(rows), ""]
        lines += [f"- {line}" for line in verdicts(rows)]
        lines += ["", f"From {_link(name)}: {_origin(result)}."]
        parts.append("\n".join(lines))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _machine(name: str, result: dict[str, Any]) -> list[str]:
    hardware, state = result["hardware"], result.get("state") or {}
    clock = (state.get("sm_clock_mhz") or {}).get("median")
    return [
        hardware["name"],
        hardware["compute_capability"],
        number(hardware["power_limit_watts"], ".0f") or "not recorded",
        number(clock, ".0f") or "not recorded",
        hardware["driver"] or "not recorded",
        result["versions"]["torch"],
        result["date"][:10],
        _link(name),
    ]


def _link(name: str) -> str:
    return f"[{name.removesuffix('.json')}](../{SUBMITTED}/{name})"


def _origin(result: dict[str, Any]) -> str:
    versions = [f"{name} {result[name]}" for name in ("version", "commit") if result[name]]
    settings = result["settings"]
    repetitions = f"medians of {settings['repetitions']} repetitions"
    return ", ".join([*versions, settings["dtype"], repetitions, *filter(None, [result.get("note")])])


def _speeds(rows: list[Row]) -> list[str]:
    """Forward + backward: TFLOP/s of every implementation that was timed."""
    timed = [row for row in rows if row.mode == "both" and row.tflops]
    names = [*dict.fromkeys(row.implementation for row in timed)]
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in timed:
        key = (row.shape.mask, row.shape.head_dim, row.shape.tokens)
        cells.setdefault(key, {})[row.implementation] = row.tflops
    table = [
        [f"{mask}, D {head_dim}", f"{tokens:,}", *(number(own.get(name), ".0f") for name in names)]
        for (mask, head_dim, tokens), own in cells.items()
    ]
    return align(["forward + backward, TFLOP/s", "N", *map(title, names)], table)


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Write the page, or check or convert a file. Exits with a message if a file is wrong."""
    arguments = parse_arguments(argv)
    if arguments.check:
        fail_if_wrong({arguments.check.name: read_result(arguments.check)})
        print(f"{arguments.check} can be submitted: add it to {SUBMITTED}/")
    elif arguments.convert:
        converted = convert(read_result(arguments.convert), f"results/{arguments.convert.name}")
        fail_if_wrong({arguments.convert.name: converted})
        write_json(arguments.out, converted)
        print(f"written: {arguments.out}")
    else:
        write_text(PAGE, renewed(PAGE.read_text(encoding="utf-8"), submitted()))
        print(f"written: {PAGE}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument("--check", type=Path, metavar="FILE.json", help="check a file, and write nothing")
    parser.add_argument("--convert", type=Path, metavar="BENCH.json", help="write it as --out")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="of --convert")
    arguments = parser.parse_args(argv)
    for file in (arguments.check, arguments.convert):
        if file is not None and not file.is_file():
            parser.error(f"{file}: no such file")
    if (arguments.convert is None) != (arguments.out is None):
        parser.error("--convert and --out go together")
    return arguments


def submitted(folder: Path = ROOT / SUBMITTED) -> dict[str, dict[str, Any]]:
    """{file name: result} of all files, by GPU and date. Exits with a message if one is wrong."""
    results = {file.name: read_result(file) for file in sorted(folder.glob("*.json"))}
    fail_if_wrong(results)
    order = sorted(results, key=lambda name: (results[name]["hardware"]["name"], results[name]["date"], name))
    return {name: results[name] for name in order}


def fail_if_wrong(results: dict[str, Any]) -> None:
    problems = [f"{name}: {problem}" for name, result in results.items() for problem in check(result)]
    if problems:
        sys.exit("\n".join(problems))


def renewed(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with what is generated between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + page_of(results) + END + rest.split(END)[1]


if __name__ == "__main__":
    main()
