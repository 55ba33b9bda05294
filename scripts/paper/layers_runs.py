"""The training runs whose layers are measured: found, opened and checked before any work."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

from data.corpus import Corpus
from data.tokens import count_sequences
from scripts.compare import find_runs, labels_of
from scripts.paper.traces import Origin
from scripts.runs import milestones, open_data, read_settings
from trainer.checkpoint import checkpoint_of
from trainer.run_directory import RunDirectory, read_metrics
from trainer.settings import Settings


@dataclass(frozen=True)
class TrainedRun:
    """A run, and which of its weights: those of origin.step.

    checkpoint: the step whose checkpoint has them; None: they are the finished ones.
    """

    name: str
    directory: RunDirectory
    settings: Settings
    corpus: Corpus
    origin: Origin
    checkpoint: int | None

    @property
    def sequences_per_step(self) -> int:
        return self.settings.tokens_per_step // self.settings.context


class UnusableWeights(Exception):
    """The weights of a run are damaged, or not those of its model; the message says which and why."""


def open_runs(arguments: Namespace) -> list[TrainedRun]:
    """All runs, checked before any is measured.

    Raises ValueError or FileNotFoundError for a run that is unfinished, or lacks its data or what is asked.
    """
    paths = find_runs([Path(path) for path in arguments.runs])
    if not paths:
        raise ValueError(f"no metrics.jsonl under {', '.join(arguments.runs)}; give directories of runs")
    names = labels_of(paths)
    runs = [
        open_run(name, RunDirectory(path), arguments.step) for name, path in zip(names, paths, strict=True)
    ]
    for run in runs:
        check(run, arguments)
    return runs


def open_run(name: str, directory: RunDirectory, step: int | None) -> TrainedRun:
    """The run at its end, or at the checkpoint of a step.

    Raises ValueError or FileNotFoundError if it is unfinished then, or its data not what it was.
    """
    settings = read_settings(directory)
    if step is None:
        if not (directory.is_finished and directory.weights.is_dir()):
            raise ValueError(
                f"{directory.path} has no finished weights; leave it out, train it to its end (the command "
                "that started it continues it), or choose a checkpoint with --step"
            )
        reached = read_metrics(directory.metrics)[-1]["step"]
    else:
        checkpoint_of(directory.checkpoints, step)
        reached = step
    origin = Origin(
        run=name,
        step=reached,
        tokens=reached * settings.tokens_per_step,
        tokens_per_step=settings.tokens_per_step,
        qk_norm=settings.model.qk_norm,
        attention=settings.attention.backend,
    )
    return TrainedRun(name, directory, settings, open_data(directory, settings), origin, checkpoint=step)


def check(run: TrainedRun, arguments: Namespace) -> None:
    """Raise ValueError if the run has too few validation sequences, layers or heads for the arguments."""
    sequences = count_sequences(run.corpus.val, run.settings.context)
    if sequences < arguments.sequences:
        raise ValueError(
            f"--sequences {arguments.sequences}: the validation text of {run.name} has {sequences} sequences "
            f"of {run.settings.context} tokens; use --sequences {sequences} or fewer"
        )
    shape = run.settings.model
    for name, asked, there in (
        ("--trace-layers", arguments.trace_layers, shape.n_layers),
        ("--trace-heads", arguments.trace_heads, shape.n_heads),
    ):
        foreign = [number for number in asked or () if not 0 <= number < there]
        if foreign:
            raise ValueError(f"{name} {foreign[0]}: {run.name} has 0 to {there - 1}; choose among these")


def milestones_of(run: TrainedRun) -> list[TrainedRun]:
    """The run at each of its milestones before its end."""
    return [
        replace(run, checkpoint=step, origin=at_step(run.origin, step))
        for step in milestones(run.directory, run.settings)
        if step < run.origin.step
    ]


def at_step(origin: Origin, step: int) -> Origin:
    return replace(origin, step=step, tokens=step * origin.tokens_per_step)
