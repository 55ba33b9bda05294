"""What takes the bias out of the gradients, and what it costs: the section on remedies.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model.config import LlamaConfig, parameter_count
from scripts.paper.gradient_bias_tables import CONTROL, Row, pick
from scripts.paper.remedies_tables import (
    TENSORS,
    TITLES,
    TensorRow,
    bias_and_noise,
    in_time,
    sources_of,
    title_of,
    with_interval,
)
from scripts.paper.report.gradient_bias import shown
from scripts.paper.report.markdown import commit_of, hardware, table
from scripts.paper.report.section import Section
from scripts.paper.result_files import Results


def remedies(results: Results) -> Section:
    data = results.json("remedies.json")
    rows = [Row(**row) for row in data["rows"]]
    runs = list(dict.fromkeys(row.run for row in rows))
    tables = {"Cost": cost_table(data)}
    for run in runs:
        own = [row for row in rows if row.run == run]
        tables[f"Gradients of all weights, {run}: |b| / |G| and its 95% interval"] = gradient_table(data, own)
    for source in sources_of(data):
        tables[f"Tensors, {source}: bias / noise, relative to the exact tensor"] = tensor_table(data, source)
    fields = {"table": main_table(data, rows, runs), "scale": scale_in_words(data), "best": best(data, rows)}
    for candidate in data["candidates"]:
        fields |= numbers_of(rows, runs, candidate)
    return Section(provenance(data), tables, [], fields)


def main_table(data: dict[str, Any], rows: list[Row], runs: list[str]) -> str:
    """A line for each candidate: cost, bias and noise in the gradients of the first run, and its tensors."""
    if not runs:
        return cost_table(data)
    own, tensors = [row for row in rows if row.run == runs[0]], tensors_of(data, runs[0])
    lines = []
    for candidate, known in data["candidates"].items():
        if not any(row.setting == candidate for row in own):
            continue
        whole, qk = (pick(own, candidate, group) for group in ("all", "qk"))
        noise = "" if whole.noise[0] is None else f"{whole.noise[0]:.4f}"
        lines.append(
            [
                title_of(data, candidate),
                f"{known['units']:g}",
                in_time(known["kernel_time"]) or ("not timed" if known["has_kernel"] else "no kernel"),
                shown(whole.bias),
                shown(qk.bias),
                noise,
                *(bias_and_noise(tensors[candidate, tensor]) for tensor in TENSORS),
            ]
        )
    header = ["candidate", "tensor-core time", "kernel time (commit)", "bias, all weights", "bias, q and k"]
    return table([*header, "noise / minibatch noise", *(TITLES[tensor] for tensor in TENSORS)], lines)


def tensors_of(data: dict[str, Any], source: str) -> dict[tuple[str, str], TensorRow]:
    """By candidate and tensor."""
    rows = [TensorRow(**row) for row in data["tensors"] if row["source"] == source]
    return {(row.candidate, row.tensor): row for row in rows}


def cost_table(data: dict[str, Any]) -> str:
    lines = [
        [own["title"], f"{own['units']:g}", in_time(own["kernel_time"]), own["extra"]]
        for own in data["candidates"].values()
    ]
    return table(["candidate", "tensor-core time", "kernel time (commit)", "further cost"], lines)


def gradient_table(data: dict[str, Any], rows: list[Row]) -> str:
    lines = []
    for candidate in dict.fromkeys(row.setting for row in rows):
        whole, qk = (pick(rows, candidate, group) for group in ("all", "qk"))
        along = "" if whole.along[0] is None else f"{whole.along[0]:+.4f}"
        lines.append([title_of(data, candidate), with_interval(whole.bias), along, with_interval(qk.bias)])
    return table(["candidate", "bias, all weights", "along the gradient", "bias, q and k"], lines)


def tensor_table(data: dict[str, Any], source: str) -> str:
    own = tensors_of(data, source)
    lines = [
        [title_of(data, candidate), *(bias_and_noise(own[candidate, tensor]) for tensor in TENSORS)]
        for candidate in dict.fromkeys(name for name, _ in own)
    ]
    return table(["candidate", *(TITLES[tensor] for tensor in TENSORS)], lines)


def numbers_of(rows: list[Row], runs: list[str], candidate: str) -> dict[str, str]:
    """{"all.default": "0.061", "qk.default": …} of the first run, for sentences."""
    found = {}
    for group in ("all", "qk"):
        own = [row for row in rows if row.run in runs[:1] and row.setting == candidate and row.group == group]
        if own and own[0].bias[0] is not None:
            found[f"{group}.{candidate}"] = f"{own[0].bias[0]:.3f}"
    return found


def best(data: dict[str, Any], rows: list[Row]) -> str:
    """The all-INT8 candidates whose interval of the bias reaches the smallest of their estimates."""
    if not rows:
        return "unknown"
    biases = {
        row.setting: row.bias
        for row in rows
        if (row.run, row.group) == (rows[0].run, "all")
        and row.setting != CONTROL
        and data["candidates"][row.setting]["all_int8"]
        and None not in row.bias
    }
    smallest = min(bias[0] for bias in biases.values())
    alike = [title_of(data, name) for name, bias in biases.items() if bias[1] <= smallest]
    return "; ".join(alike)


def scale_in_words(data: dict[str, Any]) -> str:
    """ "0.895M parameters, 1.31M tokens of real text, context 512, on a CPU"; of each run."""
    words = [
        f"{parameter_count(LlamaConfig(**run['model'])) / 1e6:.3g}M parameters, {run['tokens'] / 1e6:.3g}M "
        f"tokens of text ({run['data']['name'] or run['data']['source']}), context {run['context']}"
        for run in data["runs"].values()
    ]
    return "; ".join([*words, hardware(data)])


def provenance(data: dict[str, Any]) -> str:
    refined = [
        f"{source}: {own['p']:.0%} of P, {own['ds']:.0%} of dS" for source, own in data["refined"].items()
    ]
    batches = (
        f"Gradients on {data['settings']['batches']} batches of {data['tokens_per_batch']:,} tokens. "
        if data["runs"]
        else ""
    )
    return (
        f"{hardware(data)}, {commit_of(data)}. Scale: {scale_in_words(data)}. {batches}"
        f"Kernel time: {data['kernel_time']}. Rows of tiles with finer scales: {'; '.join(refined)}."
    )


SECTIONS: dict[str, Callable[[Results], Section]] = {"remedies": remedies}
