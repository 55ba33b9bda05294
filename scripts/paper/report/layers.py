"""Attention in the layers of trained models: errors (Figures 5 and 6), Table 2, RMS."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from model.config import LlamaConfig, parameter_count
from scripts.paper import intermediates
from scripts.paper import published as paper
from scripts.paper.report.layer_errors import Layers
from scripts.paper.report.markdown import commit_of, decimal, hardware, known, table, without_repeats
from scripts.paper.report.rules import NOT_SEEN
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import (
    ds_verdicts,
    gradients_verdicts,
    ratio_verdicts,
    rms_verdicts,
)
from scripts.paper.result_files import Results
from scripts.paper.variants import variant_of
from trainer.plot import PROBED

SHOWN_VARIANTS = {"paper": "`paper()`", "default": "default"}
SMOOTHINGS = {"smooth-none": "no smoothing", "default": "K (default)", "smooth-qk": "Q and K"}


def layers(results: Results) -> Section:
    data = results.json("layers.json")
    found = Layers(data)
    tables = {
        "Runs": runs_table(found),
        "Figures 5 and 6: cosine similarity and relative L2, mean over layers (worst layer)": error_table(
            found
        ),
        "Smoothing: relative L2, mean over layers, other settings as in the default": smoothing_table(found),
        "Table 2: cosine similarity / relative L2 under `paper()`, reference; paper: layer 11 of its run "
        "with QK-norm at 2.1M tokens per step; here: the layer with the largest error of dQ": table2(
            found, found.plain()
        ),
        f"RMS of P, dP and dS (§4.2), mean over layers; largest logit. {data['normalisation']}": rms_table(
            found
        ),
    }
    verdicts = [
        *gradients_verdicts(found),
        *ds_verdicts(found),
        *rms_verdicts(found),
        *ratio_verdicts(
            "qk_norm",
            found,
            [(without, with_it) for with_it, without in alike_but(found, "qk_norm", True, False)],
            lambda run: f"learning rate {run['lr']:g}",
        ),
        *ratio_verdicts(
            "tokens_per_step", found, most_against_fewest_tokens(found), lambda run: "", otherwise=NOT_SEEN
        ),
    ]
    fields = {
        "errors": summary_table(found),
        "table2": table2(found, extremes(found)),
        "table2_readings": readings_in_words(found),
    }
    return Section(provenance(found), tables, verdicts, fields)


def provenance(found: Layers) -> str:
    """Hardware, algorithms in training, texts, tokens per step, seeds and commit of what was measured."""
    data, runs = found.data, found.runs.values()
    sequences = data["settings"]["sequences"]
    texts = {run.get("text") for run in runs}
    steps = sorted({run["tokens_per_step"] for run in runs})
    trained = dict.fromkeys(variant_of({"attention": r["attention_settings"], "model": r}) for r in runs)
    return (
        f"{hardware(data)}, {commit_of(data)}; {sequences} validation sequence{'s' * (sequences > 1)} per "
        f"run. Trained with: {'; '.join(trained)}. Tokens per step: {'; '.join(f'{n:,}' for n in steps)}. "
        f"Seeds: {'; '.join(map(str, sorted({run['seed'] for run in runs})))}. "
        f"Text: {'not recorded' if None in texts else '; '.join(sorted(texts))}."
    )


def readings_in_words(found: Layers) -> str:
    """Whether P and dS were also compared after their own rounding."""
    measured = [name for name in found.runs if "p_rounded" in found.data["table2"][name]["paper"]]
    if len(measured) == len(found.runs):
        return "P and dS stand before and after their own rounding to INT8"
    return (
        "P and dS are those before their own rounding to INT8: what reaches them from Q, K, O and V. After "
        f"it they were measured in {len(measured)} of {len(found.runs)} runs"
    )


def extremes(found: Layers) -> list[str]:
    """Of the plain runs: the largest model with QK-norm, and the run with the largest error of dQ and dK."""
    with_norm = [name for name in found.plain() if found.runs[name]["qk_norm"]] or found.plain()
    largest = max(with_norm, key=lambda name: parameters(found.runs[name]))
    worst = max(found.plain(), key=lambda name: nan_as_infinite(found.gradient_error(name)))
    return list(dict.fromkeys([largest, worst]))


def nan_as_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def parameters(run: dict[str, Any]) -> int:
    return parameter_count(LlamaConfig(**run["model"]))


def norm_of(run: dict[str, Any]) -> str:
    return "on" if run["qk_norm"] else "off"


def runs_table(found: Layers) -> str:
    rows = [
        [
            name,
            f"{parameters(run) / 1e6:.3g}M",
            f"{run['context']}",
            f"{run['tokens_per_step']:,}",
            f"{run['tokens']:,}",
            norm_of(run),
        ]
        for name, run in found.runs.items()
    ]
    return table(["run", "parameters", "context", "tokens per step", "tokens seen", "QK-norm"], rows)


def summary_table(found: Layers) -> str:
    """A line for each plain run: errors of dQ and dK under the paper's algorithm and the default."""
    rows = []
    for name in found.plain():
        cells = [decimal(found.mean(name, v, f"{x}_l2")) for v in SHOWN_VARIANTS for x in ("dq", "dk")]
        logit = found.statistic(name, "largest_logit", max)
        rows.append([name, norm_of(found.runs[name]), *cells, f"{logit:.1f}"])
    header = [f"{title}, {x}" for title in SHOWN_VARIANTS.values() for x in ("dQ", "dK")]
    return table(["run", "QK-norm", *header, "largest logit"], rows, left=2)


def error_table(found: Layers) -> str:
    """Two lines for each run and variant: cosine similarity, relative L2."""
    rows = []
    for run in found.runs:
        for variant, title in SHOWN_VARIANTS.items():
            for kind, label, worst in (("cos", "CosSim", min), ("l2", "L2", max)):
                values = [found.errors(run, variant, f"{name}_{kind}") for name in PROBED]
                cells = [f"{decimal(fmean(v))} ({decimal(extreme(v, worst))})" for v in values]
                rows.append([run, title, label, *cells])
    return table(["run", "variant", "", *PROBED.values()], without_repeats(rows, 2), left=3)


def extreme(values: Sequence[float], worst: Callable[..., float]) -> float:
    """The worst of the values; a NaN is worse than any."""
    return math.nan if any(map(math.isnan, values)) else worst(values)


def smoothing_table(found: Layers) -> str:
    rows = [
        [run, *(decimal(found.mean(run, v, f"{name}_l2")) for name in ("dq", "dk") for v in SMOOTHINGS)]
        for run in found.runs
    ]
    header = [f"{PROBED[name]}, {title}" for name in ("dq", "dk") for title in SMOOTHINGS.values()]
    return table(["run", *header], rows)


def table2(found: Layers, names: Sequence[str]) -> str:
    """The paper's column, and one of each of these runs."""
    tables = {name: found.data["table2"][name] for name in names}
    rows = [
        [
            title,
            *(
                pair(column[name]) if name in column else "not measured"
                for column in (
                    paper.TABLE_2 | intermediates.rounded_too(paper.TABLE_2),
                    *(t["paper"] for t in tables.values()),
                )
            ),
        ]
        for name, title in intermediates.TITLES.items()
    ]
    columns = [f"{run}, layer {t['layer']}, QK-norm {norm_of(found.runs[run])}" for run, t in tables.items()]
    return table(["", "paper, QK-norm on", *columns], rows)


def pair(values: Sequence[float | None]) -> str:
    return " / ".join(decimal(known(value)) for value in values)


def rms_table(found: Layers) -> str:
    keys = ("p_rms", "dp_rms", "ds_rms", "dp_rms_in_step", "ds_rms_in_step")
    rows = [["paper", "4096", *(f"{value:.1e}" for value in paper.RMS.values()), "", "", ""]]
    for name, run in found.runs.items():
        means = [f"{found.statistic(name, key):.1e}" for key in keys]
        largest = found.statistic(name, "largest_logit", max)
        rows.append([name, f"{run['context']}", *means, f"{largest:.1f}"])
    return table(["run", "N", "P", "dP", "dS", "dP, in step", "dS, in step", "largest logit"], rows)


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


SECTIONS: dict[str, Callable[[Results], Section]] = {"layers": layers}
