"""Gradients of every weight on many batches, and their inner products, for scripts.paper.gradient_bias."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from data.loader import stack_sequences
from model.backends import AttentionFn
from model.llama import Llama
from scripts.paper.gradient_bias_estimates import Grams
from scripts.paper.trained_runs import TrainedRun
from scripts.runs import training_loader
from trainer.checkpoint import NO_PROCESS_GROUP, load_alone
from trainer.optimizer import adamw
from trainer.run_directory import checkpoint_of

RAW, ADAM = "raw", "adam"
VIEWS = (RAW, ADAM)

COLUMNS_AT_ONCE = 2**20  # of n × P gradients that are converted to float64
COLUMNS_OF_PIECE = 2**12  # that a thread block of a GPU may sum up

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (sequences, context)
Gradients = dict[str, Tensor]  # by weight: (batches, elements), float32


def gradients(
    llama: Llama, batches: Sequence[Batch], micro_batch: int, dtype: torch.dtype, out: Gradients
) -> list[float]:
    """Gradients of the mean loss of each batch, written to `out`; the losses, in nats per token."""
    losses = []
    for row, (inputs, targets) in enumerate(batches):
        llama.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=inputs.device)
        for tokens, following in zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True):
            with torch.autocast(inputs.device.type, dtype, enabled=dtype is not torch.float32):
                share = llama(tokens, following) * (len(tokens) / len(inputs))
            share.backward()
            loss += share.detach()
        for name, parameter in llama.named_parameters():
            out[name][row].copy_(parameter.grad.flatten())
        losses.append(loss)
    llama.zero_grad(set_to_none=True)
    return torch.stack(losses).tolist()


def empty_gradients(llama: Llama, batches: int, *, in_host_memory: bool = False) -> Gradients:
    """Room for the gradients of so many batches, where the weights are or in pinned host memory."""
    place = {"pin_memory": True} if in_host_memory else {"device": next(llama.parameters()).device}
    return {
        name: torch.empty(batches, parameter.numel(), **place) for name, parameter in llama.named_parameters()
    }


def fit_twice(llama: Llama, batches: int) -> bool:
    """Whether the GPU has room for the gradients of so many batches, twice; True on a CPU."""
    device = next(llama.parameters()).device
    if device.type != "cuda":
        return True
    size = 4 * batches * sum(parameter.numel() for parameter in llama.parameters())
    # A quarter is left to activations.
    return 2 * size < 0.75 * torch.cuda.get_device_properties(device).total_memory


@contextmanager
def attending(llama: Llama, attend: AttentionFn) -> Iterator[None]:
    """While this is open, every layer computes its attention with `attend`."""
    originals = [block.self_attn.attend for block in llama.layers]
    try:
        for block in llama.layers:
            block.self_attn.attend = attend
        yield
    finally:
        for block, original in zip(llama.layers, originals, strict=True):
            block.self_attn.attend = original


@torch.no_grad()
def gram(left: Tensor, right: Tensor, scale: Tensor | None = None) -> np.ndarray:
    """⟨left_i · scale, right_j · scale⟩ in float64 (n, n), of rows (n, P); scale: (P,), None for ones."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for first in range(0, left.shape[1], COLUMNS_AT_ONCE):
        columns = slice(first, first + COLUMNS_AT_ONCE)
        rows = [left[:, columns].double()]
        rows += rows if left is right else [right[:, columns].double()]
        if scale is not None:
            squares = scale[columns].double().square()
            rows[0] = rows[0] * squares
        total += product(*rows)
    return total.cpu().numpy()


def product(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ of few, long rows (n, P): many pieces side by side, or a GPU would be nearly idle."""
    whole = left.shape[1] // COLUMNS_OF_PIECE * COLUMNS_OF_PIECE
    pieces = [x[:, :whole].unflatten(1, (-1, COLUMNS_OF_PIECE)).transpose(0, 1) for x in (left, right)]
    return (pieces[0] @ pieces[1].mT).sum(0) + left[:, whole:] @ right[:, whole:].T


def tensor_grams(
    g_setting: Gradients,
    g: Gradients,
    own: Mapping[tuple[str, str], Grams],
    scales: Mapping[str, Tensor],
) -> dict[tuple[str, str], Grams]:
    """By (view, weight). own: `own_grams`. g_setting may be in host memory."""
    grams = {}
    for name, rows in g_setting.items():
        d = rows.to(g[name].device, copy=True).sub_(g[name])
        for view, scale in ((RAW, None), (ADAM, scales[name])):
            products = {"dd": gram(d, d, scale), "dg": gram(d, g[name], scale)}
            grams[view, name] = replace(own[view, name], **products)
    return grams


def own_grams(g: Gradients, scales: Mapping[str, Tensor]) -> dict[tuple[str, str], Grams]:
    """By (view, weight), the inner products of g; those of d are zero."""
    nothing = np.zeros([len(next(iter(g.values())))] * 2)
    return {
        (view, name): Grams(nothing, nothing, gram(g[name], g[name], scale))
        for name in g
        for view, scale in ((RAW, None), (ADAM, scales[name]))
    }


# --- Adam ---------------------------------------------------------------------------------------------------


def adam_scales(run: TrainedRun, llama: Llama, device: torch.device) -> dict[str, Tensor]:
    """1 / (√v̂ + eps) by weight, (elements,), with Adam's second moments in the run's checkpoint of its step.

    `llama` has the weights of that checkpoint, on the CPU. Raises ValueError if there is none, if it is
    damaged, or of a run with another optimizer.
    """
    settings = run.settings.optimizer
    if settings.name != "adamw":
        raise ValueError(
            f"{run.name}: trained with {settings.name}, so there are no Adam's moments; give a run with "
            "optimizer=adamw"
        )
    path = checkpoint_of(run.directory.checkpoints, run.step)
    optimizer = adamw(llama.parameters(), settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_PROCESS_GROUP)
        _, moments_and_groups = get_state_dict(llama, optimizer)
    try:
        load_alone({"optimizer": moments_and_groups}, path)
    except ValueError as error:
        raise ValueError(f"{run.name}: Adam's moments cannot be read: {error}") from error
    scales = {}
    for name, state in moments_and_groups["state"].items():
        v_hat = state["exp_avg_sq"] / (1 - settings.beta2 ** float(state["step"]))
        scales[name] = 1 / (v_hat.flatten().sqrt() + settings.eps).to(device)
    return scales


# --- Batches ------------------------------------------------------------------------------------------------


def draw_batches(run: TrainedRun, count: int, tokens_per_batch: int) -> tuple[list[Batch], bool]:
    """Disjoint batches that follow the run's end in its data order, and whether the run has not seen them.

    Raises ValueError if the text has too few sequences, or a batch is not made of whole ones.
    """
    context = run.settings.context
    if tokens_per_batch % context or tokens_per_batch < context:
        nearest = max(round(tokens_per_batch / context), 1) * context
        raise ValueError(
            f"--tokens-per-batch {tokens_per_batch} is not a multiple of the {context} tokens of a sequence "
            f"of {run.name}; use --tokens-per-batch {nearest}"
        )
    size = tokens_per_batch // context
    loader = training_loader(run.settings, run.corpus)
    if loader.sequences < count * size:
        raise ValueError(
            f"{count} batches of {tokens_per_batch} tokens need {count * size} sequences, and the text of "
            f"{run.name} has {loader.sequences}; use --batches {max(loader.sequences // size, 3)} or fewer, "
            "or smaller batches (--tokens-per-batch)"
        )
    indices: dict[int, None] = {}
    step = run.step
    while len(indices) < count * size:  # a sequence repeats when the text does
        indices.update(dict.fromkeys(loader.sequence_indices(step).tolist()))
        step += 1
    chosen = np.array(list(indices)[: count * size]).reshape(count, size)
    return [stack_sequences(loader.tokens, batch, context) for batch in chosen], loader.epoch_of(step) <= 1
