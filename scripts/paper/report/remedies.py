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
from scripts.paper.report.gradient_bias import extremes
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
    fields = {"table": main_tables(data, rows, runs), "best": best(data, rows, runs)}
    for candidate in data["candidates"]:
        fields |= numbers_of(rows, runs, candidate)
    return Section(provenance(data), tables, [], fields)


def main_tables(data: dict[str, Any], rows: list[Row], runs: list[str]) -> str:
    """A table for each run, below its name; costs alone if there is no run."""
    named = [f"{norm_of(data, run)}:\n\n{main_table(data, rows, run)}" for run in runs]
    return "\n\n".join(named) or cost_table(data)


def norm_of(data: dict[str, Any], run: str) -> str:
    return "With QK-norm" if data["runs"][run]["qk_norm"] else "Without QK-norm"


def main_table(data: dict[str, Any], rows: list[Row], run: str) -> str:
    """A line for each candidate: cost, bias and noise in the gradients of a run, and its tensors."""
    own, tensors = [row for row in rows if row.run == run], tensors_of(data, run)
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
                with_interval(whole.bias),
                with_interval(qk.bias),
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
    """Over runs, for sentences: {"all.low_bias": "0.0051 to 0.0088", "less.all.low_bias": "5.1 to 11.5", …}.

    all, qk: the bias. less: how many times smaller it is than the default's, if its intervals leave out zero.
    """
    found = {}
    for group in ("all", "qk"):
        biases = {run: bias_in(rows, run, candidate, group) for run in runs}
        biases = {run: bias for run, bias in biases.items() if bias}
        if not biases:
            continue
        found[f"{group}.{candidate}"] = extremes([bias[0] for bias in biases.values()], "{:.4f}")
        defaults = {run: bias_in(rows, run, "default", group) for run in biases}
        if all(defaults.values()) and all(bias[1] > 0 for bias in biases.values()):
            ratios = [defaults[run][0] / bias[0] for run, bias in biases.items()]
            found[f"less.{group}.{candidate}"] = extremes(ratios, "{:.1f}")
    return found


def bias_in(rows: list[Row], run: str, candidate: str, group: str) -> list[float] | None:
    """The bias and its interval; None if it was not measured."""
    own = [row for row in rows if (row.run, row.setting, row.group) == (run, candidate, group)]
    return own[0].bias if own and None not in own[0].bias else None


def best(data: dict[str, Any], rows: list[Row], runs: list[str]) -> str:
    """The all-INT8 candidates whose interval of the bias reaches the smallest estimate, in every run."""
    if not runs:
        return "unknown"
    first, *others = (best_of(data, [row for row in rows if row.run == run]) for run in runs)
    return "; ".join(title for title in first if all(title in own for own in others)) or "none"


def best_of(data: dict[str, Any], rows: list[Row]) -> list[str]:
    biases = {
        row.setting: row.bias
        for row in rows
        if row.group == "all"
        and row.setting != CONTROL
        and data["candidates"][row.setting]["all_int8"]
        and None not in row.bias
    }
    smallest = min(bias[0] for bias in biases.values())
    return [title_of(data, name) for name, bias in biases.items() if bias[1] <= smallest]


def scale_in_words(data: dict[str, Any]) -> str:
    """ "0.895M parameters, 1.31M tokens of parquet (tokens 98a66c5d), …"; of the runs, each once."""
    words = [
        f"{parameter_count(LlamaConfig(**run['model'])) / 1e6:.3g}M parameters, trained with "
        f"{run['attention']} on {run['tokens']:,} tokens of {run['data']['source']} (tokens "
        f"{run['data']['fingerprint'][:8]}), {run['tokens_per_step']:,} a step, context {run['context']}, "
        f"seed {run['seed']}"
        for run in data["runs"].values()
    ]
    return "; ".join(dict.fromkeys(words))


def provenance(data: dict[str, Any]) -> str:
    refined = [
        f"{source}: {own['p']:.0%} of P, {own['ds']:.0%} of dS" for source, own in data["refined"].items()
    ]
    gradients = (
        f"Models: {scale_in_words(data)}. Gradients on {data['settings']['batches']} batches of "
        f"{data['tokens_per_batch']:,} tokens, compared with {data['checkpoints'][0]['truth']}. "
        if data["checkpoints"]
        else ""
    )
    return (
        f"{hardware(data)}, {commit_of(data)}. {gradients}Kernel time: {data['kernel_time']}. "
        f"Rows of tiles with finer scales: {'; '.join(refined)}."
    )


SECTIONS: dict[str, Callable[[Results], Section]] = {"remedies": remedies}
