"""Every setting of a run, typed. Hydra fills these dataclasses from configs/ and the command line.

This file has the types, what values may be, and what may change when a run is resumed. configs/ has the
values, and marks which of them the paper publishes and which are choices. Unknown settings and options on the
command line are answered with the nearest known ones.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, ListConfig, OmegaConf

import data.recipe
from common import overrides
from common.errors import SettingsError
from common.redaction import redact
from data.recipe import Recipe
from data.settings import DataSettings, options, register_options
from model import backends
from model.config import LlamaConfig, parameter_count

#: Length of a run that sets none: the paper's, 300,000 steps of tps=260k, 37,500 of tps=2.1m.
PAPER_TOKENS = 78_643_200_000

SHARD_FROM = 1_000_000_000  # parameters; at 16 bytes each a copy fills a fifth of an 80 GB GPU

#: Marks settings that may differ when a run resumes: they change how it executes or reports, not what it
#: computes. A mark on a group holds for all in it that has none of its own.
MAY_CHANGE = {"may_change": True}


class Range(NamedTuple):
    """What holds for a setting's values, unless they are null, and that in words."""

    holds: Callable[[Any], bool]
    words: str


DECAY = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")


def setting(
    default: Any = MISSING, *, within: Range | None = None, choices: tuple[str, ...] = (), **marks: bool
) -> Any:
    """A field with what its values may be, which `value_problems` checks. marks: may_change."""
    return field(default=default, metadata={"within": within, "choices": choices, **marks})


positive = functools.partial(
    setting, within=Range(lambda value: 0 < value < math.inf, "greater than zero and finite")
)
not_negative = functools.partial(setting, within=Range(lambda value: 0 <= value < math.inf, "zero or more"))


def value_problems(settings: Any, prefix: str = "") -> Iterator[str]:
    """What is wrong with values by themselves, in this dataclass and those within it."""
    for one in fields(settings):
        value, name = getattr(settings, one.name), prefix + one.name
        choices, within = one.metadata.get("choices"), one.metadata.get("within")
        if is_dataclass(value):
            yield from value_problems(value, f"{name}.")
        elif value is None:
            continue
        elif choices and value not in choices:
            yield f"{name}={value} is unknown; choose one of {', '.join(choices)}"
        elif within and not within.holds(value):
            yield f"{name}={value} must be {within.words}"


@dataclass
class TpsSettings:
    """Tokens per step and what goes with it."""

    tokens_per_step: int = positive()  # of all devices together
    # a scaled-down replica: tokens_per_step / divide_by, keeping the paper's 1 : 8 ratio
    divide_by: int = positive(1)
    # Of linearly rising learning rate; a tenth of a run that is too short for them.
    warmup_steps: int = not_negative()


@dataclass
class OptimizerSettings:
    """AdamW, or Muon with AdamW, under a schedule with linear warm-up.

    Settings that are null here belong to one schedule or one optimizer; others do not read them.
    """

    name: str = "adamw"  # "adamw", or "muon": Muon for the matrices of the blocks, AdamW for all else
    _target_: str | None = None  # path of another class of optimizers (lion_pytorch.Lion); null: by name
    arguments: dict[str, Any] = field(default_factory=dict)  # its own; lr and weight_decay it gets anyway
    lr: float = positive()  # peak learning rate
    # How it falls after the warm-up: "cosine", "linear", "wsd" (at the end only) or "constant" (never).
    schedule: str = setting("cosine", choices=("cosine", "linear", "wsd", "constant"))
    # wsd: share of the run's steps in which it falls, by 1 - sqrt
    decay_ratio: float = setting(
        0.2, within=Range(lambda value: 0 < value <= 1, "above 0 and at most 1, a share of the steps")
    )
    # final learning rate as a fraction of the peak
    min_lr_ratio: float = setting(
        within=Range(lambda value: 0 <= value <= 1, "between 0 and 1, a fraction of optimizer.lr")
    )
    beta1: float = setting(within=DECAY)  # AdamW's decay of the mean gradient, and
    beta2: float = setting(within=DECAY)  # of its mean square
    eps: float = positive()  # AdamW's
    weight_decay: float = not_negative()  # on matrices only; gains (vectors) are not decayed
    grad_clip: float | None = positive()  # largest global gradient norm; null: no clipping
    muon_lr: float | None = positive(None)  # muon: its peak learning rate, on the same schedule; null: lr
    # muon: how a step depends on its matrix's shape; torch's adjust_lr_fn
    muon_lr_scale: str | None = setting(None, choices=("match_rms_adamw", "original"))
    muon_momentum: float | None = setting(None, within=DECAY)  # muon: decay of the mean gradient


@dataclass
class LoggerSettings:
    """Where curves go besides metrics.jsonl, which is always written."""

    # "auto" (online when configured, offline otherwise), "online", "offline" or "off"
    wandb: str = setting(choices=("auto", "online", "offline", "off"))
    project: str | None = None  # null: WANDB_PROJECT, or "sagebwd"
    group: str | None = None  # null: WANDB_RUN_GROUP; a sweep sets it
    tensorboard: bool = False  # event files below <run_dir>/tensorboard


@dataclass
class ProbeSettings:
    """Measuring the error of INT8 attention while a run trains (trainer/probe.py)."""

    every: int = not_negative()  # steps between measurements; 0: never
    sequences: int = positive()  # sequences of the step's batch to measure on, in one forward-backward pass
    # warn if the relative L2 error of a gradient exceeds this; null: never
    alarm: float | None = positive(None)


@dataclass
class SpikeSettings:
    """Finding steps with an outlier loss or gradient norm (trainer/divergence.py)."""

    # previous steps that define the typical value
    window: int = setting(within=Range(lambda value: value >= 8, "8 or more, to find the typical loss"))
    threshold: float | None = positive(None)  # standard deviations above the typical value; null: no spikes
    skip: bool = MISSING  # skip the optimizer step of a spike


@dataclass
class HardwareSettings:
    """What the run executes on. Changes the speed, not the experiment."""

    device: str = setting(choices=("cuda", "cpu"))  # "cuda" or "cpu"
    devices: int = positive(1)  # processes, one per device; torchrun overrides it
    micro_batch: int = positive()  # sequences per device and forward-backward pass, at most
    # "bfloat16" (autocast over float32 master weights) or "float32".
    dtype: str = setting(choices=("bfloat16", "float32"), may_change=False)
    compile: bool = MISSING  # torch.compile the model
    cuda_graphs: bool = False  # one GPU: replay compiled passes as CUDA graphs, which removes launch overhead
    # bit-identical when repeated or resumed; slower on a GPU, where attention=fpa then runs without cuDNN
    deterministic: bool = False
    # several devices: "ddp", "fsdp", or "auto": fsdp from a billion parameters on
    parallel: str = setting("auto", choices=("auto", "ddp", "fsdp"))
    # devices that share the tokens of a sequence, and the heads of its attention
    context_parallel: int = positive(1)
    # "blocks": activation checkpointing of all but attention
    recompute: str = setting("none", choices=("none", "blocks"))
    check_memory: bool = True  # refuse a run that cannot fit in a GPU's memory (trainer/estimate.py)
    timeout_s: float = positive(600.0)  # the run ends if a rank keeps the others waiting for longer
    peak_tflops: float | None = positive(None)  # dense bf16 peak for MFU; null: looked up by GPU name

    def is_sharded(self, shape: LlamaConfig, ranks: int) -> bool:
        """Whether weights, gradients and moments are sharded: on request, and by default if large."""
        if ranks == 1 or self.parallel == "ddp":
            return False
        return self.parallel == "fsdp" or parameter_count(shape) >= SHARD_FROM


@dataclass
class Settings:
    """A whole run."""

    # Of Hydra: `backend` and what that backend reads. Of a run: the backend's own Settings (model/backends/).
    attention: Any = field(default_factory=lambda: dict(backends.FULL_PRECISION))
    model: LlamaConfig = field(default_factory=LlamaConfig)
    # Text may have moved; whether it is the same text is checked against the checkpoint.
    data: DataSettings = field(
        default_factory=DataSettings,
        metadata={"may_change": ("root", "path", "val_path", "processes", "validation")},
    )
    tps: TpsSettings = field(default_factory=TpsSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings, metadata=MAY_CHANGE)
    hardware: HardwareSettings = field(default_factory=HardwareSettings, metadata=MAY_CHANGE)
    probe: ProbeSettings = field(default_factory=ProbeSettings, metadata=MAY_CHANGE)
    spike: SpikeSettings = field(default_factory=SpikeSettings, metadata=MAY_CHANGE)

    init_from: str | None = None  # a Hugging Face folder to start from (a run's weights/); null: random
    branch_from: str | None = None  # a run to go on from, with its optimizer (trainer/start.py)
    branch_step: int | None = positive(None)  # of its checkpoint; null: the newest

    context: int = positive()  # tokens per training sequence
    # train on the first so many of the text, over and over; null: on all
    train_sequences: int | None = positive(None)
    # length of the run; null: the paper's 78,643,200,000, unless that is over 100 passes over the text
    total_tokens: int | None = positive(None)
    steps: int | None = positive(None)  # length of the run in optimizer steps; overrides total_tokens
    # initialisation and data order
    seed: int = setting(within=Range(lambda value: 0 <= value < 2**63, "at least 0 and less than 2**63"))

    log_every: int = positive(may_change=True)  # steps between lines of metrics.jsonl
    eval_every: int = positive(may_change=True)  # steps between validations; the last step always validates
    eval_sequences: int = positive(may_change=True)  # validation sequences that are used
    # length of the text generated at a validation; 0: none
    sample_tokens: int = not_negative(may_change=True)
    sample_prompt: str = setting(may_change=True)  # with which that text begins
    # steps between checkpoints; the last step always saves one
    checkpoint_every: int = positive(may_change=True)
    keep_checkpoints: int = positive(may_change=True)  # newest checkpoints kept
    # Also steps between checkpoints, which are kept permanently; null: none.
    milestone_every: int | None = positive(None, may_change=True)
    # Code that the run calls, by name: {_target_: path.to.Class, …}. See trainer/callbacks.py.
    callbacks: dict[str, Any] = field(default_factory=dict, metadata=MAY_CHANGE)
    # drop a step whose loss or gradient is not finite, do not stop
    skip_nonfinite: bool = setting(False, may_change=True)

    runs_dir: str = setting(may_change=True)  # holds the run directories that are named after their overrides
    run_dir: str | None = setting(None, may_change=True)  # null: <runs_dir>/<overrides>
    # print the estimate of memory, time and disk, and train nothing
    plan: bool = setting(False, may_change=True)
    # plan: on this GPU ("RTX 4090"); null: on the one that is here
    gpu: str | None = setting(None, may_change=True)

    def __post_init__(self) -> None:
        """Read the attention, once: everything else asks the object. Raises SettingsError."""
        if not isinstance(self.attention, backends.Attention):
            try:
                self.attention = backends.read(self.attention)
            except ValueError as error:
                raise SettingsError(str(error)) from error

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all devices together that make up one optimizer step."""
        return self.tps.tokens_per_step // self.tps.divide_by

    def recorded(self) -> dict[str, Any]:
        """As config.yaml and the seals of checkpoints record them, without secrets."""
        return redact({**asdict(self), "attention": self.attention.recorded()})

    @functools.cached_property
    def recipes(self) -> list[Recipe]:
        """Of all texts, looked up on disk once. Raises ValueError if a text is not there, or is none."""
        return data.recipe.read(self.data)

    @property
    def dtype(self) -> torch.dtype:
        """That of autocast: of matrix products and of attention."""
        return getattr(torch, self.hardware.dtype)

    @property
    def attention_shape(self) -> dict[str, Any]:
        """The shape that the attentions of a run are built for."""
        shape = {"d_head": self.model.d_head, "is_gqa": self.model.is_gqa}
        return shape | ({"longest_document": self.context} if self.data.mask_documents else {})

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        if self.steps is not None:
            return self.steps
        return (self.total_tokens or PAPER_TOKENS) * self.tps.divide_by // self.tps.tokens_per_step


def register() -> None:
    """Make the types known to Hydra: configs/train.yaml starts from `settings_schema`."""
    schema = OmegaConf.structured(Settings)
    # Their names are set on the command line: of attentions any, as a sweep over several sets it for all.
    for group in (schema.attention, schema.callbacks, schema.optimizer.arguments):
        OmegaConf.set_struct(group, False)
    register_options(schema)
    ConfigStore.instance().store(name="settings_schema", node=schema)


# ---------------------------------------------------------------------- the command line

_BATCH = "tps.tokens_per_step (of all devices) and hardware.micro_batch (sequences per device and pass)"
_LENGTH = "steps or total_tokens; a run logs how many passes over its text that is"

#: What other trainers call a setting, and what it is here.
OTHER_WORDS = {
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), f"set {_BATCH}"),
    **dict.fromkeys(
        ("gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches"),
        f"it follows from {_BATCH}",
    ),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "num_train_epochs"), f"set {_LENGTH}"),
    "learning_rate": "use optimizer.lr",
    "max_grad_norm": "use optimizer.grad_clip",
    "max_steps": "use steps",
    **dict.fromkeys(("seq_len", "max_length", "block_size"), "use context=N tokens per sequence"),
    "tps": ", or set tps.tokens_per_step=N",
}


def unresolved(overrides: ListConfig) -> list[str]:
    """Overrides as they were typed: ${oc.env:KEY} stays, so that no secret gets into a name or a message."""
    return OmegaConf.to_container(overrides, resolve=False)


def check_or_exit(arguments: list[str], configs: Path) -> None:
    """End the program with a message if an argument `name=value` has an unknown setting, group or option."""
    groups = {folder.name: overrides.options_in(folder) for folder in configs.iterdir() if folder.is_dir()}
    groups["data"] = [*options(), *groups.get("data", ())]
    del groups["paper"]  # the experiments of scripts.reproduce
    parsed = overrides.check_or_exit(
        arguments,
        Settings,
        groups,
        program="python train.py",
        further=attention_settings(),
        other_words=OTHER_WORDS,
    )
    for override in parsed:
        if override.key_or_group == "hydra/launcher" and not overrides.has_search_path(parsed):
            Plugins.instance()  # installed launchers add themselves to the store
            installed = {name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")}
            if "submitit_slurm" not in installed and "slurm" in overrides.chosen_options(override):
                sys.exit(f"{override.input_line} needs hydra-submitit-launcher: pip install -e '.[slurm]'")
            own = overrides.options_in(configs / "hydra" / "launcher")
            overrides.check_option_or_exit(override, sorted({*installed, *own}))


def attention_settings() -> set[str]:
    """Dotted names of the settings of all attentions."""
    kinds = map(backends.settings_of, backends.available())
    return {"attention.backend", *(f"attention.{name}" for kind in kinds for name in kind.names())}
