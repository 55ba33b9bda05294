"""Figures 5 and 6, Table 2 and the RMS of §4.2 of SageBwd (arXiv 2603.02170), from runs trained here.

    python -m scripts.paper.layers runs/NAME [runs/NAME …]

Each run's finished weights, or with --step those of a checkpoint, go through one forward and backward with
full-precision attention, on validation sequences of the run's own data and context. That gives q, k, v and dO
of every layer, and from these

    Figures 5, 6   O, dQ, dK and dV of every layer under variants of SageBwd, against exact attention
    §4.2           RMS of the exact P, dP and dS, and the largest logit
    Table 2        the tensors in the middle, at the layer whose dQ has the largest error under paper()

The variants are

    default       what sage_attention uses; it smooths K
    smooth-none   the default without smoothing
    smooth-qk     the default with Q smoothed as well
    paper         the paper's literal algorithm, SageConfig.paper(); it smooths K

dO, and with it dP and dS, is the gradient of each sequence's own mean loss, in nats per token. In a training
step the loss is the mean over all sequences of the step, so dO is smaller by their number there. The paper
does not say which of the two its RMS is of; both are reported.

Written after every run: OUT.json.gz (every layer), OUT.md (means over layers, RMS and Table 2, with the
paper's numbers), OUT.png (errors by layer) and OUT_smoothing.png (what smoothing changes).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from common.errors import ends_with_message
from common.terminal import positive_int
from data.loader import stack_sequences
from data.tokens import count_sequences
from model import backends
from model.backends import FULL_PRECISION, Backend
from sagebwd import SageConfig
from scripts.bench.measuring import describe_run
from scripts.paper import intermediates
from scripts.paper import published as paper
from scripts.paper.layers_tables import (
    MAIN_VARIANTS,
    Row,
    draw_layers,
    draw_smoothing,
    most_error_prone,
    to_markdown,
)
from scripts.paper.trained_runs import (
    TrainedRun,
    describe_trained,
    load_model,
    measure_all,
    open_runs,
    parser_of,
)
from trainer.probe import Captured, capture, errors, exact_layer

PROGRAM = "python -m scripts.paper.layers"

VARIANTS = {
    "default": SageConfig(),
    "smooth-none": replace(SageConfig(), smooth_k=False),
    "smooth-qk": replace(SageConfig(), smooth_q=True),
    "paper": SageConfig.paper(),
}

NORMALISATION = (
    "dO, and with it dP and dS, is the gradient of each sequence's own mean loss (nats per token) towards O. "
    "In step: divided by the sequences of a training step, over which its loss is the mean. The RMS is over "
    "all N × N entries of all heads and sequences, those hidden by the causal mask being 0; times "
    "sqrt(2N / (N + 1)) it is that of the others alone."
)


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    """Measure the runs."""
    arguments = parse_arguments(argv)
    runs = open_runs(arguments.runs, arguments.step)
    for run in runs:
        check(run, arguments)
    result = describe(argv, arguments, runs)
    work = ((run.name, measure_run(run, result, arguments)) for run in runs)
    pictures = {
        ".png": lambda result, rows: draw_layers(result["runs"], rows),
        "_smoothing.png": lambda result, rows: draw_smoothing(rows),
    }
    measure_all(arguments, result, work, to_markdown, pictures)


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = parser_of(PROGRAM, __doc__, None, out="runs/paper/layers")
    add = parser.add_argument
    add("--sequences", type=positive_int, default=1, help="validation sequences, all in one pass (default 1)")
    add("--step", type=positive_int, help="the checkpoint of this step (default: the end)")
    return parser.parse_args(argv)


def check(run: TrainedRun, arguments: Namespace) -> None:
    """Raise ValueError if the run has too few validation sequences."""
    sequences = count_sequences(run.corpus.val, run.settings.context)
    if sequences < arguments.sequences:
        raise ValueError(
            f"--sequences {arguments.sequences}: the validation text of {run.name} has {sequences} sequences "
            f"of {run.settings.context} tokens; use --sequences {sequences} or fewer"
        )


def describe(argv: list[str] | None, arguments: Namespace, runs: list[TrainedRun]) -> dict[str, Any]:
    """What was measured, of which runs, how and where."""
    return {
        **describe_run(PROGRAM, argv, arguments, ("numpy", "cuda-bindings")),
        "figures": "SageBwd (arXiv 2603.02170), Figures 5 and 6, Table 2 and the RMS of §4.2",
        "values": "_cos: cosine similarity, _l2: relative L2, against exact attention in float32",
        "normalisation": NORMALISATION,
        "variants": {name: asdict(config) for name, config in VARIANTS.items()},
        "runs": {run.name: describe_trained(run) for run in runs},
        "paper_rms": {f"{name}_rms": value for name, value in paper.RMS.items()},
        "paper_table2": paper.TABLE_2,
        "table2": {},
    }


# --- Measurements -------------------------------------------------------------------------------------------


def measure_run(run: TrainedRun, result: dict[str, Any], arguments: Namespace) -> Iterator[list[Row]]:
    """The row of each layer, then Table 2 and what computed the variants, which are added to the result."""
    variants = {name: sage(config, run, arguments) for name, config in VARIANTS.items()}
    captured, rows = capture_run(run, range(run.settings.model.n_layers), arguments), []
    for layer, tensors in captured.items():
        exact, statistics = exact_layer(tensors)
        measured = {name: errors(tensors, variant.attend, exact) for name, variant in variants.items()}
        in_step = {f"{x}_in_step": statistics[x] / run.sequences_per_step for x in ("dp_rms", "ds_rms")}
        rows.append(Row(run.name, layer, measured, statistics | in_step))
        yield rows[-1:]
    worst = most_error_prone(rows, "paper").layer
    result["runs"][run.name]["attentions"] = {name: found.description for name, found in variants.items()}
    result["table2"][run.name] = {"layer": worst} | {
        name: intermediates.measure(captured[worst], VARIANTS[name]) for name in MAIN_VARIANTS
    }
    yield []


def sage(config: SageConfig, run: TrainedRun, arguments: Namespace) -> Backend:
    """SageBwd for the run's heads: kernels on a GPU, where they take the run's dtype."""
    attention = {"backend": "sagebwd", **asdict(config)}
    choices = [attention, {**attention, "kernels": "reference"}]
    return backends.build_first(choices, **build_keywords(run, arguments))


def build_keywords(run: TrainedRun, arguments: Namespace) -> dict[str, Any]:
    """The keywords of `backends.build` for the run's heads."""
    shape = run.settings.model
    where = {"device": torch.device(arguments.device), "dtype": run.settings.dtype}
    return {**where, "d_head": shape.d_head, "is_gqa": shape.is_gqa}


def capture_run(run: TrainedRun, layers: Sequence[int], arguments: Namespace) -> dict[int, Captured]:
    """q, k, v, O and dO of some layers, on the first validation sequences, with full-precision attention.

    Raises ValueError for damaged weights.
    """
    device, dtype = torch.device(arguments.device), run.settings.dtype
    attention = backends.build(FULL_PRECISION, **build_keywords(run, arguments))
    llama = load_model(run, attention.attend).to(device)
    tokens = stack_sequences(run.corpus.val, np.arange(arguments.sequences), run.settings.context)
    return capture(
        llama,
        layers,
        *(x.to(device) for x in tokens),
        autocast=lambda: torch.autocast(device.type, dtype, enabled=dtype is not torch.float32),
    )


if __name__ == "__main__":
    main()
