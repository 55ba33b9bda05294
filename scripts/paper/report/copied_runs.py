"""Sections beyond the experiments: training runs copied into the results, and single measurements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

from scripts.paper.report.gradient_bias import LARGE
from scripts.paper.report.gradient_bias_325m import gradient_bias_325m
from scripts.paper.report.markdown import table
from scripts.paper.report.section import Section
from scripts.paper.report.speed import preparing
from scripts.paper.result_files import Results
from scripts.paper.run_metrics import final_loss, speed, validation_loss
from trainer.plot import series


class Further(NamedTuple):
    """A section beyond the experiments, shown when all the files in `needs` are there."""

    title: str
    needs: tuple[str, ...]
    section: Callable[[Results], Section]


def llama_325m_fpa(results: Results) -> Section:
    run = "llama_325m_fpa"
    records, environment = results.run(run), results.environment(run)
    tokens, losses = series(records, "loss")
    window = 20
    means = [mean(losses[i - window : i]) for i in range(window, len(losses) + 1)]
    below = next(i for i, value in enumerate(means) if value < 4.5) + window
    shorter = results.metrics(f"{run}/300_steps.jsonl")
    rows = [
        [f"training loss, mean of the last {window} steps", f"{final_loss(records, window):.2f}"],
        [
            f"first step whose mean over {window} steps is below 4.5",
            f"{below} ({tokens[below - 1] / 1e6:.1f}M tokens)",
        ],
        ["validation loss", f"{validation_loss(records):.2f}"],
        ["speed", f"{speed(records):,.0f} tokens/s, {median_mfu(records):.1%} of the bf16 peak"],
        ["peak memory", f"{max(series(records, 'peak_memory_gib')[1]):.1f} GiB"],
        [
            f"training loss of a run of {shorter[-1]['step']} steps, mean of the last 30",
            f"{final_loss(shorter, 30):.2f}",
        ],
    ]
    setting = (
        f"{environment['device']}, torch {environment['torch']}, {records[-1]['step']} steps, `tps=260k`"
    )
    return Section(
        setting, {"The 325M model in full precision (cuDNN), bf16, QK-norm": table(["", ""], rows)}
    )


def median_mfu(records: list[dict[str, Any]]) -> float:
    return sorted(series(records, "mfu")[1])[len(series(records, "mfu")[1]) // 2]


def llama_325m_pair(results: Results) -> Section:
    folder, last = "llama_325m_pair", 30
    runs = {name: results.run(f"{folder}/{name}") for name in ("fpa", "sagebwd")}
    again = results.metrics("llama_325m_fpa/300_steps.jsonl")
    rows = [
        [f"`{name}`", f"{final_loss(run, last):.3f}", f"{validation_loss(run):.3f}", f"{speed(run):,.0f}"]
        for name, run in runs.items()
    ]
    rows.append(["`fpa`, repeated on another day", f"{final_loss(again, last):.3f}", "", ""])
    ends = {name: final_loss(run, last) for name, run in runs.items()}
    header = ["attention", f"training loss, last {last} steps", "validation loss", "tokens/s"]
    return Section(
        f"2 × {results.environment(f'{folder}/fpa')['device']}, {runs['fpa'][-1]['step']} steps, `tps=260k`",
        {"One pair of runs, Triton kernels and cuDNN": table(header, rows)},
        fields={
            "gap": f"{ends['sagebwd'] - ends['fpa']:+.3f}",
            "repeat_gap": f"{final_loss(again, last) - ends['fpa']:+.3f}",
        },
    )


def llama_tiny(results: Results) -> Section:
    folder = "llama_tiny_gpt2"
    runs = {name: results.run(f"{folder}/{name}") for name in ("fpa", "sagebwd")}
    ends = {name: final_loss(run) for name, run in runs.items()}
    setting = (
        f"{results.environment(f'{folder}/fpa')['device']}, `model=llama_tiny`, GPT-2's vocabulary, context "
        f"512, {runs['fpa'][0]['tokens']:,} tokens per step, {runs['fpa'][-1]['step']} steps"
    )
    shown = {"`fpa`": runs["fpa"], "`sagebwd` (reference)": runs["sagebwd"]}
    fields = {"gap": f"{ends['sagebwd'] - ends['fpa']:.3f}"}
    return Section(setting, {"One pair of runs": loss_table(shown)}, fields=fields)


def quickstart(results: Results) -> Section:
    runs = {f"`{name}`": results.run(f"quickstart/{name}") for name in ("fpa", "sagebwd")}
    setting = f"{results.environment('quickstart/fpa')['device']}, `make quickstart`"
    return Section(setting, {"One seed": loss_table(runs)})


def loss_table(runs: dict[str, list[dict]]) -> str:
    rows = [
        [name, f"{final_loss(run):.3f}", f"{validation_loss(run):.3f}", f"{speed(run):,.0f}"]
        for name, run in runs.items()
    ]
    return table(["attention", "training loss (last tenth)", "validation loss", "tokens/s"], rows)


FURTHER = {
    **{
        name.removesuffix(".json"): Further(
            f"Beyond the paper: bias of gradients in a 325M model, {norm} QK-norm",
            (name,),
            partial(gradient_bias_325m, name=name),
        )
        for name, norm in zip(LARGE, ("with", "without"), strict=True)
    },
    "llama_325m_fpa": Further(
        "The 325M model on real text, full precision",
        ("llama_325m_fpa/metrics.jsonl", "llama_325m_fpa/300_steps.jsonl"),
        llama_325m_fpa,
    ),
    "llama_325m_pair": Further(
        "SageBwd and full precision, the 325M model, one pair",
        ("llama_325m_pair/sagebwd/metrics.jsonl", "llama_325m_fpa/300_steps.jsonl"),
        llama_325m_pair,
    ),
    "llama_tiny_gpt2": Further(
        "SageBwd and full precision, a tiny model, one pair",
        ("llama_tiny_gpt2/sagebwd/metrics.jsonl",),
        llama_tiny,
    ),
    "prepare": Further("Preparing text", ("prepare_tiktoken.json", "prepare_gigatoken.json"), preparing),
    "quickstart": Further("The quickstart", ("quickstart/sagebwd/metrics.jsonl",), quickstart),
}
