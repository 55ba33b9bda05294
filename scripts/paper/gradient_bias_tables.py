"""What scripts.paper.gradient_bias measured, as rows and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.bench.measuring import origin_of
from scripts.output import align, number

CONTROL = "control"  # full precision with another kernel

#: The paper's two tokens per step.
PAPER_TOKENS = (262_144, 2_097_152)

VIEW_TITLES = {"raw": "raw gradients", "adam": "as Adam sees them"}
GROUP_TITLES = {
    "all": "all",
    "qk": "q, k",
    "q": "q",
    "k": "k",
    "v": "v",
    "o": "o",
    "gains": "QK-norm gains",
    "mlp": "MLP",
    "embeddings": "embeddings",
    "norms": "other norms",
}

Interval = list[float | None]  # estimate, lower and upper end; None: not a number, or infinite


@dataclass(frozen=True)
class Row:
    """What a setting does to the gradient of some weights at a checkpoint.

    view: "raw" or "adam". group: of GROUP_TITLES. layer: None for all layers. tokens: trained on by then.
    bias: |b| / |G|; negative where the estimate of |b|² is, so about zero. along: ⟨b, G⟩ / |G|².
    noise: variance of quantization over variance of the minibatch. critical_tokens: tokens per step at which
    |b|² equals the variance of the minibatch; None: no bias was found.
    """

    run: str
    step: int
    tokens: int
    setting: str
    view: str
    group: str
    layer: int | None
    bias: Interval
    along: Interval
    noise: Interval
    critical_tokens: Interval


# --- Tables -------------------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any], rows: list[Row]) -> str:
    lines = ["# Bias and noise of INT8 attention in the gradients of training", ""]
    lines += [origin_of(result), ""]
    control = f"; `{CONTROL}` is {result['control']}" if CONTROL in settings_of(rows) else ""
    lines += [
        f"Gradients on {result['settings']['batches']} batches of {result['tokens_per_batch']:,} tokens. "
        f"Each setting is compared with {result['checkpoints'][0]['truth']}{control}. "
        "Bias: |b| / |G|. Along: ⟨b, G⟩ / |G|². Noise: variance of quantization / "
        "variance of a minibatch of that size. T*: tokens per step at which bias² equals the variance of the "
        "minibatch. Bias² / noise at T tokens: T / T*. In brackets: 95% intervals. "
        "`python -m scripts.paper.gradient_bias --help` says more; the JSON has every layer and group.",
        "",
    ]
    for run, steps in checkpoints(rows).items():
        last = [row for row in rows if (row.run, row.step) == (run, steps[-1])]
        lines += [f"## {run}", "", describe_checkpoint(result, run, steps[-1]), ""]
        for view, title in VIEW_TITLES.items():
            chosen = [row for row in last if row.view == view]
            lines += [f"### {run}, step {steps[-1]}, {title}", "", *summary_table(chosen), ""]
            lines += ["Bias by group of weights:", "", *group_table(chosen), ""]
            lines += ["Critical tokens per step T* of the q and k projections, by layer:", ""]
            lines += [*layer_table(chosen), ""]
        if len(steps) > 1:
            lines += [f"### {run}, along training, raw gradients", "", *progress_table(rows, run), ""]
    return "\n".join(lines)


def describe_checkpoint(result: dict[str, Any], run: str, step: int) -> str:
    found = next(item for item in result["checkpoints"] if (item["run"], item["step"]) == (run, step))
    trained = result["runs"][run]
    seen = "not seen" if trained.get("batches_unseen") else "partly seen"
    norm = "with" if trained["qk_norm"] else "without"
    return (
        f"Trained with {trained['attention']} {norm} QK-norm on {found['tokens']:,} tokens, "
        f"{trained['tokens_per_step']:,} a step, learning rate {trained['optimizer']['lr']:g}; text of the "
        f"batches {seen} in training; loss there {found['loss']:.4f}."
    )


def checkpoints(rows: list[Row]) -> dict[str, list[int]]:
    """Steps of each run, in order."""
    return {
        run: sorted({row.step for row in rows if row.run == run})
        for run in dict.fromkeys(row.run for row in rows)
    }


def summary_table(rows: list[Row]) -> list[str]:
    """A line for each setting."""
    header = ["setting", "bias, all", "along, all", "bias, q and k", "noise, all", "T*, all", "T*, q and k"]
    header += [f"bias² / noise of q and k at {tokens:,}" for tokens in PAPER_TOKENS]
    lines = []
    for setting in settings_of(rows):
        whole, qk = (pick(rows, setting, group) for group in ("all", "qk"))
        lines.append(
            [
                f"`{setting}`",
                interval(whole.bias, decimal),
                interval(whole.along, decimal),
                interval(qk.bias, decimal),
                number(whole.noise[0], ".4f"),
                interval(whole.critical_tokens, count),
                interval(qk.critical_tokens, count),
                *(f"{share(qk, tokens):.3g}" for tokens in PAPER_TOKENS),
            ]
        )
    return align(header, lines)


def group_table(rows: list[Row]) -> list[str]:
    """Bias: a line for each setting, a column for each group."""
    groups = [group for group in GROUP_TITLES if any(row.group == group for row in rows)]
    lines = [
        [f"`{setting}`", *(decimal(pick(rows, setting, group).bias[0]) for group in groups)]
        for setting in settings_of(rows)
    ]
    return align(["setting", *(GROUP_TITLES[group] for group in groups)], lines)


def layer_table(rows: list[Row]) -> list[str]:
    """T* of the q and k projections: a line for each setting, a column for each layer."""
    layers = sorted({row.layer for row in rows if row.layer is not None})
    lines = [
        [f"`{setting}`", *(count(pick(rows, setting, "qk", n).critical_tokens[0]) for n in layers)]
        for setting in settings_of(rows)
    ]
    return align(["setting", *map(str, layers)], lines)


def progress_table(rows: list[Row], run: str) -> list[str]:
    """Bias and T* at every checkpoint of a run: a line for each setting."""
    chosen = [row for row in rows if row.run == run and row.view == "raw"]
    steps = checkpoints(chosen)[run]
    tokens = {row.step: row.tokens for row in chosen}
    columns = [
        ("bias, all", "all", lambda row: decimal(row.bias[0])),
        ("bias, q and k", "qk", lambda row: decimal(row.bias[0])),
        ("T*, q and k", "qk", lambda row: count(row.critical_tokens[0])),
    ]
    header = [f"{title}, {count(tokens[step])}" for title, *_ in columns for step in steps]
    by_step = [[row for row in chosen if row.step == step] for step in steps]
    lines = [
        [
            f"`{setting}`",
            *(shown(pick(own, setting, group)) for _, group, shown in columns for own in by_step),
        ]
        for setting in settings_of(chosen)
    ]
    return ["After training on so many tokens:", "", *align(["setting", *header], lines)]


def settings_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.setting for row in rows))


def pick(rows: list[Row], setting: str, group: str, layer: int | None = None) -> Row:
    """The one row of a setting, group and layer among those of a checkpoint and view."""
    wanted = (setting, group, layer)
    return next(row for row in rows if (row.setting, row.group, row.layer) == wanted)


def share(row: Row, tokens: int) -> float:
    """bias² / noise of the minibatch at so many tokens per step; 0 where no bias was found."""
    critical = row.critical_tokens[0]
    return 0.0 if critical is None else tokens / critical


def interval(values: Interval, form: Callable[[float | None], str]) -> str:
    estimate, low, high = map(form, values)
    return f"{estimate} [{low}, {high}]"


def decimal(value: float | None) -> str:
    return number(value, ".3f")


def count(value: float | None) -> str:
    """Tokens, to two or three digits."""
    if value is None:
        return "∞"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 1e3 * size:
            return f"> 1000{unit}" if unit == "G" else f"{value / size:,.0f}{unit}"
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
