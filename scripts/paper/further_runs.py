"""The training runs beyond the paper's figures: large logits, learning rates, equal losses, long runs.

Times are those of the 35M model on an H200: 191 steps of 131,072 tokens take about 30 s, start included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sagebwd.config import MATMULS
from scripts.paper.experiment_runs import DEBUG_LARGE, DEBUG_SMALL, LARGE, SMALL, Run, Setup, runs_of

#: Minutes until a short run takes its first step, its kernels compiled before.
SHORT_START_UP = 0.15

Stages = tuple[tuple[Run, ...], ...]


# --- Large logits -------------------------------------------------------------------------------------------

ASSAYS = ("large_logits", "one_batch")
#: The paper's Table 2 has a relative L2 error of P of .129, which INT8 Q and K give at a gain of about 4.
GAINS = (1.0, 2.0, 4.0, 8.0)
SEEDS = (1, 2, 3, 4, 5)
ALL_INT8 = f"attention.int8_matmuls=[{','.join(MATMULS)}]"
#: What is compared, in order of interest. The all_int8 ones, with dP in INT8, are positive controls: what the
#: assays must be able to see. fpa-flash is the negative control: full precision with another kernel.
SETTINGS = {
    "fpa": ("attention=fpa",),
    "sagebwd_paper": ("attention=sagebwd_paper",),
    "sagebwd": ("attention=sagebwd",),
    "sagebwd_paper-all_int8": ("attention=sagebwd_paper", ALL_INT8),
    "sagebwd_low_bias": ("attention=sagebwd_low_bias",),
    "sagebwd_consistent": ("attention=sagebwd_consistent",),
    "sagebwd_accurate": ("attention=sagebwd_accurate",),
    "sagebwd-all_int8": ("attention=sagebwd", ALL_INT8),
    "fpa-flash": ("attention=fpa", "attention.sdpa=flash"),
}
#: Instead of the assay's experiment, for a CPU: seconds. 2,048 tokens per step, 32 sequences.
DEBUG = {
    "large_logits": ("experiment=debug", "tps=2.1m", "probe.every=4"),
    "one_batch": ("experiment=debug", "tps=2.1m", "probe.every=4", "train_sequences=32"),
}


def name_of(assay: str, gain: float, setting: str, seed: int) -> str:
    """A run's directory: "one_batch-gain4-sagebwd-seed1"."""
    return f"{assay}-gain{gain:g}-{setting}-seed{seed}"


def gain_overrides(
    assay: str, gain: float, setting: str, seed: int, *, debug: bool = False
) -> tuple[str, ...]:
    """The arguments of train.py; with `debug` those of a tiny run on a CPU."""
    own = DEBUG[assay] if debug else (f"experiment={assay}",)
    attention = SETTINGS[setting]
    if debug:  # a CPU's FlashAttention takes no small heads
        attention = tuple(text.replace("sdpa=flash", "sdpa=math") for text in attention)
    return (*own, *attention, f"model.qk_norm_gain={gain:g}", f"seed={seed}")


def gain_runs(
    assay: str,
    gains: Iterable[float] = GAINS,
    settings: Iterable[str] = tuple(SETTINGS),
    seeds: Iterable[int] = SEEDS,
    *,
    debug: bool = False,
) -> tuple[Run, ...]:
    """Every gain and setting at every seed; seed by seed, so that whole comparisons are done first."""
    minutes = replace(LARGE, start_up=SHORT_START_UP).minutes
    folder = "large_logits-debug" if debug else "large_logits"
    return tuple(
        Run(
            f"{folder}/{name_of(assay, gain, setting, seed)}",
            gain_overrides(assay, gain, setting, seed, debug=debug),
            minutes,
        )
        for seed in seeds
        for gain in gains
        for setting in settings
    )


def gain_stages(assay: str) -> dict[str, Stages]:
    small = gain_runs(assay, (1.0, 4.0), ("fpa", "sagebwd", "sagebwd-all_int8"), (1, 2), debug=True)
    return {"full": (gain_runs(assay),), "scaled": (gain_runs(assay),), "debug": (small,)}


# --- Learning rates -----------------------------------------------------------------------------------------

#: Each is twice the one before. The other items train with 0.001 and 0.006, at which nothing breaks.
RATES = tuple(4e-3 * 2**k for k in range(6))
#: 191 steps; in full precision the model is past the steep part of its loss.
RATE = Setup(
    "35m-131k-rates",
    ("experiment=scaled_131k", "total_tokens=25034752", "sample_tokens=0", "checkpoint_every=191"),
    25_034_752,
    1_200_000,
    seeds=(1, 2),
    start_up=SHORT_START_UP,
)
RATE_SETTINGS = ("fpa", "sagebwd_paper", "sagebwd", "sagebwd_consistent")
RATE_GRID = {
    f"{setting}{ending}": (f"attention={setting}", *norm)
    for ending, norm in (("", ()), ("-no_qk_norm", ("model.qk_norm=false",)))
    for setting in RATE_SETTINGS
}


def rate_stages(setup: Setup, rates: Iterable[float]) -> Stages:
    """A stage for each rate. What diverged in every seed at half the rate is not trained at this one."""
    stages: list[tuple[Run, ...]] = []
    before = None
    for rate in rates:
        at_rate = replace(
            setup,
            name=f"{setup.name}/lr{rate:g}",
            overrides=(*setup.overrides, f"optimizer.lr={rate:g}"),
        )
        runs = runs_of(at_rate, RATE_GRID)
        if before is not None:
            runs = tuple(replace(run, unless_diverged=same_at(before, run, setup)) for run in runs)
        stages.append(runs)
        before = rate
    return tuple(stages)


def same_at(rate: float, run: Run, setup: Setup) -> tuple[str, ...]:
    """The names of the run's setting, in all seeds, at another rate."""
    variant = run.name.split("/")[-1].rsplit("-seed", 1)[0]
    return tuple(f"{setup.name}/lr{rate:g}/{variant}-seed{seed}" for seed in setup.seeds)


LEARNING_RATE = {
    "full": rate_stages(RATE, RATES),
    "scaled": rate_stages(RATE, RATES),
    "debug": rate_stages(replace(DEBUG_SMALL, name="debug-rates"), (3e-3, 6e-3)),
}


# --- Equal losses -------------------------------------------------------------------------------------------

#: With and without QK-norm, in full precision: the errors are those that SageBwd would make in these layers.
EQUAL_GRID = {"fpa": ("attention=fpa",), "fpa-no_qk_norm": ("attention=fpa", "model.qk_norm=false")}


def with_milestones(setup: Setup, every: int) -> Setup:
    """A setup of its own name whose runs keep a checkpoint after every so many steps, 0.42 GB each (35M)."""
    own = (f"checkpoint_every={every}", f"milestone_every={every}")
    return replace(
        setup,
        name=f"{setup.name}-equal",
        overrides=(*setup.overrides, *own),
        milestone_every=None,
        start_up=SHORT_START_UP,
    )


#: Eight checkpoints a run, at the same tokens: 6.3M apart.
EQUAL_LARGE, EQUAL_SMALL = with_milestones(LARGE, 48), with_milestones(SMALL, 384)
EQUAL_LOSS = {
    "full": (runs_of(EQUAL_LARGE, EQUAL_GRID) + runs_of(EQUAL_SMALL, EQUAL_GRID),),
    "scaled": (runs_of(EQUAL_LARGE, EQUAL_GRID) + runs_of(EQUAL_SMALL, EQUAL_GRID),),
    "debug": (
        runs_of(with_milestones(DEBUG_LARGE, 4), EQUAL_GRID)
        + runs_of(with_milestones(DEBUG_SMALL, 4), EQUAL_GRID),
    ),
}


# --- Long runs ----------------------------------------------------------------------------------------------

LONG_TOKENS = 1_000_079_360
#: 7,630 steps, and 61,040 of an eighth of the tokens. Warm-up: 2.6% of the run, as in the paper.
LONG_LARGE = Setup(
    "35m-131k-long",
    (
        *("experiment=scaled_131k", f"total_tokens={LONG_TOKENS}", "tps.warmup_steps=200"),
        *("eval_every=763", "checkpoint_every=763", "probe.every=763", "sample_tokens=0", "log_every=5"),
    ),
    LONG_TOKENS,
    1_200_000,
    seeds=(1, 2, 3),
)
LONG_SMALL = Setup(
    "35m-16k-long",
    (
        *("experiment=scaled_16k", f"total_tokens={LONG_TOKENS}", "tps.warmup_steps=1600"),
        *("eval_every=6104", "checkpoint_every=6104", "probe.every=6104", "sample_tokens=0", "log_every=40"),
    ),
    LONG_TOKENS,
    400_000,
    seeds=(1, 2, 3),
)
LONG_GRID = {setting: (f"attention={setting}",) for setting in RATE_SETTINGS}
LONG_RUNS = {
    "full": (runs_of(LONG_LARGE, LONG_GRID), runs_of(LONG_SMALL, LONG_GRID)),
    "scaled": (runs_of(LONG_LARGE, LONG_GRID), runs_of(LONG_SMALL, LONG_GRID)),
    "debug": (
        runs_of(replace(DEBUG_LARGE, name="debug-2k-long", milestone_every=None), LONG_GRID),
        runs_of(replace(DEBUG_SMALL, name="debug-256-long"), LONG_GRID),
    ),
}
