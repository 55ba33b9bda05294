"""What an experiment is: stages of training runs, commands, a file, a cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts.paper.experiment_runs import SCALES, Run

#: In a command: the directories of the item's runs, and of the traces of these.
RUNS, TRACES = "{runs}", "{traces}"


@dataclass(frozen=True)
class Item:
    """One experiment: stages of training runs, then commands that write a JSON file for the report.

    stages: by scale; the runs of a stage may run at the same time, stages follow each other.
    json: the file, which may be compressed (json.gz).
    commands: by scale; modules of scripts/, with {results} for the folder of results, RUNS for the runs, and
        TRACES for their traces.
    of_weights: the commands read trained weights, which diverged runs do not have.
    keeps_weights: finished runs keep checkpoints and weights, 0.5 GB (35M) or 5 GB (325M) each.
    minutes: by scale, of the commands.
    """

    name: str
    title: str
    json: str
    commands: Mapping[str, tuple[tuple[str, ...], ...]]
    also: tuple[str, ...] = ()  # further names it goes by
    stages: Mapping[str, tuple[tuple[Run, ...], ...]] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    of_weights: bool = False
    keeps_weights: bool = True

    def runs(self, scale: str) -> list[Run]:
        return [run for stage in self.stages.get(scale, ()) for run in stage]

    def cost(self, scale: str) -> float:
        """Minutes of one H200 (table1, causal_leak: of a CPU), runs that other items share included."""
        return sum(run.minutes for run in self.runs(scale)) + self.minutes.get(scale, 0.0)

    def cost_in_words(self) -> str:
        return ", ".join(f"{duration_in_words(self.cost(scale))} ({scale})" for scale in ("scaled", "full"))


def duration_in_words(minutes: float) -> str:
    """A rough length of time: "3 min", "2.5 h", "5,000 h"."""
    if minutes < 90:
        return f"{max(minutes, 1):.0f} min"
    return f"{minutes / 60:,.1f} h" if minutes < 6000 else f"{minutes / 60:,.0f} h"


def everywhere(*command: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The same command at every scale."""
    return dict.fromkeys(SCALES, (command,))


def on_gpu(*command: str, debug: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """A command for the GPU, and at the debug scale a smaller one for a CPU."""
    return {"full": (command,), "scaled": (command,), "debug": (debug,)}


def one_after_the_other(*commands: dict[str, tuple[tuple[str, ...], ...]]) -> dict:
    """The commands of all these, at each scale in this order."""
    return {scale: sum((own[scale] for own in commands), ()) for scale in SCALES}


def traced(module: str, name: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Traces of the item's runs, a few MB each, then the script that reads them, at every scale."""
    trace = (
        "scripts.paper.layers",
        RUNS,
        "--traces",
        "--milestones",
        "--only-traces",
        "--trace-heads",
        "0",
        "1",
    )
    return dict.fromkeys(SCALES, (trace, (module, TRACES, "--out", f"{{results}}/{name}")))


def curves(name: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The command that compares the item's runs, at every scale."""
    return {
        scale: (
            ("scripts.paper.curves", RUNS, "--item", name, "--scale", scale, "--out", f"{{results}}/{name}"),
        )
        for scale in SCALES
    }
