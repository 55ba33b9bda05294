"""The learning rate at which each attention breaks: the section on learning_rate.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scripts.paper.report import rules
from scripts.paper.report.markdown import span, table
from scripts.paper.report.pool import groups_of, pooled, runs_of
from scripts.paper.report.rules import NOT_SEEN, OPEN
from scripts.paper.report.section import Section
from scripts.paper.report.training import PAPER, group_title, provenance, variant_table
from scripts.paper.report.verdicts import Verdict, settled
from scripts.paper.result_files import Results
from scripts.paper.variants import FULL_PRECISION, NO_QK_NORM, SAGE

#: A run that ends this far, in nats, above the best of its setting and seed at lower rates is broken.
BROKEN_BY = 0.3

#: Runs of one setting and seed, by learning rate.
Series = dict[float, dict[str, Any]]


def learning_rate(results: Results) -> Section:
    data = results.json("learning_rate.json")
    runs = runs_of(data)
    groups = sorted(groups_of(data, pooled(results)), key=lambda group: group["lr"])
    shown = {run["variant"] for run in runs}
    tables = {"Where each attention breaks": break_table(runs)}
    tables |= {group_title(group): variant_table(group, shown, {}) for group in groups}
    verdicts = [
        verdict_of(claim, data, runs, own, ending)
        for claim, ending in (("breaks", NO_QK_NORM), ("stable", ""))
        for own in (SAGE, PAPER)
        if own + ending in shown
    ]
    diverged = f"{sum(bool(run['diverged']) for run in runs)} of {len(runs)} runs diverged"
    fields = {
        "breaks": break_table(runs),
        "rates": rates_in_words(runs),
        "diverged": diverged,
        "gaps": gaps_in_words(runs, SAGE),
        "paper_gaps": gaps_in_words(runs, PAPER),
    }
    return Section(provenance(data, groups, shown), tables, verdicts, fields)


def series_of(runs: list[dict], variant: str) -> dict[int, Series]:
    """By seed."""
    found: dict[int, Series] = {}
    for run in runs:
        if run["variant"] == variant:
            found.setdefault(run["seed"], {})[run["group"]["lr"]] = run
    return {seed: dict(sorted(own.items())) for seed, own in sorted(found.items())}


def breaks_at(series: Series) -> float:
    """The lowest rate at which a run diverged, or ended BROKEN_BY above the best before; ∞: none did."""
    best = math.inf
    for rate, run in series.items():
        if run["diverged"] or run["final_loss"] > best + BROKEN_BY:
            return rate
        best = min(best, run["final_loss"])
    return math.inf


def verdict_of(claim: str, data: dict, runs: list[dict], variant: str, ending: str) -> Verdict:
    """By the seeds in which something broke: a rate at which nothing breaks tells nothing.

    "breaks": SageBwd breaks at a lower rate than full precision. "stable": it does not.
    """
    case = {SAGE: "", PAPER: "`paper()`"}[variant]
    ours, full = (series_of(runs, name + ending) for name in (variant, FULL_PRECISION))
    both = {seed: (ours[seed], full[seed]) for seed in ours if seed in full}
    telling = {seed: pair for seed, pair in both.items() if tells(*pair)}
    if not telling:
        largest = max(run["group"]["lr"] for run in runs)
        why = "no seed was run with both"
        if both:
            why = f"up to {largest:g} the two never end {BROKEN_BY:g} apart where one alone breaks"
        return Verdict(claim, OPEN, why, case, why)
    lower = sum(breaks_at(own) < breaks_at(other) for own, other in telling.values())
    holds = lower if claim == "breaks" else len(telling) - lower
    otherwise = NOT_SEEN if claim == "breaks" else rules.CONTRADICTS_HERE
    answer = rules.by_share(holds, len(telling), otherwise)
    numbers = "; ".join(
        f"seed {seed}: {in_words(own)}, full precision {in_words(other)}"
        for seed, (own, other) in telling.items()
    )
    why = f"holds in {holds} of {len(telling)} seeds" if answer == OPEN else ""
    return settled(data, Verdict(claim, answer, numbers, case, why))


def tells(one: Series, other: Series) -> bool:
    """Whether one of the two breaks, at a rate that the other was tried at or beyond, or broke before.

    If it breaks without diverging, the other must break, too, or end BROKEN_BY below it: one may be just
    above the limit and the other just below.
    """
    ends = breaks_at(one), breaks_at(other)
    lowest = min(ends)
    tried = [end < math.inf or max(series) >= lowest for end, series in zip(ends, (one, other), strict=True)]
    if lowest == math.inf or not all(tried):
        return False
    losses = [series[lowest]["final_loss"] for series in (one, other) if lowest in series]
    return ends[0] == ends[1] or None in losses or len(losses) < 2 or abs(losses[0] - losses[1]) >= BROKEN_BY


def in_words(series: Series) -> str:
    rate = breaks_at(series)
    return f"does not break up to {max(series):g}" if rate == math.inf else f"breaks at {rate:g}"


def rates_in_words(runs: list[dict]) -> str:
    """ "0.001 to 0.064"."""
    return span([run["group"]["lr"] for run in runs], "{:g}".format)


def gaps_in_words(runs: list[dict], variant: str) -> str:
    """ "-0.10 to +0.22": final losses minus full precision's at the same rate and seed, with QK-norm."""
    full = {(run["seed"], run["group"]["lr"]): run for run in runs if run["variant"] == FULL_PRECISION}
    pairs = ((run, full.get((run["seed"], run["group"]["lr"]))) for run in runs if run["variant"] == variant)
    losses = [(own["final_loss"], other["final_loss"]) for own, other in pairs if other]
    gaps = [own - other for own, other in losses if None not in (own, other)]
    return span(gaps, "{:+.2f}".format) if gaps else "not run"


def break_table(runs: list[dict]) -> str:
    """A line for each variant: the rate at which each seed breaks, and its best loss with the rate of it."""
    seeds = sorted({run["seed"] for run in runs})
    rows = []
    for variant in sorted({run["variant"] for run in runs}, key=lambda name: (NO_QK_NORM in name, name)):
        own = series_of(runs, variant)
        ends = [in_words(own[seed]) if seed in own else "not run" for seed in seeds]
        whole = [run for series in own.values() for run in series.values() if run["final_loss"] is not None]
        best = min(whole, key=lambda run: run["final_loss"], default=None)
        loss = "" if best is None else f"{best['final_loss']:.4f} at {best['group']['lr']:g}"
        rows.append([variant, *ends, loss])
    return table(["attention", *(f"seed {seed}" for seed in seeds), "best final loss"], rows)


SECTIONS: dict[str, Callable[[Results], Section]] = {"learning_rate": learning_rate}
