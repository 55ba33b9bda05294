"""The training runs whose weights are measured: found, opened and checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import model.huggingface
from data.corpus import Corpus
from model.backends import AttentionFn
from model.llama import Llama
from scripts.runs import find_runs, labels_of, milestones, open_data, read_settings
from trainer.checkpoint import checkpoint_of, load_weights
from trainer.run_directory import RunDirectory
from trainer.settings import Settings


@dataclass(frozen=True)
class Origin:
    """Which weights of a run."""

    run: str  # name of the run, which tells it from the others that are measured with it
    step: int  # optimizer steps that the weights have seen
    tokens: int  # tokens they have seen
    tokens_per_step: int
    qk_norm: bool
    attention: str  # the run's own, "fpa" or "sagebwd"


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

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v in the run."""
        return getattr(torch, self.settings.hardware.dtype)


class UnusableWeights(Exception):
    """The weights of a run are damaged, or not those of its model; the message says which and why."""


def open_runs(paths: Sequence[str], step: int | None = None) -> list[TrainedRun]:
    """The runs at and below these paths, at their ends or at the checkpoint of a step.

    Raises ValueError or FileNotFoundError for a run that is unfinished, or lacks its data or what is asked.
    """
    found = find_runs([Path(path) for path in paths])
    if not found:
        raise ValueError(f"no metrics.jsonl under {', '.join(paths)}; give directories of runs")
    names = labels_of(found)
    return [open_run(name, RunDirectory(path), step) for name, path in zip(names, found, strict=True)]


def open_run(name: str, directory: RunDirectory, step: int | None) -> TrainedRun:
    settings = read_settings(directory)
    if step is None:
        if not (directory.is_finished and directory.weights.is_dir()):
            raise ValueError(
                f"{directory.path} has no finished weights; leave it out, train it to its end (the command "
                "that started it continues it), or choose a checkpoint with --step"
            )
        directory.check()
        reached = settings.total_steps
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


def milestones_of(run: TrainedRun) -> list[TrainedRun]:
    """The run at each of its milestones before its end."""
    return [
        replace(
            run,
            checkpoint=step,
            origin=replace(run.origin, step=step, tokens=step * run.origin.tokens_per_step),
        )
        for step in milestones(run.directory, run.settings)
        if step < run.origin.step
    ]


def load_model(run: TrainedRun, attention: AttentionFn) -> Llama:
    """Raises UnusableWeights if the weights are damaged."""
    try:
        if run.checkpoint is None:
            return model.huggingface.load(run.directory.weights, attention)
        llama = Llama(run.settings.model, attention)
        load_weights(run.directory.checkpoints, run.checkpoint, llama)
    except (ValueError, FileNotFoundError) as error:
        raise UnusableWeights(f"{run.name}: {error}") from error
    return llama
