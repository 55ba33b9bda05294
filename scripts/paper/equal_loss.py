"""Errors of SageBwd in the layers of trained models at equal loss, by depth, and what K-smoothing can do.

    python -m scripts.paper.equal_loss runs/NAME [runs/NAME …] --out runs/paper/equal_loss

At the end of each run and at each checkpoint that milestone_every kept, every layer is measured as in
scripts.paper.layers: relative L2 of O, dQ, dK and dV against exact attention under variants of SageBwd. With
them go

    loss        validation loss of that checkpoint, full precision, on --sequences-of-loss sequences
    k_mean      ‖μ_K‖ over the spread of K, which is the root mean square over tokens of ‖K − μ_K‖; mean over
                heads. K-smoothing takes μ_K away: where this is far below 1 there is little to take

Runs that train differently fast are compared at equal loss, by interpolation between their checkpoints: the
report does that. Writes OUT.json.gz, OUT.md and OUT.png.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.loader import count_sequences, stack_sequences
from model import backends
from model.backends import FULL_PRECISION, Backend
from scripts.bench.measuring import describe_run
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.compare import find_runs, labels_of
from scripts.output import with_ending
from scripts.paper import drawing
from scripts.paper.equal_loss_tables import Row, draw, to_markdown
from scripts.paper.layers import (
    VARIANTS,
    build_keywords,
    capture_run,
    describe_trained,
    dtype_of,
    load_model,
    sage,
)
from scripts.paper.layers_runs import TrainedRun, UnusableWeights, milestones_of, open_run
from scripts.paper.result_files import OUT, write_result
from trainer.probe import Captured, errors, exact_layer, explanations
from trainer.run_directory import RunDirectory

PROGRAM = "python -m scripts.paper.equal_loss"
#: Of scripts.paper.layers; without smoothing, to see what smoothing K does.
MEASURED = ("paper", "default", "smooth-none")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        runs = open_all(arguments)
        result = describe(argv, arguments, runs)
        rows = []
        with tqdm(total=sum(map(len, runs)), disable=None) as progress:
            for checkpoints in runs:
                rows += measure_run(checkpoints, arguments, progress)
                write(arguments.out, result, rows)
    except (ValueError, FileNotFoundError, UnusableWeights) as error:
        sys.exit(str(error))
    print(f"written to {arguments.out}.json.gz, .md and .png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("runs", nargs="+", help="directories of finished runs, or folders that hold some")
    add("--sequences", type=positive_int, default=1, help="validation sequences of the errors (default 1)")
    add("--sequences-of-loss", type=positive_int, default=256, help="(default %(default)s, or all there are)")
    add("--device", help="cuda: the kernels; cpu: the reference (default: cuda if available)")
    add("--out", type=Path, default=OUT / "equal_loss", help="beginning of the files' names")
    arguments = parser.parse_args(argv)
    arguments.device = choose_device(arguments.device, parser)
    return arguments


def open_all(arguments: Namespace) -> list[list[TrainedRun]]:
    """The checkpoints of each run, the end last. Raises ValueError or FileNotFoundError."""
    paths = find_runs([Path(path) for path in arguments.runs])
    if not paths:
        raise ValueError(f"no metrics.jsonl under {', '.join(arguments.runs)}; give directories of runs")
    names = labels_of(paths)
    ends = [open_run(name, RunDirectory(path), None) for name, path in zip(names, paths, strict=True)]
    return [[*milestones_of(end), end] for end in ends]


def describe(argv: list[str] | None, arguments: Namespace, runs: list[list[TrainedRun]]) -> dict[str, Any]:
    return {
        **describe_run(PROGRAM, argv, arguments, ("numpy",)),
        "values": "_cos: cosine similarity, _l2: relative L2, against exact attention in float32",
        "variants": {name: asdict(VARIANTS[name]) for name in MEASURED},
        "runs": {end.name: describe_trained(end) for *_, end in runs},
    }


def write(out: Path, result: dict[str, Any], rows: Sequence[Row]) -> None:
    write_result(out, result, rows, to_markdown(result, rows))
    drawing.save(draw(rows), with_ending(out, ".png"))


# --- Measuring ----------------------------------------------------------------------------------------------


def measure_run(checkpoints: Sequence[TrainedRun], arguments: Namespace, progress: tqdm) -> list[Row]:
    """A row for each checkpoint and layer."""
    variants = {name: sage(VARIANTS[name], checkpoints[-1], arguments) for name in MEASURED}
    rows = []
    for run in checkpoints:
        progress.set_description(f"{run.name}, step {run.origin.step}")
        loss = validation_loss(run, arguments)
        captured = capture_run(run, range(run.settings.model.n_layers), arguments)
        place = run.name, run.origin.step, run.origin.tokens, loss
        rows += [Row(*place, layer, *measure_layer(own, variants)) for layer, own in captured.items()]
        progress.update()
    return rows


def measure_layer(captured: Captured, variants: dict[str, Backend]) -> tuple[dict, dict[str, float]]:
    """The errors under each variant, and what may explain them."""
    exact = exact_layer(captured)
    measured = {name: errors(captured, variant.attend, exact) for name, variant in variants.items()}
    k_mean = mean_over_spread(captured.k).mean().item()
    return measured, explanations(captured, exact) | {"k_mean": k_mean}


def mean_over_spread(k: Tensor) -> Tensor:
    """‖μ_K‖ / √mean ‖K − μ_K‖², of keys (B, G, N, D), for each sequence and head (B, G)."""
    k = k.double()
    mean = k.mean(-2)
    return mean.norm(dim=-1) / (k - mean[..., None, :]).square().sum(-1).mean(-1).sqrt()


@torch.no_grad()
def validation_loss(run: TrainedRun, arguments: Namespace) -> float:
    """Nats per token on the first validation sequences, with full-precision attention."""
    device, dtype = torch.device(arguments.device), dtype_of(run)
    attention = backends.build(FULL_PRECISION, **build_keywords(run, arguments))
    llama = load_model(run, attention.attend).to(device)
    context = run.settings.context
    count = min(arguments.sequences_of_loss, count_sequences(run.corpus.val, context))
    losses = []
    for chosen in np.array_split(np.arange(count), -(-count // run.settings.hardware.micro_batch)):
        inputs, targets = (x.to(device) for x in stack_sequences(run.corpus.val, chosen, context))
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            losses.append(llama(inputs, targets).double() * len(chosen))
    return (torch.stack(losses).sum() / count).item()


if __name__ == "__main__":
    main()
