"""Checks settings against each other and works out what follows from them.

Runs in milliseconds, before any data is read, any model is built or anything is compiled. What takes a file
to know is checked where it is read.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

import data.settings
import data.tokenizers
import model.config
from common.errors import SettingsError
from trainer.optimizer import OPTIMIZERS, warmup_steps
from trainer.settings import Settings, value_problems

log = logging.getLogger(__name__)

Problems = Iterator[str]


@dataclass(frozen=True)
class Sizes:
    """What the settings amount to."""

    steps: int  # optimizer steps of the run
    warmup_steps: int  # of these, with rising learning rate
    tokens_per_step: int
    sequences_per_step: int
    micro_batch: int  # sequences per device and forward-backward pass
    micro_steps: int  # of these passes per device and step (gradient accumulation)


def check(settings: Settings, ranks: int) -> Sizes:
    """The sizes of a run on `ranks` devices. Raises SettingsError with every problem, each with its fix."""
    # What follows from values makes sense only once each of them does.
    problems = [*check_values(settings)] or [one for follow in CHECKS for one in follow(settings, ranks)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(f"these settings cannot be trained:\n{listed}")
    return sizes_of(settings, ranks)


def sizes_of(settings: Settings, ranks: int) -> Sizes:
    """The sizes of a run on `ranks` devices, of settings that were checked."""
    sequences = settings.tokens_per_step // settings.context
    of_device = sequences // groups(settings, ranks)
    micro_batch = min(settings.hardware.micro_batch, of_device)
    return Sizes(
        steps=settings.total_steps,
        warmup_steps=warmup_steps(settings),
        tokens_per_step=settings.tokens_per_step,
        sequences_per_step=sequences,
        micro_batch=micro_batch,
        micro_steps=of_device // micro_batch,
    )


def report_warmup(settings: Settings) -> None:
    """Log that the run is too short for its warm-up."""
    if (found := warmup_steps(settings)) < settings.tps.warmup_steps:
        log.warning(
            "the learning rate rises for %d of the %d steps: the run is too short for tps.warmup_steps=%d",
            *(found, settings.total_steps, settings.tps.warmup_steps),
        )


def groups(settings: Settings, ranks: int) -> int:
    """How many groups of ranks train on different sequences: of one rank each without context parallelism."""
    return ranks // settings.hardware.context_parallel


def unit_of(settings: Settings) -> str:
    """What :func:`groups` counts."""
    size = settings.hardware.context_parallel
    return "device(s)" if size == 1 else f"group(s) of {size} devices"


# ---------------------------------------------------------------------- values by themselves


def check_values(settings: Settings) -> Problems:
    yield from value_problems(settings)
    if settings.optimizer.name not in OPTIMIZERS:
        yield f"optimizer.name={settings.optimizer.name} is unknown; choose one of {', '.join(OPTIMIZERS)}"
    yield from model.config.problems(settings.model)
    # With such names Hydra makes objects.
    for name in re.findall(r'"(_\w*_)": ', json.dumps(settings.optimizer.arguments, default=str)):
        yield f"optimizer.arguments has {name}, but nothing is made of arguments; use numbers, text and lists"
    try:
        _ = settings.recipes
    except ValueError as error:
        yield str(error)


# ---------------------------------------------------------------------- values together


def check_text(settings: Settings, ranks: int) -> Problems:
    if settings.data.val_path and not settings.data.path:
        yield "data.path is missing: data.val_path alone is no text to train on; set data.path=FILE, too"
    if settings.data.source == data.settings.MIXTURE and settings.train_sequences is not None:
        yield (
            f"train_sequences={settings.train_sequences} has no meaning with data=mixture; use "
            "train_sequences=null"
        )
    needed = data.tokenizers.vocabulary_size(settings.data.tokenizer)
    if settings.model.vocab_size < needed:
        yield (
            f"model.vocab_size={settings.model.vocab_size} is smaller than the {needed} tokens of "
            f"data.tokenizer={settings.data.tokenizer}; use "
            + (
                f"the tokenizer that those weights were trained with: data.tokenizer={settings.init_from}"
                if settings.init_from
                else f"data.tokenizer=bytes, which has 257 and suits small models, or "
                f"model.vocab_size={-(-needed // 64) * 64} (padded to a multiple of 64 for speed)"
            )
        )


def check_documents(settings: Settings, ranks: int) -> Problems:
    if settings.data.mask_documents and (why := settings.attention.why_no_documents()):
        yield f"data.mask_documents=true: {why}"


def check_hardware(settings: Settings, ranks: int) -> Problems:
    hardware = settings.hardware
    if settings.gpu and not settings.plan:
        yield f"gpu={settings.gpu} is for estimates: add plan=true, or leave it out and train on what is here"
    elif settings.gpu and hardware.device != "cuda":
        yield f"gpu={settings.gpu}, but hardware.device={hardware.device}; choose hardware=gpu or gpu_24gb"
    if hardware.device == "cuda" and not settings.plan:  # an estimate may be made on another machine
        available = torch.cuda.device_count()
        if available == 0:
            yield (
                "hardware.device=cuda, but PyTorch sees no CUDA GPU here. Choose hardware=cpu for small "
                "models (python train.py experiment=quickstart is one), or install a CUDA build of PyTorch"
            )
        elif hardware.devices > available:
            yield (
                f"hardware.devices={hardware.devices}, but this machine has {available} GPU(s); use "
                f"hardware.devices={available}"
            )
    if hardware.cuda_graphs and not (hardware.device == "cuda" and hardware.compile and ranks == 1):
        yield (
            "hardware.cuda_graphs=true needs one GPU and hardware.compile=true. Here are "
            f"hardware.device={hardware.device}, hardware.compile={str(hardware.compile).lower()} "
            f"and {ranks} device(s); use hardware.cuda_graphs=false"
        )


def check_float8(settings: Settings, ranks: int) -> Problems:
    if settings.model.linear is None:
        return
    if settings.hardware.dtype != "bfloat16":
        yield f"model.linear=float8 in hardware.dtype={settings.hardware.dtype}; use hardware.dtype=bfloat16"
    if find_spec("torchao") is None:
        yield "model.linear=float8 needs torchao: pip install -e '.[train,float8]' -c constraints.txt"
    on_gpu = settings.hardware.device == "cuda" and torch.cuda.is_available() and not settings.plan
    if on_gpu and torch.cuda.get_device_capability() < (8, 9):
        yield (
            f"model.linear=float8, but {torch.cuda.get_device_name()} has no FP8, which begins with compute "
            "capability 8.9 (Ada, Hopper); use model.linear=null"
        )


def check_context(settings: Settings, ranks: int) -> Problems:
    if settings.context > settings.model.max_context:
        yield (
            f"context={settings.context} is longer than the model's rotary position table, "
            f"model.max_context={settings.model.max_context}; raise the latter or use "
            f"context={settings.model.max_context}"
        )


def check_context_parallel(settings: Settings, ranks: int) -> Problems:
    size = settings.hardware.context_parallel
    shared = {
        "devices": ranks,
        "context": settings.context,
        "model.n_heads": settings.model.n_heads,
        "key and value heads": settings.model.kv_heads,
    }
    common = math.gcd(*shared.values())
    if common % size:
        name, value = next((name, value) for name, value in shared.items() if value % size)
        fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        yield (
            f"hardware.context_parallel={size} does not divide {name}={value}; use a common divisor of "
            f"{', '.join(shared)}: {fitting}"
        )


def check_muon(settings: Settings, ranks: int) -> Problems:
    optimizer = settings.optimizer
    if optimizer.name != "muon":
        return
    if optimizer.muon_momentum is None or optimizer.muon_lr_scale is None:
        yield "optimizer.name=muon leaves Muon's own settings open; choose optimizer=muon, which has them"
    if optimizer.muon_lr_scale == "original" and optimizer.muon_lr is None:
        yield (
            "optimizer.muon_lr_scale=original needs a learning rate of its own, because optimizer.lr is for "
            "AdamW; use optimizer.muon_lr=0.02, or optimizer.muon_lr_scale=match_rms_adamw"
        )


def check_length(settings: Settings, ranks: int) -> Problems:
    if settings.total_steps < 1:
        yield (
            f"total_tokens={settings.total_tokens} is less than one step of {settings.tokens_per_step} "
            "tokens; raise it, or set steps"
        )


def check_tokens_per_step(settings: Settings, ranks: int) -> Problems:
    tps, hardware = settings.tps, settings.hardware
    if hardware.device == "cuda" and hardware.devices > torch.cuda.device_count() and not settings.plan:
        return  # check_hardware says how many devices there are
    wanted, ranks = tps.tokens_per_step, groups(settings, ranks)
    sequence = settings.context * ranks * tps.divide_by
    unit = hardware.micro_batch * sequence
    if not unit or wanted % unit == 0 or (wanted < unit and wanted % sequence == 0):
        return
    nearest = sorted({max(wanted // unit, 1) * unit, (wanted // unit + 1) * unit})
    fixes = ["tps.tokens_per_step=" + " or ".join(map(str, nearest))]
    per_rank, remainder = divmod(wanted, sequence)
    if remainder == 0 and per_rank > 0:
        divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
        fitting = sorted(sorted(divisors, key=lambda n: abs(n - hardware.micro_batch))[:2])
        fixes.append("hardware.micro_batch=" + " or ".join(map(str, fitting)))
    scale = f" × tps.divide_by={tps.divide_by}" if tps.divide_by > 1 else ""
    yield (
        f"tps.tokens_per_step={wanted} cannot be made of hardware.micro_batch={hardware.micro_batch} "
        f"sequences × context={settings.context} tokens × {ranks} {unit_of(settings)}{scale} = {unit} "
        f"tokens. Nearest that can: {'; or '.join(fixes)}"
    )


#: In the order in which their problems are listed.
CHECKS: tuple[Callable[[Settings, int], Problems], ...] = (
    check_text,
    check_documents,
    check_muon,
    check_hardware,
    check_float8,
    check_context,
    check_context_parallel,
    check_length,
    check_tokens_per_step,
)
