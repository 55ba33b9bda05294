"""The gap at both numbers of tokens per step in long runs: the section on long_runs.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from scripts.paper import published as paper
from scripts.paper.report.rules import GAP, OPEN
from scripts.paper.report.section import Section
from scripts.paper.report.training import algorithms, read, section
from scripts.paper.report.verdicts import Verdict, interaction_verdict, loss_verdict
from scripts.paper.result_files import Results
from scripts.paper.variants import FULL_PRECISION

#: Full precision must end within this, in nats, at both numbers of tokens per step for these to be compared.
ALIKE = 0.03


def long_runs(results: Results) -> Section:
    data, groups, _ = read(results, "long_runs")
    groups = sorted(groups, key=lambda group: -group["tokens_per_step"])
    verdicts = []
    for large, small in pairwise(groups):
        apart = distance(large, small)
        for own, case in algorithms(large, ""):
            pair = (own, FULL_PRECISION)
            verdicts.append(loss_verdict("gap", data, large, pair, GAP, case))
            verdicts.append(loss_verdict("match", data, small, pair, paper.FIGURE_1B_GAP, case))
            verdict = interaction_verdict(
                "interaction", data, large, small, pair, paper.FIGURE_1_INTERACTION, case
            )
            verdicts.append(if_alike(verdict, apart))
    if not verdicts:
        why = "one number of tokens per step was run"
        verdicts = [Verdict(claim, OPEN, why, "", why) for claim in ("gap", "match", "interaction")]
    made = section("long_runs", data, groups, verdicts, paper.FIGURE_1[2097152])
    apart = [distance(large, small) for large, small in pairwise(groups)]
    shown = "; ".join("unknown" if own is None else f"{own:.4f}" for own in apart) or "unknown"
    return replace(made, fields=made.fields | {"distance": shown})


def distance(large: dict, small: dict) -> float | None:
    """How far apart full precision ends at two numbers of tokens per step; None: not run at both."""
    losses = [
        own["final_loss"]
        for group in (large, small)
        for own in group["variants"]
        if own["variant"] == FULL_PRECISION and own["final_loss"] is not None
    ]
    return abs(losses[0] - losses[1]) if len(losses) == 2 else None


def if_alike(verdict: Verdict, apart: float | None) -> Verdict:
    """Open where full precision ends elsewhere at the other number of tokens per step."""
    if verdict.answer == OPEN or (apart is not None and apart <= ALIKE):
        return verdict
    shown = "at an unknown distance" if apart is None else f"{apart:.3f} apart"
    why = f"full precision ends {shown} at the two, more than {ALIKE}: their rates do not match"
    return verdict._replace(answer=OPEN, numbers=f"{verdict.numbers}; {why}", why=why)


SECTIONS: dict[str, Callable[[Results], Section]] = {"long_runs": long_runs}
