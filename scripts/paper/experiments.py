"""The experiments of configs/paper/: what each one trains and measures, at which scale, and what it costs.

    full      the paper's own size: the 325M model on 78.6 billion tokens, for anyone with the hardware
    scaled    smaller models and fewer tokens: minutes to hours of one H200
    debug     seconds on a CPU, to see that everything works; the numbers mean nothing

An item is one YAML file:

    title, and also: further names it goes by
    variants        names of common.yaml; every one runs at every seed of a setup
    setups          setups of its own, as in common.yaml
    runs            by scale, a list of setups, or of {setup, variants, seeds, starts_from, branches_from};
                    each branch goes on from the run branches_from of its own seed
    measure         commands: {runs} are the run directories, {results} the folder of results, {out} the
                    result there
    debug           the commands at the debug scale, if they are others
    needs_weights   the commands read trained weights, which diverged runs do not have
    minutes         of the commands, on one H200
    result          FOLDER/NAME of the JSON file below {results}; it may be compressed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SCALES = ("full", "scaled", "debug")
CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
COMMON = "common"
#: The paper's tables and figures first; the others follow by name.
FIRST = ("table1", "figure1a", "figure1b", "figures2-3", "figure4", "layers", "finetune", "presets")


@dataclass(frozen=True)
class Run:
    """One training run: the arguments of train.py, and a directory of its own below --runs-dir."""

    name: str
    overrides: tuple[str, ...]
    minutes: float  # of one H200, or of `gpus` of them
    gpus: int = 1
    starts_from: str | None = None  # the run whose trained weights it begins with, on other text
    branches_from: str | None = None  # the run whose last checkpoint it goes on from

    @property
    def after(self) -> str | None:
        """The run that it needs."""
        return self.starts_from or self.branches_from


@dataclass(frozen=True)
class Item:
    """One experiment. commands and runs: by scale."""

    name: str
    title: str
    result: str
    commands: Mapping[str, tuple[str, ...]]
    runs: Mapping[str, tuple[Run, ...]]
    also: tuple[str, ...] = ()
    needs_weights: bool = False
    minutes: float = 0.0

    def cost(self, scale: str) -> float:
        """Minutes of one H200 (table1: of a CPU), runs that other items share included."""
        return self.minutes + sum(run.minutes * run.gpus for run in self.runs[scale])

    def compared(self, scale: str) -> list[Run]:
        """The runs that the commands read: all but those that others only start from."""
        started_from = {run.after for run in self.runs[scale]}
        return [run for run in self.runs[scale] if run.name not in started_from]


@cache
def items() -> dict[str, Item]:
    """All items by name, those of the paper first."""
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    names = [*FIRST, *(name for name in names if name not in (*FIRST, COMMON))]
    return {name: read_item(name) for name in names}


def find(name: str) -> Item:
    """The item of this name. Raises KeyError."""
    known = items() | {other: item for item in items().values() for other in item.also}
    return known[name]


def read_item(name: str) -> Item:
    own, common = read_yaml(name), read_yaml(COMMON)
    setups = common["setups"] | own.get("setups", {})
    debug = own.get("debug", own["measure"])
    commands = {
        scale: tuple(text.replace("{out}", f"{{results}}/{own['result']}") for text in texts)
        for scale, texts in zip(SCALES, (own["measure"], own["measure"], debug), strict=True)
    }
    runs = {
        scale: tuple(
            run
            for entry in own.get("runs", {}).get(scale, ())
            for run in runs_of(entry, own.get("variants", ()), setups, common["variants"])
        )
        for scale in SCALES
    }
    return Item(
        name,
        own["title"],
        own["result"],
        commands,
        runs,
        also=tuple(own.get("also", ())),
        needs_weights=own.get("needs_weights", False),
        minutes=own.get("minutes", 0),
    )


def read_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


def runs_of(
    entry: str | dict[str, Any],
    chosen: list[str],
    setups: dict[str, dict[str, Any]],
    variants: dict[str, list[str]],
) -> list[Run]:
    """Every variant at every seed; seed by seed, so that whole comparisons are done first."""
    entry = {"setup": entry} if isinstance(entry, str) else entry
    setup, trunk = setups[entry["setup"]], entry.get("branches_from")
    return [
        Run(
            f"{entry['setup']}/{variant}-seed{seed}",
            (*setup["overrides"], *variants[variant], f"seed={seed}"),
            setup["minutes"],
            gpus=setup.get("gpus", 1),
            starts_from=entry.get("starts_from"),
            branches_from=f"{trunk}-seed{seed}" if trunk else None,
        )
        for seed in entry.get("seeds", setup.get("seeds", [1]))
        for variant in entry.get("variants", chosen)
    ]


def total_cost(scale: str) -> float:
    """Minutes of one H200 for all items, runs that they share counted once."""
    runs = {run.name: run for item in items().values() for run in item.runs[scale]}
    measuring = sum(item.minutes for item in items().values())
    return measuring + sum(run.minutes * run.gpus for run in runs.values())


def duration_in_words(minutes: float) -> str:
    """A rough length of time: "3 min", "2.5 h", "5,000 h"."""
    if minutes < 90:
        return f"{max(minutes, 1):.0f} min"
    return f"{minutes / 60:,.1f} h" if minutes < 6000 else f"{minutes / 60:,.0f} h"
