"""Results that people sent in: what a file must hold, and the page that shows them all.

python -m scripts.bench.submissions                    write docs/gpus.md from results/submitted/*.json
python -m scripts.bench.submissions --check FILE.json  say what is wrong with a file of scripts.bench.share
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from data.files import write_text
from scripts.bench.registry import Shape
from scripts.bench.tables import (
    DEFAULT,
    FAILED,
    MODES,
    PASSED,
    REFUSED,
    TENSORS,
    Row,
    look_of,
    rows_of,
    verdicts,
)
from scripts.command_line import command_parser
from scripts.output import align, number, read_result

PROGRAM = "python -m scripts.bench.submissions"
SUBMITTED = Path("results/submitted")
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


def _is_text(value: Any) -> bool:
    """Also in a cell of a table."""
    return isinstance(value, str) and bool(value.strip()) and not {*value} & {*"|<>\n"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _is_date(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_state(value: Any) -> bool:
    """A median for each value that nvidia-smi told."""
    if not isinstance(value, dict):
        return value is None
    return all(x is None or (isinstance(x, dict) and _is_number(x.get("median"))) for x in value.values())


def _are_errors(value: Any) -> bool:
    if not isinstance(value, dict) or not {*value} <= {*TENSORS}:
        return False
    return all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())


#: What a value must be, in words and as a function.
Rule = tuple[str, Callable[[Any], bool]]

TEXT: Rule = ("a line of text without | < >", _is_text)
TEXT_OR_NULL: Rule = (f"{TEXT[0]}, or null if it is not known", lambda x: x is None or _is_text(x))
NUMBER: Rule = ("a positive number", _is_number)
NUMBER_OR_NULL: Rule = (f"{NUMBER[0]}, or null if it was not recorded", lambda x: x is None or _is_number(x))


def _one_of(*values: Any) -> Rule:
    return f"one of {', '.join(map(str, values))}", lambda x: x in values


def _fields_of(structure: type) -> Rule:
    names = [one.name for one in fields(structure)]
    wanted = f"an object with no other fields than {', '.join(names)}"
    return wanted, lambda x: isinstance(x, dict) and {*x} <= {*names}


#: By path. What begins with a question mark need not be there.
OF_FILE: dict[str, Rule] = {
    "schema": _one_of(SCHEMA),
    "command": TEXT,
    "date": ("a date with a time zone, as 2026-11-23T08:00:00+00:00", _is_date),
    "commit": TEXT_OR_NULL,
    "version": TEXT_OR_NULL,
    "hardware.name": TEXT,
    "hardware.compute_capability": (
        'a text such as "8.9"',
        lambda x: isinstance(x, str) and re.fullmatch(r"\d+\.\d", x) is not None,
    ),
    "hardware.memory_gib": NUMBER,
    "hardware.driver": TEXT_OR_NULL,
    "hardware.power_limit_watts": NUMBER_OR_NULL,
    "hardware.max_sm_clock_mhz": NUMBER_OR_NULL,
    "versions.torch": TEXT,
    "versions.cuda": TEXT,
    "versions.triton": TEXT_OR_NULL,
    "settings.dtype": _one_of("bfloat16", "float16"),
    "settings.repetitions": NUMBER,
    "rows": ("a list with a row at least", lambda x: isinstance(x, list) and bool(x)),
    "?note": TEXT_OR_NULL,
    "?state": ("null, or a median for each value that nvidia-smi told", _is_state),
}
OF_ROW: dict[str, Rule] = {
    "": _fields_of(Row),
    "shape": _fields_of(Shape),
    **dict.fromkeys(("shape.batch", "shape.heads", "shape.tokens", "shape.head_dim"), NUMBER),
    "shape.causal": ("true or false", lambda x: isinstance(x, bool)),
    "implementation": TEXT,
    "mode": _one_of(*MODES),
    "status": _one_of(PASSED, FAILED, REFUSED),
    "median_ms": NUMBER_OR_NULL,
    "errors": ("errors of O, dQ, dK, dV as [cosine, relative L2]", _are_errors),
}


def check(result: Any) -> list[str]:
    """What is wrong with a file, in words: the field, its value and what it must be. Empty if nothing is."""
    if not isinstance(result, dict):
        return [f"the file is {_short(result)}; it must be an object with the fields of scripts.bench.share"]
    problems = [*_broken(result, OF_FILE, "")]
    rows = result.get("rows")
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        problems += [*_broken(row, OF_ROW, f"rows[{i}].")] or _inconsistent(row, f"rows[{i}].")
    if not problems and not any(row["implementation"] == DEFAULT for row in rows):
        problems.append(f"rows has no implementation {DEFAULT!r}; it must have one")
    return problems


def _broken(value: Any, rules: dict[str, Rule], prefix: str) -> Iterator[str]:
    for path, (wanted, holds) in rules.items():
        name = path.removeprefix("?")
        found = value
        for part in filter(None, name.split(".")):
            found = found.get(part, KeyError) if isinstance(found, dict) else KeyError
        shown = f"{prefix}{name}".rstrip(".")
        if found is KeyError:
            if not path.startswith("?"):
                yield f"{shown} is missing; it must be {wanted}"
        elif not holds(found):
            yield f"{shown} is {_short(found)}; it must be {wanted}"


def _inconsistent(row: dict[str, Any], prefix: str) -> list[str]:
    """Whether the speed of a row is its work over its time, and only right results have one."""
    if (row["status"] == PASSED) != (row["median_ms"] is not None):
        found = f"median_ms is {row['median_ms']} where status is {row['status']!r}"
        return [f"{prefix}{found}; a time must be there if, and only if, that is {PASSED!r}"]
    if row["median_ms"] is None:
        return []
    speed = Shape(**row["shape"]).flops * MODES[row["mode"]].flops / (row["median_ms"] * 1e-3) / 1e12
    found = row.get("tflops")
    if not _is_number(found) or abs(found / speed - 1) > 0.01:
        return [f"{prefix}tflops is {_short(found)}; it must be {speed:.4g}, which follows from median_ms"]
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
