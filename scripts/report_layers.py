"""The report's sections about attention in trained models: its errors by layer, its formats, their causes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from model.config import LlamaConfig, parameter_count
from scripts import gradient_error as study
from scripts import intermediates, paper
from scripts.report_parts import (
    AGREES,
    CANNOT_TELL,
    DIFFERS,
    Body,
    Verdict,
    decimal,
    hardware,
    markdown,
    picture,
)
from scripts.results import Results
from trainer.plot import PROBED

#: A model that has seen fewer tokens than this is hardly trained: what is measured in it decides nothing.
TRAINED = 1_000_000
#: Errors that differ by less than this factor count as equal; there is one seed.
SAME = 1.1
#: A relative L2 below this counts as exact.
EXACT = 1e-3
#: An RMS that is smaller by this factor is far below.
ORDER = 10
#: dP in INT8 must multiply the error of dQ by this to be the reason for 16 bit.
DP_FACTOR = 2
UNTRAINED = f"No model here has seen {TRAINED:,} tokens."


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


# --- Figures 5 and 6, Table 2, RMS --------------------------------------------------------------------------

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


# --- S3: formats of the gradients ---------------------------------------------------------------------------

FORMATS = {"int8": "INT8", "e4m3": "FP8 e4m3", "e5m2": "FP8 e5m2"}


def gradient_formats(results: Results) -> Body:
    data = results.json("gradient_formats.json")
    measured = format_errors(data)
    seen = {name: origin["tokens"] for name, origin in data["sources"].items()}
    queries, keys = data["settings"]["tile"]
    inputs = "q, k, v and dO of models that were trained here, at the last step" if seen else "Gaussians"
    text = [
        f"{inputs}, on {hardware(data)}: causal attention in float64, and again with the operands of the "
        "backward in 8 bits and O exact. Relative L1 of dQ, as S3 prints it, mean over layers, with a scale "
        f"per tile of {queries} × {keys} (`block`) or per output row in it (`row`) for P and dS. S3's "
        "numbers are of other tensors, and of its whole attention.",
        "dP in 16 bit; S3: over the layers of CogVideoX-2B, its FP8 not named:",
        formats_table(measured),
        "dP in 16 bit and in INT8, all else in INT8; S3: Table 1c:",
        dp_table(measured),
        "Every step, dK, dV, relative L2, and FP8 with dP in 8 bits: "
        "[`gradient_formats.md`](gradient_formats.md).",
    ]
    verdicts = [
        verdict(measured, granularity, seen)
        for verdict in (formats_verdict, dp_bits_verdict)
        for granularity in dict.fromkeys(granularity for _, granularity in measured)
    ]
    return Body("\n\n".join(text), verdicts)


#: {(trace, granularity): {(format, bits of dP): {"l1": …, "cos": …} of dQ, mean over layers}}
FormatErrors = dict[tuple[str, str], dict[tuple[str, int], dict[str, float]]]


def format_errors(data: dict[str, Any]) -> FormatErrors:
    """Of the last step of each run, or of random numbers. Raises ValueError if there are none."""
    if not data["rows"]:
        raise ValueError("no rows")
    last = {origin["run"]: name for name, origin in sorted(data["sources"].items(), key=by_step)}
    kept = set(last.values()) or {row["trace"] for row in data["rows"]}
    by_scheme: dict[tuple[str, str, str, int], list[dict]] = {}
    for row in data["rows"]:
        if row["trace"] in kept:
            scheme = row["scheme"]
            key = row["trace"], scheme["granularity"], scheme["format"], scheme["dp_bits"]
            by_scheme.setdefault(key, []).append(row["errors"]["dq"])
    measured: FormatErrors = {}
    for (trace, granularity, name, bits), errors in by_scheme.items():
        means = {kind: fmean(known(error[kind]) for error in errors) for kind in ("l1", "cos")}
        measured.setdefault((trace, granularity), {})[name, bits] = means
    return measured


def by_step(item: tuple[str, dict]) -> int:
    return item[1]["step"]


def formats_table(measured: FormatErrors) -> str:
    int8, fp8 = paper.S3_FORMATS["int8"], paper.S3_FORMATS["fp8"]
    rows = [["S3", "", decimal(int8), decimal(fp8), "", f"{fp8 / int8:.2f}"]]
    for (trace, granularity), errors in measured.items():
        int8, *fp8 = (errors[name, 16]["l1"] for name in FORMATS)
        rows.append([trace, granularity, *map(decimal, (int8, *fp8)), f"{min(fp8) / int8:.2f}"])
    return markdown(["", "P, dS per", *FORMATS.values(), "better FP8 / INT8"], rows, left=2)


def dp_table(measured: FormatErrors) -> str:
    (cos_8, l1_8), (cos_16, l1_16) = paper.S3_DP["int8"], paper.S3_DP["fp16"]
    lines = [("S3", "", l1_16, cos_16, l1_8, cos_8)]
    for (trace, granularity), errors in measured.items():
        high, low = errors["int8", 16], errors["int8", 8]
        lines.append((trace, granularity, high["l1"], high["cos"], low["l1"], low["cos"]))
    rows = [
        [name, granularity, *map(decimal, values), f"{values[2] / values[0]:.2f}"]
        for name, granularity, *values in lines
    ]
    header = ["", "P, dS per", "16 bit, L1", "16 bit, CosSim", "INT8, L1", "INT8, CosSim", "L1, times"]
    return markdown(header, rows, left=2)


def formats_verdict(measured: FormatErrors, granularity: str, seen: dict[str, int]) -> Verdict:
    def case(trace: str, errors: dict[tuple[str, int], dict[str, float]]) -> Case:
        int8, *fp8 = (errors[name, 16]["l1"] for name in FORMATS)
        return Case(
            trace, seen.get(trace, 0), int8 < min(fp8), f"{decimal(int8)} against {decimal(min(fp8))}"
        )

    printed = " against ".join(decimal(paper.S3_FORMATS[name]) for name in ("int8", "fp8"))
    claim = f"INT8 gradients beat FP8 ones (dQ {printed}); a scale per {granularity}"
    rule = "The error of dQ with INT8 must be below that with either FP8 format."
    return by_share(claim, [case(*item) for item in of_granularity(measured, granularity).items()], rule)


def dp_bits_verdict(measured: FormatErrors, granularity: str, seen: dict[str, int]) -> Verdict:
    factors = {
        trace: errors["int8", 8]["l1"] / errors["int8", 16]["l1"]
        for trace, errors in of_granularity(measured, granularity).items()
    }
    cases = [
        Case(trace, seen.get(trace, 0), factor >= DP_FACTOR, f"{factor:.2f}")
        for trace, factor in factors.items()
    ]
    printed = paper.S3_DP["int8"][1] / paper.S3_DP["fp16"][1]
    claim = (
        f"dP must stay in 16 bit: INT8 multiplies the error of dQ by {printed:.1f}; a scale per {granularity}"
    )
    rule = (
        f"Here by {min(factors.values()):.2f} to {max(factors.values()):.2f}; it must be {DP_FACTOR} or more."
    )
    return by_share(claim, cases, rule)


def of_granularity(measured: FormatErrors, granularity: str) -> dict[str, dict]:
    """By trace."""
    return {trace: errors for (trace, own), errors in measured.items() if own == granularity}


# --- Where the error of the gradients comes from ------------------------------------------------------------

#: Variants that are always shown; beside them those that no other beats in cost and error.
ALWAYS_SHOWN = ("paper", "default", "V-smoothing", "exact δ", "consistent", "accurate", "all in 16 bit")
#: A variant on the front must err less than the cheaper one before it by this much to be shown.
WORTH_SHOWING = 0.1


class Study:
    """gradient_error.json, as scripts.gradient_error has it in memory."""

    def __init__(self, data: dict[str, Any]):
        self.sources = [study.Source(**source) for source in data["sources"].values()]
        self.rows = [
            study.Row(**row | {"relative_l2": all_known(row["relative_l2"])}) for row in data["rows"]
        ]
        self.last = [source for source in self.sources if source.is_last]

    def error(self, source: study.Source, kind: str, name: str, tensor: str) -> float:
        """Relative L2, mean over layers and heads."""
        rows = study.chosen(self.rows, source=source.name, kind=kind, name=name)
        return study.mean_error(rows, tensor)

    def parts(self, source: study.Source, tensor: str) -> dict[str, float]:
        """The error that each part of the default leaves alone."""
        return {part: self.error(source, "alone", part, tensor) for part in study.PARTS[tensor]}


def all_known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: known(value) for name, value in values.items()}


def gradient_error(results: Results) -> Body:
    data = results.json("gradient_error.json")
    found = Study(data)
    heads = {(row.source, row.layer, row.head) for row in found.rows}
    text = [
        f"{len(heads)} heads from traces of models that were trained here, computed again on "
        f"{hardware(data)}: the default of SageBwd, each of its roundings alone, and other variants. "
        "Relative L2 of dQ and dK against float64 attention, mean over layers and heads. The parts: S in "
        "INT8; O, and δ with it; dS, and the operand it is multiplied with. Bold: the largest part.",
        parts_table(found),
    ]
    if results.has("gradient_error_progress.png"):
        text.append(picture("gradient_error_progress.png", "Error and its parts over the tokens seen"))
    text += [
        *(largest_parts(found, tensor) for tensor in study.PARTS),
        "Variants at the last step of each run, by cost in INT8 products of N × N × D, of which 16-bit "
        f"attention takes 18: {', '.join(always_shown(found))}; and those that no other beats in cost and "
        f"error (geometric mean of dQ and dK over runs), each {WORTH_SHOWING:.0%} or more better than the "
        "one before. The cost leaves out all that is no product.",
        variants_table(found),
        picture("gradient_error.png", "Error of dQ and dK against cost"),
        "All variants, and layer by layer: [`gradient_error.md`](gradient_error.md); what they are: "
        "[`scripts/gradient_variants.py`](../scripts/gradient_variants.py).",
    ]
    return Body("\n\n".join(text))


def parts_table(found: Study) -> str:
    """A line for each trace: the default's error of dQ and dK, and each part alone."""
    rows = []
    for source in sorted(found.sources, key=lambda source: (source.run, source.tokens or 0)):
        cells = []
        for tensor in study.PARTS:
            cells.append(decimal(found.error(source, "variant", "default", tensor)))
            errors = found.parts(source, tensor)
            largest = largest_of(errors)
            cells += [bold(decimal(e)) if part == largest else decimal(e) for part, e in errors.items()]
        seen = "" if source.tokens is None else f"{source.tokens:,}"
        rows.append([source.run if source.tokens else source.name, seen, *cells])
    header = [
        title
        for tensor, parts in study.PARTS.items()
        for title in (f"{study.TITLES[tensor]}, default", *parts)
    ]
    return markdown(["run", "tokens seen", *header], rows)


def largest_of(errors: dict[str, float]) -> str:
    return max(errors, key=errors.get)


def bold(text: str) -> str:
    return f"**{text}**"


def largest_parts(found: Study, tensor: str) -> str:
    """ "The largest part of dQ's error at the last step is S in RUN; O and δ in RUN (.01 of .02), RUN …"."""
    by_part: dict[str, list[str]] = {}
    for source in found.last:
        errors = found.parts(source, tensor)
        part, whole = largest_of(errors), found.error(source, "variant", "default", tensor)
        by_part.setdefault(part, []).append(
            f"{source.run or source.name} ({decimal(errors[part])} of {decimal(whole)})"
        )
    shares = "; ".join(f"**{part}** in {', '.join(names)}" for part, names in by_part.items())
    return f"The largest part of {study.TITLES[tensor]}'s error at the last step is {shares}."


def variants_table(found: Study) -> str:
    """A line for each source, a column for each variant."""
    costs = study.costs_of(found.rows)
    names = sorted(shown_variants(found), key=lambda name: (costs[name], name))
    rows = [
        [
            source.name,
            *(
                " / ".join(decimal(found.error(source, "variant", name, tensor)) for tensor in study.PARTS)
                for name in names
            ),
        ]
        for source in found.last
    ]
    cost = ["cost", *(f"{costs[name]:g}" for name in names)]
    return markdown(["dQ / dK", *names], [cost, *rows])


def always_shown(found: Study) -> list[str]:
    """Those of ALWAYS_SHOWN that were measured."""
    measured = study.costs_of(found.rows)
    return [name for name in ALWAYS_SHOWN if name in measured]


def shown_variants(found: Study) -> set[str]:
    """Those always shown, and the front's, but for small steps."""
    panels = [study.points_of(found.rows, source, tensor) for source in found.last for tensor in study.PARTS]
    points = {
        name: (cost, geometric_mean([max(panel[name][1], 1e-12) for panel in panels]))
        for name, (cost, _) in panels[0].items()
    }
    shown, best = set(always_shown(found)), math.inf
    for name in study.front(points):
        if points[name][1] < (1 - WORTH_SHOWING) * best:
            shown.add(name)
            best = points[name][1]
    return shown
