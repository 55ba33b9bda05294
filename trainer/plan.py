"""Time and disk of a run before its first step, and the table that `plan=true` prints."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.recipe import training_texts
from data.settings import DataSettings
from model.config import attention_flops_per_token, flops_per_token, parameter_count
from trainer.checks import Sizes, check, groups, unit_of
from trainer.distributed import is_sharded
from trainer.errors import TrainingError
from trainer.estimate import Memory, checkpoint_copy, gib, memory, state_bytes
from trainer.machine import matmul_flops, peak_of, peak_tflops
from trainer.settings import Settings

#: MFU of llama_325m on an H200 at context 4096, by attention.backend: results/bench_training.json.
MFU_ON_H200 = {"fpa": 0.471, "sagebwd": 0.465}
#: For any other GPU: an assumption.
ASSUMED_MFU = 0.4
#: Speed of several GPUs relative to that many single ones, two to four H200s: results/bench_gpus.json.
SCALING = {"ddp": 0.96, "fsdp": 0.90}

#: On a CPU, speed of a step relative to a large float32 matrix product, and of the reference of SageBwd's
#: attention. Of steps of llama_tiny and llama_35m on two cores; that of a tiny step is lower.
CPU_SHARE, CPU_SHARE_OF_REFERENCE = 0.55, 0.1

#: Evaluation is a forward without a backward.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all devices together; None if nothing is known. basis: where that is from."""

    tokens_per_second: float | None
    basis: str


def speed(settings: Settings, ranks: int) -> Speed:
    """How fast these settings train. On a CPU, this measures for a twentieth of a second."""
    if settings.hardware.device == "cpu":
        return _cpu_speed(settings)
    if settings.hardware.dtype == "float32":
        return Speed(None, "not known in float32 on a GPU")
    here = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if here else "NVIDIA H200"
    peak = settings.hardware.peak_tflops or (peak_tflops(torch.device("cuda", 0)) if here else peak_of(name))
    if peak is None:
        return Speed(None, f"not known for {name}; set hardware.peak_tflops to its dense bfloat16 peak")
    measured = MFU_ON_H200.get(settings.attention.backend) if peak == peak_of("NVIDIA H200") else None
    mfu = measured or ASSUMED_MFU
    parallel = "fsdp" if is_sharded(settings.model, settings.hardware, ranks) else "ddp"
    scaling = SCALING[parallel] if ranks > 1 else 1.0
    flops = flops_per_token(settings.model, settings.context)
    where = "measured with the 325M model" if measured else "assumed"
    of = f"{peak:g} TFLOP/s" if here or settings.hardware.peak_tflops else f"an H200's {peak:g} TFLOP/s"
    return Speed(
        mfu * peak * 1e12 * ranks * scaling / flops,
        f"{mfu:.1%} of {of}, {where}; small models and passes are slower",
    )


def _cpu_speed(settings: Settings) -> Speed:
    rate = matmul_flops(torch.float32)
    flops = flops_per_token(settings.model, settings.context)
    attention = attention_flops_per_token(settings.model, settings.context)
    in_reference = attention if settings.attention.backend == "sagebwd" else 0.0
    seconds = ((flops - in_reference) / CPU_SHARE + in_reference / CPU_SHARE_OF_REFERENCE) / rate
    return Speed(
        1 / seconds,
        f"from a matrix product at {rate / 1e9:.0f} GFLOP/s, measured now; too fast for tiny models",
    )


def run_seconds(settings: Settings, sizes: Sizes, tokens_per_second: float) -> float:
    """Seconds of all steps and evaluations, without start, probe and checkpoints."""
    evaluations = -(-sizes.steps // settings.eval_every)
    sets = len(training_texts(settings.data)) + len(settings.data.validation)
    evaluated = evaluations * sets * settings.eval_sequences * settings.context * FORWARD
    return (sizes.steps * sizes.tokens_per_step + evaluated) / tokens_per_second


# ---------------------------------------------------------------------- the table


def describe(settings: Settings, ranks: int) -> str:
    """The table of `plan=true`. Reads what is on disk of the data, and writes nothing."""
    sizes, estimate = check(settings, ranks), memory(settings, ranks)
    sections = (
        _run(settings, sizes, ranks),
        _text(settings.data, sizes),
        _memory(settings, estimate, ranks),
        _time(settings, sizes, ranks),
        _disk(settings, sizes),
    )
    return "\n\n".join("\n".join(_aligned([*rows])) for rows in sections)


Rows = Iterator[tuple[str, str]]


def _run(settings: Settings, sizes: Sizes, ranks: int) -> Rows:
    yield "parameters", f"{parameter_count(settings.model):,}"
    yield "steps", f"{sizes.steps:,}"
    yield (
        "tokens per step",
        f"{sizes.tokens_per_step:,} = {sizes.micro_steps:,} micro-batches × {settings.hardware.micro_batch} "
        f"sequences × {settings.context:,} tokens × {groups(settings, ranks)} {unit_of(settings)}",
    )
    yield "tokens", f"{sizes.steps * sizes.tokens_per_step:,}"


def _text(settings: DataSettings, sizes: Sizes) -> Rows:
    texts = training_texts(settings)
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
        passes = "" if len(texts) > 1 else f": {sizes.steps * sizes.tokens_per_step / tokens:.3g} passes"
        yield name, f"{tokens:,} training tokens are prepared{passes}"


def _memory(settings: Settings, estimate: Memory, ranks: int) -> Rows:
    yield "memory per device", ""
    for name, size in estimate.parts.items():
        yield f"  {name}", gib(size)
    available = "" if estimate.available is None else f" of {gib(estimate.available)}"
    verdict = ": does not fit" if estimate.is_hopeless else ": may not fit" if estimate.is_tight else ""
    yield "  total", f"{gib(estimate.total)}{available} ({estimate.device}){verdict}"
    copy = checkpoint_copy(settings, ranks)
    if settings.hardware.device == "cuda" and copy:
        yield "  and of CPU memory", f"{gib(copy)}, a copy for checkpoints in the background"


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


def _aligned(rows: list[tuple[str, str]]) -> Iterator[str]:
    for name, value in rows:
        yield f"{name:<44}{value}".rstrip()


def duration(seconds: float) -> str:
    """Seconds as text with the unit that suits them."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
