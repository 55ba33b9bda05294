"""Losses where logits are large, and without minibatch noise: the sections on large_logits and one_batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scripts.paper.large_logits import is_positive_control
from scripts.paper.large_logits_tables import SIGHT, Row
from scripts.paper.report.controls import sight, under_controls
from scripts.paper.report.markdown import decimal, table
from scripts.paper.report.pool import groups_of, pooled, runs_of
from scripts.paper.report.rules import GAP
from scripts.paper.report.section import Section
from scripts.paper.report.training import PAPER, algorithms, group_title, provenance, variant_table
from scripts.paper.report.verdicts import difference, diverged, loss_verdict
from scripts.paper.result_files import Results
from scripts.paper.variants import FULL_PRECISION, SAGE

#: Columns of the front page's table: settings as the pool names them.
SHOWN = {
    PAPER: "`paper()`",
    SAGE: "default",
    f"{SAGE}, low bias": "`low_bias()`",
    f"{SAGE}, consistent": "`consistent()`",
    f"{SAGE}, accurate": "`accurate()`",
    f"{PAPER}, all INT8": "`paper()`, dP in INT8",
    f"{SAGE}, all INT8": "default, dP in INT8",
    f"{FULL_PRECISION}, flash": "full precision, FlashAttention-2",
}


def assay(name: str, results: Results) -> Section:
    data = results.json(f"{name}.json")
    data |= {"scale": data.get("scale", "scaled"), "hardware": ", ".join(data["trained_on"])}
    groups = sorted(map(full_precision_first, groups_of(data, pooled(results))), key=gain_of)
    runs = runs_of(data)
    positive = sorted({run["variant"] for run in runs if is_positive_control(run)})
    full = {run["variant"] for run in runs if run["attention"] == "fpa"}
    negative = sorted(full - {FULL_PRECISION})
    verdicts = []
    for group in groups:
        for own, case in algorithms(group, f"gain {gain_of(group):g}"):
            verdict = loss_verdict("gap", data, group, (own, FULL_PRECISION), GAP, case)
            verdicts.append(under_controls(verdict, group, own, positive, negative))
    shown = {run["variant"] for run in runs}
    tables = {
        f"Gain {gain_of(group):g}: {group_title(group)}": (
            f"{SIGHT[sight(group, positive)]}\n\n{variant_table(group, shown, {})}"
        )
        for group in groups
    }
    tables["Largest logit and relative L2 of dQ and dK, at the last probe"] = probe_table(data)
    fields = {"gaps": gap_table(data, groups, positive), "sight": sight_in_words(groups, positive)}
    return Section(provenance(data, groups, shown), tables, verdicts, fields)


def full_precision_first(group: dict[str, Any]) -> dict[str, Any]:
    """Tables compare with the first."""
    return group | {"variants": sorted(group["variants"], key=lambda own: own["variant"] != FULL_PRECISION)}


def gain_of(group: dict[str, Any]) -> float:
    return float(group.get("qk_norm_gain", 1.0))


def sight_in_words(groups: list[dict], positive: list[str]) -> str:
    """ "sees errors of this size (gain 4); blind (gain 1, 2)"."""
    words = {True: "sees errors of this size", False: "blind", None: "no interval of a positive control"}
    found: dict[str, list[str]] = {}
    for group in groups:
        found.setdefault(words[sight(group, positive)], []).append(f"{gain_of(group):g}")
    return "; ".join(f"{answer} (gain {', '.join(gains)})" for answer, gains in found.items())


def gap_table(data: dict, groups: list[dict], positive: list[str]) -> str:
    """A line for each gain: logits, errors of dQ, whether the assay sees, and the gap of each setting."""
    names = [name for name in SHOWN if any(was_run(group, name) for group in groups)]
    rows = []
    for group in groups:
        logit, dq = full_precision_probe(data, gain_of(group))
        seen = {True: "yes", False: "no", None: "unknown"}[sight(group, positive)]
        gaps = [gap_cell(group, name) for name in names]
        rows.append([f"{gain_of(group):g}", logit, dq, seen, *gaps])
    header = ["gain", "largest logit", "error of dQ", "sees", *(SHOWN[name] for name in names)]
    return table(header, rows)


def was_run(group: dict, name: str) -> bool:
    return any(own["variant"] == name for own in group["variants"])


def gap_cell(group: dict, name: str) -> str:
    if diverged(group, name):
        return "diverged"
    gap = difference(group, name, FULL_PRECISION)
    return "" if gap is None else f"{gap}"


def full_precision_probe(data: dict, gain: float) -> tuple[str, str]:
    """The largest logit, and the error of dQ that the default would have, in runs of full precision."""
    for row in (Row(**own) for own in data["rows"]):
        if (row.gain, row.setting) == (gain, FULL_PRECISION):
            logit = "" if row.largest_logit is None else f"{row.largest_logit:.1f}"
            return logit, decimal(row.probe["dq_l2"]) if "dq_l2" in row.probe else ""
    return "", ""


def probe_table(data: dict) -> str:
    """A line for each gain and setting: what the last probe of its runs saw."""
    rows = []
    for row in (Row(**own) for own in data["rows"]):
        errors = [decimal(row.probe[name]) if name in row.probe else "" for name in ("dq_l2", "dk_l2")]
        logit = "" if row.largest_logit is None else f"{row.largest_logit:.1f}"
        rows.append([f"{row.gain:g}", row.setting, logit, *errors])
    return table(["gain", "setting", "largest logit", "dQ", "dK"], rows, left=2)


SECTIONS: dict[str, Callable[[Results], Section]] = {
    name: partial(assay, name) for name in ("large_logits", "one_batch")
}
