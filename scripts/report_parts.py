"""What the report's sections are made of: verdicts, text, tables, numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.results import Results

AGREES, DIFFERS, CANNOT_TELL = "agrees", "does not agree", "cannot tell at this scale"


class Verdict(NamedTuple):
    """One thing the paper says, whether it holds here, and by which rule on which numbers."""

    claim: str
    answer: str
    why: str = ""


@dataclass(frozen=True)
class Body:
    """The text of a section below its heading, and what it concludes."""

    text: str
    verdicts: list[Verdict] = field(default_factory=list)


class Section(NamedTuple):
    """A section beside the paper's items, shown when all the files in `needs` are there."""

    title: str
    needs: tuple[str, ...]
    write: Callable[[Results], Body]


def decimal(value: float) -> str:
    """Four decimals, as the papers print them: .0160."""
    return f"{value:.4f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.4f}"


def hardware(data: dict) -> str:
    """The name of what a JSON was measured on."""
    place = data["hardware"]
    name = place if isinstance(place, str) else place["name"]
    return "a CPU" if name == "cpu" else name


def tile(config: dict) -> str:
    return f"{config['block_q']} × {config['block_kv']}"


def picture(path: str, text: str) -> str:
    return f"![{text}]({path})"


def markdown(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table whose first `left` columns are aligned to the left, the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))
