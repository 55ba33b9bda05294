"""Cells and tables of the report, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table whose first `left` columns are aligned to the left, the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def known(value: float | None) -> float:
    """JSON has no NaN; it has null in its place."""
    return math.nan if value is None else value


def decimal(value: float) -> str:
    """Four decimals, as the papers print them: .0160."""
    return f"{value:.4f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.4f}"


def bold(text: str) -> str:
    return f"**{text}**"


def span(values: Sequence[float], show: Callable[[float], str]) -> str:
    """ "1.02 to 3.44"."""
    return f"{show(min(values))} to {show(max(values))}"


def hardware(data: dict[str, Any]) -> str:
    """The name of what a JSON was measured on."""
    place = data["hardware"]
    name = place if isinstance(place, str) else place["name"]
    return "CPU" if name == "cpu" else name


def tile(config: dict[str, Any]) -> str:
    return f"{config['block_q']} × {config['block_kv']}"


def without_repeats(rows: list[list[str]], columns: int) -> list[list[str]]:
    """The rows with each of the first columns left empty where it, and what is before it, is as above."""
    shown, above = [], [""] * columns
    for row in rows:
        names = ["" if row[: n + 1] == above[: n + 1] else row[n] for n in range(columns)]
        shown.append([*names, *row[columns:]])
        above = row
    return shown


def commit_of(data: dict[str, Any]) -> str:
    """ "commit 719bbd4", of what a JSON was measured with."""
    commits = dict.fromkeys(own.get("commit") for own in (data, *data.get("joined_with", ())))
    if not all(commits):
        return "commit not recorded"
    return f"commit{'s' * (len(commits) > 1)} {', '.join(commit[:7] for commit in commits)}"
