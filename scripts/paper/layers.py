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

With --traces, q, k, v and dO of some layers are written for scripts.paper.gradient_error and
scripts.paper.gradient_formats; with --milestones also those of the run's earlier checkpoints, to see the
errors as training goes on.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import model.huggingface
from data.loader import stack_sequences
from model import backends
from model.backends import FULL_PRECISION, AttentionFn, Backend
from model.llama import Llama
from sagebwd import SageConfig
from scripts.bench.measuring import describe_run
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.output import with_ending
from scripts.paper import drawing, intermediates
from scripts.paper import published as paper
from scripts.paper.layers_pictures import draw_layers, draw_smoothing
from scripts.paper.layers_runs import TrainedRun, UnusableWeights, milestones_of, open_runs
from scripts.paper.layers_tables import MAIN_VARIANTS, Row, most_error_prone, to_markdown
from scripts.paper.result_files import OUT, write_result
from scripts.paper.traces import Layer, save_trace, trace_file
from trainer.checkpoint import load_weights
from trainer.probe import (
    Captured,
    capture,
    chosen_layers,
    errors,
    exact_layer,
    explanations,
)
from trainer.settings import Settings

PROGRAM = "python -m scripts.paper.layers"

VARIANTS = {
    "default": SageConfig(),
    "smooth-none": replace(SageConfig(), smooth_k=False),
    "smooth-qk": replace(SageConfig(), smooth_q=True),
    "paper": SageConfig.paper(),
}

PAPER_RMS = {f"{name}_rms": value for name, value in paper.RMS.items()}

NORMALISATION = (
    "dO, and with it dP and dS, is the gradient of each sequence's own mean loss (nats per token) towards O. "
    "In step: divided by the sequences of a training step, over which its loss is the mean. The RMS is over "
    "all N × N entries of all heads and sequences, those hidden by the causal mask being 0; times "
    "sqrt(2N / (N + 1)) it is that of the others alone."
)

EXAMPLES = """
examples:
  the four runs of the paper's grid with SageBwd, on a GPU
      python -m scripts.paper.layers runs/attention-sagebwd+* --device cuda --sequences 4
  and q, k, v, dO of two layers and heads for other scripts to study, in runs/NAME/traces/step_N.safetensors
      python -m scripts.paper.layers runs/NAME --traces --trace-layers 0 11 --trace-heads 0 5
  these alone, at the end and at every checkpoint saved by milestone_every
      python -m scripts.paper.layers runs/NAME --traces --milestones --only-traces --trace-heads 0 1

written after every run:
  OUT.json.gz        every layer's numbers, Table 2, settings, hardware, versions
  OUT.md             means over layers, RMS and Table 2, with the paper's numbers
  OUT.png            errors by layer under the paper's algorithm and the default
  OUT_smoothing.png  errors without smoothing, with K, and with Q and K smoothed
"""


def main(argv: list[str] | None = None) -> None:
    """Trace the runs, if asked to, and measure them."""
    arguments = parse_arguments(argv)
    try:
        runs = open_runs(arguments)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    try:
        if arguments.traces is not None:
            trace_all(runs, arguments)
        if not arguments.only_traces:
            measure_all(runs, describe(argv, arguments, runs), arguments)
    except UnusableWeights as error:
        sys.exit(str(error))


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    parser.add_argument("runs", nargs="+", help="directories of finished runs, or folders that hold some")
    parser.add_argument(
        "--sequences", type=positive_int, default=1, help="validation sequences, all in one pass (default 1)"
    )
    parser.add_argument("--step", type=positive_int, help="the checkpoint of this step (default: the end)")
    parser.add_argument("--device", help="cuda: the kernels; cpu: the reference (default: cuda if available)")
    parser.add_argument(
        "--traces",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="write RUN/traces/step_N.safetensors; with a folder, FOLDER/NAME/step_N.safetensors of each run",
    )
    parser.add_argument("--milestones", action="store_true", help="traces of earlier checkpoints, too")
    parser.add_argument("--only-traces", action="store_true", help="write traces, and measure nothing")
    parser.add_argument(
        "--trace-layers", type=int, nargs="+", help="counted from 0 (default: first, middle and last)"
    )
    parser.add_argument("--trace-heads", type=int, nargs="+", help="query heads (default: all)")
    parser.add_argument(
        "--out", default=str(OUT / "layers"), help="beginning of the files' names (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    arguments.device = choose_device(arguments.device, parser)
    about_traces = ("trace_layers", "trace_heads", "milestones", "only_traces")
    given = [name for name in about_traces if getattr(arguments, name)]
    if arguments.traces is None and given:
        parser.error(f"--{given[0].replace('_', '-')} is about what --traces writes; give that as well")
    if arguments.milestones and arguments.step is not None:
        parser.error("--milestones follows a run to its end; leave --step out")
    return arguments


def describe(argv: list[str] | None, arguments: Namespace, runs: list[TrainedRun]) -> dict[str, Any]:
    """What was measured, of which runs, how and where."""
    return {
        **describe_run(PROGRAM, argv, arguments, ("numpy", "cuda-bindings")),
        "figures": "SageBwd (arXiv 2603.02170), Figures 5 and 6, Table 2 and the RMS of §4.2",
        "values": "_cos: cosine similarity, _l2: relative L2, against exact attention in float32",
        "normalisation": NORMALISATION,
        "variants": {name: asdict(config) for name, config in VARIANTS.items()},
        "runs": {run.name: describe_trained(run) for run in runs},
        "paper_rms": PAPER_RMS,
        "paper_table2": paper.TABLE_2,
        "table2": {},
    }


def describe_trained(run: TrainedRun) -> dict[str, Any]:
    """What a run was trained with."""
    return (
        asdict(run.origin)
        | {"context": run.settings.context, "sequences_per_step": run.sequences_per_step}
        | {"dtype": run.settings.hardware.dtype, "seed": run.settings.seed}
        | {"lr": run.settings.optimizer.lr, "text": text_of(run.settings)}
        | {"model": asdict(run.settings.model), "attention_settings": run.settings.attention.recorded()}
    )


def text_of(settings: Settings) -> str:
    """What a run was trained on: the files' names, or the source."""
    return Path(settings.data.path).name if settings.data.path else settings.data.source


# --- Measurements -------------------------------------------------------------------------------------------


def measure_all(runs: list[TrainedRun], result: dict[str, Any], arguments: Namespace) -> None:
    """Measure run after run, and write all results so far after each. Raises UnusableWeights."""
    rows: list[Row] = []
    with tqdm(total=sum(run.settings.model.n_layers + 1 for run in runs), disable=None) as progress:
        for run in runs:
            progress.set_description(run.name)
            rows += measure_run(run, result, arguments, progress)
            write(Path(arguments.out), result, rows)
    print(to_markdown(result, rows))
    print(f"written to {arguments.out}.json.gz, .md and .png")


def write(out: Path, result: dict[str, Any], rows: list[Row]) -> None:
    """OUT.json.gz, OUT.md and the pictures."""
    write_result(out, result, rows, to_markdown(result, rows))
    drawing.save(draw_layers(result["runs"], rows), with_ending(out, ".png"))
    drawing.save(draw_smoothing(rows), with_ending(out, "_smoothing.png"))


def measure_run(run: TrainedRun, result: dict[str, Any], arguments: Namespace, progress: tqdm) -> list[Row]:
    """A row for each layer; adds Table 2 and what computed the variants to the result."""
    variants = {name: sage(config, run, arguments) for name, config in VARIANTS.items()}
    captured = capture_run(run, range(run.settings.model.n_layers), arguments)
    rows = measure_layers(run, captured, variants, progress)
    worst = most_error_prone(rows, "paper").layer
    result["runs"][run.name]["attentions"] = {name: found.description for name, found in variants.items()}
    result["table2"][run.name] = measure_table2(captured[worst], worst)
    progress.update()
    return rows


def sage(config: SageConfig, run: TrainedRun, arguments: Namespace) -> Backend:
    """SageBwd for the run's heads: kernels on a GPU, where they take the run's dtype."""
    attention = {"backend": "sagebwd", **asdict(config)}
    return backends.build_first(
        [attention, {**attention, "implementation": "reference"}], **build_keywords(run, arguments)
    )


def build_keywords(run: TrainedRun, arguments: Namespace) -> dict[str, Any]:
    """The keywords of `backends.build` for the run's heads."""
    shape = run.settings.model
    where = {"device": torch.device(arguments.device), "dtype": dtype_of(run)}
    return {**where, "d_head": shape.d_head, "is_gqa": shape.is_gqa}


def capture_run(run: TrainedRun, layers: Sequence[int], arguments: Namespace) -> dict[int, Captured]:
    """q, k, v, O and dO of some layers, on the first validation sequences, with full-precision attention.

    Raises UnusableWeights.
    """
    device, dtype = torch.device(arguments.device), dtype_of(run)
    attention = backends.build(FULL_PRECISION, **build_keywords(run, arguments))
    llama = load_model(run, attention.attend).to(device)
    tokens = stack_sequences(run.corpus.val, np.arange(arguments.sequences), run.settings.context)
    return capture(
        llama,
        layers,
        *(x.to(device) for x in tokens),
        lambda: torch.autocast(device.type, dtype, enabled=dtype is not torch.float32),
    )


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


def dtype_of(run: TrainedRun) -> torch.dtype:
    """The dtype of q, k and v in the run."""
    return getattr(torch, run.settings.hardware.dtype)


def measure_layers(
    run: TrainedRun, captured: dict[int, Captured], variants: dict[str, Backend], progress: tqdm
) -> list[Row]:
    """Every layer under every variant."""
    rows = []
    for layer, tensors in captured.items():
        exact = exact_layer(tensors)
        measured = {name: errors(tensors, variant.attend, exact) for name, variant in variants.items()}
        rows.append(Row(run.name, layer, measured, with_step(explanations(tensors, exact), run)))
        progress.update()
    return rows


def with_step(values: dict[str, float], run: TrainedRun) -> dict[str, float]:
    """The statistics and, `_in_step`, the RMS of dP and dS where the loss is the mean over a step."""
    in_step = {f"{name}_in_step": values[name] / run.sequences_per_step for name in ("dp_rms", "ds_rms")}
    return values | in_step


def measure_table2(captured: Captured, layer: int) -> dict[str, Any]:
    measured = {name: intermediates.measure(captured, VARIANTS[name]) for name in MAIN_VARIANTS}
    return {"layer": layer, **measured}


# --- Traces -------------------------------------------------------------------------------------------------


def trace_all(runs: list[TrainedRun], arguments: Namespace) -> None:
    """Write the traces of all runs, and of their milestones if asked to. Raises UnusableWeights."""
    earlier = [found for run in runs for found in milestones_of(run)] if arguments.milestones else []
    with tqdm([*earlier, *runs], disable=None) as progress:
        for run in progress:
            progress.set_description(f"trace of {run.origin.name}")
            write_trace(run, arguments)


def write_trace(run: TrainedRun, arguments: Namespace) -> None:
    """The chosen layers and heads in bfloat16."""
    folder = Path(arguments.traces) / run.name if arguments.traces else run.directory.traces
    chosen = chosen_layers(arguments.trace_layers, run.settings.model.n_layers)
    captured = capture_run(run, chosen, arguments)
    layers = {layer: choose_heads(captured[layer], arguments.trace_heads) for layer in chosen}
    origin = replace(run.origin, heads=arguments.trace_heads)
    save_trace(trace_file(folder, origin), origin, layers)


def choose_heads(captured: Captured, heads: Sequence[int] | None) -> Layer:
    """All of a layer, or some query heads, each with a copy of the key and value head that serves it."""
    q, k, v, grad_out = captured.q, captured.k, captured.v, captured.grad_out
    if heads is not None:
        group = q.shape[1] // k.shape[1]
        serving = [head // group for head in heads]
        q, k, v, grad_out = q[:, heads], k[:, serving], v[:, serving], grad_out[:, heads]
    return Layer(*(x.to(torch.bfloat16) for x in (q, k, v, grad_out)))


if __name__ == "__main__":
    main()
