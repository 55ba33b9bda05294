"""Verdicts of assays that have controls: a match counts only where the assay sees what it must see.

The positive control has all seven products in INT8, which must cost loss. The negative control is full
precision with another kernel, which must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.paper.report.rules import OPEN
from scripts.paper.report.verdicts import Verdict, difference, diverged_alone
from scripts.paper.variants import FULL_PRECISION

BLIND = "blind: the positive control, all seven products in INT8, ends no higher than full precision either"
UNKNOWN = "no interval of a positive control, so a match means nothing"
UNSTEADY = "another full-precision kernel differs, too"


def ends_above(group: dict[str, Any], variant: str) -> bool | None:
    """Whether a variant ends above full precision, or diverged alone; None: no interval tells."""
    if diverged_alone(group, variant, FULL_PRECISION):
        return True
    gap = difference(group, variant, FULL_PRECISION)
    if gap is None or gap.half_width is None:
        return None
    return gap.mean > gap.half_width


def sight(group: dict[str, Any], controls: Sequence[str]) -> bool | None:
    """Whether any of the positive controls ends above full precision; None: none of them has an interval."""
    known = [seen for name in controls if (seen := ends_above(group, name)) is not None]
    return any(known) if known else None


def is_steady(group: dict[str, Any], controls: Sequence[str]) -> bool:
    """Whether no negative control differs from full precision; without one it is taken to be so."""
    gaps = [difference(group, name, FULL_PRECISION) for name in controls]
    known = [gap for gap in gaps if gap is not None and gap.half_width is not None]
    return all(abs(gap.mean) <= gap.half_width for gap in known)


def under_controls(
    verdict: Verdict, group: dict[str, Any], variant: str, positive: Sequence[str], negative: Sequence[str]
) -> Verdict:
    """The verdict on a variant's gap to full precision, or open where the controls forbid it."""
    if verdict.answer == OPEN:
        return verdict
    if ends_above(group, variant):
        why = "" if is_steady(group, negative) else UNSTEADY
    else:
        why = {True: "", False: BLIND, None: UNKNOWN}[sight(group, positive)]
    return verdict._replace(answer=OPEN, numbers=f"{verdict.numbers}; {why}", why=why) if why else verdict
