"""Memory of a run before its first step: what it takes on each device, whether the device has it, what helps.

Counted from the settings, in milliseconds, without a model or data. On H200s it is within 2% of what PyTorch
allocated in the runs of results/bench_training.json, bench_training_24gb.json and bench_gpus.json;
tests/trainer/test_estimate.py compares them. On a CPU two short runs took 1.03 (llama_tiny) and 1.09 times
their estimate (llama_35m), because malloc does not return all that was freed.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from model.config import LlamaConfig, parameter_count
from model.memory import Activations, Pass, activations, block_matrices
from trainer.checks import groups, sizes_of
from trainer.distributed import is_sharded
from trainer.errors import TrainingError
from trainer.machine import host_memory, own_memory
from trainer.settings import Settings

log = logging.getLogger(__name__)

FLOAT32 = 4  # bytes of a weight, of its gradient and of each of its moments

#: A run is refused if its estimate is more than this multiple of the memory there is. No measured run took
#: less than 0.98 of its estimate, so nothing that fits is refused, even if another version of PyTorch saves
#: less. Below the margin the run starts with a warning: its first step tells.
MARGIN = 1.25

#: Of a process on a CPU: libraries that are loaded while it trains, by the run of llama_tiny.
LOADED_LATER = 128 << 20

#: Of a process on a GPU besides its tensors: CUDA's context, kernels, workspaces of cuBLAS. Assumed.
CUDA_CONTEXT = 800 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes that one device needs at its peak, by part, and bytes that it has (None: not known)."""

    parts: dict[str, int]
    available: int | None
    device: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def is_hopeless(self) -> bool:
        """Whether the run cannot fit, by the MARGIN."""
        return self.available is not None and self.total > MARGIN * self.available

    @property
    def is_tight(self) -> bool:
        """Whether the estimate is more than there is, or within a twentieth of it."""
        return self.available is not None and self.total > 0.95 * self.available


def memory(settings: Settings, ranks: int) -> Memory:
    """The memory that each of `ranks` devices needs. Asks the device of this process what it has."""
    available, device = available_memory(settings, ranks)
    return Memory(memory_parts(settings, ranks), available, device)


def check_memory(settings: Settings, ranks: int) -> Memory:
    """The estimate. Raises TrainingError if the run cannot fit, unless hardware.check_memory is off."""
    estimate = memory(settings, ranks)
    if estimate.is_hopeless and settings.hardware.check_memory:
        raise TrainingError(refusal(settings, ranks, estimate))
    return estimate


def report_memory(estimate: Memory) -> None:
    """Log how much of the device's memory the run will take."""
    if estimate.available is None:
        return
    text = f"memory: about {gib(estimate.total)} of {gib(estimate.available)} ({estimate.device})"
    if estimate.is_tight:
        log.warning("%s, which may not suffice; plan=true prints the parts", text)
    else:
        log.info("%s", text)


# ---------------------------------------------------------------------- what a device needs


def memory_parts(settings: Settings, ranks: int) -> dict[str, int]:
    """Bytes on each of `ranks` devices at the peak of a step, by part, without parts that are zero."""
    hardware, count = settings.hardware, parameter_count(settings.model)
    sharded = is_sharded(settings.model, hardware, ranks)
    copies = ranks if sharded else 1
    own = replace(settings, context=settings.context // hardware.context_parallel)
    step = _activations(own, hardware.micro_batch, compiled=hardware.compile)
    on_gpu = hardware.device == "cuda"
    parts = {
        "weights": FLOAT32 * count // copies,
        "weights gathered by FSDP": _gathered(settings.model) if sharded else 0,
        "gradients": _gradients(settings, ranks, step),
        "the optimizer's moments": moment_bytes(settings) // copies,
        f"weights in {hardware.dtype} for autocast": step.weight_copies,
        "activations": step.blocks,
        "saved by attention": step.attention,
        "logits and loss, or backward of a block": step.working,
        "the probe, beyond a step": max(0, _probe(settings) - step.total),
        "copy for checkpoints in the background": 0 if on_gpu else checkpoint_copy(settings, ranks),
        "CUDA context and libraries (assumed)": CUDA_CONTEXT if on_gpu else 0,
        "Python and libraries": 0 if on_gpu else own_memory() + LOADED_LATER,
    }
    return {name: size for name, size in parts.items() if size}


def checkpoint_copy(settings: Settings, ranks: int) -> int:
    """Bytes of CPU memory, for each device, of the state that is written while training goes on."""
    if not settings.checkpoint_background:
        return 0
    return state_bytes(settings) // (ranks if is_sharded(settings.model, settings.hardware, ranks) else 1)


def state_bytes(settings: Settings) -> int:
    """Bytes of a checkpoint: weights and moments."""
    return FLOAT32 * parameter_count(settings.model) + moment_bytes(settings)


def moment_bytes(settings: Settings) -> int:
    """Bytes of the optimizer's state: two moments of a weight, one of those that Muon updates."""
    moments = 2 * parameter_count(settings.model)
    if settings.optimizer.name == "muon":
        moments -= settings.model.n_layers * block_matrices(settings.model)
    return FLOAT32 * moments


def _activations(settings: Settings, sequences: int, *, compiled: bool) -> Activations:
    shape, hardware = settings.model, settings.hardware
    dtype = getattr(torch, hardware.dtype)
    q, k = (
        torch.empty(sequences, heads, settings.context, shape.d_head, dtype=dtype, device="meta")
        for heads in (shape.n_heads, shape.kv_heads)
    )
    work = Pass(
        sequences,
        settings.context,
        dtype.itemsize,
        compiled=compiled,
        on_gpu=hardware.device == "cuda",
        recompute=hardware.recompute == "blocks",
    )
    return activations(shape, work, settings.attention.saved_bytes(q, k, device=hardware.device))


def _gradients(settings: Settings, ranks: int, step: Activations) -> int:
    """Bytes of gradients at the peak of memory, the end of a forward.

    Of several micro-batches the gradients of the first are there when the last one runs. DDP has buckets
    from the start, which are the gradients of the last micro-batch only. FSDP shards the sum, not before.
    """
    whole = FLOAT32 * parameter_count(settings.model)
    accumulates = sizes_of(settings, ranks).micro_steps > 1 or settings.hardware.cuda_graphs
    if is_sharded(settings.model, settings.hardware, ranks):
        return whole if accumulates else whole // ranks
    if ranks > 1:
        return whole * (2 if accumulates else 1)
    # Without accumulation a backward frees activations while it allocates gradients.
    return whole if accumulates else max(0, whole - step.blocks - step.attention)


def _gathered(shape: LlamaConfig) -> int:
    """Whole weights that FSDP holds at a time: the block that computes, the next one, embedding and head."""
    outside = shape.vocab_size * shape.d_model * (1 if shape.tie_embeddings else 2) + shape.d_model
    block = (parameter_count(shape) - outside) // shape.n_layers
    return FLOAT32 * (outside + 2 * block)


def _probe(settings: Settings) -> int:
    """Activations of the probe, which runs the model in eager mode on a few sequences."""
    if not settings.probe.every:
        return 0
    return _activations(settings, settings.probe.sequences, compiled=False).total


# ---------------------------------------------------------------------- what a device has


def available_memory(settings: Settings, ranks: int) -> tuple[int | None, str]:
    """Bytes that a device of this kind has here for one rank, and its name.

    Bytes that others use count as there: a run that has just ended, or a page cache, gives them back.
    """
    if settings.hardware.device == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        installed = host_memory()
        return (None if installed is None else installed // here), "RAM" if here == 1 else "RAM for each rank"
    if not torch.cuda.is_available():
        return None, "no GPU here"
    _, installed = torch.cuda.mem_get_info()
    return installed, torch.cuda.get_device_name()


# ---------------------------------------------------------------------- what helps


def refusal(settings: Settings, ranks: int, estimate: Memory) -> str:
    """Why the run does not fit, in numbers, and changes that would make it fit."""
    largest = sorted(estimate.parts.items(), key=lambda part: -part[1])[:4]
    fixes = [*fitting(settings, ranks, estimate)] or ["a smaller model, or devices with more memory"]
    return (
        f"this run needs about {gib(estimate.total)} on each device, and there are "
        f"{gib(estimate.available)} ({estimate.device}).\n"
        f"  it needs: {', '.join(f'{name} {gib(size)}' for name, size in largest)}, …\n"
        + "".join(f"  use {fix}\n" for fix in fixes)
        + "`plan=true` prints all parts; hardware.check_memory=false trains anyway"
    )


def fitting(settings: Settings, ranks: int, estimate: Memory) -> Iterator[str]:
    """Changes of the settings that make the run fit, by the estimate, each with the memory it then needs."""
    found = False
    for kind in _alternatives(settings, ranks):
        for changes in kind:
            if found and len(changes) > 2:
                break  # a simpler change does it
            changed = replace(settings, hardware=replace(settings.hardware, **changes))
            needed = sum(memory_parts(changed, changes.get("devices", ranks)).values())
            if needed <= estimate.available:
                listed = " ".join(f"hardware.{name}={value}" for name, value in changes.items())
                yield f"{listed}: {gib(needed)}"
                found = True
                break


def _alternatives(settings: Settings, ranks: int) -> Iterator[list[dict[str, int | str]]]:
    """Kinds of changes that take less memory and train the same, each from the smallest change on."""
    hardware = settings.hardware
    sequences = settings.tokens_per_step // (settings.context * groups(settings, ranks))
    smaller = [n for n in range(hardware.micro_batch - 1, 0, -1) if sequences % n == 0]
    yield [{"micro_batch": n} for n in smaller]
    if hardware.recompute == "none":
        yield [{"recompute": "blocks"}, *({"micro_batch": n, "recompute": "blocks"} for n in smaller)]
    if hardware.device == "cuda" and hardware.context_parallel == 1:
        counts = range(ranks + 1, torch.cuda.device_count() + 1)
        fsdp = [{"devices": n, "parallel": "fsdp"} for n in counts if sequences * ranks % n == 0]
        yield [
            change for change in fsdp if sequences * ranks // change["devices"] % hardware.micro_batch == 0
        ]
        yield [{**change, "micro_batch": 1, "recompute": "blocks"} for change in fsdp]


def gib(size: float) -> str:
    """Bytes as text in GiB, small ones in MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
