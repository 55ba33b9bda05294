"""What a run takes before its first step: memory, time and disk; what helps; the table of `plan=true`.

Counted from the settings, in milliseconds, without a model or data; memory and time for GPUs only. On H200s
memory is within 2% of what PyTorch allocated in the runs of results/speed, bench_training,
bench_training_24gb and bench_gpus; tests/trainer/test_estimate.py compares them.
"""

import logging
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import SettingsError, TrainingError
from data.recipe import training_texts
from model.config import LlamaConfig, flops_per_token, parameter_count
from model.memory import Activations, Pass, activations, block_matrices
from trainer.checks import Sizes, check, groups, sizes_of, unit_of
from trainer.settings import PAPER_TOKENS, Settings

log = logging.getLogger(__name__)

FLOAT32 = 4  # bytes of a weight, of its gradient and of each of its moments

GPUS_ONLY = "estimated for GPUs only"

#: A run is refused if its estimate is more than this multiple of the memory there is. No measured run took
#: less than 0.98 of its estimate, so nothing that fits is refused, even if another version of PyTorch saves
#: less. Below the margin the run starts with a warning: its first step tells.
MARGIN = 1.25

#: Of a process besides its tensors: CUDA's context, kernels, workspaces of cuBLAS. Assumed.
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
    """The memory that each of `ranks` GPUs needs, and what the GPU of this process, or `gpu`, has.

    Bytes that others use count as there: a run that has just ended gives them back.
    """
    parts = memory_parts(settings, ranks)
    if settings.gpu:
        return Memory(parts, memory_of(settings.gpu), settings.gpu)
    if not torch.cuda.is_available():
        return Memory(parts, None, "no GPU here; gpu=… names one")
    return Memory(parts, torch.cuda.mem_get_info()[1], torch.cuda.get_device_name())


def check_memory(settings: Settings, ranks: int) -> None:
    """Log how much of its GPU's memory the run will take.

    Raises TrainingError if the run cannot fit, unless hardware.check_memory is off.
    """
    if settings.hardware.device == "cpu":
        return
    estimate = memory(settings, ranks)
    if estimate.is_hopeless and settings.hardware.check_memory:
        raise TrainingError(refusal(settings, ranks, estimate))
    text = f"memory: about {gib(estimate.total)} of {gib(estimate.available)} ({estimate.device})"
    if estimate.is_tight:
        log.warning("%s, which may not suffice; plan=true prints the parts", text)
    else:
        log.info("%s", text)


# ---------------------------------------------------------------------- what a device needs


def memory_parts(settings: Settings, ranks: int) -> dict[str, int]:
    """Bytes on each of `ranks` devices at the peak of a step, by part, without parts that are zero."""
    hardware, count = settings.hardware, parameter_count(settings.model)
    sharded = settings.hardware.is_sharded(settings.model, ranks)
    copies = ranks if sharded else 1
    own = replace(settings, context=settings.context // hardware.context_parallel)
    step = _activations(own, sizes_of(settings, ranks).micro_batch, compiled=hardware.compile)
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
        "CUDA context and libraries (assumed)": CUDA_CONTEXT,
    }
    return {name: size for name, size in parts.items() if size}


def checkpoint_copy(settings: Settings, ranks: int) -> int:
    """Bytes of CPU memory, for each device, of the state that is written while training goes on."""
    return state_bytes(settings) // (ranks if settings.hardware.is_sharded(settings.model, ranks) else 1)


def state_bytes(settings: Settings) -> int:
    """Bytes of a checkpoint: weights and moments."""
    return FLOAT32 * parameter_count(settings.model) + moment_bytes(settings)


def moment_bytes(settings: Settings) -> int:
    """Bytes of the optimizer's state: two moments of a weight, one of those that Muon updates.

    Of a class that the user names (optimizer._target_) it is not known; two moments are what most have.
    """
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
        on_gpu=True,
        recompute=hardware.recompute == "blocks",
    )
    return activations(shape, work, settings.attention.saved_bytes(q, k, device="cuda"))


def _gradients(settings: Settings, ranks: int, step: Activations) -> int:
    """Bytes of gradients at the peak of memory, the end of a forward.

    Of several micro-batches the gradients of the first are there when the last one runs. DDP has buckets
    from the start, which are the gradients of the last micro-batch only. FSDP shards the sum, not before.
    """
    whole = FLOAT32 * parameter_count(settings.model)
    accumulates = sizes_of(settings, ranks).micro_steps > 1 or settings.hardware.cuda_graphs
    if settings.hardware.is_sharded(settings.model, ranks):
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


# ---------------------------------------------------------------------- what helps


def refusal(settings: Settings, ranks: int, estimate: Memory) -> str:
    """Why the run does not fit, in numbers, and what would."""
    largest = sorted(estimate.parts.items(), key=lambda part: -part[1])[:4]
    return (
        f"this run needs about {gib(estimate.total)} on each device, and there are "
        f"{gib(estimate.available)} ({estimate.device}).\n"
        f"  it needs: {', '.join(f'{name} {gib(size)}' for name, size in largest)}, …\n"
        f"  largest micro-batch that fits: {fitting(settings, ranks, estimate)}\n"
        "`plan=true` prints all parts; hardware.check_memory=false trains anyway"
    )


def advise_smaller_batch(settings: Settings, ranks: int) -> str:
    """What helps if a GPU's memory runs out while it trains."""
    micro_batch = sizes_of(settings, ranks).micro_batch
    return (
        f"with hardware.micro_batch={micro_batch} sequences of {settings.context} tokens. Use "
        f"hardware.micro_batch={max(micro_batch // 2, 1)}: the tokens per step, and so the training, stay "
        "the same"
    )


def fitting(settings: Settings, ranks: int, estimate: Memory) -> str:
    """The simplest change that trains the same and fits: its largest micro-batch and the memory it takes."""
    hardware = settings.hardware
    kinds: list[dict[str, int | str]] = [{}, {"recompute": "blocks"}]
    if hardware.context_parallel == 1:
        more = range(ranks + 1, torch.cuda.device_count() + 1)
        kinds += [{"devices": n, "parallel": "fsdp", "recompute": "blocks"} for n in more]
    for changes in kinds:
        changed = replace(settings, hardware=replace(hardware, **changes))
        if largest := largest_micro_batch(changed, changes.get("devices", ranks), estimate):
            micro_batch, needed = largest
            listed = {**changes, "micro_batch": micro_batch}
            return " ".join(f"hardware.{name}={value}" for name, value in listed.items()) + f": {gib(needed)}"
    return "none; use a smaller model or more devices"


def largest_micro_batch(settings: Settings, ranks: int, estimate: Memory) -> tuple[int, int] | None:
    """The largest micro-batch that a step can be made of and that fits, and its memory; None if none does."""
    sequences, remainder = divmod(settings.tokens_per_step, settings.context * groups(settings, ranks))
    for n in range(sequences, 0, -1) if remainder == 0 else ():
        if sequences % n == 0:
            hardware = replace(settings.hardware, micro_batch=n)
            found = replace(estimate, parts=memory_parts(replace(settings, hardware=hardware), ranks))
            if not found.is_tight:
                return n, found.total
    return None


# ---------------------------------------------------------------------- time

#: MFU of llama_325m on an H200 at context 4096, by attention.backend: results/speed/bench_training.json.
MFU_ON_H200 = {"fpa": 0.471, "sagebwd": 0.465}
#: For any other GPU: an assumption.
ASSUMED_MFU = 0.4
#: Speed of several GPUs relative to that many single ones, two to four H200s: results/speed/bench_gpus.json.
SCALING = {"ddp": 0.96, "fsdp": 0.90}

#: Passes over the text beyond which a run must say how long it is.
MOST_PASSES = 100


class Speed(NamedTuple):
    """Tokens per second of all devices together; None if nothing is known. basis: where that is from."""

    tokens_per_second: float | None
    basis: str


def speed(settings: Settings, ranks: int) -> Speed:
    """How fast these settings train."""
    if settings.hardware.device == "cpu":
        return Speed(None, GPUS_ONLY)
    if settings.hardware.dtype == "float32":
        return Speed(None, "not known in float32 on a GPU")
    here = torch.cuda.is_available()
    name = settings.gpu or (torch.cuda.get_device_name() if here else "H200")
    peak = settings.hardware.peak_tflops or peak_of(name)
    if peak is None:
        return Speed(None, f"not known for {name}; set hardware.peak_tflops to its dense bfloat16 peak")
    measured = MFU_ON_H200.get(settings.attention.backend) if peak == peak_of("NVIDIA H200") else None
    mfu = measured or ASSUMED_MFU
    parallel = "fsdp" if settings.hardware.is_sharded(settings.model, ranks) else "ddp"
    scaling = SCALING[parallel] if ranks > 1 else 1.0
    flops = flops_per_token(settings.model, settings.context)
    where = "measured with the 325M model" if measured else "assumed"
    of = f"{peak:g} TFLOP/s" if settings.hardware.peak_tflops else f"the {peak:g} TFLOP/s of {name}"
    return Speed(
        mfu * peak * 1e12 * ranks * scaling / flops,
        f"{mfu:.1%} of {of}, {where}; small models and passes are slower",
    )


def run_seconds(settings: Settings, sizes: Sizes, tokens_per_second: float) -> float:
    """Seconds of all steps and evaluations, without start, probe and checkpoints."""
    evaluations = -(-sizes.steps // settings.eval_every)
    sets = len(training_texts(settings.data)) + len(settings.data.validation)
    forward = 1 / 3  # of a step, which has a backward, too
    evaluated = evaluations * sets * settings.eval_sequences * settings.context * forward
    return (sizes.steps * sizes.tokens_per_step + evaluated) / tokens_per_second


def report_length(settings: Settings, ranks: int, passes: float) -> None:
    """Log how long the run is. Raises TrainingError if nobody chose that, and it is too long for the text.

    passes: of the whole run over its text.
    """
    sizes, rate = sizes_of(settings, ranks), speed(settings, ranks).tokens_per_second
    tokens = sizes.steps * sizes.tokens_per_step
    length = f"{tokens:,} tokens, {number_of(passes)} passes over the text"
    if rate is not None:  # starting a short run takes longer than its steps
        seconds = run_seconds(settings, sizes, rate)
        length += f", about {duration(seconds)}" if seconds >= 60 else ", minutes at most"
    if is_too_long(settings, passes):
        raise TrainingError(
            f"no length is set, and the paper's would be {length}; use steps=N, "
            f"total_tokens={round(10 * tokens / passes)} for 10 passes or total_tokens={PAPER_TOKENS} for all"
        )
    log.info("length: %s", length)


def is_too_long(settings: Settings, passes: float) -> bool:
    """Whether no length is set, and the paper's is too long for the text."""
    return settings.steps is None and settings.total_tokens is None and passes > MOST_PASSES


# ---------------------------------------------------------------------- GPUs by their names


class Gpu(NamedTuple):
    """A GPU by its datasheet."""

    tflops: float  # peak of dense bf16 matrix products, without sparsity
    gib: float  # memory that PyTorch finds there, to a percent; of an A100 the larger one


GPUS = {
    "A100": Gpu(312.0, 79.2),
    "H100": Gpu(989.0, 79.2),  # SXM
    "H100 NVL": Gpu(835.0, 93.1),
    "H100 PCIe": Gpu(756.0, 79.2),
    "H200": Gpu(989.0, 139.8),  # SXM
    "H200 NVL": Gpu(835.0, 139.8),
    "B200": Gpu(2250.0, 178.3),
    "L40S": Gpu(362.0, 44.4),
    "RTX 3090": Gpu(71.0, 23.6),
    "RTX 4090": Gpu(165.2, 23.6),
    "RTX 5090": Gpu(209.5, 31.4),
}

#: Words in the driver's names of GPUs that do not change the peak: the maker, the socket and the memory.
NEUTRAL = re.compile(r"NVIDIA|GeForce|SXM\d?|PCIe?|\d+GB|HBM\d", re.IGNORECASE)


def peak_tflops(device: torch.device) -> float | None:
    """Peak of the device in dense bf16, in TFLOP/s, if it is a known GPU, else None."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Peak of a GPU by the driver's name for it; None for one that is not known."""
    known = known_gpu(name)
    return GPUS[known].tflops if known else None


def memory_of(name: str) -> int:
    """Bytes of a known GPU, or fewer if its name says so: "A100 40GB"."""
    said = re.search(r"(\d+)GB", name.upper())
    gib = min(GPUS[known_gpu(name)].gib, 0.99 * int(said[1]) if said else math.inf)
    return int(gib * 2**30)


def known_gpu(name: str) -> str | None:
    """The longest name of GPUS within the driver's, or a user's, name of a GPU.

    None if there is no such GPU, or the name has a word of unknown meaning, such as "Laptop".
    """
    words = set(re.split(r"[ -]", name.upper()))
    inside = [known for known in GPUS if {*known.upper().split()} <= words]
    if not inside:
        return None
    longest = max(inside, key=len)
    return longest if all(map(NEUTRAL.fullmatch, words - {*longest.upper().split()})) else None


# ---------------------------------------------------------------------- the table


def describe(settings: Settings, ranks: int) -> str:
    """The table of `plan=true`. Reads what is on disk of the data, and writes nothing."""
    sizes = check(settings, ranks)
    if settings.gpu and known_gpu(settings.gpu) is None:
        raise SettingsError(f"gpu={settings.gpu} is not known; choose one of {', '.join(GPUS)}")
    sizes = replace(sizes, steps=max(0, sizes.steps - (settings.branch_step or 0)))  # those to be done
    sections = (
        _run(settings, sizes, ranks),
        _text(settings, sizes),
        _memory(settings, ranks),
        _time(settings, sizes, ranks),
        _disk(settings, sizes),
    )
    return "\n\n".join("\n".join(f"{name:<44}{it}".rstrip() for name, it in rows) for rows in sections)


Rows = Iterator[tuple[str, str]]


def _run(settings: Settings, sizes: Sizes, ranks: int) -> Rows:
    yield "parameters", f"{parameter_count(settings.model):,}"
    yield "steps", f"{sizes.steps:,}{f' after step {settings.branch_step:,}' if settings.branch_step else ''}"
    yield (
        "tokens per step",
        f"{sizes.tokens_per_step:,} = {sizes.micro_steps:,} micro-batches × {sizes.micro_batch} "
        f"sequences × {settings.context:,} tokens × {groups(settings, ranks)} {unit_of(settings)}",
    )
    yield "tokens", f"{sizes.steps * sizes.tokens_per_step:,}"


def _text(settings: Settings, sizes: Sizes) -> Rows:
    texts = training_texts(settings.data)
    for text in texts:
        name = f"text {text.name}" if text.name else "text"
        try:
            manifest = text.manifest()
        except (ValueError, OSError) as error:
            yield name, str(error)
            continue
        if manifest is None:
            yield name, "not prepared yet; its tokens are counted then"
            continue
        tokens = manifest.tokens("train")
        passes = sizes.steps * sizes.tokens_per_step / tokens
        told = f"{number_of(passes)} passes{', too many: set total_tokens' * is_too_long(settings, passes)}"
        yield name, f"{tokens:,} training tokens are prepared" + ("" if len(texts) > 1 else f": {told}")


def _memory(settings: Settings, ranks: int) -> Rows:
    if settings.hardware.device == "cpu":
        yield "memory per device", GPUS_ONLY
        return
    estimate = memory(settings, ranks)
    yield "memory per device", ""
    for name, size in estimate.parts.items():
        yield f"  {name}", gib(size)
    available = "" if estimate.available is None else f" of {gib(estimate.available)}"
    verdict = ": does not fit" if estimate.is_hopeless else ": may not fit" if estimate.is_tight else ""
    yield "  total", f"{gib(estimate.total)}{available} ({estimate.device}){verdict}"
    if estimate.available is not None:
        yield "  largest micro-batch that fits", fitting(settings, ranks, estimate)
    copy = gib(checkpoint_copy(settings, ranks))
    yield "  and of CPU memory", f"{copy}, a copy for checkpoints in the background"


def _time(settings: Settings, sizes: Sizes, ranks: int) -> Rows:
    found = speed(settings, ranks)
    if found.tokens_per_second is None:
        yield "time", found.basis
        return
    yield "time per step", duration(sizes.tokens_per_step / found.tokens_per_second)
    yield "time of the run", duration(run_seconds(settings, sizes, found.tokens_per_second))
    yield "tokens per second", f"{found.tokens_per_second:,.0f} ({found.basis})"


def _disk(settings: Settings, sizes: Sizes) -> Rows:
    state = state_bytes(settings)
    saved = -(-sizes.steps // settings.checkpoint_every)
    milestones = sizes.steps // settings.milestone_every if settings.milestone_every else 0
    # While a checkpoint is written the oldest is still there.
    kept = min(saved, settings.keep_checkpoints + 1) + milestones
    yield "disk", ""
    yield "  checkpoints", f"{gib(kept * state)}, {kept} of {gib(state)}"
    yield "  weights", gib(4 * parameter_count(settings.model))
    free = _free(settings)
    yield "  free for the run", f"{gib(free)}{': not enough' if free < kept * state else ''}"


def check_disk(settings: Settings) -> None:
    """Raise TrainingError if not even one checkpoint fits on the disk that a run saves them to."""
    needed, free = state_bytes(settings), _free(settings)
    if free < needed:
        raise TrainingError(
            f"the disk is too full: a checkpoint takes {gib(needed)}, and {settings.run_dir} has {gib(free)} "
            "left. Make room, or set run_dir=… to another disk"
        )


def _free(settings: Settings) -> int:
    """Bytes that are free where the run saves, which may be behind a link: of the nearest folder there is."""
    path = Path(settings.run_dir or settings.runs_dir, "checkpoints").resolve()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


def duration(seconds: float) -> str:
    """Seconds as text with the unit that suits them."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def number_of(passes: float) -> str:
    return f"{passes:,.0f}" if passes >= MOST_PASSES else f"{passes:.3g}"


def gib(size: float) -> str:
    """Bytes as text in GiB, small ones in MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
