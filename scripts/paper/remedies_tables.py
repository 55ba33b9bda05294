"""What scripts.paper.remedies measured, as rows and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scripts.bench.measuring import origin_of
from scripts.output import align
from scripts.paper.gradient_bias_tables import CONTROL, Row, count, pick

TENSORS = ("dq", "dk", "dv")
TITLES = {"dq": "dQ", "dk": "dK", "dv": "dV"}


@dataclass(frozen=True)
class TensorRow:
    """What a candidate does to a tensor of some heads, relative to the exact one; see scripts.paper.remedies.

    error, bias, noise: root mean square over heads, error² = bias² + noise²; bias is negative where the
    estimate of bias² is, so about zero. along: mean over heads.
    """

    source: str
    candidate: str
    tensor: str
    heads: int
    error: float
    bias: float
    noise: float
    along: float


def combined(heads: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """error, bias, noise and along of all heads, from each head's error², bias² and along."""
    error, bias, along = (fmean(own) for own in zip(*heads, strict=True))
    found = {
        "error": math.sqrt(error),
        "bias": math.copysign(math.sqrt(abs(bias)), bias),
        "noise": math.sqrt(max(error - bias, 0.0)),
        "along": along,
    }
    return {name: six_digits(value) for name, value in found.items()}


def six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def to_markdown(result: dict[str, Any], rows: Sequence[Row]) -> str:
    lines = [
        "# Remedies: bias, noise and cost",
        "",
        origin_of(result),
        "",
        "`python -m scripts.paper.remedies --help` says what the columns are. Tensor-core time: 11 is all "
        "six products in INT8, 18 is 16-bit attention. Kernel time: a multiple of the default's (commit); "
        "empty: not timed.",
        "",
        *cost_table(result),
        "",
    ]
    for run in dict.fromkeys(row.run for row in rows):
        own = [row for row in rows if row.run == run]
        lines += [f"## Gradients of all weights: {run}", "", *gradient_table(result, own), ""]
    for source in sources_of(result):
        lines += [f"## Tensors: {source}", "", *tensor_table(result, source), ""]
    return "\n".join(lines)


def cost_table(result: dict[str, Any]) -> list[str]:
    lines = [
        [own["title"], f"{own['units']:g}", in_time(own["kernel_time"]), own["extra"]]
        for own in result["candidates"].values()
    ]
    return align(["candidate", "tensor-core time", "kernel time", "further cost"], lines)


def in_time(kernel_time: dict[str, Any] | None) -> str:
    return "" if kernel_time is None else f"{kernel_time['time']:.2f} ({kernel_time['commit'][:7]})"


def sources_of(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["source"] for row in result["tensors"]))


def title_of(result: dict[str, Any], candidate: str) -> str:
    if candidate == CONTROL:
        return "full precision, another kernel"
    return result["candidates"][candidate]["title"]


def gradient_table(result: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """A line for each candidate: bias of all weights and of q and k, along, noise, T*."""
    header = ["candidate", "bias, all weights", "along the gradient", "bias, q and k"]
    lines = []
    for candidate in dict.fromkeys(row.setting for row in rows):
        whole, qk = (pick(rows, candidate, group) for group in ("all", "qk"))
        along = "" if whole.along[0] is None else f"{whole.along[0]:+.4f}"
        noise = "" if whole.noise[0] is None else f"{whole.noise[0]:.5f}"
        biases = with_interval(whole.bias), along, with_interval(qk.bias)
        lines.append([title_of(result, candidate), *biases, noise, count(qk.critical_tokens[0])])
    return align([*header, "noise / minibatch noise", "T*, q and k"], lines)


def with_interval(interval: Sequence[float | None]) -> str:
    return "" if None in interval else "{:.4f} [{:.4f}, {:.4f}]".format(*interval)


def tensor_table(result: dict[str, Any], source: str) -> list[str]:
    """A line for each candidate: bias and noise of dQ, dK and dV, and dQ and dK along the exact ones."""
    rows = {
        (row["candidate"], row["tensor"]): TensorRow(**row)
        for row in result["tensors"]
        if row["source"] == source
    }
    lines = [
        [title_of(result, name), *(bias_and_noise(rows[name, tensor]) for tensor in TENSORS)]
        + [f"{rows[name, tensor].along:+.4f}" for tensor in TENSORS[:2]]
        for name in dict.fromkeys(candidate for candidate, _ in rows)
    ]
    header = [*(TITLES[tensor] for tensor in TENSORS), *(f"{TITLES[x]}, along" for x in TENSORS[:2])]
    return align(["bias / noise", *header], lines)


def bias_and_noise(row: TensorRow) -> str:
    return f"{row.bias:.4f} / {row.noise:.4f}" if row.noise else f"{row.bias:.4f}"
