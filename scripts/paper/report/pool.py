"""All training runs of a folder of results, compared: one noise for all runs of a setup, so one number each.

A setup is a model, a text and a schedule; its runs may belong to several experiments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from scripts.paper.large_logits import setting_of
from scripts.paper.loss_pictures import own_settings
from scripts.paper.loss_statistics import compare, is_same_run
from scripts.paper.result_files import Results
from scripts.paper.run_summary import stored_runs

#: The files that hold training runs. large_logits starts from other weights: its runs make their own setups.
FILES = (
    *("figure1a", "figure1b", "figure4", "finetune", "presets"),
    *("large_logits", "one_batch", "long_runs", "learning_rate"),
)


def pooled(results: Results) -> list[dict[str, Any]]:
    """The groups of all runs that have come to an end, each run once. Raises DamagedResult or ValueError."""
    found: dict[tuple, list[dict]] = {}
    for name in FILES:
        if results.has(f"{name}.json"):
            for run in runs_of(results.json(f"{name}.json")):
                same = found.setdefault((json.dumps(run["group"]), run["variant"], run["seed"]), [])
                if not any(is_same_run(run, other) for other in same):
                    same.append(run)
    return compare([run for own in found.values() for run in own])


def runs_of(data: dict[str, Any]) -> list[dict]:
    """The runs of a file that have come to an end; controls get names of their own."""
    return [run | {"variant": setting_of(run)} for run in ended(stored_runs(data))]


def ended(runs: Sequence[dict]) -> list[dict]:
    return [run for run in runs if run["finished"] or run["diverged"]]


def groups_of(data: dict[str, Any], groups: Sequence[dict]) -> list[dict]:
    """The groups that hold runs of this file, in its order."""
    wanted = dict.fromkeys(json.dumps(run["group"]) for run in ended(data["runs"]))
    by_setup = {json.dumps(own_settings(group)): group for group in groups}
    return [by_setup[setup] for setup in wanted]


def alike_but_tokens_per_step(group: dict, groups: Sequence[dict]) -> list[dict]:
    """The groups of the same model, text, rate and number of tokens that take fewer of them in a step."""
    return [
        other
        for other in groups
        if setup_of(other) == setup_of(group) and other["tokens_per_step"] < group["tokens_per_step"]
    ]


def setup_of(group: dict) -> dict[str, Any]:
    """What both groups of an interaction share."""
    schedule = ("tokens_per_step", "steps", "warmup_steps")
    shared = {key: value for key, value in own_settings(group).items() if key not in schedule}
    return shared | {"tokens": group["tokens_per_step"] * group["steps"]}
