"""Print the text that a run trained on at a step.

    python -m scripts.show_batch runs/NAME --step 1200    step 1200 of metrics.jsonl
    python -m scripts.show_batch runs/NAME --spikes       the steps listed in spikes.jsonl

Run it from the checkout, on a machine that has the run's data. Needs no GPU. Each sequence has its index in
the data, from 0, as in the log and in spikes.jsonl; of a mixture its source; and its epoch, the number of
complete passes over that text before this one.
"""

import argparse
from pathlib import Path
from typing import Any

from common.errors import ends_with_message
from common.terminal import command_parser
from scripts.output import printable
from scripts.runs import open_data, read_settings, training_loader
from trainer.run_directory import RunDirectory, read_metrics


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    run = RunDirectory(arguments.run)
    for step in spike_steps(run) if arguments.spikes else [arguments.step]:
        show(run, step, arguments.characters)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.show_batch", __doc__)
    parser.add_argument("run", type=Path, help="the run's directory, which has its config.yaml")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="a step, counted from 1 as in metrics.jsonl")
    which.add_argument("--spikes", action="store_true", help="every step of the run's spikes.jsonl")
    parser.add_argument("--characters", type=int, help="how much of each text (default: all)")
    return parser.parse_args(argv)


def spike_steps(run: RunDirectory) -> list[int]:
    """The steps of spikes.jsonl; prints why each is listed."""
    run.check(run.spikes)
    spikes = read_metrics(run.spikes) if run.spikes.exists() else []
    if not spikes:
        raise ValueError(
            f"{run.spikes} lists no spikes: no step stood out. Show any step with --step N, or train with a "
            "lower spike.threshold"
        )
    for spike in spikes:
        print(f"step {spike['step']}: {describe(spike)}")
    return [spike["step"] for spike in spikes]


def describe(spike: dict[str, Any]) -> str:
    reasons = [
        f"{name} {spike[name]:.4g} (typical {spike[f'typical_{name}']:.4g})" for name in spike["beyond"]
    ]
    return ", ".join(reasons) + (", skipped" if spike["skipped"] else "")


def show(run: RunDirectory, step: int, characters: int | None) -> None:
    """Print the sequences of a step in the order of training. Raises ValueError if there is no such step."""
    settings = read_settings(run)
    if not 1 <= step <= settings.total_steps:
        steps = settings.total_steps
        raise ValueError(f"--step {step}: steps are counted from 1 to {steps}, as in metrics.jsonl")
    corpus, context = open_data(run, settings), settings.context
    loader = training_loader(settings, corpus)
    print(f"\nstep {step}: {loader.sequences_per_step} sequences of {context} tokens")
    for index, epoch in zip(loader.sequence_indices(step - 1), loader.epochs(step - 1), strict=True):
        source = f" of {name}" if (name := loader.order.text_of(index)) else ""
        text = corpus.tokenizer.decode(loader.tokens.window(index * context, context))
        print(f"\n--- sequence {index}{source}, epoch {epoch}")
        shown = text[:characters] + (" […]" if len(text[:characters]) < len(text) else "")
        print(printable(shown, keep="\n\t"))


if __name__ == "__main__":
    main()
