"""Measuring the weights of training runs: runs found and checked before any work, files after every step."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

import model.huggingface
from common.terminal import add_device_option, command_parser
from data.corpus import Corpus
from model.backends import AttentionFn
from model.llama import Llama
from scripts.output import save_figure, with_ending, write_compressed, write_markdown
from scripts.runs import find_runs, open_data, places, read_settings
from trainer.checkpoint import checkpoint_of, load_weights
from trainer.run_directory import RunDirectory, steps_in
from trainer.settings import Settings


@dataclass(frozen=True)
class TrainedRun:
    """A run, and which of its weights: the finished ones, or those of the checkpoint of `step`."""

    name: str  # which tells it from the others that are measured with it
    directory: RunDirectory
    settings: Settings
    corpus: Corpus
    step: int  # optimizer steps that the weights have seen
    is_finished: bool

    @property
    def tokens(self) -> int:
        """Tokens that the weights have seen."""
        return self.step * self.settings.tokens_per_step

    @property
    def sequences_per_step(self) -> int:
        return self.settings.tokens_per_step // self.settings.context


def parser_of(program: str, description: str | None, examples: str | None, out: str) -> ArgumentParser:
    """A parser of a command that measures runs. out: the default beginning of its files' names."""
    parser = command_parser(program, description, examples)
    parser.add_argument("runs", nargs="+", help="directories of finished runs, or folders that hold some")
    parser.add_argument("--out", default=out, help="beginning of the files' names (default %(default)s)")
    add_device_option(parser)
    return parser


def measure_all(
    arguments: Namespace,
    result: dict[str, Any],
    work: Iterable[tuple[str, Iterable[list[Any]]]],
    to_markdown: Callable[[dict[str, Any], list[Any]], str],
    pictures: Mapping[str, Callable[[dict[str, Any], list[Any]], Any]] = MappingProxyType({}),
) -> None:
    """Measure piece after piece; write the numbers after each step of one, tables and pictures after each.

    work: the pieces, each a title and an iterator that does a step and yields its rows (dataclasses).
    pictures: by the ending of the file, made of the result and all rows.
    """
    out, rows = Path(arguments.out), []
    with tqdm(disable=None) as progress:
        for title, steps in work:
            progress.set_description(title)
            for own in steps:
                rows += own
                write_compressed(out, result | {"rows": [asdict(row) for row in rows]})
                progress.update()
            write_markdown(out, to_markdown(result, rows))
            for ending, draw in pictures.items():
                save_figure(draw(result, rows), with_ending(out, ending))
    print(to_markdown(result, rows))
    print("written to", ", ".join(f"{out}{ending}" for ending in (".json.gz", ".md", *pictures)))


def describe_trained(run: TrainedRun) -> dict[str, Any]:
    """What a run was trained with, as JSON."""
    settings = run.settings
    return {
        "run": run.name,
        "step": run.step,
        "tokens": run.tokens,
        "tokens_per_step": settings.tokens_per_step,
        "qk_norm": settings.model.qk_norm,
        "attention": settings.attention.backend,
        "context": settings.context,
        "sequences_per_step": run.sequences_per_step,
        "text": run.corpus.manifest.fingerprint,
        "tokens_of_text": run.corpus.manifest.tokens("train"),
        "dtype": settings.hardware.dtype,
        "seed": settings.seed,
        "warmup_steps": settings.tps.warmup_steps,
        "lr": settings.optimizer.lr,
        "optimizer": asdict(settings.optimizer),
        "model": asdict(settings.model),
        "attention_settings": settings.attention.recorded(),
    }


def open_runs(paths: Sequence[str], step: int | None = None) -> list[TrainedRun]:
    """The runs at and below these paths, at their ends or at the checkpoint of a step.

    Raises ValueError or FileNotFoundError for a run that is unfinished, or lacks its data or what is asked.
    """
    found = find_runs([Path(path) for path in paths])
    if not found:
        raise ValueError(f"no metrics.jsonl under {', '.join(paths)}; give directories of runs")
    named = zip(places(found), found, strict=True)
    return [open_run(name, RunDirectory(path), step) for name, path in named]


def open_run(name: str, directory: RunDirectory, step: int | None) -> TrainedRun:
    settings = read_settings(directory)
    if step is None:
        if not (directory.is_finished and directory.weights.is_dir()):
            raise ValueError(
                f"{directory.path} has no finished weights; leave it out, train it to its end (the command "
                "that started it continues it), or choose a checkpoint with --step"
            )
        directory.check()
    else:
        checkpoint_of(directory.checkpoints, step)
    corpus = open_data(directory, settings)
    return TrainedRun(name, directory, settings, corpus, step or settings.total_steps, step is None)


def milestones_of(run: TrainedRun) -> list[TrainedRun]:
    """The run at each checkpoint of milestone_every before its end."""
    every = run.settings.milestone_every
    steps = [step for step in steps_in(run.directory.checkpoints) if every and step % every == 0]
    return [replace(run, step=step, is_finished=False) for step in steps if step < run.step]


def load_model(run: TrainedRun, attention: AttentionFn) -> Llama:
    """Raises ValueError if the weights are damaged."""
    try:
        if run.is_finished:
            return model.huggingface.load(run.directory.weights, attention)
        llama = Llama(run.settings.model, attention)
        load_weights(run.directory.checkpoints, run.step, llama)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{run.name}: {error}") from error
    return llama
