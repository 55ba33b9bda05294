"""Results that people sent in: what a file must hold, and the page that shows them all.

python -m scripts.bench.submissions                    write docs/gpus.md from results/gpus/*.json
python -m scripts.bench.submissions --check FILE.json  say what is wrong with a file of scripts.bench.share
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from common.files import write_text
from common.terminal import command_parser
from scripts.bench.tables import DEFAULT, MODES, PASSED, Row, look_of, rows_of, verdicts
from scripts.output import align, number, read_result

PROGRAM = "python -m scripts.bench.submissions"
SUBMITTED = Path("results/gpus")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpus.md"
BEGIN, END = "<!-- submitted results: begin -->\n", "<!-- submitted results: end -->\n"
SCHEMA = 1


def main(argv: list[str] | None = None) -> None:
    """Write the page, or check a file. Exits with a message if a file is wrong."""
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument("--check", type=Path, metavar="FILE.json", help="check a file, and write nothing")
    file = parser.parse_args(argv).check
    if file is None:
        write_text(PAGE, renewed(PAGE.read_text(encoding="utf-8"), submitted()))
        print(f"written: {PAGE}")
    elif not file.is_file():
        parser.error(f"{file}: no such file")
    else:
        fail_if_wrong({file.name: read_result(file)})
        print(f"{file} can be submitted: add it to {SUBMITTED}/")


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


# --- What a file must hold ----------------------------------------------------------------------------------

TEXT, NUMBER, NULL = "a line of text without | < >", "a positive number", "null"
#: By path. What begins with a question mark need not be there.
OF_FILE = {
    "schema": (NUMBER,),
    **dict.fromkeys(("command", "date", "hardware.name", "hardware.compute_capability"), (TEXT,)),
    **dict.fromkeys(("versions.torch", "versions.cuda", "settings.dtype"), (TEXT,)),
    **dict.fromkeys(("commit", "version", "hardware.driver", "versions.triton", "?note"), (TEXT, NULL)),
    **dict.fromkeys(("hardware.memory_gib", "settings.repetitions"), (NUMBER,)),
    **dict.fromkeys(("hardware.power_limit_watts", "hardware.max_sm_clock_mhz"), (NUMBER, NULL)),
    "?state.sm_clock_mhz.median": (NUMBER,),
}
OF_ROW = {
    **dict.fromkeys(("shape.batch", "shape.heads", "shape.tokens", "shape.head_dim"), (NUMBER,)),
    **dict.fromkeys(("implementation", "mode", "status"), (TEXT,)),
    "median_ms": (NUMBER, NULL),
}


def check(result: Any) -> list[str]:
    """What is wrong with a file, in words: the field, its value and what it must be. Empty if nothing is."""
    problems = [*_broken(result, OF_FILE, "")]
    if problems:
        return problems
    if result["schema"] != SCHEMA:
        problems.append(f"schema is {result['schema']}; it must be {SCHEMA}")
    if not _has_time_zone(result["date"]):
        problems.append(f"date is {result['date']!r}; it must be as 2026-11-23T08:00:00+00:00")
    rows = result.get("rows")
    if not isinstance(rows, list) or not any(_is_default(row) for row in rows):
        return [*problems, f"rows must be a list, and have the implementation {DEFAULT!r}"]
    for i, row in enumerate(rows):
        problems += [*_broken(row, OF_ROW, f"rows[{i}].")] or _inconsistent(row, f"rows[{i}].")
    return problems


def _broken(value: Any, wanted: dict[str, tuple[str, ...]], prefix: str) -> Iterator[str]:
    for path, kinds in wanted.items():
        name, found = path.removeprefix("?"), value
        for part in name.split("."):
            found = found.get(part, KeyError) if isinstance(found, dict) else KeyError
        if found is KeyError and not path.startswith("?"):
            yield f"{prefix}{name} is missing; it must be {' or '.join(kinds)}"
        elif found is not KeyError and _kind_of(found) not in kinds:
            yield f"{prefix}{name} is {_short(found)}; it must be {' or '.join(kinds)}"


def _kind_of(value: Any) -> str | None:
    """TEXT, which fits into a cell of a table, NUMBER, NULL, or nothing of these."""
    if value is None:
        return NULL
    if isinstance(value, str):
        return TEXT if value.strip() and not {*value} & {*"|<>\n"} else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return NUMBER if is_number and value > 0 else None


def _has_time_zone(date: str) -> bool:
    try:
        return datetime.fromisoformat(date).tzinfo is not None
    except ValueError:
        return False


def _is_default(row: Any) -> bool:
    return isinstance(row, dict) and row.get("implementation") == DEFAULT


def _inconsistent(row: dict[str, Any], prefix: str) -> list[str]:
    """Whether the fields are those of a row, its speed is its work over its time, and only if it is right."""
    try:
        [own] = rows_of({"rows": [row]})
        flops = own.shape.flops * MODES[own.mode].flops
    except (TypeError, KeyError) as error:
        return [f"{prefix[:-1]} has other fields than scripts.bench.share writes ({error})"]
    if (own.status == PASSED) != (own.median_ms is not None):
        found = f"median_ms is {own.median_ms} where status is {own.status!r}"
        return [f"{prefix}{found}; a time must be there if, and only if, that is {PASSED!r}"]
    if own.median_ms is None:
        return []
    speed = flops / (own.median_ms * 1e-3) / 1e12
    if _kind_of(own.tflops) != NUMBER or abs(own.tflops / speed - 1) > 0.01:
        follows = f"it must be {speed:.4g}, which follows from median_ms"
        return [f"{prefix}tflops is {_short(own.tflops)}; {follows}"]
    return []


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"


# --- The page -----------------------------------------------------------------------------------------------


def renewed(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with what is generated between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + page_of(results) + END + rest.split(END)[1]


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
    parts = ["\n".join(align(header, [_machine(name, result) for name, result in results.items()]))]
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
    titles = [look_of(name).title for name in names]
    return align(["forward + backward, TFLOP/s", "N", *titles], table)


if __name__ == "__main__":
    main()
