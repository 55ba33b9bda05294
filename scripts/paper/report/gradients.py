"""The gradients: their formats, and where their error comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from scripts.paper import gradient_error_rows as study
from scripts.paper import published as paper
from scripts.paper.attention_errors import TITLES
from scripts.paper.report.markdown import bold, commit_of, decimal, hardware, known, span, table
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import (
    FormatErrors,
    dp_bits_verdict,
    dp_factors,
    formats_verdict,
    of_granularity,
)
from scripts.paper.result_files import Results

# --- S3: formats of the gradients ---------------------------------------------------------------------------

FORMATS = {"int8": "INT8", "e4m3": "FP8 e4m3", "e5m2": "FP8 e5m2"}


def gradient_formats(results: Results) -> Section:
    data = results.json("gradient_formats.json")
    measured = format_errors(data)
    seen = {name: origin["tokens"] for name, origin in data["sources"].items()}
    granularities = list(dict.fromkeys(granularity for _, granularity in measured))
    queries, keys = data["settings"]["tile"]
    tables = {
        "16-bit dP, relative L1 of dQ; S3: over the layers of CogVideoX-2B, its FP8 not named": (
            formats_table(measured)
        ),
        "16-bit and INT8 dP, all else INT8; S3: Table 1c": dp_table(measured),
    }
    verdicts = [
        verdict(measured, granularity, seen)
        for verdict in (formats_verdict, dp_bits_verdict)
        for granularity in granularities
    ]
    inputs = "q, k, v and dO of trained models at their last step" if seen else "Gaussian inputs"
    setting = (
        f"{hardware(data)}, {commit_of(data)}; {inputs}, causal, tiles of {queries} × {keys}, O exact, mean "
        "over layers"
    )
    return Section(setting, tables, verdicts, {"summary": formats_summary(measured, granularities)})


def format_errors(data: dict[str, Any]) -> FormatErrors:
    """Of the last step of each run, or of random numbers. Raises ValueError if there are none."""
    if not data["rows"]:
        raise ValueError("no rows")
    last = {origin["run"]: name for name, origin in sorted(data["sources"].items(), key=by_step)}
    wanted = set(last.values()) or {row["trace"] for row in data["rows"]}
    by_scheme: dict[tuple[str, str, str, int], list[dict]] = {}
    for row in data["rows"]:
        if row["trace"] in wanted:
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


def formats_summary(measured: FormatErrors, granularities: Sequence[str]) -> str:
    """A line for S3 and each granularity; the range over runs."""
    int8, fp8 = paper.S3_FORMATS["int8"], paper.S3_FORMATS["fp8"]
    s3_dp = paper.S3_DP["int8"][1] / paper.S3_DP["fp16"][1]
    rows = [["S3", decimal(int8), f"{fp8 / int8:.2f}", f"{s3_dp:.2f}"]]
    for granularity in granularities:
        own = of_granularity(measured, granularity).values()
        errors = [error["int8", 16]["l1"] for error in own]
        ratios = [
            min(error[name, 16]["l1"] for name in ("e4m3", "e5m2")) / error["int8", 16]["l1"] for error in own
        ]
        factors = list(dp_factors(measured, granularity).values())
        shown = [span(errors, decimal), *(span(values, "{:.2f}".format) for values in (ratios, factors))]
        rows.append([f"a scale per {granularity}", *shown])
    header = ["", "INT8, relative L1 of dQ", "better FP8 / INT8", "INT8 dP / 16-bit dP"]
    return table(header, rows)


def formats_table(measured: FormatErrors) -> str:
    int8, fp8 = paper.S3_FORMATS["int8"], paper.S3_FORMATS["fp8"]
    rows = [["S3", "", decimal(int8), decimal(fp8), "", f"{fp8 / int8:.2f}"]]
    for (trace, granularity), errors in measured.items():
        int8, *fp8 = (errors[name, 16]["l1"] for name in FORMATS)
        rows.append([trace, granularity, *map(decimal, (int8, *fp8)), f"{min(fp8) / int8:.2f}"])
    return table(["run", "P, dS per", *FORMATS.values(), "better FP8 / INT8"], rows, left=2)


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
    header = ["run", "P, dS per", "16 bit, L1", "16 bit, CosSim", "INT8, L1", "INT8, CosSim", "L1, ratio"]
    return table(header, rows, left=2)


# --- Where the error of the gradients comes from ------------------------------------------------------------

TIME = "error_against_time.json"
#: Variants that are always shown; with them those that no other beats in cost and error.
ALWAYS_SHOWN = ("paper", "default", "V-smoothing", "exact δ", "consistent", "accurate", "all in 16 bit")
#: A variant on the front must have an error smaller than the cheaper one before it by this much to be shown.
WORTH_SHOWING = 0.1


class Study:
    """gradient_error.json, as scripts.paper.gradient_error has it in memory."""

    def __init__(self, data: dict[str, Any]):
        self.sources = [study.HeadSource(**source) for source in data["sources"].values()]
        self.rows = [
            study.Row(**row | {"relative_l2": all_known(row["relative_l2"])}) for row in data["rows"]
        ]
        self.last = [source for source in self.sources if source.is_last]
        self._by_name: dict[tuple[str, str, str], list[study.Row]] = {}
        for row in self.rows:
            self._by_name.setdefault((row.source, row.kind, row.name), []).append(row)

    def error(self, source: study.HeadSource, kind: str, name: str, tensor: str) -> float:
        """Relative L2, mean over layers and heads."""
        return study.mean_error(self._by_name[source.name, kind, name], tensor)

    def parts(self, source: study.HeadSource, tensor: str) -> dict[str, float]:
        """The error that each part of the default leaves alone."""
        return {part: self.error(source, "alone", part, tensor) for part in study.PARTS[tensor]}


def all_known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: known(value) for name, value in values.items()}


def gradient_error(results: Results) -> Section:
    data = results.json("gradient_error.json")
    found = Study(data)
    heads = {(row.source, row.layer, row.head) for row in found.rows}
    tables = {
        "The default's error and its parts, relative L2, mean over layers and heads; bold: largest part": (
            parts_table(found)
        ),
        "Runs by the largest part of the error at the last step": largest_parts_table(found),
        "Variants at the last step of each run, dQ / dK; cost in INT8 products of N × N × D (16-bit "
        f"attention: 18); {', '.join(always_shown(found))}, and those that no other beats in cost and error, "
        f"each {WORTH_SHOWING:.0%} or more better than the one before": variants_table(found),
    }
    fields = {"heads": f"{len(heads)}", "largest_parts": largest_parts_table(found, with_runs=False)}
    if results.has(TIME):
        timed = results.json(TIME)
        caption = (
            "Error against time: forward and backward, causal, head size "
            f"{timed['settings']['head_dim']}, as a multiple of the default's time in the same run; relative "
            "L2 of the algorithm, geometric mean over runs"
        )
        tables[caption] = fields["against_time"] = against_time(timed)
    setting = f"{hardware(data)}, {commit_of(data)}, {len(heads)} heads of trained models"
    return Section(setting, tables, fields=fields)


def against_time(data: dict[str, Any]) -> str:
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
    titles = [TITLES[tensor] for tensor in study.PARTS]
    return table(["setting", "commit", *(f"N {n}" for n in lengths), *titles], rows, left=2)


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
        title for tensor, parts in study.PARTS.items() for title in (f"{TITLES[tensor]}, default", *parts)
    ]
    return table(["run", "tokens seen", *header], rows)


def largest_of(errors: dict[str, float]) -> str:
    return max(errors, key=errors.get)


def largest_parts_table(found: Study, with_runs: bool = True) -> str:
    """A line for each gradient and part: in which runs it is the largest part of the default's error."""
    rows = []
    for tensor in study.PARTS:
        by_part: dict[str, list[str]] = {}
        for source in found.last:
            errors = found.parts(source, tensor)
            part, whole = largest_of(errors), found.error(source, "variant", "default", tensor)
            name = f"{source.run or source.name} ({decimal(errors[part])} of {decimal(whole)})"
            by_part.setdefault(part, []).append(name)
        for part, names in by_part.items():
            count = f"{len(names)} of {len(found.last)}"
            rows.append([TITLES[tensor], part, count, *([", ".join(names)] if with_runs else [])])
    return table(
        ["gradient", "largest part", "runs", *([""] if with_runs else [])], rows, left=4 if with_runs else 3
    )


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
    return table(["dQ / dK", *names], [cost, *rows])


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


SECTIONS: dict[str, Callable[[Results], Section]] = {
    "gradient_formats": gradient_formats,
    "gradient_error": gradient_error,
}
