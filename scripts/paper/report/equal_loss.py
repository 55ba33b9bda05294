"""Errors in the layers at equal loss, by depth, and the mean of K: the section on equal_loss.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from scripts.paper.equal_loss_tables import (
    Row,
    at,
    common_loss,
    curve,
    error_at,
    gradient_error,
    rank_correlation,
    runs_of,
    smoothing_gain,
)
from scripts.paper.report.layers import alike_but, most_against_fewest_tokens
from scripts.paper.report.markdown import commit_of, decimal, hardware, span, table
from scripts.paper.report.rules import CONTRADICTS_HERE, NOT_SEEN, OPEN
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import SAME, Case, Verdict, by_share
from scripts.paper.result_files import Results


class Found:
    """equal_loss.json. ``runs`` has what was measured, ``missing`` the rest, if measuring was stopped."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.rows = [Row(**row) for row in data["rows"]]
        measured = set(runs_of(self.rows))
        self.runs = {name: run for name, run in data["runs"].items() if name in measured}
        self.missing = [name for name in data["runs"] if name not in measured]


def equal_loss(results: Results) -> Section:
    found = Found(results.json("equal_loss.json"))
    pairs = {
        "qk_norm": [(without, with_it) for with_it, without in alike_but(found, "qk_norm", True, False)],
        "tokens_per_step": most_against_fewest_tokens(found),
    }
    verdicts = [
        verdict_of("qk_norm", found, pairs["qk_norm"], CONTRADICTS_HERE),
        verdict_of("tokens_per_step", found, pairs["tokens_per_step"], NOT_SEEN),
    ]
    compared = pair_table(found, [pair for own in pairs.values() for pair in own])
    tables = {
        "Error of dQ and dK under `paper()`, mean over layers, at the lowest loss of both": compared,
        "Depth and the mean of K, at the end of each run": depth_table(found),
    }
    ratios = [own[1] / own[2] for pair in pairs["qk_norm"] if (own := ratio_of(found, *pair)) is not None]
    fields = {
        "pairs": compared,
        "depth": depth_table(found),
        "k_mean": k_mean_in_words(found),
        "qk_norm_ratio": span(ratios, "{:.2f}".format) if ratios else "an unknown share",
    }
    return Section(provenance(found), tables, verdicts, fields)


def ratio_of(found: Found, a: str, b: str) -> tuple[float, float, float] | None:
    """The loss at which two runs are compared, and the error of each there; None: they share none."""
    curves = [curve(found.rows, run) for run in (a, b)]
    loss = common_loss(*curves)
    errors = [error_at(own, loss) for own in curves]
    return None if None in errors else (loss, *errors)


def verdict_of(claim: str, found: Found, pairs: Sequence[tuple[str, str]], otherwise: str) -> Verdict:
    """The paper sees larger errors in the first run of each pair."""
    known = {pair: own for pair in pairs if (own := ratio_of(found, *pair)) is not None}
    if not known:
        why = "no two runs differ in nothing else and pass through the same loss"
        return Verdict(claim, OPEN, why, "", why)
    cases = []
    for (a, b), (loss, first, second) in known.items():
        tokens = min(found.runs[x]["tokens"] for x in (a, b))
        numbers = f"{first / second:.2f} times at {loss:.3f}"
        cases.append(Case(f"{a} against {b}", tokens, first / second >= SAME, numbers))
    return by_share(claim, cases, "; ".join(case.numbers for case in cases), otherwise=otherwise)


def pair_table(found: Found, pairs: Sequence[tuple[str, str]]) -> str:
    """A line for each pair: at equal loss, and beside it at the end of both runs."""
    rows = []
    for a, b in pairs:
        ends = [gradient_error(at(found.rows, run)) for run in (a, b)]
        own = ratio_of(found, a, b)
        cells = ["", "", ""]
        if own is not None:
            cells = [f"{own[0]:.3f}", f"{decimal(own[1])} / {decimal(own[2])}", f"{own[1] / own[2]:.2f}"]
        rows.append([f"{a} against {b}", *cells, f"{ends[0] / ends[1]:.2f}"])
    return table(["runs", "loss", "errors", "ratio", "ratio at equal steps"], rows)


def depth_table(found: Found) -> str:
    """A line for each run: error of dQ in the first and last layer, its rank correlation with depth, μ_K."""
    rows = []
    for run in runs_of(found.rows):
        layers = at(found.rows, run)
        errors = [row.errors["paper"]["dq_l2"] for row in layers]
        k_means = [row.statistics["k_mean"] for row in layers]
        gains = [smoothing_gain(row) for row in layers]
        correlation = rank_correlation([row.layer for row in layers], errors)
        rows.append(
            [
                run,
                f"{layers[0].loss:.3f}",
                decimal(errors[0]),
                decimal(errors[-1]),
                "" if correlation is None else f"{correlation:+.2f}",
                f"{min(k_means):.2f} to {max(k_means):.2f}",
                f"{fmean(gains):.2f}",
            ]
        )
    header = ["run", "loss", "dQ, first layer", "dQ, last layer", "rank correlation with depth"]
    return table([*header, "‖μ_K‖ / spread of K", "dQ without K-smoothing / with"], rows)


def k_mean_in_words(found: Found) -> str:
    """ "0.31 to 2.10; rank correlation with what K-smoothing gains +0.80"."""
    layers = [row for run in runs_of(found.rows) for row in at(found.rows, run)]
    k_means = [row.statistics["k_mean"] for row in layers]
    correlation = rank_correlation(k_means, [smoothing_gain(row) for row in layers])
    shown = "unknown" if correlation is None else f"{correlation:+.2f}"
    return f"{min(k_means):.2f} to {max(k_means):.2f}; rank correlation with what K-smoothing gains {shown}"


def provenance(found: Found) -> str:
    runs = found.runs.values()
    missing = f"; trained but not measured: {'; '.join(found.missing)}" if found.missing else ""
    return (
        f"{hardware(found.data)}, {commit_of(found.data)}. Runs: {'; '.join(found.runs)}{missing}. Text: "
        f"{'; '.join(sorted({run['text'] for run in runs}))}. Tokens per step: "
        f"{'; '.join(f'{n:,}' for n in sorted({run['tokens_per_step'] for run in runs}))}. Seeds: "
        f"{'; '.join(map(str, sorted({run['seed'] for run in runs})))}."
    )


SECTIONS: dict[str, Callable[[Results], Section]] = {"equal_loss": equal_loss}
