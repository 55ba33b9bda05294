"""What the report's sections are made of: verdicts, text, tables, numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.paper.results import Results

AGREES, DIFFERS, CANNOT_TELL = "agrees", "does not agree", "cannot tell at this scale"
#: A model that has seen fewer tokens than this is hardly trained: what is measured in it decides nothing.
TRAINED = 1_000_000
UNTRAINED = f"No model here has seen {TRAINED:,} tokens."


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


class Case(NamedTuple):
    """Whether a claim holds for a model that has seen so many tokens (0: random numbers); the numbers."""

    name: str
    tokens: int
    holds: bool
    numbers: str


def by_share(claim: str, cases: Sequence[Case], rule: str) -> Verdict:
    """Agrees if the claim holds in all cases, and does not if in none; those where it fails are listed."""
    trained = [case for case in cases if case.tokens >= TRAINED]
    if not trained:
        return Verdict(claim, CANNOT_TELL, f"{UNTRAINED} {rule}")
    failing = [f"{case.name}: {case.numbers}" for case in trained if not case.holds]
    count = len(trained) - len(failing)
    answer = {len(trained): AGREES, 0: DIFFERS}.get(count, CANNOT_TELL)
    why = f"{rule} That holds in {count} of {len(trained)} cases (all: agrees; none: does not)"
    return Verdict(claim, answer, f"{why}; not in {'; '.join(failing)}." if failing else f"{why}.")


def known(value: float | None) -> float:
    """JSON has no NaN; it has null in its place."""
    return math.nan if value is None else value


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
