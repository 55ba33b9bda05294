"""Bias and noise that INT8 attention adds to gradients: the section on gradient_bias.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.config import LlamaConfig, parameter_count
from scripts.paper.gradient_bias_tables import (
    CONTROL,
    PAPER_TOKENS,
    Row,
    count,
    layers_of,
    pick,
    settings_of,
    share,
)
from scripts.paper.report.markdown import commit_of, hardware, table
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import Verdict, bias_of, bottleneck_verdict, critical_verdict
from scripts.paper.result_files import Results, naming

#: The same on 325M models, with and without QK-norm: fewer settings. gradient_bias_325m.py has their tables.
LARGE = ("gradient_bias_325m.json", "gradient_bias_325m_no_qk_norm.json")

#: Settings of the front page's table, in its order.
SHOWN = {
    CONTROL: "full precision, another kernel",
    "paper": "`paper()`",
    "paper_no_smooth_k": "`paper()`, K not smoothed",
    "default": "default",
    "smooth_v_unsigned_p": "`low_bias()`: default with `smooth_v` and `unsigned_p`",
    "consistent": "`consistent()`",
    "accurate": "`accurate()`",
    "strictly_causal": "`strictly_causal()`",
    "only_o": "only O in INT8",
    "only_dq_dk": "only dQ and dK in INT8",
    "only_s": "only S in INT8",
    "only_dv": "only dV in INT8",
    "all_int8": "all seven in INT8, dP too",
}
#: Those that the verdicts are on.
JUDGED = {"paper": "`paper()`", "default": "default"}


@dataclass(frozen=True)
class End:
    """The last checkpoint of a run: its gradients under every setting, in one view."""

    run: str
    norm: str
    parameters: int
    rows: list[Row]

    def row(self, setting: str, group: str = "qk", layer: int | None = None) -> Row:
        return pick(self.rows, setting, group, layer)

    @property
    def settings(self) -> list[str]:
        return settings_of(self.rows)


def gradient_bias(results: Results) -> Section:
    data = results.json("gradient_bias.json")
    ends = ends_of(data)
    verdicts = verdicts_on(data, ends)
    for name in filter(results.has, LARGE):
        with naming(name, results):
            verdicts += verdicts_on(results.json(name))
    tables = {
        f"{end.norm}, end of the run, raw gradients; bias relative to the gradient": bias_table(end)
        for end in ends
    }
    fields = {
        "bias": "\n\n".join(f"{end.norm}:\n\n{bias_table(end)}" for end in ends),
        "growth": growth_table(data, ends),
        "bias_over_noise": bias_over_noise(ends),
        "largest_noise": f"{largest_noise(ends):.1%}",
        **{f"critical.{name}": critical(ends, name) for name in JUDGED if known_everywhere(ends, name)},
        **{f"qk.{name}": over_runs(ends, name, "qk") for name in SHOWN if known_everywhere(ends, name)},
        **{f"all.{name}": over_runs(ends, name, "all") for name in SHOWN if known_everywhere(ends, name)},
    }
    tables["Bias of the q and k projections along training"] = fields["growth"]
    return Section(provenance(data), tables, verdicts, fields)


def ends_of(data: dict[str, Any], view: str = "raw") -> list[End]:
    """Of every run the rows of its last step, in one view. Raises ValueError if there are none."""
    rows = [Row(**row) for row in data["rows"] if row["view"] == view]
    if not rows:
        raise ValueError("no rows")
    found = []
    for run in dict.fromkeys(row.run for row in rows):
        last = max(row.step for row in rows if row.run == run)
        norm = "With QK-norm" if data["runs"][run]["qk_norm"] else "Without QK-norm"
        parameters = parameter_count(LlamaConfig(**data["runs"][run]["model"]))
        own = [row for row in rows if (row.run, row.step) == (run, last)]
        found.append(End(run, norm, parameters, own))
    return found


def size_of(end: End) -> str:
    return f"{end.parameters / 1e6:.3g}M"


def checkpoints(data: dict[str, Any], run: str) -> dict[str, dict[int, Row]]:
    """By setting and tokens seen: what it does to the q and k projections, raw, all layers together."""
    found: dict[str, dict[int, Row]] = {}
    for row in (Row(**own) for own in data["rows"]):
        if (row.run, row.view, row.group, row.layer) == (run, "raw", "qk", None):
            found.setdefault(row.setting, {})[row.tokens] = row
    return {setting: dict(sorted(own.items())) for setting, own in found.items()}


def verdicts_on(data: dict[str, Any], ends: list[End] | None = None) -> list[Verdict]:
    """On the end of every run of a JSON."""
    ends = ends_of(data) if ends is None else ends
    return [verdict for end in ends for verdict in verdicts_of(end, checkpoints(data, end.run))]


def verdicts_of(end: End, seen: dict[str, dict[int, Row]]) -> list[Verdict]:
    """On the end of a run; the numbers have q and k alone and the earlier checkpoints, too."""
    place = f"{size_of(end)} parameters, {end.norm[0].lower()}{end.norm[1:]}"
    verdicts = []
    for setting, title in JUDGED.items():
        if setting in end.settings:
            layers = [end.row(setting, "qk", layer).critical_tokens[0] for layer in layers_of(end.rows)]
            below = sum(value is not None and value < max(PAPER_TOKENS) for value in layers)
            q, k = (count(end.row(setting, group).critical_tokens[0]) for group in ("q", "k"))
            numbers = f", below {max(PAPER_TOKENS):,} in {below} of {len(layers)} layers; q alone {q}, k {k}"
            earlier = [
                f"{count(row.critical_tokens[0])} after {count(tokens)}"
                for tokens, row in list(seen[setting].items())[:-1]
            ]
            numbers += f"; earlier {', '.join(earlier)} tokens" if earlier else ""
            case = f"{title}, {place}"
            verdicts.append(critical_verdict(end.row(setting).critical_tokens, case, numbers))
    if {"only_dq_dk", "only_o"} <= set(end.settings):
        of_ds, of_o = (end.row(name).bias for name in ("only_dq_dk", "only_o"))
        verdicts.append(bottleneck_verdict(of_ds, of_o, f"scales per row as in the default, {place}"))
    return verdicts


def bias_table(end: End) -> str:
    """A line for each setting: bias of all weights and of q and k, its part along the gradient, noise, T*."""
    header = [
        "setting",
        "bias, all weights",
        "along the gradient",
        "bias, q and k",
        "noise / minibatch noise",
    ]
    header += ["T*, q and k", *(f"bias² / minibatch noise of q and k at {n:,}" for n in PAPER_TOKENS)]
    rows = []
    for setting in (name for name in SHOWN if name in end.settings):
        whole, qk = end.row(setting, "all"), end.row(setting)
        rows.append(
            [
                SHOWN[setting],
                shown(whole.bias),
                f"{whole.along[0]:+.3f}" if whole.along[0] is not None else "",
                shown(qk.bias),
                f"{whole.noise[0]:.4f}" if whole.noise[0] is not None else "",
                count(qk.critical_tokens[0]),
                *(f"{share(qk, tokens):.3f}" for tokens in PAPER_TOKENS),
            ]
        )
    return table(header, rows)


def shown(interval: list[float | None]) -> str:
    return "" if None in interval else bias_of(interval)


def growth_table(data: dict[str, Any], ends: list[End]) -> str:
    """A line for each run and judged setting: bias of q and k, and T*, at every checkpoint."""
    seen = {end.run: checkpoints(data, end.run) for end in ends}
    tokens = sorted({n for by_setting in seen.values() for own in by_setting.values() for n in own})
    lines = []
    for end in ends:
        for setting, title in JUDGED.items():
            own = seen[end.run].get(setting, {})
            biases = [shown(own[n].bias) if n in own else "" for n in tokens]
            critical = [count(own[n].critical_tokens[0]) if n in own else "" for n in tokens]
            if own:
                lines.append([end.norm, title, *biases, *critical])
    header = [f"{name}, {count(n)} tokens" for name in ("bias", "T*") for n in tokens]
    return table(["run", "setting", *header], lines, left=2)


def bias_over_noise(ends: list[End]) -> str:
    """ "48 to 62": bias² of q and k over the variance of quantization, under paper(), at the large step."""
    ratios = [
        share(end.row("paper"), max(PAPER_TOKENS)) / end.row("paper").noise[0]
        for end in ends
        if "paper" in end.settings and end.row("paper").noise[0]
    ]
    return extremes(ratios, "{:,.0f}") if ratios else "unknown"


def largest_noise(ends: list[End]) -> float:
    """Largest variance of quantization over that of the minibatch, of all settings; all weights, q and k."""
    rows = [end.row(setting, group) for end in ends for setting in end.settings for group in ("all", "qk")]
    return max((row.noise[0] for row in rows if row.noise[0] is not None), default=0.0)


def critical(ends: list[End], setting: str) -> str:
    """ "2.96M to 3.57M": T* of q and k, over runs."""
    found = [end.row(setting).critical_tokens[0] for end in ends]
    known = [value for value in found if value is not None]
    shown = list(dict.fromkeys([count(min(known)), count(max(known))])) if known else []
    return " to ".join(shown + ["∞"] * (len(known) < len(found)))


def known_everywhere(ends: list[End], setting: str) -> bool:
    return all(setting in end.settings for end in ends)


def over_runs(ends: list[End], setting: str, group: str) -> str:
    """ ".158 to .228": the bias over the gradient, over runs."""
    values = [end.row(setting, group).bias[0] for end in ends]
    return extremes([value for value in values if value is not None], "{:.3f}")


def extremes(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def provenance(data: dict[str, Any]) -> str:
    """Hardware, commit, and of the runs: models, attention, text, tokens per step and seeds."""
    runs = list(data["runs"].values())

    def all_of(values: list) -> str:
        return "; ".join(dict.fromkeys(map(str, values)))

    models = [f"{run['model']['n_layers']} layers of width {run['model']['d_model']}" for run in runs]
    texts = [f"{run['data']['source']} (tokens {run['data']['fingerprint'][:8]})" for run in runs]
    measured = any(row["setting"] == CONTROL for row in data["rows"])
    control = f"control: {data['control']}" if measured else "no control"
    tokens, steps = ([f"{run[key]:,}" for run in runs] for key in ("tokens", "tokens_per_step"))
    return (
        f"{hardware(data)}, {commit_of(data)}. Models: {all_of(models)}, trained with "
        f"{all_of([run['attention'] for run in runs])} on {all_of(tokens)} tokens. Text: "
        f"{all_of(texts)}. Tokens per step: {all_of(steps)}. Seeds: "
        f"{all_of([run['seed'] for run in runs])}. Gradients on {data['settings']['batches']} batches of "
        f"{data['tokens_per_batch']:,} tokens, compared with {data['checkpoints'][0]['truth']}; {control}."
    )


SECTIONS: dict[str, Callable[[Results], Section]] = {"gradient_bias": gradient_bias}
