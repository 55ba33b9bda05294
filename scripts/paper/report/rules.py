"""The rules that turn numbers into verdicts, and their thresholds. They know nothing of runs or files.

`judge` is the one rule for all differences of final losses; `by_share` is the one for claims that were tried
in several models.
"""

from __future__ import annotations

from scripts.paper import published as paper

AGREES = "agrees"
CONTRADICTS = "contradicts"
CONTRADICTS_HERE = "contradicts at this scale"
NOT_SEEN = "not seen at this scale"
OPEN = "open"
NOT_RUN = "not run"

#: What a verdict can be; all but the last decide.
ANSWERS = (AGREES, CONTRADICTS, CONTRADICTS_HERE, NOT_SEEN, OPEN)

# --- Thresholds ---------------------------------------------------------------------------------------------

#: The smallest difference of final losses, in nats, that the paper calls a gap (Figure 1a).
GAP = paper.FIGURE_1_GAP
#: This part of a gap is the margin: a smaller difference counts as none.
MARGIN_SHARE = 0.5
#: A run of less than this part of the paper's tokens is far shorter than the paper's.
LONG_ENOUGH = 0.1
#: A claim holds if it does in this share of the models or more; it is wrong if it fails in as many.
MOST = 0.75


def judge(low: float, high: float, printed: float, tokens_share: float) -> str:
    """Whether a difference of final losses is the paper's, from its 95% interval.

    low, high: the interval, in nats. printed: the paper's difference; 0, or nearly, where it sees none.
    tokens_share: tokens of the run over those of the paper's.

    The margin is MARGIN_SHARE of the paper's gap, or of GAP where the paper sees none (|printed| is below
    half of GAP then).

        The paper sees a gap.
            agrees       a gap is seen: the interval excludes 0 and reaches the paper's gap, or all of it
                         lies above the margin
            contradicts  a gap in the other direction is seen
            not seen     the interval excludes the paper's gap and not 0, or all of it lies below the margin;
                         in a run of LONG_ENOUGH of the paper's tokens this contradicts
        The paper sees no gap.
            agrees       the interval lies within the margin around the paper's number
            contradicts  a gap is seen, in either direction
        open             otherwise: the interval is too wide
    """
    margin = MARGIN_SHARE * GAP
    if abs(printed) < margin:
        if printed - margin < low and high < printed + margin:
            return AGREES
        seen = sees_gap(low, high, GAP) or sees_gap(-high, -low, GAP)
        return wrong(tokens_share) if seen else OPEN
    if sees_gap(low, high, printed):
        return AGREES
    if sees_gap(-high, -low, printed):
        return wrong(tokens_share)
    if high < MARGIN_SHARE * printed or (low <= 0 and high < printed):
        return CONTRADICTS if tokens_share >= LONG_ENOUGH else NOT_SEEN
    return OPEN


def wrong(tokens_share: float) -> str:
    """What a run that shows something else says of the paper."""
    return CONTRADICTS if tokens_share >= LONG_ENOUGH else CONTRADICTS_HERE


def sees_gap(low: float, high: float, gap: float) -> bool:
    """Whether an interval shows a gap: it excludes 0 and reaches the gap, or lies above the margin."""
    return (low > 0 and high >= gap) or low >= MARGIN_SHARE * gap


def by_share(holds: int, cases: int, otherwise: str = CONTRADICTS_HERE) -> str:
    """Whether a claim holds that was tried in so many models.

    agrees if it holds in MOST of them or more, `otherwise` if it fails in MOST or more, and else open.
    """
    if not cases:
        return OPEN
    if holds >= MOST * cases:
        return AGREES
    return otherwise if cases - holds >= MOST * cases else OPEN


def between(low: float, high: float, below: float, above: float) -> str:
    """Whether a number lies between two others, from its 95% interval; above the upper one: not seen."""
    if below <= low and high <= above:
        return AGREES
    if low > above:
        return NOT_SEEN
    return CONTRADICTS_HERE if high < below else OPEN


def is_larger(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Whether a number is larger than another, from their intervals; where these overlap it is open."""
    if one[0] > other[1]:
        return AGREES
    return CONTRADICTS_HERE if one[1] < other[0] else OPEN
