"""The report's sections about the gradients: their formats, and where their error comes from."""

from __future__ import annotations

import math
from statistics import fmean, geometric_mean
from typing import Any

from scripts.paper import gradient_error as study
from scripts.paper import published as paper
from scripts.paper.report_parts import (
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

#: dP in INT8 must multiply the error of dQ by this to be the reason for 16 bit.
DP_FACTOR = 2

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

TIME = "error_against_time.json"
#: Variants that are always shown; beside them those that no other beats in cost and error.
ALWAYS_SHOWN = ("paper", "default", "V-smoothing", "exact δ", "consistent", "accurate", "all in 16 bit")
#: A variant on the front must err less than the cheaper one before it by this much to be shown.
WORTH_SHOWING = 0.1


class Study:
    """gradient_error.json, as scripts.paper.gradient_error has it in memory."""

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
        *(against_time(results.json(TIME)) if results.has(TIME) else ()),
        "All variants, and layer by layer: [`gradient_error.md`](gradient_error.md); what they are: "
        "[`scripts/paper/gradient_variants.py`](../scripts/paper/gradient_variants.py).",
    ]
    return Body("\n\n".join(text))


def against_time(data: dict[str, Any]) -> list[str]:
    """A line for each setting that was timed."""
    lengths = sorted({int(tokens) for row in data["rows"] for tokens in row["time"]})
    rows = [
        [
            row["setting"],
            row["commit"][:7],
            *(f"{row['time'][str(n)]:.2f}" if str(n) in row["time"] else "" for n in lengths),
            *(decimal(row["relative_l2"][tensor]) for tensor in study.PARTS),
        ]
        for row in data["rows"]
    ]
    titles = [study.TITLES[tensor] for tensor in study.PARTS]
    return [
        "Against the time that kernels take: forward and backward, causal, head size "
        f"{data['settings']['head_dim']}, as a multiple of the default's in the same run, and relative L2, "
        f"geometric mean over these runs ([`{TIME}`]({TIME})). Of cuDNN and FlashAttention-2 the error is "
        "that of SageBwd with all products in 16 bit.",
        markdown(["", "commit", *(f"N {n}" for n in lengths), *titles], rows, left=2),
        picture("error_against_time.png", "Error of dQ and dK against time"),
    ]


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
