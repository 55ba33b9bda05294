"""Bias of INT8 attention in the gradients of a 325M model: a section for each JSON, with QK-norm and without.

Their verdicts are among those of gradient_bias.py, by the same rule.
"""

from __future__ import annotations

from typing import Any

from scripts.paper.gradient_bias_tables import (
    GROUP_TITLES,
    PAPER_TOKENS,
    VIEW_TITLES,
    Interval,
    Row,
    count,
    layers_of,
    share,
)
from scripts.paper.report.gradient_bias import SHOWN, End, ends_of, provenance, shown, size_of
from scripts.paper.report.markdown import table, without_repeats
from scripts.paper.report.section import Section
from scripts.paper.result_files import Results

#: The weights of the tables. Only a model with QK-norm has gains.
GROUPS = ("all", "q", "k", "qk", "gains")


def gradient_bias_325m(results: Results, name: str) -> Section:
    """The section on the JSON of this name."""
    data = results.json(name)
    ends = {view: only_end(data, view) for view in VIEW_TITLES}
    titles = {view: f"{size_of(end)} parameters, {VIEW_TITLES[view]}" for view, end in ends.items()}
    tables = {f"{titles[view]}: bias and T* by weights": group_table(end) for view, end in ends.items()}
    tables |= {
        f"{titles[view]}: T* of the {group} projections by layer": layer_table(end, group)
        for view, end in ends.items()
        for group in ("q", "k")
    }
    run = data["runs"][ends["raw"].run]
    fields = {
        "parameters": size_of(ends["raw"]),
        "tokens": f"{run['tokens']:,}",
        "batches": str(data["settings"]["batches"]),
        "unseen": unseen(data, run),
        "weights": short_table(ends["raw"]),
        "layers": layers_below(ends),
    }
    for view, end in ends.items():
        for setting in end.settings:
            for group in groups_of(end):
                fields |= numbers_of(end.row(setting, group), f"{view}.{setting}.{group}")
            for group in ("q", "k"):
                fields[f"below.{view}.{setting}.{group}"] = below(end, setting, group, max(PAPER_TOKENS))
    return Section(provenance(data), tables, [], fields)


def only_end(data: dict[str, Any], view: str) -> End:
    """Raises ValueError if there are several runs."""
    [end] = ends_of(data, view)
    return end


def groups_of(end: End) -> list[str]:
    there = {row.group for row in end.rows}
    return [group for group in GROUPS if group in there]


def numbers_of(row: Row, name: str) -> dict[str, str]:
    """Bias, T*, bias² over the noise of the minibatch at the paper's two steps, noise of quantization."""
    small, large = (f"{share(row, tokens):.2f}" for tokens in PAPER_TOKENS)
    noise = row.noise[0]
    return {
        f"bias.{name}": "" if row.bias[0] is None else f"{row.bias[0]:.3f}",
        f"critical.{name}": count(row.critical_tokens[0]),
        f"small.{name}": small,
        f"large.{name}": large,
        f"noise.{name}": "" if noise is None else f"{noise:.1%}",
    }


def short_table(end: End) -> str:
    """A line for each setting: bias and T* of all weights, of q, of k and of both."""
    groups = [group for group in GROUPS if group != "gains"]
    header = ["setting", *(f"{name}, {GROUP_TITLES[group]}" for name in ("bias", "T*") for group in groups)]
    header += [f"bias² / minibatch noise of k at {tokens:,}" for tokens in PAPER_TOKENS]
    rows = []
    for setting in settings_of(end):
        found = [end.row(setting, group) for group in groups]
        biases = ["" if row.bias[0] is None else f"{row.bias[0]:.3f}" for row in found]
        critical = [count(row.critical_tokens[0]) for row in found]
        at_steps = [f"{share(end.row(setting, 'k'), tokens):.4f}" for tokens in PAPER_TOKENS]
        rows.append([SHOWN[setting], *biases, *critical, *at_steps])
    return table(header, rows)


def group_table(end: End) -> str:
    """A line for each setting and group of weights, with intervals."""
    header = ["setting", "weights", "bias", "noise / minibatch noise", "T*"]
    header += [f"bias² / minibatch noise at {tokens:,}" for tokens in PAPER_TOKENS]
    rows = []
    for setting in settings_of(end):
        for group in groups_of(end):
            row = end.row(setting, group)
            noise = "" if row.noise[0] is None else f"{row.noise[0]:.4f}"
            at_steps = [f"{share(row, tokens):.4f}" for tokens in PAPER_TOKENS]
            critical = critical_in_words(row.critical_tokens)
            rows.append([SHOWN[setting], GROUP_TITLES[group], shown(row.bias), noise, critical, *at_steps])
    return table(header, without_repeats(rows, 1), left=2)


def critical_in_words(interval: Interval) -> str:
    """ "1.86M [1.73M, 2.02M]"."""
    estimate, low, high = map(count, interval)
    return f"{estimate} [{low}, {high}]"


def layer_table(end: End, group: str) -> str:
    layers = layers_of(end.rows)
    rows = [
        [SHOWN[setting], *(count(critical_of(end, setting, group, layer)) for layer in layers)]
        for setting in settings_of(end)
    ]
    return table(["setting", *map(str, layers)], rows)


def layers_below(ends: dict[str, End]) -> str:
    """A line for each setting, of q and of k: the smallest T* of a layer, and how many lie below a step."""
    header = ["setting", "weights"]
    for view in ends:
        header += [f"smallest T*, {VIEW_TITLES[view]}"]
        header += [f"layers with T* below {tokens:,}, {VIEW_TITLES[view]}" for tokens in PAPER_TOKENS]
    rows = []
    for setting in settings_of(next(iter(ends.values()))):
        for group in ("q", "k"):
            cells = []
            for end in ends.values():
                cells += [smallest(end, setting, group)]
                cells += [below(end, setting, group, tokens) for tokens in PAPER_TOKENS]
            rows.append([SHOWN[setting], group, *cells])
    return table(header, without_repeats(rows, 1), left=2)


def smallest(end: End, setting: str, group: str) -> str:
    """ "339k (layer 15)"; layers count from 0."""
    by_layer = {layer: critical_of(end, setting, group, layer) for layer in layers_of(end.rows)}
    known = {layer: value for layer, value in by_layer.items() if value is not None}
    if not known:
        return count(None)
    layer = min(known, key=known.__getitem__)
    return f"{count(known[layer])} (layer {layer})"


def below(end: End, setting: str, group: str, tokens: int) -> str:
    """ "6 of 20": layers in which bias² is above the noise of the minibatch at so many tokens per step."""
    found = [critical_of(end, setting, group, layer) for layer in layers_of(end.rows)]
    return f"{sum(value is not None and value < tokens for value in found)} of {len(found)}"


def critical_of(end: End, setting: str, group: str, layer: int) -> float | None:
    return end.row(setting, group, layer).critical_tokens[0]


def settings_of(end: End) -> list[str]:
    return [name for name in SHOWN if name in end.settings]


def unseen(data: dict[str, Any], run: dict[str, Any]) -> str:
    """ "215 of 256": sequences of the batches that the run had not trained on."""
    wanted = data["settings"]["batches"] * data["tokens_per_batch"] // run["context"]
    left = (run["tokens_of_text"] - 1) // run["context"] - run["tokens"] // run["context"]
    return f"{max(min(left, wanted), 0)} of {wanted}"
