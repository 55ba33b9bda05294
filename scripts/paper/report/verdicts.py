"""Whether what the papers say holds here, as verdicts with their numbers (in words: claims.py).

The rules with their thresholds are in rules.py; those here take numbers from the JSON files to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from scripts.paper import published as paper
from scripts.paper.experiment_runs import PAPER_TOKENS
from scripts.paper.gradient_bias_tables import PAPER_TOKENS as TOKENS_PER_STEP
from scripts.paper.gradient_bias_tables import Interval, count
from scripts.paper.loss_statistics import Estimate, difference_of
from scripts.paper.report import rules
from scripts.paper.report.layer_errors import Layers
from scripts.paper.report.markdown import decimal, known, span
from scripts.paper.report.rules import AGREES, CONTRADICTS, CONTRADICTS_HERE, NOT_SEEN, OPEN

# --- Thresholds of the rules below --------------------------------------------------------------------------

#: A model that has seen fewer tokens than this is hardly trained: what is measured in it decides nothing.
TRAINED = 1_000_000
#: Relative L2 errors within this of the paper's count as the same: its shapes and seeds are not published.
TABLE_1_TOLERANCE = 0.10
#: The share of the entries of Table 1 that must be the same.
TABLE_1_SHARE = 0.9
#: A speed-up within this of the paper's counts as the same.
SPEED_UP_TOLERANCE = 0.10
#: Errors that differ by less than this factor count as equal; there is one seed.
SAME = 1.1
#: A ratio of RMS within this factor of the paper's is of its order.
ORDER = 10
#: dP in INT8 must multiply the error of dQ by this to be the reason for a 16-bit dP.
DP_FACTOR = 2


class Verdict(NamedTuple):
    """Whether a claim holds in one case (a learning rate, a granularity, … or ""), and on which numbers.

    why: of an open one, what is missing.
    """

    claim: str
    answer: str
    numbers: str = ""
    case: str = ""
    why: str = ""


class Case(NamedTuple):
    """Whether a claim holds for a model that has seen so many tokens (0: random numbers); the numbers."""

    name: str
    tokens: int
    holds: bool
    numbers: str


class Difference(NamedTuple):
    """One variant's final loss minus another's.

    half_width: of the 95% interval, None with one seed. seeds: how many the two have in common. degrees: of
    freedom of the noise.
    """

    mean: float
    half_width: float | None
    seeds: int
    degrees: int = 0

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
    return "; ".join(f"{answer} ({'; '.join(cases)})" for answer, cases in by_answer.items())


# --- Rules: errors ------------------------------------------------------------------------------------------


def by_share(
    claim: str, cases: Sequence[Case], numbers: str = "", case: str = "", otherwise: str = CONTRADICTS_HERE
) -> Verdict:
    """By the share of the trained models in which the claim holds; lists where it fails."""
    trained = [own for own in cases if own.tokens >= TRAINED]
    if not trained:
        why = f"no model has seen {TRAINED:,} tokens"
        return Verdict(claim, OPEN, why, case, why)
    failing = [f"{own.name}: {own.numbers}" for own in trained if not own.holds]
    holding = len(trained) - len(failing)
    answer = rules.by_share(holding, len(trained), otherwise)
    share = f"{holding} of {len(trained)} run{'s' * (len(trained) > 1)}"
    found = [numbers, share, f"not {'; '.join(failing)}" if failing else ""]
    why = f"holds in {share}" if answer == OPEN else ""
    return Verdict(claim, answer, "; ".join(filter(None, found)), case, why)


class Shape(NamedTuple):
    """Table 1 at one shape: how many of its entries are the paper's, and which are not."""

    name: str
    same: int
    entries: int
    off: str

    def __str__(self) -> str:
        return f"{self.same} of {self.entries}" + (f"; not {self.off}" if self.off else "")

    @property
    def agrees(self) -> bool:
        return self.same >= TABLE_1_SHARE * self.entries


def compare_table1(name: str, rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Shape:
    """The relative L2 errors of one variant against the paper's. titles: of the tensors, in its order."""
    entries, off = 0, []
    for row in rows:
        for tensor, (_, wanted) in zip(titles, paper.TABLE_1[int(row["sigma"])], strict=True):
            entries += 1
            if abs(row[tensor][1] / wanted - 1) > TABLE_1_TOLERANCE:
                found = f"{decimal(row[tensor][1])} against {decimal(wanted)}"
                off.append(f"{titles[tensor]} at σ = {row['sigma']:g}, {found}")
    return Shape(name, entries - len(off), entries, "; ".join(off))


def table1_verdict(claim: str, chosen: Shape, others: Sequence[Shape] = ()) -> Verdict:
    """Whether the paper's table comes out at a shape at all: which one it used is not published.

    chosen: the shape of table1.json. others: all that were tried with kernels.
    """
    best = max([chosen, *others], key=lambda shape: shape.same / shape.entries)
    numbers = f"{best}; at {best.name}"
    if others:
        number = sum(shape.agrees for shape in others)
        numbers += f", the best of the shapes tried; {number} of {len(others)} of these give the table"
    return Verdict(claim, AGREES if best.agrees else CONTRADICTS, numbers)


def norm_of(run: Mapping[str, Any]) -> str:
    return "with QK-norm" if run["qk_norm"] else "without QK-norm"


def by_norm(found: Layers, claim: str, case: Callable[[str], Case]) -> list[Verdict]:
    """A verdict on the runs with QK-norm and one on those without: their logits differ."""
    kinds: dict[str, list[Case]] = {}
    for run in found.plain():
        kinds.setdefault(norm_of(found.runs[run]), []).append(case(run))
    return [by_share(claim, cases, case=norm) for norm, cases in kinds.items()]


def gradients_verdicts(found: Layers) -> list[Verdict]:
    def case(run: str) -> Case:
        o, dq, dk, dv = (found.mean(run, "paper", f"{name}_l2") for name in ("o", "dq", "dk", "dv"))
        numbers = f"dQ {decimal(dq)}, dK {decimal(dk)}, O {decimal(o)}, dV {decimal(dv)}"
        return Case(run, found.runs[run]["tokens"], min(dq, dk) > max(o, dv), numbers)

    return by_norm(found, "gradients", case)


def ds_verdicts(found: Layers) -> list[Verdict]:
    def case(run: str) -> Case:
        table = found.data["table2"][run]["paper"]
        ds, p, dp, delta = (known(table[name][1]) for name in ("ds", "p", "dp", "delta"))
        numbers = f"dS {decimal(ds)}, P {decimal(p)}, δ {decimal(delta)}"
        return Case(run, found.runs[run]["tokens"], ds > max(p, dp, delta), numbers)

    return by_norm(found, "ds", case)


def rms_verdicts(found: Layers) -> list[Verdict]:
    printed = paper.RMS["dp"] / paper.RMS["ds"]

    def case(run: str) -> Case:
        ratio = found.statistic(run, "dp_rms") / found.statistic(run, "ds_rms")
        in_order = printed / ORDER <= ratio <= printed * ORDER
        return Case(run, found.runs[run]["tokens"], in_order, f"{ratio:,.0f} times")

    return by_norm(found, "rms", case)


def ratio_verdicts(
    claim: str,
    found: Layers,
    pairs: Sequence[tuple[str, str]],
    case_of: Callable[[Mapping[str, Any]], str],
    otherwise: str = CONTRADICTS_HERE,
) -> list[Verdict]:
    """The paper sees larger errors in the first run of each pair than in the second.

    case_of: what sets apart the pairs that get verdicts of their own.
    """
    if not pairs:
        why = "no two runs differ in nothing else"
        return [Verdict(claim, OPEN, why, "", why)]
    kinds: dict[str, list[tuple[float, Case]]] = {}
    for a, b in pairs:
        ratio = found.gradient_error(a) / found.gradient_error(b)
        tokens = min(found.runs[x]["tokens"] for x in (a, b))
        case = Case(f"{a} against {b}", tokens, ratio >= SAME, f"{ratio:.2f} times")
        kinds.setdefault(case_of(found.runs[a]), []).append((ratio, case))
    return [
        by_share(
            claim,
            [case for _, case in own],
            f"{span([ratio for ratio, _ in own], '{:.2f}'.format)} times",
            case_name,
            otherwise,
        )
        for case_name, own in kinds.items()
    ]


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
        return unmeasured("fastest")
    enough = max(speed_ups) >= (1 - SPEED_UP_TOLERANCE) * paper.BEST_SPEED_UP
    return Verdict("fastest", AGREES if enough else CONTRADICTS, f"{max(speed_ups):.2f}, on other hardware")


def always_faster_verdict(speed_ups: Sequence[float]) -> Verdict:
    if not speed_ups:
        return unmeasured("always")
    ahead, paper_ahead = (sum(value > 1 for value in own) for own in (speed_ups, paper.SPEED_UPS))
    agrees = ahead / len(speed_ups) >= paper_ahead / len(paper.SPEED_UPS)
    return Verdict("always", AGREES if agrees else CONTRADICTS, f"{ahead} of {len(speed_ups)}")


def unmeasured(claim: str) -> Verdict:
    why = "FlashAttention-2 was not measured"
    return Verdict(claim, OPEN, why, "", why)


# --- Rules: losses ------------------------------------------------------------------------------------------


def loss_verdict(
    claim: str, data: dict, group: dict, pair: tuple[str, str], printed: float, case: str = ""
) -> Verdict:
    """Whether two final losses differ by what the paper prints; pair: of, minus. See `rules.judge`."""
    of, minus = pair
    found = difference(group, of, minus)
    if diverged_alone(group, of, minus):
        numbers = f"{of} diverges, {minus} does not"
        return settled(data, Verdict(claim, rules.wrong(share_of(group)), numbers, case))
    if found is None:
        why = "a run is missing or diverged"
        return Verdict(claim, OPEN, why, case, why)
    if found.half_width is None:
        why = "one seed, not repeated: no interval"
        return Verdict(claim, OPEN, f"{found}", case, why)
    return judged(claim, data, group, Estimate(found.mean, found.half_width, 0), printed, f"{found}", case)


def judged(
    claim: str, data: dict, group: dict, found: Estimate, printed: float, numbers: str, case: str
) -> Verdict:
    low, high = found.mean - found.half_width, found.mean + found.half_width
    answer = rules.judge(low, high, printed, share_of(group))
    why = f"the interval is too wide: ± {found.half_width:.3f}" if answer == OPEN else ""
    if answer == NOT_SEEN:
        numbers += f" within {tokens_of(group) / 1e6:,.3g}M tokens"
    return settled(data, Verdict(claim, answer, numbers, case, why))


def tokens_of(group: dict) -> int:
    return group["tokens_per_step"] * group["steps"]


def share_of(group: dict) -> float:
    """The tokens of a group's runs over those of the paper's."""
    return tokens_of(group) / PAPER_TOKENS


def k_smoothing_verdict(data: dict, group: dict, pair: tuple[str, str], case: str = "") -> Verdict:
    """The paper prints no loss without K-smoothing: a gap as in Figure 1a counts, and so does divergence."""
    if diverged_alone(group, *pair):
        return settled(data, Verdict("k_smoothing", AGREES, "without it the loss diverges", case))
    return loss_verdict("k_smoothing", data, group, pair, rules.GAP, case)


def interaction(large: Difference, small: Difference) -> Estimate:
    """How much larger a gap is in one group than in another. Both have an interval."""
    return difference_of(*(Estimate(gap.mean, gap.half_width, gap.degrees) for gap in (large, small)))


def interaction_verdict(
    claim: str, data: dict, large: dict, small: dict, pair: tuple[str, str], printed: float, case: str = ""
) -> Verdict:
    """Whether the gap is larger at many tokens per step than at few, by what the paper prints."""
    gaps = [difference(group, *pair) for group in (large, small)]
    if None in gaps:
        why = "not run at both numbers of tokens per step, or diverged"
        return Verdict(claim, OPEN, why, case, why)
    if any(gap.half_width is None for gap in gaps):
        why = "one of the two gaps has one seed, not repeated: no interval"
        return Verdict(claim, OPEN, why, case, why)
    found = interaction(*gaps)
    numbers = f"{found.mean:+.4f} ± {found.half_width:.4f}: {gaps[0]} minus {gaps[1]}"
    return judged(claim, data, large, found, printed, numbers, case)


def divergence_verdict(data: dict, group: dict, variant: str, full: str, case: str = "") -> Verdict:
    """The paper sees `variant` diverge; a short run that does not shows nothing of that.

    Where `full`, the same in full precision, diverges as well, INT8 is not the reason.
    """
    if not any(own["variant"] == variant for own in group["variants"]):
        return Verdict("divergence", OPEN, "no run", case, "no run")
    if diverged(group, variant) and diverged(group, full):
        why = "diverges, but so does full precision"
        return Verdict("divergence", OPEN, why, case, why)
    if diverged(group, variant):
        return settled(data, Verdict("divergence", AGREES, "diverges", case))
    if share_of(group) >= rules.LONG_ENOUGH:
        return settled(data, Verdict("divergence", CONTRADICTS, "does not diverge", case))
    numbers = f"does not diverge within {tokens_of(group) / 1e6:,.3g}M tokens"
    return settled(data, Verdict("divergence", NOT_SEEN, numbers, case))


def settled(data: dict, verdict: Verdict) -> Verdict:
    """The verdict, unless the scale is the one for debugging."""
    if data["scale"] != "debug":
        return verdict
    why = "the debug scale measures nothing"
    return verdict._replace(answer=OPEN, numbers=f"{verdict.numbers}; {why}", why=why)


def difference(group: dict, of: str, minus: str) -> Difference | None:
    """None if one of the two was not run or diverged."""
    for entry in group["differences"]:
        if entry["of"] == of and entry["minus"] == minus:
            degrees = group["degrees_of_freedom"]
            return Difference(entry["mean"], entry["half_width"], entry["seeds"], degrees)
    return None


def diverged(group: dict, variant: str) -> bool:
    return any(own["variant"] == variant and own["diverged"] for own in group["variants"])


def diverged_alone(group: dict, variant: str, other: str) -> bool:
    """Whether the variant diverged while the other was run, too, and did not."""
    was_run = any(own["variant"] == other for own in group["variants"])
    return diverged(group, variant) and was_run and not diverged(group, other)


# --- Rules: bias of gradients -------------------------------------------------------------------------------


def critical_verdict(critical_tokens: Interval, case: str, numbers: str = "") -> Verdict:
    """Whether gradient noise hides the bias at the paper's small tokens per step and not at its large.

    critical_tokens: tokens per step at which both are equal, with its interval; None: without end.
    """
    estimate, low, high = (float("inf") if value is None else value for value in critical_tokens)
    answer = rules.between(low, high, *TOKENS_PER_STEP)
    shown = f"{count_of(estimate)} [{count_of(low)}, {count_of(high)}]{numbers}"
    why = "the interval reaches across one of the two" if answer == OPEN else ""
    return Verdict("critical", answer, shown, case, why)


def count_of(tokens: float) -> str:
    return count(None if tokens == float("inf") else tokens)


def bottleneck_verdict(of_ds: Interval, of_o: Interval, case: str) -> Verdict:
    """Whether rounding dS (dQ and dK in INT8) biases the gradient more than rounding O does."""
    if None in (*of_ds, *of_o):
        return Verdict("bottleneck", OPEN, "", case, "no interval")
    answer = rules.is_larger((of_ds[1], of_ds[2]), (of_o[1], of_o[2]))
    numbers = f"dQ and dK alone {bias_of(of_ds)}, O alone {bias_of(of_o)}"
    return Verdict("bottleneck", answer, numbers, case, "the intervals overlap" if answer == OPEN else "")


def bias_of(interval: Interval) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*interval)
