"""Show the text that a run trained on at a step, and mark unusual sequences.

    python -m scripts.show_batch runs/NAME --step 1200                     step 1200 of metrics.jsonl
    python -m scripts.show_batch runs/NAME --step 1200 --sequence 17 40    only these two, in full
    python -m scripts.show_batch runs/NAME --spikes                        the steps listed in spikes.jsonl

Run it from the checkout, on a machine that has the run's data. Needs no GPU. Columns of the table:

  index       index of the sequence in the data, from 0, as in the log and in spikes.jsonl
  epoch       number of complete passes over the data before this one; of a mixture, over its source
  top token   the most frequent token, and its share of the sequence
  distinct    number of distinct tokens
  run         longest run of one token
  documents   number of documents that the sequence has parts of

A * marks sequences that are unusual for their step, compared with the median: a top token twice as frequent,
half as many distinct tokens, or a run four times as long.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.terminal import command_parser
from data.corpus import Corpus
from data.loader import BatchLoader
from scripts.output import printable
from scripts.runs import open_data, read_settings
from trainer.run_directory import RunDirectory, read_metrics
from trainer.settings import Settings


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        run = RunData.open(arguments.run)
        steps = spike_steps(run.directory) if arguments.spikes else [arguments.step]
        for step in steps:
            show(run, step, arguments.sequence, arguments.characters)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.show_batch", __doc__)
    parser.add_argument("run", type=Path, help="the run's directory, which has its config.yaml")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="a step, counted from 1 as in metrics.jsonl")
    which.add_argument("--spikes", action="store_true", help="every step of the run's spikes.jsonl")
    parser.add_argument(
        "--sequence", type=int, nargs="+", metavar="I", help="only sequences of these indices"
    )
    parser.add_argument(
        "--characters",
        type=int,
        help="how much of each text to print; 0: all (default: 300, or all of the sequences you name)",
    )
    arguments = parser.parse_args(argv)
    if arguments.spikes and arguments.sequence:
        parser.error("--sequence names sequences of one step; use it with --step, one of those of --spikes")
    if arguments.characters is None:
        arguments.characters = 0 if arguments.sequence else 300
    if arguments.characters < 0:
        parser.error(f"--characters {arguments.characters}: use a positive number, or 0 for everything")
    return arguments


@dataclass(frozen=True)
class RunData:
    """A run and the data it trained on."""

    directory: RunDirectory
    steps: int  # of the whole run, however many of them it has taken
    corpus: Corpus
    loader: BatchLoader

    @classmethod
    def open(cls, path: Path) -> "RunData":
        """Raises ValueError or FileNotFoundError if this is not a run, or its data has changed."""
        directory = RunDirectory(path)
        settings = read_settings(directory)
        corpus = open_data(directory, settings)
        return cls(directory, settings.total_steps, corpus, make_loader(settings, corpus))

    def sequences(self, step: int) -> list["Sequence"]:
        """The sequences of a step, which counts from 1, in the order of training."""
        loader = self.loader
        rows = zip(loader.sequence_indices(step - 1).tolist(), loader.epochs(step - 1).tolist(), strict=True)
        return [
            Sequence(
                index=index,
                epoch=epoch,
                tokens=loader.tokens.window(index * loader.context, loader.context),
                end_of_text=self.corpus.tokenizer.end_of_text,
                source=loader.order.text_of(index),
            )
            for index, epoch in rows
        ]


def make_loader(settings: Settings, corpus: Corpus) -> BatchLoader:
    """The loader of the run for one process; the order does not depend on the number of processes."""
    return BatchLoader(
        corpus.train,
        context=settings.context,
        sequences_per_step=settings.tokens_per_step // settings.context,
        micro_batch=1,
        seed=settings.seed,
        sequences=settings.train_sequences,
    )


def spike_steps(directory: RunDirectory) -> list[int]:
    """The steps of spikes.jsonl; prints why each is listed."""
    directory.check(directory.spikes)
    spikes = read_metrics(directory.spikes) if directory.spikes.exists() else []
    if not spikes:
        raise ValueError(
            f"{directory.spikes} lists no spikes: no step stood out. Show any step with --step N, or train "
            "with a lower spike.threshold"
        )
    for spike in spikes:
        print(f"step {spike['step']}: {describe(spike)}")
    print()
    return [spike["step"] for spike in spikes]


def describe(spike: dict[str, Any]) -> str:
    reasons = [
        f"{name} {spike[name]:.4g} (typical {spike[f'typical_{name}']:.4g})" for name in spike["beyond"]
    ]
    return ", ".join(reasons) + (", skipped" if spike["skipped"] else "")


@dataclass(frozen=True)
class Sequence:
    """One training sequence. tokens: its inputs, (context,)."""

    index: int
    epoch: int
    tokens: np.ndarray
    end_of_text: int
    source: str | None = None  # of a mixture

    @property
    def top_token(self) -> tuple[int, float]:
        """The most frequent token, and its share of the sequence."""
        values, counts = np.unique(self.tokens, return_counts=True)
        return int(values[counts.argmax()]), counts.max() / len(self.tokens)

    @property
    def distinct(self) -> int:
        return len(np.unique(self.tokens))

    @property
    def longest_run(self) -> int:
        """Length of the longest run of one token."""
        changes = np.flatnonzero(np.diff(self.tokens)) + 1
        return int(np.diff(changes, prepend=0, append=len(self.tokens)).max())

    @property
    def boundaries(self) -> list[int]:
        """Positions of the end-of-text tokens."""
        return np.flatnonzero(self.tokens == self.end_of_text).tolist()

    @property
    def documents(self) -> int:
        """How many documents the sequence has parts of; an end of text as last token begins no other."""
        return 1 + sum(position < len(self.tokens) - 1 for position in self.boundaries)


def odd(sequences: list[Sequence]) -> set[int]:
    """Indices of the unusual sequences, by the rule in the docstring of this module."""
    share, distinct, run = (
        statistics.median(values)
        for values in zip(*((s.top_token[1], s.distinct, s.longest_run) for s in sequences), strict=True)
    )
    return {
        s.index
        for s in sequences
        if s.top_token[1] >= 2 * share or s.distinct <= distinct / 2 or s.longest_run >= 4 * run
    }


def show(run: RunData, step: int, indices: list[int] | None, characters: int) -> None:
    """Print the table of a step's sequences, then their texts.

    Raises ValueError if the run has no such step, or it did not train on one of `indices`.
    """
    if not 1 <= step <= run.steps:
        raise ValueError(f"--step {step}: steps are counted from 1 to {run.steps}, as in metrics.jsonl")
    sequences = run.sequences(step)
    chosen = [s for s in sequences if indices is None or s.index in indices]
    missing = set(indices or ()) - {s.index for s in chosen}
    if missing:
        raise ValueError(
            f"step {step} did not train on sequence {', '.join(map(str, sorted(missing)))}, but on "
            f"{', '.join(str(s.index) for s in sequences[:8])}{', …' if len(sequences) > 8 else ''}; leave "
            "--sequence out to see them all"
        )
    print(f"step {step}: {len(sequences)} sequences of {run.loader.context} tokens\n")
    print(table(chosen, odd(sequences), run.corpus.tokenizer.decode))
    for sequence in chosen:
        text = printable(run.corpus.tokenizer.decode(sequence.tokens), keep="\n\t")
        ends = ", ".join(map(str, sequence.boundaries)) or "none"
        source = f" of {sequence.source}" if sequence.source else ""
        print(
            f"\n--- sequence {sequence.index}{source}, epoch {sequence.epoch}, "
            f"documents end at tokens: {ends}"
        )
        print(text if not characters or len(text) <= characters else text[:characters] + " […]")
    print()


def table(sequences: list[Sequence], marked: set[int], decode) -> str:
    lines = [f"  {'index':>10} {'epoch':>5} {'top token':>20} {'distinct':>8} {'run':>6} {'documents':>9}"]
    for s in sequences:
        token, share = s.top_token
        top = f"{decode([token])!r:>12} {share:7.1%}"
        mark = "*" if s.index in marked else " "
        lines.append(
            f"{mark} {s.index:>10} {s.epoch:>5} {top:>20} {s.distinct:>8} {s.longest_run:>6} {s.documents:>9}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
