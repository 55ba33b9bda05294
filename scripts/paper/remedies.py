"""The remedy table: what takes the bias out of INT8 attention's gradients, and what it costs.

    python -m scripts.paper.remedies runs/NAME --sigmas 1 3 5 --out runs/paper/remedies
    python -m scripts.paper.remedies --sigmas 1 3 5                    # Gaussian heads alone, without a run

Every candidate of `scripts.paper.remedy_schemes` is measured twice:

    tensors    dQ, dK and dV of single heads against float64 attention: of a run's validation text, and of
               Gaussian q, k, v and dO. error: relative L2. With e_r the error of draw r, bias² is the mean of
               ⟨e_r, e_s⟩ over r ≠ s, and noise² the rest. A candidate that does not round at random makes the
               same error in every draw, so all of it is bias here. along: ⟨error, exact⟩ / |exact|², negative
               where the tensor is too short. Root mean square over heads; along: mean.
    gradients  of all weights of a run's model, on many batches, as in scripts.paper.gradient_bias: there bias
               is what no number of batches averages out, and noise the rest.

Its tensor-core time is in INT8 products of N × N × D (16-bit attention: 18). If its kernel was timed, the
time of forward and backward is given as a multiple of the default's. Candidates are emulated in float32,
their 16-bit tensors in bf16. On a GPU the model runs those that have kernels with their kernels. The files
are written after every run.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from model.backends import AttentionFn
from sagebwd import SageConfig, sage_attention
from sagebwd.reference import exact_attention
from scripts.bench.measuring import describe_run
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.compare import find_runs, labels_of
from scripts.output import write_tables
from scripts.paper import gradient_bias
from scripts.paper.attention_emulation import Head, Result, emulate
from scripts.paper.attention_errors import draw_inputs
from scripts.paper.gradient_bias_gradients import draw_batches
from scripts.paper.gradient_bias_tables import CONTROL, Row
from scripts.paper.layers import capture_run
from scripts.paper.layers_runs import TrainedRun, UnusableWeights, open_run
from scripts.paper.remedies_tables import TENSORS, TensorRow, combined, six_digits, to_markdown
from scripts.paper.remedy_schemes import Remedy, attend_with, loses_too_much, remedies
from scripts.paper.result_files import OUT, Results
from scripts.paper.roundings import in_groups
from trainer.probe import chosen_layers
from trainer.run_directory import RunDirectory

PROGRAM = "python -m scripts.paper.remedies"
#: What 16-bit tensors are emulated in.
DTYPE = torch.bfloat16
#: Names in error_against_time.json of candidates that have kernels.
TIMED = {
    "16_bit": "cuDNN",
    "default": "sagebwd",
    "paper": "sagebwd paper",
    "unsigned_p": "sagebwd unsigned P",
    "smooth_v": "sagebwd smooth V",
    "low_bias": "sagebwd low bias",
    "consistent": "sagebwd consistent",
}
#: Tokens of the times.
TIMED_AT = "4096"


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        runs = open_all(arguments)
        result = describe(argv, arguments, runs)
        measure_tensors(runs, result, arguments)
        rows: list[Row] = []
        write_tables(arguments.out, result, rows, to_markdown(result, rows))
        for run in runs:
            rows += gradient_rows(run, result, arguments)
            write_tables(arguments.out, result, rows, to_markdown(result, rows))
    except (ValueError, FileNotFoundError, UnusableWeights) as error:
        sys.exit(str(error))
    print(f"written to {arguments.out}.json and .md")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("runs", nargs="*", help="directories of finished runs, or folders that hold some")
    add("--sigmas", type=float, nargs="+", default=[], help="also Gaussian heads, with these σ of Q and K")
    add("--gaussian-heads", type=positive_int, default=2, help="heads of each σ (default %(default)s)")
    add("--tokens", type=positive_int, default=1024, help="of Gaussian heads (default %(default)s)")
    add(
        "--sequences",
        type=positive_int,
        default=2,
        help="validation sequences of a run (default %(default)s)",
    )
    add("--layers", type=int, nargs="+", help="counted from 0 (default: first, middle and last)")
    add("--batches", type=positive_int, default=32, help="of gradients, at least 3 (default %(default)s)")
    add("--tokens-per-batch", type=positive_int, default=65_536, help="(default %(default)s)")
    add("--micro-batch", type=positive_int, help="sequences in a pass (default: 32,768 tokens)")
    names = list(remedies(64, DTYPE))
    add(
        "--candidates", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    add("--times", type=Path, default=Path("results"), help="folder with error_against_time.json")
    add("--seed", type=int, default=0, help="of what is random (default 0)")
    add("--device", help="cuda or cpu (default: cuda if available)")
    add("--out", type=Path, default=OUT / "remedies", help="beginning of the files' names")
    arguments = parser.parse_args(argv)
    if not arguments.runs and not arguments.sigmas:
        parser.error("nothing to measure; name run directories, or --sigmas 1 3 5")
    if arguments.batches < 3:
        parser.error(f"--batches {arguments.batches}: intervals leave batches out; use --batches 3 or more")
    arguments.device = choose_device(arguments.device, parser)
    return arguments


def open_all(arguments: Namespace) -> list[TrainedRun]:
    """Raises ValueError or FileNotFoundError for what is not a finished run."""
    paths = find_runs([Path(path) for path in arguments.runs])
    if arguments.runs and not paths:
        raise ValueError(f"no metrics.jsonl under {', '.join(arguments.runs)}; give directories of runs")
    names = labels_of(paths)
    return [open_run(name, RunDirectory(path), None) for name, path in zip(names, paths, strict=True)]


def describe(argv: list[str] | None, arguments: Namespace, runs: list[TrainedRun]) -> dict[str, Any]:
    """What was measured, of which runs, how and where."""
    settings = Namespace(**{**vars(arguments), "times": str(arguments.times)})
    times = times_of(Results(arguments.times))
    return {
        **describe_run(PROGRAM, argv, settings, ("numpy",)),
        "values": "tensors: against float64, relative to the exact tensor; rows: as in gradient_bias.json",
        "candidates": {
            name: describe_candidate(remedy) | {"kernel_time": times.get(name)}
            for name, remedy in chosen(arguments, 64).items()
        },
        "kernel_time": f"of forward and backward, causal, N {TIMED_AT}, D 64, as a multiple of the default's",
        "refined_rows": "share of the rows of tiles of P (in O) and dS (in dQ) with finer scales in `finer`",
        "tokens_per_batch": arguments.tokens_per_batch,
        "runs": {run.name: gradient_bias.describe_trained(run) for run in runs},
        "tensors": [],
        "refined": {},
        "left_out": {},
        "checkpoints": [],
        "gradients": [],
    }


def chosen(arguments: Namespace, head_dim: int) -> dict[str, Remedy]:
    """The candidates that were asked for, in the order of all."""
    every = remedies(head_dim, DTYPE)
    return {name: remedy for name, remedy in every.items() if name in arguments.candidates}


def describe_candidate(remedy: Remedy) -> dict[str, Any]:
    return {
        "title": remedy.title,
        "units": remedy.units,
        "all_int8": remedy.all_int8,
        "has_kernel": remedy.config is not None or remedy.title == "all products in 16 bit",
        "extra": remedy.extra,
        "draws": remedy.draws,
        "config": None if remedy.config is None else asdict(remedy.config),
    }


def times_of(results: Results) -> dict[str, dict[str, Any]]:
    """{candidate: {"time": multiple of the default's, "commit": …}} of those that were timed."""
    if not results.has("error_against_time.json"):
        return {}
    rows = {row["setting"]: row for row in results.json("error_against_time.json")["rows"]}
    return {
        name: {"time": rows[timed]["time"][TIMED_AT], "commit": rows[timed]["commit"]}
        for name, timed in TIMED.items()
        if timed in rows and TIMED_AT in rows[timed]["time"]
    }


# --- Tensors ------------------------------------------------------------------------------------------------


def measure_tensors(runs: Sequence[TrainedRun], result: dict[str, Any], arguments: Namespace) -> None:
    """Add a row for each source of heads, candidate and tensor to the result, and what "finer" refines."""
    sources = {run.name: partial(heads_of_run, run, arguments) for run in runs}
    sources |= {f"Gaussian, σ {x:g}": partial(gaussian_heads, x, arguments) for x in arguments.sigmas}
    torch.manual_seed(arguments.seed)
    for source, draw in tqdm(sources.items(), desc="tensors", disable=None):
        heads = draw()
        result["tensors"] += [asdict(row) for row in measure_heads(source, heads, arguments)]
        result["refined"][source] = refined_share(heads)


def heads_of_run(run: TrainedRun, arguments: Namespace) -> list[Head]:
    """Every head of the chosen layers, in values that bf16 has. Raises ValueError for shared key heads."""
    if run.settings.model.is_gqa:
        raise ValueError(f"{run.name} shares key heads; the emulation needs a model with n_kv_heads=null")
    layers = chosen_layers(arguments.layers, run.settings.model.n_layers)
    captured = capture_run(run, layers, arguments).values()
    tensors = [(x.q, x.k, x.v, x.grad_out) for x in captured]
    flat = (
        torch.cat([x.flatten(0, 1) for x in each]).to(DTYPE).float() for each in zip(*tensors, strict=True)
    )
    return [Head(*each) for each in zip(*flat, strict=True)]


def gaussian_heads(sigma: float, arguments: Namespace) -> list[Head]:
    """Heads of 64 channels: Q and K of standard deviation `sigma`, V and dO of 1."""
    shape = (arguments.gaussian_heads, arguments.tokens, 64)
    draws = draw_inputs(sigma, shape, DTYPE, seed=arguments.seed, device=arguments.device)
    return [Head(*each) for each in zip(*(x.float() for x in draws), strict=True)]


def measure_heads(source: str, heads: Sequence[Head], arguments: Namespace) -> list[TensorRow]:
    """Every candidate on these heads, which have one size."""
    exact = [exact_result(head) for head in heads]
    rows = []
    for name, remedy in chosen(arguments, heads[0].q.shape[-1]).items():
        splits = [
            {tensor: split(errors[tensor], getattr(whole, tensor)) for tensor in TENSORS}
            for head, whole in zip(heads, exact, strict=True)
            for errors in [errors_of(head, whole, remedy)]
        ]
        rows += [
            TensorRow(source, name, tensor, len(heads), **combined([own[tensor] for own in splits]))
            for tensor in TENSORS
        ]
    return rows


def exact_result(head: Head) -> Result:
    """In float64."""
    whole = exact_attention(*(x[None, None] for x in head), is_causal=True)
    return Result(*(getattr(whole, name)[0, 0] for name in Result._fields))


def errors_of(head: Head, exact: Result, remedy: Remedy) -> dict[str, Tensor]:
    """By tensor (draws, N · D), float64."""
    draws = [emulate(head, remedy.scheme) for _ in range(remedy.draws)]
    return {
        name: torch.stack([(getattr(x, name).double() - getattr(exact, name)).flatten() for x in draws])
        for name in TENSORS
    }


def split(errors: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """error², bias² and along of one head's errors (draws, N · D), relative to the exact tensor (N, D)."""
    draws, truth = len(errors), exact.double().flatten()
    size = truth @ truth
    gram = errors @ errors.T / size
    own = gram.trace() / draws
    bias = own if draws == 1 else (gram.sum() - gram.trace()) / (draws * (draws - 1))
    return own.item(), bias.item(), (errors.mean(0) @ truth / size).item()


def refined_share(heads: Sequence[Head]) -> dict[str, float]:
    """Of the rows of tiles of P in O and dS in dQ that see a key: the share with finer scales in "finer"."""
    shares: dict[str, list[float]] = {"p": [], "ds": []}
    for head in heads:
        tensors = (x[None, None] for x in head)
        whole = exact_attention(*tensors, is_causal=True, matrices=True, dtype=torch.float32)
        _, columns = SageConfig().tile(head.q.shape[-1])
        for name, found in shares.items():
            weights = getattr(whole, name)[0, 0]
            seen = (in_groups(weights, 1, columns) != 0).any(3)
            chosen = in_groups(loses_too_much(weights, columns).float(), 1, columns).amax(3) > 0
            found.append(((chosen & seen).sum() / seen.sum()).item())
    return {name: six_digits(fmean(found)) for name, found in shares.items()}


# --- Gradients of a model -----------------------------------------------------------------------------------


def gradient_rows(run: TrainedRun, result: dict[str, Any], arguments: Namespace) -> list[Row]:
    """Bias and noise in the gradients of all weights and of q and k, raw; a row for each candidate."""
    device = torch.device(arguments.device)
    batches, unseen = draw_batches(run, run.origin.step, arguments.batches, arguments.tokens_per_batch)
    result["runs"][run.name] |= {"batches_unseen": unseen}
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    found = attentions(run, arguments)
    with tqdm(total=1 + len(found), desc=f"gradients of {run.name}", disable=None) as progress:
        measured = gradient_bias.measure_checkpoint(run, batches, found, result, arguments, progress.update)
        rows = [row for own in measured for row in own]
    result["gradients"] = [
        own for own in result["gradients"] if is_shown(own["view"], own["group"], own["layer"])
    ]
    return [row for row in rows if is_shown(row.view, row.group, row.layer)]


def is_shown(view: str, group: str, layer: int | None) -> bool:
    return view == "raw" and group in ("all", "qk") and layer is None


def attentions(run: TrainedRun, arguments: Namespace) -> dict[str, AttentionFn]:
    """The control and the candidates; kernels where there are some, on a GPU."""
    device = torch.device(arguments.device)
    found = gradient_bias.attentions([CONTROL], device)
    for name, remedy in chosen(arguments, run.settings.model.d_head).items():
        has_kernel = device.type == "cuda" and remedy.config is not None
        found[name] = (
            partial(sage_attention, config=remedy.config) if has_kernel else attend_with(remedy.scheme)
        )
    return found


if __name__ == "__main__":
    main()
