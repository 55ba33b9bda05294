"""The page that shows the results which people sent in: docs/gpus.md, from results/gpus/*.json.

python -m scripts.bench.submissions
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from common.files import write_text
from common.terminal import command_parser
from scripts.bench.tables import DEFAULT, MODES, PASSED, overview, rows_of, verdicts
from scripts.output import align, number, read_json

SUBMITTED = Path("results/gpus")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpus.md"
BEGIN, END = "<!-- submitted results: begin -->\n", "<!-- submitted results: end -->\n"


def main(argv: list[str] | None = None) -> None:
    """Write the page. Exits with a message if a file is wrong."""
    command_parser("python -m scripts.bench.submissions", __doc__).parse_args(argv)
    write_text(PAGE, renewed(PAGE.read_text(encoding="utf-8"), submitted()))
    print(f"written: {PAGE}")


def submitted(folder: Path = ROOT / SUBMITTED) -> dict[str, dict[str, Any]]:
    """{file name: result} of all files, by GPU and date. Exits with a message if one is wrong."""
    results = {file.name: read_json(file) for file in sorted(folder.glob("*.json"))}
    for name, result in results.items():
        if problem := fault_of(result):
            sys.exit(f"{name}: {problem}")
    order = sorted(results, key=lambda name: (results[name]["hardware"]["name"], results[name]["date"], name))
    return {name: results[name] for name in order}


def fault_of(result: dict[str, Any]) -> str | None:
    """Why a file cannot be shown: a field or the default is missing, or a speed is not that of its time."""
    try:
        page_of({"": result})
        rows = [(row, row.shape.flops * MODES[row.mode].flops) for row in rows_of(result)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"it has other fields than scripts.bench.share writes ({error!r})"
    if not any(row.implementation == DEFAULT for row, _ in rows):
        return f"it has no rows of {DEFAULT!r}, the default settings"
    for row, flops in rows:
        where = f"{row.implementation}, {row.mode}, {row.shape}"
        if (row.status == PASSED) != bool(row.median_ms and row.tflops):
            return f"{where}: {row.status}, but median_ms is {row.median_ms} and tflops {row.tflops}"
        if row.status == PASSED:
            speed = flops / (row.median_ms * 1e-3) / 1e12
            if not abs(row.tflops / speed - 1) < 0.01:
                return f"{where}: tflops is {row.tflops}, and {speed:.4g} follows from median_ms"
    return None


# --- The page -----------------------------------------------------------------------------------------------


def renewed(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with what is generated between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + page_of(results) + END + rest.split(END)[1]


def page_of(results: dict[str, dict[str, Any]]) -> str:
    """The generated part of docs/gpus.md, from {file name: result}."""
    header = ["GPU", "compute capability", "power limit, W", "SM clock, MHz", "driver", "torch"]
    header += ["date", "file"]
    parts = ["\n".join(align(header, [_machine(name, result) for name, result in results.items()]))]
    for name, result in results.items():
        rows = rows_of(result)
        lines = [f"## {result['hardware']['name']}, {result['date'][:10]}", "", "TFLOP/s:", ""]
        lines += overview([row for row in rows if row.mode == "both"])
        lines += [f"- {line}" for line in verdicts(rows)]
        lines += ["", f"From {_link(name)}: {_origin(result)}."]
        parts.append("\n".join(lines))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _machine(name: str, result: dict[str, Any]) -> list[str]:
    hardware, state = result["hardware"], result.get("state") or {}
    return [
        hardware["name"],
        hardware["compute_capability"],
        number(hardware["power_limit_watts"], ".0f") or "not recorded",
        number(state.get("sm_clock_mhz"), ".0f") or "not recorded",
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


if __name__ == "__main__":
    main()
