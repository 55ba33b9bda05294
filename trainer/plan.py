"""Checks settings against each other and works out what follows from them.

Runs in milliseconds, before any data is read, any model is built or anything is compiled.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

import data.recipe
import data.settings
import data.tokenizers
import model.config
import model.huggingface
from model import backends
from trainer import optimizer, profiling, schedule
from trainer.errors import SettingsError
from trainer.seal import checkpoints_in
from trainer.settings import HardwareSettings, Settings
from trainer.tensorboard import MISSING_PACKAGE

Problems = Iterator[str]

SEEDS = 2**63  # from 0 to below this; PyTorch takes -1 for 2**64 - 1
LONGEST_TIMEOUT_S = 365 * 86400
MODELS = Path(__file__).resolve().parents[1] / "configs" / "model"
FEW = 3  # settings that a message lists; for more it names a model
SHARD_FROM = 1_000_000_000  # parameters; at 16 bytes each a copy fills a fifth of an 80 GB GPU


@dataclass(frozen=True)
class Plan:
    """What the settings amount to."""

    steps: int  # optimizer steps of the run
    tokens_per_step: int
    sequences_per_step: int
    micro_steps: int  # forward-backward passes per device and step (gradient accumulation)


def make_plan(settings: Settings, ranks: int) -> Plan:
    """The plan of a run on `ranks` devices.

    Raises SettingsError that lists every problem, each with its fix.
    """
    problems = [problem for check in CHECKS for problem in check(settings, ranks)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(f"these settings cannot be trained:\n{listed}")

    tokens = tokens_per_step(settings)
    return Plan(
        steps=steps_of(settings),
        tokens_per_step=tokens,
        sequences_per_step=tokens // settings.context,
        micro_steps=tokens // (settings.context * settings.hardware.micro_batch * ranks),
    )


def tokens_per_step(settings: Settings) -> int:
    """Tokens of all devices together that make up one optimizer step."""
    return settings.tps.tokens_per_step // settings.tps.divide_by


def is_sharded(config: model.config.LlamaConfig, hardware: HardwareSettings, ranks: int) -> bool:
    """Whether weights, gradients and moments are sharded: on request, and by default for large models."""
    if ranks == 1 or hardware.parallel == "ddp":
        return False
    return hardware.parallel == "fsdp" or model.config.parameter_count(config) >= SHARD_FROM


def steps_of(settings: Settings) -> int:
    """Optimizer steps of the run."""
    if settings.steps is not None:
        return settings.steps
    return settings.total_tokens * settings.tps.divide_by // settings.tps.tokens_per_step


# ---------------------------------------------------------------------- checks: each yields problems


def check_model(settings: Settings, ranks: int) -> Problems:
    yield from model.config.problems(settings.model)


def check_data(settings: Settings, ranks: int) -> Problems:
    try:
        data.recipe.read(settings.data)
    except ValueError as error:
        yield str(error)
    if settings.data.val_path and not settings.data.path:
        yield "data.path is missing: data.val_path alone is no text to train on; set data.path=FILE, too"
    if settings.data.source == data.settings.MIXTURE and settings.train_sequences is not None:
        yield (
            f"train_sequences={settings.train_sequences} has no meaning with data=mixture; use "
            "train_sequences=null"
        )


def check_attention(settings: Settings, ranks: int) -> Problems:
    try:
        backends.check(settings.attention, deterministic=settings.hardware.deterministic)
    except ValueError as error:
        yield str(error)


def check_optimizer(settings: Settings, ranks: int) -> Problems:
    yield from schedule.problems(settings.optimizer)
    yield from optimizer.problems(settings.optimizer)


def check_ranges(settings: Settings, ranks: int) -> Problems:
    """Single values that are out of range."""
    for name, value in _positive(settings).items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{name}={value} must be {'finite' if value == math.inf else 'greater than zero'}"
    for name, value in (
        ("tps.warmup_steps", settings.tps.warmup_steps),
        ("sample_tokens", settings.sample_tokens),
    ):
        if value < 0:
            yield f"{name}={value} must not be negative; 0 turns it off"
    if not 0 <= settings.seed < SEEDS:
        yield f"seed={settings.seed} must not be negative, and must be less than 2**63 = {SEEDS}"
    timeout = settings.hardware.timeout_s
    if math.isfinite(timeout) and timeout > LONGEST_TIMEOUT_S:
        yield f"hardware.timeout_s={timeout} must be at most {LONGEST_TIMEOUT_S}, a year"
    if settings.sample_tokens and not settings.sample_prompt:
        yield "sample_prompt is empty; give the sample a beginning, or use sample_tokens=0"


def _positive(settings: Settings) -> dict[str, float | None]:
    """Settings that must be greater than zero, if they are set, by name."""
    return {
        "context": settings.context,
        "train_sequences": settings.train_sequences,
        "total_tokens": settings.total_tokens,
        "steps": settings.steps,
        "log_every": settings.log_every,
        "eval_every": settings.eval_every,
        "eval_sequences": settings.eval_sequences,
        "checkpoint_every": settings.checkpoint_every,
        "keep_checkpoints": settings.keep_checkpoints,
        "milestone_every": settings.milestone_every,
        "tps.tokens_per_step": settings.tps.tokens_per_step,
        "tps.divide_by": settings.tps.divide_by,
        "hardware.micro_batch": settings.hardware.micro_batch,
        "hardware.devices": settings.hardware.devices,
        "hardware.timeout_s": settings.hardware.timeout_s,
        "hardware.peak_tflops": settings.hardware.peak_tflops,
        "optimizer.lr": settings.optimizer.lr,
        "optimizer.eps": settings.optimizer.eps,
        "optimizer.grad_clip": settings.optimizer.grad_clip,
    }


def check_places(settings: Settings, ranks: int) -> Problems:
    """Empty names are the current folder to the operating system."""
    for name, value, example in (
        ("run_dir", settings.run_dir, "run_dir=runs/NAME, or leave it out"),
        ("runs_dir", settings.runs_dir, "runs_dir=runs"),
        ("init_from", settings.init_from, "init_from=runs/NAME/weights, or leave it out"),
        ("data.root", settings.data.root, "data.root=tokens"),
    ):
        if value is not None and not value.strip():
            yield f"{name}= is empty; use {example}"


def check_choices(settings: Settings, ranks: int) -> Problems:
    """Settings with a fixed set of values."""
    hardware = settings.hardware
    for name, value, choices in (
        ("hardware.dtype", hardware.dtype, ("bfloat16", "float32")),
        ("hardware.device", hardware.device, ("cuda", "cpu")),
        ("hardware.parallel", hardware.parallel, ("auto", "ddp", "fsdp")),
        ("hardware.recompute", hardware.recompute, ("none", "blocks")),
        ("logger.wandb", settings.logger.wandb, ("auto", "online", "offline", "off")),
    ):
        if value not in choices:
            yield f"{name}={value} is unknown; choose one of {', '.join(choices)}"


def check_tensorboard(settings: Settings, ranks: int) -> Problems:
    if settings.logger.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield MISSING_PACKAGE


def check_milestones(settings: Settings, ranks: int) -> Problems:
    every, checkpoint_every = settings.milestone_every, settings.checkpoint_every
    if every is None or min(every, checkpoint_every) < 1:
        return  # off, or reported by check_ranges
    if every % checkpoint_every:
        multiple = -(-every // checkpoint_every) * checkpoint_every
        yield (
            f"milestone_every={every} must be a multiple of checkpoint_every={checkpoint_every}, or most "
            f"milestones are never saved; use milestone_every={multiple}"
        )


def check_gpus(settings: Settings, ranks: int) -> Problems:
    hardware = settings.hardware
    if hardware.device != "cuda" or settings.plan:  # a plan may be made on another machine
        return
    available = torch.cuda.device_count()
    if available == 0:
        yield (
            "hardware.device=cuda, but PyTorch sees no CUDA GPU here. Use hardware=cpu for small models "
            "(python train.py experiment=quickstart is one), or install a CUDA build of PyTorch"
        )
    elif hardware.devices > available:
        yield (
            f"hardware.devices={hardware.devices}, but this machine has {available} GPU(s); "
            f"use hardware.devices={available}"
        )


def check_cuda_graphs(settings: Settings, ranks: int) -> Problems:
    hardware = settings.hardware
    if hardware.cuda_graphs and not (hardware.device == "cuda" and hardware.compile and ranks == 1):
        yield (
            "hardware.cuda_graphs=true needs one GPU and hardware.compile=true. Here are "
            f"hardware.device={hardware.device}, hardware.compile={str(hardware.compile).lower()} "
            f"and {ranks} device(s); use hardware.cuda_graphs=false"
        )


def check_context(settings: Settings, ranks: int) -> Problems:
    if settings.context > settings.model.max_context:
        yield (
            f"context={settings.context} is longer than the model's rotary position table, "
            f"model.max_context={settings.model.max_context}; raise the latter or use "
            f"context={settings.model.max_context}"
        )


def check_vocabulary(settings: Settings, ranks: int) -> Problems:
    try:
        needed = data.tokenizers.vocabulary_size(settings.data.tokenizer)
    except ValueError:
        return  # reported by check_data
    if settings.model.vocab_size < needed:
        yield (
            f"model.vocab_size={settings.model.vocab_size} is smaller than the {needed} tokens of "
            f"data.tokenizer={settings.data.tokenizer}; use "
            + (
                f"the tokenizer that those weights were trained with: data.tokenizer={settings.init_from}"
                if settings.init_from
                else f"model.vocab_size={-(-needed // 64) * 64} (padded to a multiple of 64 for speed)"
            )
        )


def check_schedule(settings: Settings, ranks: int) -> Problems:
    tps, steps_set = settings.tps, settings.steps is not None
    if min(tps.divide_by, tps.tokens_per_step, settings.total_tokens) < 1 or (
        steps_set and settings.steps < 1
    ):
        return  # reported by check_ranges
    steps = steps_of(settings)
    if steps < 1:
        yield (
            f"total_tokens={settings.total_tokens} is less than one step of {tokens_per_step(settings)} "
            "tokens; raise it, or set steps"
        )
    else:
        yield from schedule.length_problems(settings.optimizer, steps=steps, warmup_steps=tps.warmup_steps)
        yield from profiling.problems(settings.profile, steps)


def check_probe(settings: Settings, ranks: int) -> Problems:
    probe, last = settings.probe, settings.model.n_layers - 1
    if probe.every < 0:
        yield f"probe.every={probe.every} must not be negative; 0 turns the probe off"
    if probe.layers is not None and not probe.layers:
        yield "probe.layers is empty; name a layer, or use probe.every=0 to turn the probe off"
    foreign = [layer for layer in probe.layers or () if not 0 <= layer <= last]
    if foreign and last >= 0:
        yield (
            f"probe.layers names {', '.join(map(str, foreign))}, but the model's layers are 0 to {last}; "
            f"choose among these, for instance probe.layers=[{last}]"
        )
    if not 1 <= probe.sequences <= max(settings.hardware.micro_batch, 1):
        yield (
            f"probe.sequences={probe.sequences} must be between 1 and hardware.micro_batch="
            f"{settings.hardware.micro_batch}, which is what fits in memory at a time"
        )
    if probe.alarm is not None and not probe.alarm > 0:
        yield f"probe.alarm={probe.alarm} must be greater than zero; null never warns"


def check_spike(settings: Settings, ranks: int) -> Problems:
    spike = settings.spike
    if spike.window < 8:
        yield (
            f"spike.window={spike.window} is too few steps to find the typical loss; use 8 or more, or "
            "spike.threshold=null to look for no spikes"
        )
    if spike.threshold is not None and not spike.threshold > 0:
        yield f"spike.threshold={spike.threshold} must be greater than zero; null looks for no spikes"
    if spike.skip and spike.threshold is None:
        yield (
            "spike.skip=true, but spike.threshold=null finds no spikes; set spike.threshold=6, or "
            "spike.skip=false"
        )


def check_init_from(settings: Settings, ranks: int) -> Problems:
    """The folder's config.json alone; its weights are read when the model is built."""
    if not (settings.init_from or "").strip() or _continues(settings):
        return  # not set, reported by check_places, or not needed any more
    try:
        stored = model.huggingface.read_config(settings.init_from)
    except OSError as error:
        absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
        problem = "there is no" if absent else f"{error.strerror}:"
        yield (
            f"init_from={settings.init_from}: {problem} {model.huggingface.CONFIG_FILE}; give the weights/ "
            "folder of a finished run, or a model in the Hugging Face layout"
        )
        return
    except ValueError as error:
        yield f"init_from={settings.init_from}: {error}"
        return
    wrong = model.config.differences(stored, settings.model)
    if not wrong:
        return
    problem = f"init_from={settings.init_from} holds a model of another shape; use"
    preset = _model_of_shape(stored)
    if preset and len(wrong) > FEW:
        yield f"{problem} model={preset}"
    else:
        use = " ".join(f"model.{name}={theirs}" for name, theirs, _ in wrong)
        yield f"{problem} {use} (here {', '.join(f'{name}={ours}' for name, _, ours in wrong)})"


def _model_of_shape(stored: model.config.LlamaConfig) -> str | None:
    """The option of the group `model` that has the shape of these weights."""
    for file in sorted(MODELS.glob("*.yaml")):
        if not model.config.differences(stored, model.config.LlamaConfig(**OmegaConf.load(file))):
            return file.stem
    return None


def _continues(settings: Settings) -> bool:
    """Whether the run goes on from a checkpoint, which holds all weights."""
    if settings.run_dir is None or settings.rerun_finished:
        return False
    try:
        return bool(checkpoints_in(Path(settings.run_dir) / "checkpoints"))
    except OSError:  # reported when the run's folder is opened
        return False


def check_tokens_per_step(settings: Settings, ranks: int) -> Problems:
    tps, hardware = settings.tps, settings.hardware
    if min(tps.divide_by, tps.tokens_per_step, settings.context, hardware.micro_batch, ranks) < 1:
        return  # reported by check_ranges
    if tps.tokens_per_step % tps.divide_by:
        yield (
            f"tps.tokens_per_step={tps.tokens_per_step} is not a multiple of tps.divide_by={tps.divide_by}; "
            f"use tps.tokens_per_step={tps.tokens_per_step // tps.divide_by * tps.divide_by or tps.divide_by}"
        )
        return
    wanted = tps.tokens_per_step // tps.divide_by
    unit = hardware.micro_batch * settings.context * ranks
    if wanted % unit == 0:
        return
    nearest = sorted({max(wanted // unit, 1) * unit, (wanted // unit + 1) * unit})
    fixes = ["tps.tokens_per_step=" + " or ".join(str(tokens * tps.divide_by) for tokens in nearest)]
    per_rank, remainder = divmod(wanted, settings.context * ranks)
    if remainder == 0 and per_rank > 0:
        divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
        fitting = sorted(sorted(divisors, key=lambda n: abs(n - hardware.micro_batch))[:2])
        fixes.append("hardware.micro_batch=" + " or ".join(map(str, fitting)))
    yield (
        f"{wanted} tokens per step cannot be made of hardware.micro_batch={hardware.micro_batch} sequences × "
        f"context={settings.context} tokens × {ranks} device(s) = {unit} tokens. "
        f"Nearest that can: {'; or '.join(fixes)}"
    )


#: All checks, in the order in which their problems are listed.
CHECKS: tuple[Callable[[Settings, int], Problems], ...] = (
    check_model,
    check_data,
    check_attention,
    check_optimizer,
    check_ranges,
    check_places,
    check_choices,
    check_tensorboard,
    check_milestones,
    check_gpus,
    check_cuda_graphs,
    check_context,
    check_vocabulary,
    check_schedule,
    check_probe,
    check_spike,
    check_init_from,
    check_tokens_per_step,
)
