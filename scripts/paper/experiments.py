"""The experiments of the paper: what each one runs, at which scale, what it costs and where it is reported.

    full      the paper's own size: the 325M model on 78.6 billion tokens, for anyone with the hardware
    scaled    smaller models and fewer tokens: minutes to hours of one H200
    debug     seconds on a CPU, to see that everything works; the numbers mean nothing

A further setting of SageBwd to compare with is one line of PRESETS, a further experiment one Item of ITEMS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.paper import (
    report_gradients,
    report_layers,
    report_sections,
    report_speed,
    report_training,
)
from scripts.paper.report_parts import Body
from scripts.paper.results import Results

RESULTS = Path("results")
SCALES = ("full", "scaled", "debug")

#: In a command: the directories of the item's runs, and of the traces of these.
RUNS, TRACES = "{runs}", "{traces}"

#: Minutes until a run takes its first step: imports, data, compilation.
START_UP = 1.0


@dataclass(frozen=True)
class Setup:
    """A model, its data and its schedule: what runs that are compared share."""

    name: str
    overrides: tuple[str, ...]
    tokens: int
    tokens_per_second: int  # of one H200, as runs have shown; SMALL's is estimated
    seeds: tuple[int, ...] = (1,)
    milestone_every: int | None = None  # steps between the checkpoints that runs in MILESTONES_OF keep

    @property
    def minutes(self) -> float:
        """Of one H200, for one run."""
        return self.tokens / self.tokens_per_second / 60 + START_UP


@dataclass(frozen=True)
class Run:
    """One training run: the arguments of train.py, and a directory of its own below --runs-dir."""

    name: str
    overrides: tuple[str, ...]
    minutes: float  # of one H200
    starts_from: str | None = None  # the run whose trained weights it begins with
    own_text: bool = False  # brings its own data settings


PAPER_TOKENS = 78_643_200_000
FULL_LARGE = Setup("325m-2.1m", ("tps=2.1m",), PAPER_TOKENS, 186_000, milestone_every=10_000)
FULL_SMALL = Setup("325m-260k", ("tps=260k",), PAPER_TOKENS, 186_000)
# An eighth of the tokens per step against the full number, as in the paper, at a sixteenth of both.
# All runs of the three leave some 65 GB: a checkpoint of the 325M model has 3.9 GB, one of the 35M 0.42 GB.
LARGE = Setup(
    "35m-131k", ("experiment=scaled_131k",), 50_069_504, 1_200_000, seeds=(1, 2), milestone_every=96
)
# What 78 billion tokens do to the logits, 50 million may not: the same pushed by a high learning rate.
PUSHED = replace(LARGE, name="35m-131k-lr6e-3", overrides=(*LARGE.overrides, "optimizer.lr=6.0e-3"))
# LARGE's first steps, and the same with a steep warm-up, in which values become alike. For their traces.
BEGINNING = Setup(
    "35m-131k-beginning",
    ("experiment=scaled_131k", "total_tokens=8388608", "checkpoint_every=16", "probe.every=8"),
    8_388_608,
    1_200_000,
    milestone_every=16,
)
STEEP = Setup(
    "35m-131k-steep",
    (
        *("experiment=scaled_131k", "total_tokens=2097152", "tps.warmup_steps=2", "checkpoint_every=4"),
        "probe.every=2",
    ),
    2_097_152,
    1_200_000,
    milestone_every=4,
)
SMALL = Setup("35m-16k", ("experiment=scaled_16k",), 50_069_504, 400_000, seeds=(1, 2))
SHORT = Setup("325m-260k-short", ("experiment=scaled_325m",), 100_139_008, 186_000, milestone_every=128)
DEBUG_LARGE = Setup("debug-2k", ("experiment=debug", "tps=2.1m"), 16_384, 10_000, milestone_every=4)
DEBUG_SMALL = Setup("debug-256", ("experiment=debug", "tps=260k"), 2_048, 10_000)

QK_NORM_GRID = {
    "fpa": ("attention=fpa",),
    "sagebwd": ("attention=sagebwd",),
    "fpa-no_qk_norm": ("attention=fpa", "model.qk_norm=false"),
    "sagebwd-no_qk_norm": ("attention=sagebwd", "model.qk_norm=false"),
}
#: Runs of QK_NORM_GRID whose layers are looked at as training goes on, at the first seed.
MILESTONES_OF = ("sagebwd", "sagebwd-no_qk_norm")
SMOOTHING = {
    "sagebwd": ("attention=sagebwd",),
    "sagebwd-no_smoothing": ("attention=sagebwd", "attention.smooth_k=false"),
    "sagebwd-smooth_qk": ("attention=sagebwd", "attention.smooth_q=true"),
}
#: Settings of SageConfig to be compared at the large number of tokens per step, where the paper leaves a gap.
PRESETS = {
    "fpa": ("attention=fpa",),
    "sagebwd": ("attention=sagebwd",),
    "sagebwd-paper": (
        "attention=sagebwd",
        "attention.granularity=block",
        "attention.block_q=128",
        "attention.block_kv=64",
    ),
    "sagebwd-exact_delta": (
        "attention=sagebwd",
        "attention.exact_delta=true",
        "attention.unsigned_p=true",
    ),
    "sagebwd-consistent": ("attention=sagebwd_consistent",),
    "sagebwd-accurate": ("attention=sagebwd_accurate",),
}
FINE_TUNINGS = {"fpa": ("attention=fpa",), "sagebwd": ("attention=sagebwd",)}


def runs_of(setup: Setup, variants: Mapping[str, tuple[str, ...]]) -> tuple[Run, ...]:
    """Every variant at every seed; seed by seed, so that whole comparisons are done first."""
    return tuple(
        Run(
            f"{setup.name}/{variant}-seed{seed}",
            (*setup.overrides, *overrides, *milestones(setup, variant, seed), f"seed={seed}"),
            setup.minutes,
        )
        for seed in setup.seeds
        for variant, overrides in variants.items()
    )


def milestones(setup: Setup, variant: str, seed: int) -> tuple[str, ...]:
    """What makes a run keep checkpoints on its way; nothing for most, because they are large."""
    keeps = setup.milestone_every and variant in MILESTONES_OF and seed == setup.seeds[0]
    return (f"milestone_every={setup.milestone_every}",) if keeps else ()


def fine_tuning(setup: Setup, base: Setup) -> tuple[tuple[Run, ...], ...]:
    """First the full-precision run of `base`, if it is not there yet, then its weights trained further."""
    first = runs_of(base, {"fpa": QK_NORM_GRID["fpa"]})[:1]
    then = tuple(
        Run(run.name, run.overrides, run.minutes, starts_from=first[0].name, own_text=True)
        for run in runs_of(setup, FINE_TUNINGS)
    )
    return first, then


FINE_TUNE_FULL = Setup("finetune-325m", ("experiment=finetune",), 5_734_400, 100_000, seeds=(1, 2))
FINE_TUNE_SHORT = replace(FINE_TUNE_FULL, name="finetune-325m-short")
FINE_TUNE_DEBUG = Setup(
    "finetune-debug", ("experiment=debug", "optimizer.schedule=linear", "steps=4"), 1_024, 10_000
)


@dataclass(frozen=True)
class Item:
    """One experiment: stages of training runs, then commands, a JSON file and a section of the report.

    stages: by scale; the runs of a stage may run at the same time, stages follow each other.
    commands: by scale; modules of scripts/, with {results} for the folder of results, RUNS for the runs, and
        TRACES for their traces.
    of_weights: the commands look into trained models, which runs that diverged do not leave.
    minutes: by scale, of the commands.
    """

    name: str
    title: str
    json: str
    section: Callable[[Results], Body]
    commands: Mapping[str, tuple[tuple[str, ...], ...]]
    question: str = ""  # what of the paper it answers; "" for measurements of our own
    also: tuple[str, ...] = ()  # further names it goes by
    stages: Mapping[str, tuple[tuple[Run, ...], ...]] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    of_weights: bool = False

    def runs(self, scale: str) -> list[Run]:
        return [run for stage in self.stages.get(scale, ()) for run in stage]

    def cost(self, scale: str) -> float:
        """Minutes of one H200 (table1, causal_leak: of a CPU), runs that other items share included."""
        return sum(run.minutes for run in self.runs(scale)) + self.minutes.get(scale, 0.0)

    def cost_in_words(self) -> str:
        return ", ".join(f"{in_words(self.cost(scale))} ({scale})" for scale in ("scaled", "full"))


def in_words(minutes: float) -> str:
    """A rough length of time: "3 min", "2.5 h", "5,000 h"."""
    if minutes < 90:
        return f"{max(minutes, 1):.0f} min"
    return f"{minutes / 60:,.1f} h" if minutes < 6000 else f"{minutes / 60:,.0f} h"


def everywhere(*command: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The same command at every scale."""
    return dict.fromkeys(SCALES, (command,))


def on_gpu(*command: str, look: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """A command for the GPU, and at the debug scale its `look`: what it takes on a CPU."""
    return {"full": (command,), "scaled": (command,), "debug": (look,)}


def one_after_the_other(*commands: dict[str, tuple[tuple[str, ...], ...]]) -> dict:
    """The commands of all these, at each scale in this order."""
    return {scale: sum((own[scale] for own in commands), ()) for scale in SCALES}


#: scripts.bench.attention for a look on a CPU.
ATTENTION_LOOK = (
    *("scripts.bench.attention", "--device", "cpu", "--lengths", "64", "--tokens", "64"),
    *("--width", "128", "--repetitions", "2"),
)


def training_step(name: str, *options: str) -> tuple[str, ...]:
    """scripts.bench.training with these options; its files' names begin with `name`."""
    steps = ("--accumulation", "4", "--steps", "8", "--warm-up", "2", "--profile-steps", "2")
    return "scripts.bench.training", *steps, *options, "--out", f"{{results}}/{name}"


TRAINING_STEPS = (
    training_step(
        "bench_training",
        *("--loader", "--attention", "fpa-cudnn", "sagebwd", "sagebwd-consistent", "sagebwd-16-bit-p"),
        *("fpa-flash", "--baselines"),
    ),
    training_step(
        "bench_training_peers",
        *("--contexts", "4096", "--attention", "fpa-cudnn", "sagebwd", "--baselines", "hf-causal", "nanogpt"),
    ),
    training_step(
        "bench_training_deterministic",
        *("--contexts", "4096", "--attention", "fpa-cudnn", "fpa-deterministic", "sagebwd"),
        *("sagebwd-deterministic", "--baselines"),
    ),
    training_step(
        "bench_training_24gb",
        *("--contexts", "4096", "--tokens-per-micro-batch", "8192"),
        *("--attention", "fpa-cudnn", "fpa-graphs", "sagebwd", "sagebwd-graphs", "--baselines"),
    ),
)
TRAINING_LOOK = (
    *("scripts.bench.training", "--device", "cpu", "--model", "llama_debug", "--contexts", "64"),
    *("--tokens-per-micro-batch", "256", "--attention", "fpa", "sagebwd", "--baselines"),
    *("--steps", "3", "--warm-up", "1", "--out", "{results}/bench_training"),
)


def traced(module: str, name: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Traces of the item's runs, a few MB each, then the script that reads them, at every scale."""
    trace = (
        "scripts.paper.layers",
        RUNS,
        "--traces",
        "--milestones",
        "--only-traces",
        "--trace-heads",
        "0",
        "1",
    )
    return dict.fromkeys(SCALES, (trace, (module, TRACES, "--out", f"{{results}}/{name}")))


def curves(name: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The command that compares the item's runs, at every scale."""
    return {
        scale: (
            ("scripts.paper.curves", RUNS, "--item", name, "--scale", scale, "--out", f"{{results}}/{name}"),
        )
        for scale in SCALES
    }


FIGURE_1A = {
    "full": (runs_of(FULL_LARGE, QK_NORM_GRID),),
    "scaled": (runs_of(LARGE, QK_NORM_GRID) + runs_of(PUSHED, QK_NORM_GRID),),
    "debug": (runs_of(DEBUG_LARGE, QK_NORM_GRID),),
}
FIGURE_1B = {
    "full": (runs_of(FULL_SMALL, QK_NORM_GRID),),
    "scaled": (runs_of(SMALL, QK_NORM_GRID) + runs_of(SHORT, QK_NORM_GRID),),
    "debug": (runs_of(DEBUG_SMALL, QK_NORM_GRID),),
}
FIGURE_4 = {
    "full": (runs_of(FULL_LARGE, SMOOTHING) + runs_of(FULL_SMALL, SMOOTHING),),
    "scaled": (runs_of(LARGE, SMOOTHING) + runs_of(SMALL, SMOOTHING),),
    "debug": (runs_of(DEBUG_SMALL, SMOOTHING),),
}


#: The runs that keep milestones, at many tokens per step, and of the paper's model.
MILESTONES = {
    "full": (runs_of(FULL_LARGE, QK_NORM_GRID),),
    "scaled": (
        sum((runs_of(setup, QK_NORM_GRID) for setup in (STEEP, BEGINNING, LARGE, PUSHED, SHORT)), ()),
    ),
    "debug": (runs_of(DEBUG_LARGE, QK_NORM_GRID),),
}


def one_seed(*groups: Mapping[str, tuple[tuple[Run, ...], ...]]) -> dict[str, tuple[tuple[Run, ...], ...]]:
    """The SageBwd runs of these experiments at the first seed, each once, for a look at their layers."""
    return {
        scale: (
            tuple(
                dict.fromkeys(
                    run
                    for group in groups
                    for stage in group[scale]
                    for run in stage
                    if "/sagebwd" in run.name and run.name.endswith("-seed1")
                )
            ),
        )
        for scale in SCALES
    }


ITEMS = (
    Item(
        "table1",
        "Table 1: error on Gaussian inputs",
        "table1.json",
        report_sections.table1,
        everywhere("scripts.paper.table1", "--out", "{results}/table1.json"),
        question="the errors of Table 1",
        minutes=dict.fromkeys(SCALES, 1),
    ),
    Item(
        "figure1a",
        "Figure 1a: loss at the large number of tokens per step",
        "figure1a.json",
        report_training.figure1a,
        curves("figure1a"),
        question="SageBwd falls behind at many tokens per step",
        stages=FIGURE_1A,
    ),
    Item(
        "figure1b",
        "Figure 1b: loss at an eighth of the tokens per step",
        "figure1b.json",
        report_training.figure1b,
        curves("figure1b"),
        question="SageBwd matches full precision at few tokens per step",
        stages=FIGURE_1B,
    ),
    Item(
        "figures2-3",
        "Figures 2 and 3: speed of the attention",
        "bench_attention.json",
        report_speed.figures2_3,
        on_gpu(
            *("scripts.bench.attention", "--graphs", "--configs", "default", "16-bit-p", "consistent"),
            *("--out", "{results}/bench_attention"),
            look=(*ATTENTION_LOOK, "--out", "{results}/bench_attention"),
        ),
        question="SageBwd is faster than FlashAttention-2",
        also=("figure2", "figure3"),
        minutes={"full": 15, "scaled": 15, "debug": 1},
    ),
    Item(
        "figure4",
        "Figure 4: smoothing of K and Q",
        "figure4.json",
        report_training.figure4,
        curves("figure4"),
        question="K-smoothing is needed, Q-smoothing is not",
        stages=FIGURE_4,
    ),
    Item(
        "layers",
        "Figures 5 and 6, Table 2, RMS of P, dP and dS (§4.2): error in the layers of trained models",
        "layers.json",
        report_layers.layers,
        everywhere("scripts.paper.layers", RUNS, "--out", "{results}/layers"),
        question="the error is that of dS, and grows with tokens per step and without QK-norm",
        also=("figure5", "figure6", "table2", "rms"),
        stages=one_seed(FIGURE_1A, FIGURE_1B, FIGURE_4),
        minutes={"full": 10, "scaled": 5, "debug": 1},
        of_weights=True,
    ),
    Item(
        "gradient_formats",
        "S3: dP in INT8, and INT8 against FP8 gradients",
        "gradient_formats.json",
        report_gradients.gradient_formats,
        traced("scripts.paper.gradient_formats", "gradient_formats"),
        question="dP must stay in 16 bit, and INT8 beats FP8",
        stages=one_seed(MILESTONES),
        minutes={"full": 10, "scaled": 4, "debug": 1},
        of_weights=True,
    ),
    Item(
        "finetune",
        "S3: fine-tuning at parity",
        "finetune.json",
        report_training.finetune,
        curves("finetune"),
        question="fine-tuning with SageBwd is at par with full precision",
        stages={
            "full": fine_tuning(FINE_TUNE_FULL, base=FULL_SMALL),
            "scaled": fine_tuning(FINE_TUNE_SHORT, base=SHORT),
            "debug": fine_tuning(FINE_TUNE_DEBUG, base=DEBUG_SMALL),
        },
    ),
    Item(
        "presets",
        "Beyond the paper: further settings at the large number of tokens per step",
        "presets.json",
        report_training.presets,
        curves("presets"),
        stages={
            "full": (runs_of(FULL_LARGE, PRESETS),),
            "scaled": (runs_of(LARGE, PRESETS) + runs_of(PUSHED, PRESETS),),
            "debug": (runs_of(DEBUG_SMALL, PRESETS),),
        },
    ),
    Item(
        "gradient_error",
        "Beyond the paper: where the error of dS comes from",
        "gradient_error.json",
        report_gradients.gradient_error,
        one_after_the_other(
            traced("scripts.paper.gradient_error", "gradient_error"),
            everywhere("scripts.paper.error_against_time", "--results", "{results}"),
        ),
        stages=one_seed(MILESTONES),
        minutes={"full": 15, "scaled": 5, "debug": 1},
        of_weights=True,
    ),
    Item(
        "accuracy",
        "Accuracy of the kernels, over shapes and product by product",
        "accuracy.json",
        report_sections.accuracy,
        on_gpu(
            *("scripts.paper.accuracy", "--device", "cuda", "--out", "{results}/accuracy.json"),
            look=(
                *("scripts.paper.accuracy", "--tokens", "96", "--head-dims", "32", "--heads", "2"),
                *("--out", "{results}/accuracy.json"),
            ),
        ),
        minutes={"full": 3, "scaled": 3, "debug": 1},
    ),
    Item(
        "training_speed",
        "Speed of a training step",
        "bench_training.json",
        report_speed.training_speed,
        {"full": TRAINING_STEPS, "scaled": TRAINING_STEPS, "debug": (TRAINING_LOOK,)},
        minutes={"full": 25, "scaled": 25, "debug": 1},
    ),
    Item(
        "many_gpus",
        "Training on several GPUs",
        "bench_gpus.json",
        report_speed.many_gpus,
        on_gpu(
            *("scripts.bench.gpus", "--out", "{results}/bench_gpus"),
            look=(
                *("scripts.bench.gpus", "--device", "cpu", "--devices", "1", "--steps", "4"),
                *("--warm-up", "1", "--out", "{results}/bench_gpus", "--", "experiment=debug"),
            ),
        ),
        minutes={"full": 5, "scaled": 5, "debug": 1},
    ),
    Item(
        "causal_leak",
        "What a masked token can still change",
        "causal_leak.json",
        report_sections.causal_leak,
        everywhere("scripts.paper.causal_leak", "--out", "{results}/causal_leak.json"),
        minutes=dict.fromkeys(SCALES, 1),
    ),
)


def find(name: str) -> Item:
    """The item of this name. Raises KeyError."""
    for item in ITEMS:
        if name == item.name or name in item.also:
            return item
    raise KeyError(name)


def total_cost(scale: str) -> float:
    """Minutes of one H200 for all items, runs that they share counted once."""
    runs = {run.name: run for item in ITEMS for run in item.runs(scale)}
    return sum(run.minutes for run in runs.values()) + sum(item.minutes.get(scale, 0.0) for item in ITEMS)
