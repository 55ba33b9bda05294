"""Time and disk of a run before its first step, and the table that `plan=true` prints."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data import recipe
from data.recipe import Recipe
from data.settings import DataSettings
from model.config import parameter_count
from trainer.estimate import Memory, checkpoint_copy, gib, memory, state_bytes
from trainer.machine import matmul_flops
from trainer.plan import Plan, is_sharded, make_plan
from trainer.settings import Settings
from trainer.throughput import attention_flops_per_token, flops_per_token, peak_of, peak_tflops

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
    measured = MFU_ON_H200.get(settings.attention["backend"]) if peak == peak_of("NVIDIA H200") else None
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
    in_reference = attention if settings.attention["backend"] == "sagebwd" else 0.0
    seconds = ((flops - in_reference) / CPU_SHARE + in_reference / CPU_SHARE_OF_REFERENCE) / rate
    return Speed(
        1 / seconds,
        f"from a matrix product at {rate / 1e9:.0f} GFLOP/s, measured now; too fast for tiny models",
    )


def run_seconds(settings: Settings, plan: Plan, tokens_per_second: float) -> float:
    """Seconds of all steps and evaluations, without start, probe and checkpoints."""
    evaluations = -(-plan.steps // settings.eval_every)
    evaluated = evaluations * _evaluated_sequences(settings) * settings.context * FORWARD
    return (plan.steps * plan.tokens_per_step + evaluated) / tokens_per_second


def _evaluated_sequences(settings: Settings) -> int:
    """Sequences of an evaluation: of a prepared text no more than it holds out."""
    wanted = settings.eval_sequences
    sequences = wanted * len(settings.data.validation)
    for text in _texts(settings.data).values():
        try:
            manifest = text.manifest()
        except (ValueError, OSError):  # reported by _text
            manifest = None
        held_out = wanted if manifest is None else manifest.tokens("val") // settings.context
        sequences += min(wanted, held_out)
    return sequences


# ---------------------------------------------------------------------- the table


def describe(settings: Settings, ranks: int) -> str:
    """The table of `plan=true`. Reads what is on disk of the data, and writes nothing."""
    plan, estimate = make_plan(settings, ranks), memory(settings, ranks)
    sections = (
        _run(settings, plan, ranks),
        _text(settings.data, plan),
        _memory(settings, estimate, ranks),
        _time(settings, plan, ranks),
        _disk(settings, plan),
    )
    return "\n\n".join("\n".join(_aligned([*rows])) for rows in sections)


Rows = Iterator[tuple[str, str]]


def _run(settings: Settings, plan: Plan, ranks: int) -> Rows:
    yield "parameters", f"{parameter_count(settings.model):,}"
    yield "steps", f"{plan.steps:,}"
    yield (
        "tokens per step",
        f"{plan.tokens_per_step:,} = {plan.micro_steps:,} micro-batches × {settings.hardware.micro_batch} "
        f"sequences × {settings.context:,} tokens × {ranks} device(s)",
    )
    yield "tokens", f"{plan.steps * plan.tokens_per_step:,}"


def _texts(settings: DataSettings) -> dict[str, Recipe]:
    """What is trained on, by name: one text, or those of a mixture."""
    return {f"text {one.name or ''}".strip(): one for one in recipe.training_texts(settings)}


def _text(settings: DataSettings, plan: Plan) -> Rows:
    texts = _texts(settings)
    for name, text in texts.items():
        try:
            manifest = text.manifest()
        except (ValueError, OSError) as error:
            yield name, str(error)
            continue
        if manifest is None:
            yield name, "not prepared yet; its tokens are counted then"
            continue
        tokens = manifest.tokens("train")
        passes = "" if len(texts) > 1 else f": {plan.steps * plan.tokens_per_step / tokens:.3g} passes"
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


def _time(settings: Settings, plan: Plan, ranks: int) -> Rows:
    found = speed(settings, ranks)
    if found.tokens_per_second is None:
        yield "time", found.basis
        return
    yield "time per step", duration(plan.tokens_per_step / found.tokens_per_second)
    yield "time of the run", duration(run_seconds(settings, plan, found.tokens_per_second))
    yield "tokens per second", f"{found.tokens_per_second:,.0f} ({found.basis})"


def _disk(settings: Settings, plan: Plan) -> Rows:
    state = state_bytes(settings)
    saved = -(-plan.steps // settings.checkpoint_every)
    milestones = plan.steps // settings.milestone_every if settings.milestone_every else 0
    # While a checkpoint is written the oldest is still there.
    kept = min(saved, settings.keep_checkpoints + 1) + milestones
    yield "disk", ""
    yield "  checkpoints", f"{gib(kept * state)}, {kept} of {gib(state)}"
    yield "  weights", gib(4 * parameter_count(settings.model))
    free = shutil.disk_usage(_existing(Path(settings.run_dir or settings.runs_dir))).free
    yield "  free for the run", f"{gib(free)}{': not enough' if free < kept * state else ''}"
    stored = sum(map(_stored_bytes, recipe.read(settings.data)))
    if stored:
        yield "  tokens", f"{gib(stored)}, prepared"


def _stored_bytes(text: Recipe) -> int:
    """Bytes of the prepared tokens of a text; 0 if there are none."""
    try:
        manifest = text.manifest()
    except (ValueError, OSError):
        return 0  # reported by _text
    if manifest is None:
        return 0
    return sum(map(manifest.tokens, manifest.shards)) * manifest.ids.itemsize


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _aligned(rows: list[tuple[str, str]]) -> Iterator[str]:
    for name, value in rows:
        yield f"{name:<44}{value}".rstrip()


def duration(seconds: float) -> str:
    """Seconds as text with the unit that suits them."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
