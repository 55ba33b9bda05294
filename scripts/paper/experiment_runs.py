"""The training runs of the experiments: models, schedules, what is compared, and what it costs.

A further setting of SageBwd to compare with is one line of PRESET_GRID.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

SCALES = ("full", "scaled", "debug")

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
    start_up: float = START_UP

    @property
    def minutes(self) -> float:
        """Of one H200, for one run."""
        return self.tokens / self.tokens_per_second / 60 + self.start_up


@dataclass(frozen=True)
class Run:
    """One training run: the arguments of train.py, and a directory of its own below --runs-dir."""

    name: str
    overrides: tuple[str, ...]
    minutes: float  # of one H200
    starts_from: str | None = None  # the run whose trained weights it begins with
    own_text: bool = False  # brings its own data settings
    unless_diverged: tuple[str, ...] = ()  # not trained if all runs of these names have diverged


PAPER_TOKENS = 78_643_200_000
FULL_LARGE = Setup("325m-2.1m", ("tps=2.1m",), PAPER_TOKENS, 186_000, milestone_every=10_000)
FULL_SMALL = Setup("325m-260k", ("tps=260k",), PAPER_TOKENS, 186_000)
# An eighth of the tokens per step against the full number, as in the paper, at a sixteenth of both.
# All runs of the three take about 65 GB on disk: a checkpoint has 3.9 GB (325M model) or 0.42 GB (35M).
LARGE = Setup(
    "35m-131k", ("experiment=scaled_131k",), 50_069_504, 1_200_000, seeds=(1, 2), milestone_every=96
)
# 50M tokens may not grow the logits as far as 78 billion do, so the same at a high learning rate.
PUSHED = replace(LARGE, name="35m-131k-lr6e-3", overrides=(*LARGE.overrides, "optimizer.lr=6.0e-3"))
# LARGE's first steps, and the same with a steep warm-up, in which the rows of V become similar. For traces.
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

#: Full precision and the default of SageConfig, with and without QK-norm.
DEFAULT_GRID = {
    "fpa": ("attention=fpa",),
    "sagebwd": ("attention=sagebwd",),
    "fpa-no_qk_norm": ("attention=fpa", "model.qk_norm=false"),
    "sagebwd-no_qk_norm": ("attention=sagebwd", "model.qk_norm=false"),
}
#: The same and the paper's own algorithm.
QK_NORM_GRID = {
    **DEFAULT_GRID,
    "sagebwd-paper": ("attention=sagebwd_paper",),
    "sagebwd-paper-no_qk_norm": ("attention=sagebwd_paper", "model.qk_norm=false"),
}
#: Runs of DEFAULT_GRID whose layers are measured during training, at the first seed.
MILESTONES_OF = ("sagebwd", "sagebwd-no_qk_norm")
SMOOTHING = {
    "sagebwd": ("attention=sagebwd",),
    "sagebwd-no_smoothing": ("attention=sagebwd", "attention.smooth_k=false"),
    "sagebwd-smooth_qk": ("attention=sagebwd", "attention.smooth_q=true"),
    "sagebwd-paper": ("attention=sagebwd_paper",),
    "sagebwd-paper-no_smoothing": ("attention=sagebwd_paper", "attention.smooth_k=false"),
    "sagebwd-paper-smooth_qk": ("attention=sagebwd_paper", "attention.smooth_q=true"),
}
#: Settings of SageConfig to be compared at the large number of tokens per step, where the paper leaves a gap.
PRESET_GRID = {
    "fpa": ("attention=fpa",),
    "sagebwd": ("attention=sagebwd",),
    "sagebwd-paper": ("attention=sagebwd_paper",),
    "sagebwd-consistent": ("attention=sagebwd_consistent",),
    "sagebwd-accurate": ("attention=sagebwd_accurate",),
}
FINE_TUNINGS = {
    "fpa": ("attention=fpa",),
    "sagebwd": ("attention=sagebwd",),
    "sagebwd-paper": ("attention=sagebwd_paper",),
}


def runs_of(setup: Setup, variants: Mapping[str, tuple[str, ...]]) -> tuple[Run, ...]:
    """Every variant at every seed; seed by seed, so that whole comparisons are done first."""
    return tuple(
        Run(
            f"{setup.name}/{variant}-seed{seed}",
            (*setup.overrides, *overrides, *milestone_overrides(setup, variant, seed), f"seed={seed}"),
            setup.minutes,
        )
        for seed in setup.seeds
        for variant, overrides in variants.items()
    )


def milestone_overrides(setup: Setup, variant: str, seed: int) -> tuple[str, ...]:
    """Overrides that make a run save milestone checkpoints; none for most runs, because these are large."""
    keeps = setup.milestone_every and variant in MILESTONES_OF and seed == setup.seeds[0]
    return (f"milestone_every={setup.milestone_every}",) if keeps else ()


def fine_tuning(setup: Setup, base: Setup) -> tuple[tuple[Run, ...], ...]:
    """First the full-precision run of `base`, if it is not there yet, then its weights trained further."""
    first = runs_of(base, {"fpa": DEFAULT_GRID["fpa"]})[:1]
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


#: Full precision with and without QK-norm: the models whose gradients are measured under every setting.
FULL_PRECISION_GRID = {name: DEFAULT_GRID[name] for name in ("fpa", "fpa-no_qk_norm")}
# With a checkpoint at a quarter and at half of the run, in directories of their own: LARGE's runs keep none.
BIAS = replace(
    LARGE,
    name="35m-131k-bias",
    overrides=(*LARGE.overrides, "milestone_every=96"),
    seeds=(1,),
    milestone_every=None,
)
GRADIENT_BIAS = {
    "full": (runs_of(FULL_LARGE, FULL_PRECISION_GRID),),
    "scaled": (runs_of(BIAS, FULL_PRECISION_GRID),),
    "debug": (runs_of(DEBUG_LARGE, FULL_PRECISION_GRID),),
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
    "full": (runs_of(FULL_LARGE, DEFAULT_GRID),),
    "scaled": (
        sum((runs_of(setup, DEFAULT_GRID) for setup in (STEEP, BEGINNING, LARGE, PUSHED, SHORT)), ()),
    ),
    "debug": (runs_of(DEBUG_LARGE, DEFAULT_GRID),),
}


def one_seed(*groups: Mapping[str, tuple[tuple[Run, ...], ...]]) -> dict[str, tuple[tuple[Run, ...], ...]]:
    """The runs with SageBwd's default, first seed, each once: the models whose layers are measured."""
    return {
        scale: (
            tuple(
                dict.fromkeys(
                    run
                    for group in groups
                    for stage in group[scale]
                    for run in stage
                    if "attention=sagebwd" in run.overrides and run.name.endswith("-seed1")
                )
            ),
        )
        for scale in SCALES
    }
