"""Checks settings against each other and works out what follows from them.

Runs in milliseconds, before any data is read, any model is built or anything is compiled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import data.settings
import model.config
import model.huggingface
from model import backends
from trainer.errors import SettingsError
from trainer.settings import Settings


@dataclass(frozen=True)
class Plan:
    """What the settings amount to."""

    steps: int  # optimizer steps of the run
    tokens_per_step: int
    sequences_per_step: int
    micro_steps: int  # forward-backward passes per device and step (gradient accumulation)


def make_plan(settings: Settings, ranks: int) -> Plan:
    """The plan of a run on `ranks` devices.

    Raises SettingsError with everything that is wrong, each with its mend.
    """
    problems: list[str] = []

    def note(check: Callable[..., object], *arguments: object) -> None:
        try:
            check(*arguments)
        except ValueError as error:
            problems.append(str(error))

    note(model.config.check, settings.model)
    note(data.settings.check, settings.data)
    note(_check_attention, settings)
    for check in (_check_ranges, _check_hardware, _check_context, _check_vocabulary, _check_schedule):
        note(check, settings)
    for check in (_check_probe, _check_spike, _check_init_from):
        note(check, settings)
    note(_check_tokens_per_step, settings, ranks)
    note(_check_cuda_graphs, settings, ranks)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(f"these settings cannot be trained:\n{listed}")

    tokens = tokens_per_step(settings)
    return Plan(
        steps=_steps(settings),
        tokens_per_step=tokens,
        sequences_per_step=tokens // settings.context,
        micro_steps=tokens // (settings.context * settings.hardware.micro_batch * ranks),
    )


def tokens_per_step(settings: Settings) -> int:
    """Tokens of all devices together that make up one optimizer step."""
    return settings.tps.tokens_per_step // settings.tps.divide_by


def _steps(settings: Settings) -> int:
    if settings.steps is not None:
        return settings.steps
    return settings.total_tokens * settings.tps.divide_by // settings.tps.tokens_per_step


def _check_attention(settings: Settings) -> None:
    backends.load(settings.attention).check(settings.attention)


def _check_ranges(settings: Settings) -> None:
    """Single values that make no sense by themselves."""
    positive = {
        "context": settings.context,
        "total_tokens": settings.total_tokens,
        "log_every": settings.log_every,
        "eval_every": settings.eval_every,
        "eval_sequences": settings.eval_sequences,
        "checkpoint_every": settings.checkpoint_every,
        "keep_checkpoints": settings.keep_checkpoints,
        "tps.tokens_per_step": settings.tps.tokens_per_step,
        "tps.divide_by": settings.tps.divide_by,
        "hardware.micro_batch": settings.hardware.micro_batch,
        "hardware.devices": settings.hardware.devices,
        "hardware.timeout_s": settings.hardware.timeout_s,
        "optimizer.lr": settings.optimizer.lr,
        "optimizer.eps": settings.optimizer.eps,
        "optimizer.grad_clip": settings.optimizer.grad_clip,
    }
    if settings.steps is not None:
        positive["steps"] = settings.steps
    if settings.milestone_every is not None:
        positive["milestone_every"] = settings.milestone_every
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be greater than zero")
    for name, value in (
        ("tps.warmup_steps", settings.tps.warmup_steps),
        ("sample_tokens", settings.sample_tokens),
    ):
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative; 0 turns it off")
    if settings.milestone_every is not None and settings.milestone_every % settings.checkpoint_every:
        multiple = -(-settings.milestone_every // settings.checkpoint_every) * settings.checkpoint_every
        raise ValueError(
            f"milestone_every={settings.milestone_every} must be a multiple of checkpoint_every="
            f"{settings.checkpoint_every}, or most milestones are never saved; use milestone_every={multiple}"
        )
    if settings.sample_tokens and not settings.sample_prompt:
        raise ValueError("sample_prompt is empty; give the sample a beginning, or use sample_tokens=0")
    for name, value in (("beta1", settings.optimizer.beta1), ("beta2", settings.optimizer.beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"optimizer.{name}={value} must be at least 0 and below 1; usual is 0.9 or 0.95")
    if settings.optimizer.weight_decay < 0:
        raise ValueError(f"optimizer.weight_decay={settings.optimizer.weight_decay} must not be negative")
    if not 0 <= settings.optimizer.min_lr_ratio <= 1:
        raise ValueError(
            f"optimizer.min_lr_ratio={settings.optimizer.min_lr_ratio} must lie between 0 and 1: "
            "it is the final learning rate as a fraction of optimizer.lr"
        )


def _check_hardware(settings: Settings) -> None:
    hardware = settings.hardware
    _check_choice("hardware.dtype", hardware.dtype, ("bfloat16", "float32"))
    _check_choice("hardware.device", hardware.device, ("cuda", "cpu"))
    _check_choice("hardware.parallel", hardware.parallel, ("auto", "ddp", "fsdp"))
    _check_choice("hardware.recompute", hardware.recompute, ("none", "blocks"))
    _check_choice("optimizer.schedule", settings.optimizer.schedule, ("cosine", "linear"))
    _check_choice("logger.wandb", settings.logger.wandb, ("auto", "online", "offline", "off"))
    if hardware.deterministic and settings.attention.sdpa == "cudnn":
        raise ValueError(
            "hardware.deterministic=true, but the backward of attention.sdpa=cudnn is not deterministic; use "
            "attention.sdpa=flash or null"
        )
    if hardware.device == "cuda":
        available = torch.cuda.device_count()
        if available == 0:
            raise ValueError(
                "hardware.device=cuda, but PyTorch sees no CUDA GPU here. Use hardware=cpu for small models "
                "(python train.py experiment=quickstart is one), or install a CUDA build of PyTorch"
            )
        if hardware.devices > available:
            raise ValueError(
                f"hardware.devices={hardware.devices}, but this machine has {available} GPU(s); "
                f"use hardware.devices={available}"
            )


def _check_cuda_graphs(settings: Settings, ranks: int) -> None:
    hardware = settings.hardware
    if hardware.cuda_graphs and not (hardware.device == "cuda" and hardware.compile and ranks == 1):
        raise ValueError(
            "hardware.cuda_graphs=true replays, on one GPU, what hardware.compile=true compiled. Here are "
            f"hardware.device={hardware.device}, hardware.compile={str(hardware.compile).lower()} "
            f"and {ranks} device(s); use hardware.cuda_graphs=false"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value} is unknown; choose one of {', '.join(choices)}")


def _check_context(settings: Settings) -> None:
    if settings.context > settings.model.max_context:
        raise ValueError(
            f"context={settings.context} is longer than the model's rotary position table, "
            f"model.max_context={settings.model.max_context}; raise the latter or use "
            f"context={settings.model.max_context}"
        )


def _check_vocabulary(settings: Settings) -> None:
    needed = data.settings.vocabulary_size(settings.data.tokenizer)
    if settings.model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={settings.model.vocab_size} is smaller than the {needed} tokens of "
            f"data.tokenizer={settings.data.tokenizer}; use model.vocab_size={-(-needed // 64) * 64} "
            "(padded to a multiple of 64 for speed)"
        )


def _check_schedule(settings: Settings) -> None:
    if settings.tps.divide_by < 1 or settings.tps.tokens_per_step < 1:
        return  # named by _check_ranges
    steps = _steps(settings)
    if steps < 1:
        raise ValueError(
            f"total_tokens={settings.total_tokens} is less than one step of "
            f"{settings.tps.tokens_per_step // settings.tps.divide_by} tokens; raise it, or set steps"
        )
    if settings.tps.warmup_steps >= steps:
        raise ValueError(
            f"tps.warmup_steps={settings.tps.warmup_steps} leaves nothing of a run of {steps} steps; "
            f"use tps.warmup_steps={steps // 10}, or train longer"
        )


def _check_probe(settings: Settings) -> None:
    probe, last = settings.probe, settings.model.n_layers - 1
    if probe.every < 0:
        raise ValueError(f"probe.every={probe.every} must not be negative; 0 turns the probe off")
    if probe.layers is not None and not probe.layers:
        raise ValueError("probe.layers is empty; name a layer, or use probe.every=0 to turn the probe off")
    foreign = [layer for layer in probe.layers or () if not 0 <= layer <= last]
    if foreign:
        raise ValueError(
            f"probe.layers names {', '.join(map(str, foreign))}, but the model's layers are 0 to {last}; "
            f"choose among these, for instance probe.layers=[{last}]"
        )
    if not 1 <= probe.sequences <= max(settings.hardware.micro_batch, 1):
        raise ValueError(
            f"probe.sequences={probe.sequences} must be between 1 and hardware.micro_batch="
            f"{settings.hardware.micro_batch}, which is what fits in memory at a time"
        )
    if probe.alarm is not None and not probe.alarm > 0:
        raise ValueError(f"probe.alarm={probe.alarm} must be greater than zero; null never warns")


def _check_spike(settings: Settings) -> None:
    spike = settings.spike
    if spike.window < 8:
        raise ValueError(
            f"spike.window={spike.window} is too few steps to tell what is typical; use 8 or more, or "
            "spike.threshold=null to look for no spikes"
        )
    if spike.threshold is not None and not spike.threshold > 0:
        raise ValueError(f"spike.threshold={spike.threshold} must be greater than zero; null: no spikes")
    if spike.skip and spike.threshold is None:
        raise ValueError(
            "spike.skip=true, but spike.threshold=null finds no spikes; set spike.threshold=6, or "
            "spike.skip=false"
        )


def _check_init_from(settings: Settings) -> None:
    """The folder's config.json alone; its weights are read when the model is built."""
    if settings.init_from is None:
        return
    try:
        stored = model.huggingface.read_config(settings.init_from)
    except OSError as error:
        absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
        problem = "there is no" if absent else f"{error.strerror}:"
        raise ValueError(
            f"init_from={settings.init_from}: {problem} {model.huggingface.CONFIG_FILE}; give the weights/ "
            "folder of a finished run, or a model in the Hugging Face layout"
        ) from None
    except ValueError as error:
        raise ValueError(f"init_from={settings.init_from}: {error}") from None
    wrong = model.config.differences(stored, settings.model)
    if wrong:
        raise ValueError(
            f"init_from={settings.init_from} holds a model of another shape; use "
            + " ".join(f"model.{name}={theirs}" for name, theirs, _ in wrong)
            + " (here "
            + ", ".join(f"{name}={ours}" for name, _, ours in wrong)
            + ")"
        )


def _check_tokens_per_step(settings: Settings, ranks: int) -> None:
    tps, hardware = settings.tps, settings.hardware
    if min(tps.divide_by, tps.tokens_per_step, settings.context, hardware.micro_batch) < 1:
        return  # named by _check_ranges
    if tps.tokens_per_step % tps.divide_by:
        raise ValueError(
            f"tps.tokens_per_step={tps.tokens_per_step} is not a multiple of tps.divide_by={tps.divide_by}; "
            f"use tps.tokens_per_step={tps.tokens_per_step // tps.divide_by * tps.divide_by or tps.divide_by}"
        )
    wanted = tps.tokens_per_step // tps.divide_by
    unit = hardware.micro_batch * settings.context * ranks
    if wanted % unit == 0:
        return
    nearest = sorted({max(wanted // unit, 1) * unit, (wanted // unit + 1) * unit})
    mends = ["tps.tokens_per_step=" + " or ".join(str(tokens * tps.divide_by) for tokens in nearest)]
    per_rank, remainder = divmod(wanted, settings.context * ranks)
    if remainder == 0 and per_rank > 0:
        divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
        fitting = sorted(sorted(divisors, key=lambda n: abs(n - hardware.micro_batch))[:2])
        mends.append("hardware.micro_batch=" + " or ".join(map(str, fitting)))
    raise ValueError(
        f"{wanted} tokens per step cannot be made of hardware.micro_batch={hardware.micro_batch} sequences × "
        f"context={settings.context} tokens × {ranks} device(s) = {unit} tokens. "
        f"Nearest that can: {'; or '.join(mends)}"
    )
