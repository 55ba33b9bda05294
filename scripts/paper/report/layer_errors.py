"""What layers.json holds, by run, layer and variant of SageBwd."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from scripts.paper.report.markdown import known
from scripts.paper.variants import sage_config


class Layers:
    """layers.json."""

    def __init__(self, data: dict[str, Any]):
        self.data, self.runs = data, data["runs"]
        self.rows = {name: [row for row in data["rows"] if row["run"] == name] for name in self.runs}

    def errors(self, run: str, variant: str, key: str) -> list[float]:
        """One value a layer; key: "dq_l2", "o_cos", …"""
        return [known(row["errors"][variant][key]) for row in self.rows[run]]

    def mean(self, run: str, variant: str, key: str) -> float:
        return fmean(self.errors(run, variant, key))

    def statistic(self, run: str, key: str, over_layers: Callable[..., float] = fmean) -> float:
        return over_layers(known(row["statistics"][key]) for row in self.rows[run])

    def gradient_error(self, run: str) -> float:
        """Relative L2 of dQ and dK under the paper's algorithm, mean over layers."""
        return fmean(self.mean(run, "paper", f"{name}_l2") for name in ("dq", "dk"))

    def plain(self) -> list[str]:
        """The runs that were trained with K-smoothing alone, the paper's choice; all if there is none."""
        found = [name for name, run in self.runs.items() if smooths_k_alone(run["attention_settings"])]
        return found or list(self.runs)


def smooths_k_alone(attention: dict[str, Any]) -> bool:
    """Whether an attention is trained with the paper's smoothing; full precision needs none."""
    if attention.get("backend", "sagebwd") != "sagebwd":
        return True
    config = sage_config(attention)
    return config.smooth_k and not config.smooth_q and not config.smooth_v
