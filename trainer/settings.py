"""Every setting of a run, typed. Hydra fills these dataclasses from configs/ and the command line.

This file has the types, and marks what may change when a run is resumed. configs/ has the values, and marks
which of them the paper publishes and which are choices. Unknown settings and options on the command line are
answered with the nearest known ones.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, ListConfig, OmegaConf

from data import command_line
from data.settings import DataSettings, options, register_options
from model import backends
from model.config import LlamaConfig
from trainer.errors import SettingsError

#: Length of a run that sets none: the paper's, 300,000 steps of tps=260k, 37,500 of tps=2.1m.
PAPER_TOKENS = 78_643_200_000

#: Marks settings that may differ when a run resumes: they change how it executes or reports, not what it
#: computes. A mark on a group holds for all in it that has none of its own.
MAY_CHANGE = {"may_change": True}


def changeable(default: Any = MISSING) -> Any:
    return field(default=default, metadata=MAY_CHANGE)


@dataclass
class TpsSettings:
    """Tokens per step and what goes with it."""

    tokens_per_step: int = MISSING  # of all devices together
    divide_by: int = 1  # a scaled-down replica: tokens_per_step / divide_by, keeping the paper's 1 : 8 ratio
    # Of linearly rising learning rate; a tenth of a run that is too short for them.
    warmup_steps: int = MISSING


@dataclass
class OptimizerSettings:
    """AdamW, or Muon with AdamW, under a schedule with linear warm-up.

    Settings that are null here belong to one schedule or one optimizer; others do not read them.
    """

    name: str = "adamw"  # "adamw", or "muon": Muon for the matrices of the blocks, AdamW for all else
    _target_: str | None = None  # path of another class of optimizers (lion_pytorch.Lion); null: by name
    arguments: dict[str, Any] = field(default_factory=dict)  # its own; lr and weight_decay it gets anyway
    lr: float = MISSING  # peak learning rate
    # How it falls after the warm-up: "cosine", "linear", "wsd" (at the end only) or "constant" (never).
    schedule: str = "cosine"
    decay_ratio: float | None = None  # wsd: share of the run's steps in which it falls; null: 0.2
    decay_type: str | None = None  # wsd: how, "1-sqrt" or "linear"; null: "1-sqrt"
    min_lr_ratio: float = MISSING  # final learning rate as a fraction of the peak
    beta1: float = MISSING  # AdamW's decay of the mean gradient, and
    beta2: float = MISSING  # of its mean square
    eps: float = MISSING  # AdamW's
    weight_decay: float = MISSING  # on matrices only; gains (vectors) are not decayed
    grad_clip: float = MISSING  # largest global gradient norm
    muon_lr: float | None = None  # muon: its peak learning rate, on the same schedule; null: lr
    muon_lr_scale: str | None = None  # muon: how a step depends on its matrix's shape; torch's adjust_lr_fn
    muon_momentum: float | None = None  # muon: decay of the mean gradient


@dataclass
class LoggerSettings:
    """Where curves go besides metrics.jsonl, which is always written."""

    wandb: str = MISSING  # "auto" (online when configured, offline otherwise), "online", "offline" or "off"
    project: str | None = None  # null: WANDB_PROJECT, or "sagebwd"
    entity: str | None = None  # W&B's user or team
    group: str | None = None  # null: WANDB_RUN_GROUP; a sweep sets it
    tags: list[str] = field(default_factory=list)  # W&B's
    tensorboard: bool = False  # event files below <run_dir>/tensorboard


@dataclass
class ProbeSettings:
    """Measuring the error of INT8 attention while a run trains (trainer/probe.py)."""

    every: int = MISSING  # steps between measurements; 0: never
    layers: list[int] | None = None  # which layers, counted from 0; null: the first, middle and last
    sequences: int = MISSING  # sequences of the step's batch to measure on, in one forward-backward pass
    alarm: float | None = None  # warn if the relative L2 error of a gradient exceeds this; null: never


@dataclass
class SpikeSettings:
    """Finding steps with an outlier loss or gradient norm (trainer/spikes.py)."""

    window: int = MISSING  # previous steps that define the typical value
    threshold: float | None = None  # standard deviations above the typical value; null: no spikes
    skip: bool = MISSING  # skip the optimizer step of a spike


@dataclass
class ProfileSettings:
    """Recording a few steps with torch.profiler, and what is in memory (trainer/profiling.py)."""

    steps: int = 0  # how many steps; 0: no profile
    start: int = 10  # after so many other steps of this process
    memory: bool = False  # remember which line allocated what, for the snapshot if a GPU's memory runs out


@dataclass
class HardwareSettings:
    """What the run executes on. Changes the speed, not the experiment."""

    device: str = MISSING  # "cuda" or "cpu"
    devices: int = 1  # processes, one per device; torchrun overrides it
    micro_batch: int = MISSING  # sequences per device per forward-backward pass
    # "bfloat16" (autocast over float32 master weights) or "float32".
    dtype: str = field(default=MISSING, metadata={"may_change": False})
    compile: bool = MISSING  # torch.compile the model
    cuda_graphs: bool = False  # one GPU: replay compiled passes as CUDA graphs, which removes launch overhead
    deterministic: bool = False  # bit-identical when repeated or resumed; slower on a GPU
    parallel: str = "auto"  # several devices: "ddp", "fsdp", or "auto": fsdp from a billion parameters on
    context_parallel: int = 1  # devices that share the tokens of a sequence, and the heads of its attention
    recompute: str = "none"  # "blocks": activation checkpointing of all but attention
    check_memory: bool = True  # refuse a run that cannot fit in memory (trainer/estimate.py)
    timeout_s: float = 600.0  # the run ends if a rank keeps the others waiting for longer
    peak_tflops: float | None = None  # dense bf16 peak for MFU; null: looked up by GPU name


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
    profile: ProfileSettings = field(default_factory=ProfileSettings, metadata=MAY_CHANGE)

    init_from: str | None = None  # a Hugging Face folder to start from (a run's weights/); null: random
    branch_from: str | None = None  # a run to go on from, with its optimizer (trainer/start.py)
    branch_step: int | None = None  # of its checkpoint; null: the newest

    context: int = MISSING  # tokens per training sequence
    train_sequences: int | None = None  # train on the first so many of the text, over and over; null: on all
    total_tokens: int | None = None  # length of the run; null: PAPER_TOKENS, but not of a small text
    steps: int | None = None  # length of the run in optimizer steps; overrides total_tokens
    seed: int = MISSING  # initialisation and data order

    log_every: int = changeable()  # steps between lines of metrics.jsonl
    eval_every: int = changeable()  # steps between validations; the last step always validates
    eval_sequences: int = changeable()  # validation sequences that are used
    sample_tokens: int = changeable()  # length of the text generated at a validation; 0: none
    sample_prompt: str = changeable()  # with which that text begins
    checkpoint_every: int = changeable()  # steps between checkpoints; the last step always saves one
    # Write while training goes on; needs CPU memory for a copy of the state.
    checkpoint_background: bool = changeable(True)
    keep_checkpoints: int = changeable()  # newest checkpoints kept
    # Also steps between checkpoints, which are kept permanently; null: none.
    milestone_every: int | None = changeable(None)
    # Code that the run calls, by name: {_target_: path.to.Class, …}. See trainer/callbacks.py.
    callbacks: dict[str, Any] = field(default_factory=dict, metadata=MAY_CHANGE)
    skip_nonfinite: bool = changeable(False)  # drop a step whose loss or gradient is not finite, do not stop

    runs_dir: str = changeable()  # holds the run directories that are named after their overrides
    run_dir: str | None = changeable(None)  # null: <runs_dir>/<overrides>
    rerun_finished: bool = changeable(False)  # train a finished run again from the start
    plan: bool = changeable(False)  # print the estimate of memory, time and disk, and train nothing
    gpu: str | None = changeable(None)  # plan: on this GPU ("RTX 4090"); null: on the one that is here

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


def unresolved(overrides: ListConfig) -> list[str]:
    """Overrides as they were typed: ${oc.env:KEY} stays, so that no secret gets into a name or a message."""
    return OmegaConf.to_container(overrides, resolve=False)


def check_or_exit(arguments: list[str], configs: Path) -> None:
    """End the program with a message if an argument `name=value` has an unknown setting, group or option."""
    groups = {folder.name: command_line.options_in(folder) for folder in configs.iterdir() if folder.is_dir()}
    groups["data"] = options()
    del groups["paper"]  # the experiments of scripts.reproduce
    parsed = command_line.check_or_exit(
        arguments, Settings, groups, program="python train.py", further=attention_settings()
    )
    for override in parsed:
        if override.key_or_group == "hydra/launcher" and not command_line.has_search_path(parsed):
            Plugins.instance()  # installed launchers add themselves to the store
            installed = {name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")}
            if "submitit_slurm" not in installed and "slurm" in command_line.chosen_options(override):
                sys.exit(f"{override.input_line} needs hydra-submitit-launcher: pip install -e '.[slurm]'")
            own = command_line.options_in(configs / "hydra" / "launcher")
            command_line.check_option_or_exit(override, sorted({*installed, *own}))


def attention_settings() -> set[str]:
    """Dotted names of the settings of all attentions."""
    kinds = map(backends.settings_of, backends.available())
    return {"attention.backend", *(f"attention.{name}" for kind in kinds for name in kind.names())}
