"""A model on its devices: a copy on each (DDP) or shared out (FSDP2); recomputation, compilation.

Both ways average the gradients of all ranks once a step, in float32, and keep weights and moments in float32;
torch.autocast gives the mixed precision, so a run computes the same either way.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.config import LlamaConfig, parameter_count
from model.llama import Llama
from trainer.distributed import Ranks
from trainer.settings import HardwareSettings

SHARD_FROM = 1_000_000_000  # parameters; at 16 bytes each a copy fills a fifth of an 80 GB GPU

# Gradients of so many MiB travel together (DDP's default is 25). The compiler ends a graph wherever a bucket
# ends, which keeps it from fusing across; 100 MiB are about two layers of the 325M model.
BUCKET_MIB = 100

# What DDP calls "send the buffers before each forward": torch 2.13 renamed it.
_CHOICES = inspect.signature(DistributedDataParallel.__init__).parameters
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _CHOICES else "broadcast_buffers"


def is_sharded(config: LlamaConfig, hardware: HardwareSettings, ranks: int) -> bool:
    """Whether weights, gradients and moments are shared out: if asked, or for large models by themselves."""
    if ranks == 1 or hardware.parallel == "ddp":
        return False
    return hardware.parallel == "fsdp" or parameter_count(config) >= SHARD_FROM


def spread(llama: Llama, hardware: HardwareSettings, ranks: Ranks) -> tuple[nn.Module, nn.Module]:
    """Move the model to its devices; what exchanges gradients, and what to call: the same, compiled if asked.

    Changes `llama` itself, and replaces its parameters where they are sharded: make the optimizer after this.
    All ranks must call it, with the same weights.
    """
    sharded = is_sharded(llama.config, hardware, ranks.count)
    if hardware.recompute == "blocks":
        for layer in llama.layers:
            layer.forward = _recomputed(layer.forward)
    in_pieces = hardware.compile and (sharded or (ranks.count > 1 and hardware.recompute != "none"))
    if in_pieces:
        _compile_in_pieces(llama)
    parallel = _shard(llama, ranks) if sharded else _replicate(llama.to(ranks.device), ranks)
    # In one piece after DDP's wrapping, not before: only so does the compiler (its DDPOptimizer) divide the
    # graph at DDP's buckets, and gradients travel while the backward is still computing others. For fixed
    # shapes: torch 2.11 cannot divide a graph of changing ones.
    whole = parallel
    if hardware.compile and not in_pieces:
        mode = "reduce-overhead" if hardware.cuda_graphs else None
        whole = torch.compile(parallel, dynamic=False, mode=mode)
    return parallel, whole


def _replicate(llama: Llama, ranks: Ranks) -> nn.Module:
    """The model under DDP if there are several ranks.

    static_graph stays off: it would save nothing where every parameter takes part in every step, and it
    counts the hooks of the first pass, which accumulation (no_sync) then contradicts.
    """
    if ranks.count == 1:
        return llama
    return DistributedDataParallel(
        llama,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        **{BUFFERS: False},  # the rotary tables: computed alike everywhere, never changed
        gradient_as_bucket_view=True,  # gradients live in the buckets: 4 bytes a parameter and a copy less
        bucket_cap_mb=BUCKET_MIB,
    )


def _shard(llama: Llama, ranks: Ranks) -> nn.Module:
    """The model under FSDP: one group of weights a block, and one of embedding, last norm and head.

    Weights are gathered in float32. Gathering them in bfloat16 (MixedPrecisionPolicy) would halve what
    travels, but round the norms' gains and the residual stream, which autocast leaves in float32; and a
    block of llama_1b is gathered (243 MB) in a tenth of the time that the one before computes.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.count,))
    for layer in llama.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(llama, mesh=mesh)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block that keeps its input and the output of its attention only, and computes the rest again."""
    return partial(
        checkpoint,
        forward,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing here is random
        context_fn=partial(create_selective_checkpoint_contexts, _attention_operators()),
    )


def _attention_operators() -> list[torch._ops.OpOverload]:
    """What computes attention, forward: the dearest of a block to repeat, and small to keep."""
    aten = torch.ops.aten
    operators = [
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    if hasattr(torch.ops.sagebwd, "forward"):  # known once the kernels are imported
        operators.append(torch.ops.sagebwd.forward.default)
    return operators


def _compile_in_pieces(llama: Llama) -> None:
    """Compile the blocks, which share one program, and the head with the loss.

    FSDP's hooks run between the blocks and cannot be compiled. Blocks that recompute cannot be divided at
    DDP's buckets either; as gradients come block by block anyway, the compiler need not try.
    """
    torch._dynamo.config.optimize_ddp = False
    for layer in llama.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    llama.output = torch.compile(llama.output, dynamic=False)


@contextmanager
def gradients_exchanged(parallel: nn.Module, now: bool) -> Iterator[None]:
    """Ranks exchange gradients once a step, with the last micro-batch: `now`. For forward and backward."""
    if isinstance(parallel, FSDPModule):
        parallel.set_requires_gradient_sync(now)
        parallel.set_is_last_backward(now)
    alone = isinstance(parallel, DistributedDataParallel) and not now
    with parallel.no_sync() if alone else nullcontext():
        yield


def expect_gradients(model: nn.Module, hardware: HardwareSettings) -> None:
    """Before a step: zeros to add to where the first backward's own tensor must not become the gradient.

    That saves an addition, but the tensor of a CUDA graph lies where the graph writes again in the next pass.
    """
    if hardware.cuda_graphs:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def forget_gradients(optimizer: torch.optim.Optimizer, hardware: HardwareSettings) -> None:
    """After a step. Where :func:`expect_gradients` made zeros, they are zeros again."""
    optimizer.zero_grad(set_to_none=not hardware.cuda_graphs)


def clip_gradients(model: nn.Module, largest: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`; the norm before, a scalar."""
    parameters = list(model.parameters())
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # over all ranks
    clip_grads_with_norm_(parameters, largest, norm)
    return norm


def not_finite_gradients(model: nn.Module, ranks: Ranks) -> list[str]:
    """Names of the parameters whose gradient has a NaN or Inf on any rank. All ranks must call it."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for _, grad in named]
    bad = ranks.maximum(torch.stack([(~grad.isfinite().all()).int() for grad in local]))
    return [name for (name, _), is_bad in zip(named, bad.tolist(), strict=True) if is_bad]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole and on the CPU, on the main rank; nothing on the others. All ranks must call it.

    Sharded weights are gathered one at a time, so a GPU never holds more than one of them in addition.
    """
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def uncompiled() -> AbstractContextManager:
    """For calls of ever new shapes, each of which would be compiled."""
    return torch.compiler.set_stance("force_eager")
