"""Whether what the papers say holds here: the rules and their thresholds (in words: claims.py).

Every rule takes numbers from the JSON files and returns a `Verdict`. Nothing else decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.paper import published as paper
from scripts.paper.report.layer_errors import Layers
from scripts.paper.report.markdown import decimal, known, span

AGREES, DIFFERS, CANNOT_TELL, NOT_RUN = "agrees", "does not agree", "cannot tell at this scale", "not run"

# --- Thresholds ---------------------------------------------------------------------------------------------

#: A model that has seen fewer tokens than this is hardly trained: what is measured in it decides nothing.
TRAINED = 1_000_000
#: Relative L2 errors within this of the paper's count as the same: its shapes and seeds are not published.
TABLE_1_TOLERANCE = 0.10
#: The share of the entries of Table 1 that must be the same.
TABLE_1_SHARE = 0.9
#: Final losses that differ by less than this count as equal: half of what the paper's Figure 1a is about.
MARGIN = paper.FIGURE_1_GAP / 2
#: A speed-up within this of the paper's counts as the same.
SPEED_UP_TOLERANCE = 0.10
#: Errors that differ by less than this factor count as equal; there is one seed.
SAME = 1.1
#: A relative L2 below this counts as exact.
EXACT_BELOW = 1e-3
#: An RMS that is smaller by this factor is far below.
ORDER = 10
#: dP in INT8 must multiply the error of dQ by this to be the reason for a 16-bit dP.
DP_FACTOR = 2


class Verdict(NamedTuple):
    """Whether a claim holds in one case (a learning rate, a granularity, … or ""), and on which numbers."""

    claim: str
    answer: str
    numbers: str = ""
    case: str = ""


class Case(NamedTuple):
    """Whether a claim holds for a model that has seen so many tokens (0: random numbers); the numbers."""

    name: str
    tokens: int
    holds: bool
    numbers: str


class Difference(NamedTuple):
    """One variant's final loss minus another's.

    half_width: of the 95% interval, None with one seed. seeds: how many the two have in common.
    """

    mean: float
    half_width: float | None
    seeds: int

    def __str__(self) -> str:
        seeds = f"({self.seeds} seed{'s' * (self.seeds > 1)})"
        if self.half_width is None:
            return f"{self.mean:+.4f} {seeds}"
        return f"{self.mean:+.4f} ± {self.half_width:.4f} {seeds}"


def joined(verdicts: Sequence[Verdict]) -> str:
    """One answer for all cases of a claim, or each answer with its cases."""
    by_answer: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_answer.setdefault(verdict.answer, []).append(verdict.case)
    if len(by_answer) == 1:
        return next(iter(by_answer))
    return "; ".join(f"{answer} ({', '.join(cases)})" for answer, cases in by_answer.items())


# --- Rules: errors ------------------------------------------------------------------------------------------


def by_share(claim: str, cases: Sequence[Case], numbers: str = "", case: str = "") -> Verdict:
    """Agrees if the claim holds in all trained models, does not if in none; lists where it fails."""
    trained = [own for own in cases if own.tokens >= TRAINED]
    if not trained:
        return Verdict(claim, CANNOT_TELL, f"no model has seen {TRAINED:,} tokens", case)
    failing = [f"{own.name}: {own.numbers}" for own in trained if not own.holds]
    count = len(trained) - len(failing)
    answer = {len(trained): AGREES, 0: DIFFERS}.get(count, CANNOT_TELL)
    found = [numbers, f"{count} of {len(trained)} runs", f"not {'; '.join(failing)}" if failing else ""]
    return Verdict(claim, answer, "; ".join(filter(None, found)), case)


def table1_verdict(rows: Sequence[Mapping[str, Any]], variant: str, titles: Mapping[str, str]) -> Verdict:
    """Whether enough relative L2 errors are the paper's. titles: of the tensors, in the paper's order."""
    entries, off = 0, []
    for row in (row for row in rows if row["variant"] == variant):
        for name, (_, wanted) in zip(titles, paper.TABLE_1[int(row["sigma"])], strict=True):
            entries += 1
            if abs(row[name][1] / wanted - 1) > TABLE_1_TOLERANCE:
                found = f"{decimal(row[name][1])} against {decimal(wanted)}"
                off.append(f"{titles[name]} at σ = {row['sigma']:g}, {found}")
    same = entries - len(off)
    numbers = f"{same} of {entries}" + (f"; not {'; '.join(off)}" if off else "")
    return Verdict(variant, AGREES if same >= TABLE_1_SHARE * entries else DIFFERS, numbers)


def gradients_verdict(found: Layers) -> Verdict:
    def case(run: str) -> Case:
        o, dq, dk, dv = (found.mean(run, "paper", f"{name}_l2") for name in ("o", "dq", "dk", "dv"))
        numbers = f"dQ {decimal(dq)}, dK {decimal(dk)}, O {decimal(o)}, dV {decimal(dv)}"
        return Case(run, found.runs[run]["tokens"], min(dq, dk) > max(o, dv), numbers)

    return by_share("gradients", [case(run) for run in found.plain()])


def ds_verdict(found: Layers) -> Verdict:
    def case(run: str) -> Case:
        table = found.data["table2"][run]["paper"]
        ds, p, dp, delta = (known(table[name][1]) for name in ("ds", "p", "dp", "delta"))
        numbers = f"dS {decimal(ds)}, P {decimal(p)}, δ {decimal(delta)}"
        return Case(run, found.runs[run]["tokens"], ds > max(p, dp, delta), numbers)

    return by_share("ds", [case(run) for run in found.plain()])


def dp_verdict(found: Layers) -> Verdict:
    errors = {run: known(found.data["table2"][run]["paper"]["dp"][1]) for run in found.plain()}
    cases = [
        Case(run, found.runs[run]["tokens"], error < EXACT_BELOW, f"{error:.1e}")
        for run, error in errors.items()
    ]
    return by_share("dp", cases)


def rms_verdict(found: Layers) -> Verdict:
    ratios = {run: found.statistic(run, "dp_rms") / found.statistic(run, "ds_rms") for run in found.plain()}
    cases = [
        Case(run, found.runs[run]["tokens"], ratio >= ORDER, f"{ratio:.1f}") for run, ratio in ratios.items()
    ]
    return by_share("rms", cases, f"{span(list(ratios.values()), '{:,.0f}'.format)} times")


def ratio_verdict(claim: str, found: Layers, pairs: Sequence[tuple[str, str]]) -> Verdict:
    """The paper sees larger errors in the first run of each pair than in the second."""
    if not pairs:
        return Verdict(claim, CANNOT_TELL, "no two runs differ in nothing else")
    ratios = {(a, b): found.gradient_error(a) / found.gradient_error(b) for a, b in pairs}
    trained = [
        ratio for pair, ratio in ratios.items() if all(found.runs[x]["tokens"] >= TRAINED for x in pair)
    ]
    answer = CANNOT_TELL
    if trained and all(ratio >= SAME for ratio in trained):
        answer = AGREES
    if trained and all(ratio <= 1 / SAME for ratio in trained):
        answer = DIFFERS
    shown = "; ".join(f"{ratio:.2f} times, {a} against {b}" for (a, b), ratio in ratios.items())
    return Verdict(claim, answer, shown if trained else f"{shown}; no model has seen {TRAINED:,} tokens")


#: {(trace, granularity): {(format, bits of dP): {"l1": …, "cos": …} of dQ, mean over layers}}
FormatErrors = dict[tuple[str, str], dict[tuple[str, int], dict[str, float]]]


def formats_verdict(measured: FormatErrors, granularity: str, seen: Mapping[str, int]) -> Verdict:
    def case(trace: str, errors: dict[tuple[str, int], dict[str, float]]) -> Case:
        int8, *fp8 = (errors[name, 16]["l1"] for name in ("int8", "e4m3", "e5m2"))
        numbers = f"{decimal(int8)} against {decimal(min(fp8))}"
        return Case(trace, seen.get(trace, 0), int8 < min(fp8), numbers)

    cases = [case(*item) for item in of_granularity(measured, granularity).items()]
    return by_share("formats", cases, case=f"a scale per {granularity}")


def dp_bits_verdict(measured: FormatErrors, granularity: str, seen: Mapping[str, int]) -> Verdict:
    factors = dp_factors(measured, granularity)
    cases = [
        Case(trace, seen.get(trace, 0), factor >= DP_FACTOR, f"{factor:.2f}")
        for trace, factor in factors.items()
    ]
    found = span(list(factors.values()), "{:.2f}".format)
    return by_share("dp", cases, found, case=f"a scale per {granularity}")


def dp_factors(measured: FormatErrors, granularity: str) -> dict[str, float]:
    """By trace: by what dP in INT8 multiplies the relative L1 of dQ."""
    return {
        trace: errors["int8", 8]["l1"] / errors["int8", 16]["l1"]
        for trace, errors in of_granularity(measured, granularity).items()
    }


def of_granularity(measured: FormatErrors, granularity: str) -> dict[str, dict]:
    """By trace."""
    return {trace: errors for (trace, own), errors in measured.items() if own == granularity}


# --- Rules: speed -------------------------------------------------------------------------------------------


def fastest_verdict(speed_ups: Sequence[float]) -> Verdict:
    if not speed_ups:
        return Verdict("fastest", CANNOT_TELL, "FlashAttention-2 was not measured")
    enough = max(speed_ups) >= (1 - SPEED_UP_TOLERANCE) * paper.BEST_SPEED_UP
    return Verdict("fastest", AGREES if enough else DIFFERS, f"{max(speed_ups):.2f}, on other hardware")


def always_faster_verdict(speed_ups: Sequence[float]) -> Verdict:
    if not speed_ups:
        return Verdict("always", CANNOT_TELL, "FlashAttention-2 was not measured")
    ahead, paper_ahead = (sum(value > 1 for value in own) for own in (speed_ups, paper.SPEED_UPS))
    agrees = ahead / len(speed_ups) >= paper_ahead / len(paper.SPEED_UPS)
    return Verdict("always", AGREES if agrees else DIFFERS, f"{ahead} of {len(speed_ups)}")


# --- Rules: losses ------------------------------------------------------------------------------------------


def gap_verdict(claim: str, data: dict, group: dict, of: str, minus: str, case: str = "") -> Verdict:
    """The paper sees the loss of one variant above the other's; that a short run does not leaves it open."""
    found = difference(group, of, minus)
    if found is None or found.half_width is None:
        return without_interval(claim, data, group, of, minus, case)
    if found.mean - found.half_width > 0:
        return settled(claim, data, AGREES, f"{found}", case)
    if found.mean + found.half_width < MARGIN:
        return not_seen(claim, data, group, f"{found}", case)
    return Verdict(claim, CANNOT_TELL, f"{found}", case)


def match_verdict(claim: str, data: dict, group: dict, of: str, minus: str, case: str = "") -> Verdict:
    """The paper sees two equal losses."""
    found = difference(group, of, minus)
    if found is None or found.half_width is None:
        return without_interval(claim, data, group, of, minus, case)
    if abs(found.mean) + found.half_width < MARGIN:
        return settled(claim, data, AGREES, f"{found}", case)
    if abs(found.mean) - found.half_width > MARGIN:
        return settled(claim, data, DIFFERS, f"{found}", case)
    return Verdict(claim, CANNOT_TELL, f"{found}", case)


def divergence_verdict(data: dict, group: dict, variant: str, full: str, case: str = "") -> Verdict:
    """The paper sees `variant` diverge; that it does not in a short run says nothing about a long one.

    Where `full`, the same in full precision, diverges as well, INT8 is not the reason.
    """
    if diverged(group, variant) and diverged(group, full):
        return Verdict("divergence", CANNOT_TELL, "diverges, but so does full precision", case)
    if diverged(group, variant):
        return settled("divergence", data, AGREES, "diverges", case)
    if not any(own["variant"] == variant for own in group["variants"]):
        return Verdict("divergence", CANNOT_TELL, "no run", case)
    return not_seen("divergence", data, group, "does not diverge", case)


def k_smoothing_verdict(data: dict, group: dict, without: str, with_it: str, case: str = "") -> Verdict:
    if diverged_alone(group, without, with_it):
        return settled("k_smoothing", data, AGREES, "without it the loss diverges", case)
    return gap_verdict("k_smoothing", data, group, without, with_it, case)


def not_seen(claim: str, data: dict, group: dict, numbers: str, case: str) -> Verdict:
    """What the paper sees is not there: an answer only at the paper's own scale."""
    if data["scale"] == "full":
        return Verdict(claim, DIFFERS, numbers, case)
    tokens = group["tokens_per_step"] * group["steps"]
    return Verdict(claim, CANNOT_TELL, f"{numbers} within {tokens / 1e6:,.3g}M tokens", case)


def without_interval(claim: str, data: dict, group: dict, of: str, minus: str, case: str) -> Verdict:
    """Two variants whose final losses cannot be compared: one diverged, or is missing, or has one seed."""
    if diverged_alone(group, of, minus):
        return settled(claim, data, DIFFERS, f"{of} diverges, {minus} does not", case)
    found = difference(group, of, minus)
    if found is None:
        return Verdict(claim, CANNOT_TELL, "a run is missing or diverged", case)
    return Verdict(claim, CANNOT_TELL, f"{found}, no interval", case)


def settled(claim: str, data: dict, answer: str, numbers: str, case: str) -> Verdict:
    """An answer, unless the scale is the one for debugging."""
    if data["scale"] == "debug":
        return Verdict(claim, CANNOT_TELL, f"{numbers}; the debug scale measures nothing", case)
    return Verdict(claim, answer, numbers, case)


def difference(group: dict, of: str, minus: str) -> Difference | None:
    """None if one of the two was not run or diverged."""
    for entry in group["differences"]:
        if entry["of"] == of and entry["minus"] == minus:
            return Difference(entry["mean"], entry["half_width"], entry["seeds"])
    return None


def diverged(group: dict, variant: str) -> bool:
    return any(own["variant"] == variant and own["diverged"] for own in group["variants"])


def diverged_alone(group: dict, variant: str, other: str) -> bool:
    """Whether the variant diverged while the other was run, too, and did not."""
    was_run = any(own["variant"] == other for own in group["variants"])
    return diverged(group, variant) and was_run and not diverged(group, other)
