"""The report's section about attention in the layers of trained models: errors, Table 2, RMS."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from model.config import LlamaConfig, parameter_count
from scripts.paper import intermediates
from scripts.paper import published as paper
from scripts.paper.report_parts import (
    AGREES,
    CANNOT_TELL,
    DIFFERS,
    TRAINED,
    UNTRAINED,
    Body,
    Case,
    Verdict,
    by_share,
    decimal,
    hardware,
    known,
    markdown,
    picture,
)
from scripts.paper.results import Results
from trainer.plot import PROBED

#: Errors that differ by less than this factor count as equal; there is one seed.
SAME = 1.1
#: A relative L2 below this counts as exact.
EXACT = 1e-3
#: An RMS that is smaller by this factor is far below.
ORDER = 10

VARIANTS = {"paper": "the paper's algorithm", "default": "default"}
SMOOTHINGS = {"smooth-none": "no smoothing", "default": "K (default)", "smooth-qk": "Q and K"}


class Layers:
    """layers.json."""

    def __init__(self, data: dict[str, Any]):
        self.data, self.runs = data, data["runs"]
        self.rows = {name: [row for row in data["rows"] if row["run"] == name] for name in self.runs}

    def errors(self, run: str, variant: str, key: str) -> list[float]:
        """One value a layer; key: "dq_l2", "o_cos", …"""
        return [known(row["errors"][variant][key]) for row in self.rows[run]]

    def mean(self, run: str, variant: str, key: str) -> float:
        return fmean(self.errors(run, variant, key))

    def statistic(self, run: str, key: str, over_layers: Callable[..., float] = fmean) -> float:
        return over_layers(known(row["statistics"][key]) for row in self.rows[run])

    def gradient_error(self, run: str) -> float:
        """Relative L2 of dQ and dK under the paper's algorithm, mean over layers."""
        return fmean(self.mean(run, "paper", f"{name}_l2") for name in ("dq", "dk"))

    def plain(self) -> list[str]:
        """The runs that were trained with K-smoothing alone, the paper's choice; all if there is none."""
        found = [name for name, run in self.runs.items() if smooths_k_alone(run["attention_settings"])]
        return found or list(self.runs)


def smooths_k_alone(attention: dict[str, Any]) -> bool:
    return attention["smooth_k"] is not False and not attention["smooth_q"] and not attention["smooth_v"]


def layers(results: Results) -> Body:
    data = results.json("layers.json")
    found = Layers(data)
    sequences = data["settings"]["sequences"]
    text = [
        "q, k, v and dO of every layer of models that were trained here, from one forward and backward with "
        f"full-precision attention on {sequences} held-out sequence{'s' * (sequences > 1)}; and what "
        f"variants of SageBwd make of these on {hardware(data)}, against exact attention.",
        runs_table(found),
        "Cosine similarity (Figure 5) and relative L2 (Figure 6), mean over layers; in brackets, the worst "
        "layer.",
        error_table(found),
        picture("layers_paper.png", "Errors by layer under the paper's algorithm"),
        "Smoothing, relative L2, mean over layers; the other settings are the default's:",
        smoothing_table(found),
        "Every layer: [`layers.md`](layers.md), [`layers_default.png`](layers_default.png), "
        "[`layers_variants.png`](layers_variants.png).",
        "### Table 2",
        "The tensors on the way, cosine similarity / relative L2, under the paper's algorithm in plain "
        "PyTorch. Paper: layer 11 of its run with QK-norm at 2.1M tokens per step. Here: the layer whose dQ "
        "errs most.",
        table2(found),
        "### RMS of P, dP and dS (§4.2)",
        f"Mean over layers; of the logits, the largest. {data['normalisation']}",
        rms_table(found),
    ]
    verdicts = [
        gradients_verdict(found),
        ds_verdict(found),
        dp_verdict(found),
        rms_verdict(found),
        ratio_verdict(
            "without QK-norm dQ and dK err more",
            found,
            [(without, with_it) for with_it, without in alike_but(found, "qk_norm", True, False)],
        ),
        ratio_verdict("dQ and dK err more at more tokens per step", found, most_against_fewest_tokens(found)),
    ]
    return Body("\n\n".join(text), verdicts)


def runs_table(found: Layers) -> str:
    rows = [
        [
            name,
            f"{parameter_count(LlamaConfig(**run['model'])) / 1e6:.3g}M",
            f"{run['context']}",
            f"{run['tokens_per_step']:,}",
            f"{run['tokens']:,}",
            "yes" if run["qk_norm"] else "no",
        ]
        for name, run in found.runs.items()
    ]
    return markdown(["run", "parameters", "context", "tokens per step", "tokens seen", "QK-norm"], rows)


def error_table(found: Layers) -> str:
    """Two lines for each run and variant: cosine similarity, relative L2."""
    rows = []
    for run in found.runs:
        for variant, title in VARIANTS.items():
            for kind, label, worst in (("cos", "CosSim", min), ("l2", "L2", max)):
                values = [found.errors(run, variant, f"{name}_{kind}") for name in PROBED]
                cells = [f"{decimal(fmean(v))} ({decimal(extreme(v, worst))})" for v in values]
                rows.append([run, title, label, *cells])
    return markdown(["run", "variant", "", *PROBED.values()], without_repeats(rows, 2), left=3)


def without_repeats(rows: list[list[str]], columns: int) -> list[list[str]]:
    """The rows with each of the first columns left empty where it, and what is before it, is as above."""
    shown, above = [], [""] * columns
    for row in rows:
        names = ["" if row[: n + 1] == above[: n + 1] else row[n] for n in range(columns)]
        shown.append([*names, *row[columns:]])
        above = row
    return shown


def extreme(values: Sequence[float], worst: Callable[..., float]) -> float:
    """The worst of the values; a NaN is worse than any."""
    return math.nan if any(map(math.isnan, values)) else worst(values)


def smoothing_table(found: Layers) -> str:
    rows = [
        [run, *(decimal(found.mean(run, v, f"{name}_l2")) for name in ("dq", "dk") for v in SMOOTHINGS)]
        for run in found.runs
    ]
    header = [f"{PROBED[name]}, {title}" for name in ("dq", "dk") for title in SMOOTHINGS.values()]
    return markdown(["run", *header], rows)


def table2(found: Layers) -> str:
    """The paper's beside every plain run."""
    tables = {name: found.data["table2"][name] for name in found.plain()}
    rows = [
        [title, *(pair(column[name]) for column in (paper.TABLE_2, *(t["paper"] for t in tables.values())))]
        for name, title in intermediates.TITLES.items()
    ]
    return markdown(["", "paper", *(f"{run}, layer {t['layer']}" for run, t in tables.items())], rows)


def pair(values: Sequence[float | None]) -> str:
    return " / ".join(decimal(known(value)) for value in values)


def rms_table(found: Layers) -> str:
    keys = ("p_rms", "dp_rms", "ds_rms", "dp_rms_in_step", "ds_rms_in_step")
    rows = [["paper", "4096", *(f"{value:.1e}" for value in paper.RMS.values()), "", "", ""]]
    for name, run in found.runs.items():
        means = [f"{found.statistic(name, key):.1e}" for key in keys]
        largest = found.statistic(name, "largest_logit", max)
        rows.append([name, f"{run['context']}", *means, f"{largest:.1f}"])
    return markdown(["", "N", "P", "dP", "dS", "dP, in step", "dS, in step", "largest logit"], rows)


def gradients_verdict(found: Layers) -> Verdict:
    def case(run: str) -> Case:
        o, dq, dk, dv = (found.mean(run, "paper", f"{name}_l2") for name in ("o", "dq", "dk", "dv"))
        numbers = f"dQ {decimal(dq)}, dK {decimal(dk)}, O {decimal(o)}, dV {decimal(dv)}"
        return Case(run, found.runs[run]["tokens"], min(dq, dk) > max(o, dv), numbers)

    rule = (
        "Relative L2 under the paper's algorithm, mean over layers: the lesser of dQ and dK must exceed both "
        "O and dV."
    )
    return by_share("dQ and dK err more than O and dV", [case(run) for run in found.plain()], rule)


def ds_verdict(found: Layers) -> Verdict:
    def case(run: str) -> Case:
        table = found.data["table2"][run]["paper"]
        ds, p, dp, delta = (known(table[name][1]) for name in ("ds", "p", "dp", "delta"))
        numbers = f"dS {decimal(ds)}, P {decimal(p)}, δ {decimal(delta)}"
        return Case(run, found.runs[run]["tokens"], ds > max(p, dp, delta), numbers)

    claim = "dS errs more than P, dP and δ, of which it is made"
    return by_share(claim, [case(run) for run in found.plain()], "Relative L2 in the layer of Table 2.")


def dp_verdict(found: Layers) -> Verdict:
    errors = {run: known(found.data["table2"][run]["paper"]["dp"][1]) for run in found.plain()}
    cases = [
        Case(run, found.runs[run]["tokens"], error < EXACT, f"{error:.1e}") for run, error in errors.items()
    ]
    return by_share("dP is exact", cases, f"Its relative L2 in the layer of Table 2 is below {EXACT:g}.")


def rms_verdict(found: Layers) -> Verdict:
    ratios = {run: found.statistic(run, "dp_rms") / found.statistic(run, "ds_rms") for run in found.plain()}
    cases = [
        Case(run, found.runs[run]["tokens"], ratio >= ORDER, f"{ratio:.1f}") for run, ratio in ratios.items()
    ]
    claim = f"the RMS of dS is far below that of dP ({paper.RMS['dp'] / paper.RMS['ds']:,.0f} times)"
    low, high = min(ratios.values()), max(ratios.values())
    rule = f"Here {low:,.0f} to {high:,.0f} times; {ORDER} or more is far below."
    return by_share(claim, cases, rule)


def ratio_verdict(claim: str, found: Layers, pairs: Sequence[tuple[str, str]]) -> Verdict:
    """The paper sees the first run of each pair err more than the second."""
    if not pairs:
        return Verdict(claim, CANNOT_TELL, "There are no two runs that differ in nothing else.")
    ratios = {(a, b): found.gradient_error(a) / found.gradient_error(b) for a, b in pairs}
    trained = [
        ratio for pair, ratio in ratios.items() if all(found.runs[x]["tokens"] >= TRAINED for x in pair)
    ]
    answer, note = CANNOT_TELL, "" if trained else f" {UNTRAINED}"
    if trained and all(ratio >= SAME for ratio in trained):
        answer = AGREES
    if trained and all(ratio <= 1 / SAME for ratio in trained):
        answer = DIFFERS
    shown = "; ".join(f"{ratio:.2f} times, {a} against {b}" for (a, b), ratio in ratios.items())
    why = (
        f"Relative L2 under the paper's algorithm, mean of dQ and dK and over layers: {shown}. In all pairs "
        f"{SAME} times or more agrees, 1/{SAME} or less does not.{note}"
    )
    return Verdict(claim, answer, why)


def alike_but(found: Layers, key: str, first: Any, second: Any) -> list[tuple[str, str]]:
    """Pairs of runs that differ in `key` alone, which is `first` in one and `second` in the other."""
    settings = {name: comparable(run, key) for name, run in found.runs.items()}
    return [
        (a, b)
        for a in settings
        for b in settings
        if settings[a] == settings[b] and (found.runs[a][key], found.runs[b][key]) == (first, second)
    ]


def most_against_fewest_tokens(found: Layers) -> list[tuple[str, str]]:
    """Pairs of runs that differ in the tokens per step alone: of each kind, the most and the fewest."""
    kinds: dict[str, list[str]] = {}
    for name, run in found.runs.items():
        kinds.setdefault(comparable(run, "tokens_per_step"), []).append(name)
    ordered = [
        sorted(names, key=lambda name: found.runs[name]["tokens_per_step"]) for names in kinds.values()
    ]
    ends = [(names[-1], names[0]) for names in ordered]
    return [
        (most, fewest)
        for most, fewest in ends
        if found.runs[most]["tokens_per_step"] > found.runs[fewest]["tokens_per_step"]
    ]


def comparable(run: dict[str, Any], but: str) -> str:
    """What two runs must share to be compared, whatever their `but`."""
    model = {name: value for name, value in run["model"].items() if name != but}
    names = ("qk_norm", "tokens_per_step", "tokens", "lr", "context", "seed")
    shared = {name: run[name] for name in names if name != but}
    return json.dumps([model, shared, run["attention_settings"]], sort_keys=True)
