"""A model on its devices: replicated (DDP) or sharded (FSDP2), with activation checkpointing and compilation.

DDP and FSDP2 both average the gradients of all ranks once a step, in float32, and keep weights and moments in
float32. Mixed precision comes from torch.autocast, so a run computes the same either way.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.backends import AttentionFn
from model.llama import Llama
from trainer.distributed import Ranks
from trainer.settings import HardwareSettings

# Size of DDP's gradient buckets (the default is 25). The compiler ends a graph wherever a bucket ends and
# cannot fuse across; 100 MiB are about two layers of the 325M model.
BUCKET_MIB = 100

# DDP's argument for "broadcast the buffers before each forward"; torch 2.13 renamed it.
_CHOICES = inspect.signature(DistributedDataParallel.__init__).parameters
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _CHOICES else "broadcast_buffers"


def place(
    llama: Llama,
    hardware: HardwareSettings,
    ranks: Ranks,
    *,
    saved_operators: Sequence[torch._ops.OpOverload] = (),
) -> tuple[nn.Module, nn.Module]:
    """Move the model to its devices. Returns the module that exchanges gradients, and the module to call.

    The two are the same unless the model is compiled. Changes `llama` itself and replaces its parameters if
    they are sharded: make the optimizer after this. All ranks must call it, with the same weights.
    saved_operators: see model.backends.Backend; used with hardware.recompute=blocks.
    """
    sharded = hardware.is_sharded(llama.config, ranks.count)
    if hardware.recompute == "blocks":
        for layer in llama.layers:
            layer.forward = _checkpointed(layer.forward, saved_operators)
    in_pieces = hardware.compile and (sharded or (ranks.count > 1 and hardware.recompute != "none"))
    if in_pieces:
        _compile_in_pieces(llama)
    parallel = _shard(llama, ranks) if sharded else _replicate(llama.to(ranks.device), ranks)
    # Compiled after DDP's wrapping, not before: only then does the compiler (its DDPOptimizer) split the
    # graph at DDP's buckets, so that gradients are exchanged while the backward computes others. For fixed
    # shapes, because torch 2.11 cannot split a graph with dynamic ones.
    whole = parallel
    if hardware.compile and not in_pieces:
        mode = "reduce-overhead" if hardware.cuda_graphs else None
        whole = torch.compile(parallel, dynamic=False, mode=mode)
    return parallel, whole


def _replicate(llama: Llama, ranks: Ranks) -> nn.Module:
    """The model under DDP if there are several ranks.

    static_graph stays off. It saves nothing if every parameter takes part in every step, and it records the
    hooks of the first pass, which differ with gradient accumulation (no_sync).
    """
    if ranks.count == 1:
        return llama
    return DistributedDataParallel(
        llama,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        **{BUFFERS: False},  # the rotary tables: computed on every rank, never changed
        gradient_as_bucket_view=True,  # gradients live in the buckets: saves 4 bytes per parameter and a copy
        bucket_cap_mb=BUCKET_MIB,
    )


def _shard(llama: Llama, ranks: Ranks) -> nn.Module:
    """The model under FSDP: one group of weights per block, and one of embedding, last norm and head.

    Weights are gathered in float32. bfloat16 (MixedPrecisionPolicy) would halve the traffic, but round the
    norms' gains and the residual stream, which autocast leaves in float32. Traffic is not the limit:
    gathering a block of llama_1b (243 MB) takes a tenth of the time that the previous block computes.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.count,))
    for layer in llama.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(llama, mesh=mesh)


def _checkpointed(
    forward: Callable[..., Tensor], saved_operators: Sequence[torch._ops.OpOverload]
) -> Callable[..., Tensor]:
    """A block that saves only its input and the outputs of `saved_operators`, and recomputes the others."""
    return partial(
        checkpoint,
        forward,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing here is random
        context_fn=partial(create_selective_checkpoint_contexts, list(saved_operators)),
    )


def _compile_in_pieces(llama: Llama) -> None:
    """Compile the blocks, which share one compiled graph, and the head with the loss.

    FSDP's hooks run between the blocks and cannot be compiled. Checkpointed blocks cannot be split at DDP's
    buckets either. Gradients are ready block by block anyway, so splitting is switched off.
    """
    torch._dynamo.config.optimize_ddp = False
    for layer in llama.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    llama.output = torch.compile(llama.output, dynamic=False)


def sharing_tokens(
    llama: Llama, hardware: HardwareSettings, ranks: Ranks
) -> Callable[[], AbstractContextManager[Callable[..., tuple[Tensor, ...]]]]:
    """Make the context in which `hardware.context_parallel` neighbouring ranks share each sequence.

    For a forward and backward. It yields the function that cuts a batch's (B, N) tokens and targets to this
    rank's part of N, or with packed documents of B · N, which the model then takes. To attend, a rank
    exchanges its part of the tokens for all tokens of a part of the heads (Ulysses): any attention computes
    what it does on one device. Parts are equal, so the mean of all ranks' losses is that of all tokens.
    Elsewhere, as in validation, the model takes whole sequences.
    """
    size = hardware.context_parallel
    if size == 1:
        return partial(nullcontext, lambda *batch: batch)
    mesh = init_device_mesh(
        ranks.device.type, (ranks.count // size, size), mesh_dim_names=("data", "context")
    )
    part, group = ranks.rank % size, mesh["context"].get_group()
    whole_table = llama.rotary.forward
    layers = [layer.self_attn for layer in llama.layers]
    whole = [layer.attend for layer in layers]
    shared = [partial(_attend_by_heads, attend, group) for attend in whole]

    def own(tokens: Tensor, targets: Tensor, *cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        if cu_seqlens:
            tokens, targets = tokens.view(1, -1), targets.view(1, -1)
        return *(x.chunk(size, 1)[part].contiguous() for x in (tokens, targets)), *cu_seqlens

    def part_of_table(length: int, *cu_seqlens: Tensor) -> list[Tensor]:
        return [table.chunk(size)[part] for table in whole_table(length * size, *cu_seqlens)]

    @contextmanager
    def sharing() -> Iterator[Callable[..., tuple[Tensor, ...]]]:
        _set(layers, shared, llama, part_of_table)
        try:
            yield own
        finally:
            _set(layers, whole, llama, whole_table)

    return sharing


def _set(
    layers: Sequence[nn.Module], attends: Sequence[AttentionFn], llama: Llama, table: Callable[[int], Any]
) -> None:
    for layer, attend in zip(layers, attends, strict=True):
        layer.attend = attend
    llama.rotary.forward = table


def _attend_by_heads(
    attend: AttentionFn, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor, **settings: Any
) -> Tensor:
    """Attention of q, k, v (B, H, N / ranks, D), this rank's part of the tokens; as `attend` of all."""
    ranks = group.size()

    def exchange(parts: Tensor) -> Tensor:
        """(ranks, …): what to send to each, and what came from each."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, group)

    def all_tokens(x: Tensor) -> Tensor:
        """(B, H, N / ranks, D) to (B, H / ranks, N, D)."""
        return exchange(x.unflatten(1, (ranks, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)

    out = attend(all_tokens(q), all_tokens(k), all_tokens(v), **settings)
    return exchange(out.unflatten(2, (ranks, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2)


@contextmanager
def gradients_exchanged(parallel: nn.Module, now: bool) -> Iterator[None]:
    """Around a forward and backward: ranks exchange gradients only if `now`, in the last micro-batch."""
    if isinstance(parallel, FSDPModule):
        parallel.set_requires_gradient_sync(now)
        parallel.set_is_last_backward(now)
    alone = isinstance(parallel, DistributedDataParallel) and not now
    with parallel.no_sync() if alone else nullcontext():
        yield


def expect_gradients(model: nn.Module, hardware: HardwareSettings) -> None:
    """Before a step: no gradients, of a callback for instance, but with CUDA graphs zeros to accumulate into.

    Otherwise PyTorch takes the first backward's own tensor as the gradient, which saves an addition. With
    CUDA graphs that tensor is in memory which the next replay overwrites.
    """
    model.zero_grad(set_to_none=not hardware.cuda_graphs)
    if hardware.cuda_graphs:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def forget_gradients(optimizer: torch.optim.Optimizer, hardware: HardwareSettings) -> None:
    """After a step: drop the gradients, except those that :func:`expect_gradients` allocated."""
    if not hardware.cuda_graphs:
        optimizer.zero_grad()


def clip_gradients(model: nn.Module, largest: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most `largest`. Returns the norm before, a scalar."""
    parameters = list(model.parameters())
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # over all ranks
    if largest is not None:
        clip_grads_with_norm_(parameters, largest, norm)
    return norm


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights, unsharded and on the CPU, on the main rank; nothing on the others. All ranks must call it.

    Sharded weights are gathered one at a time, so a GPU needs memory for one unsharded weight only.
    """
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def uncompiled() -> AbstractContextManager:
    """For calls with shapes that vary, each of which would be compiled."""
    return torch.compiler.set_stance("force_eager")
