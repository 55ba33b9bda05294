"""The experiments of the paper: what each one runs, at which scale, what it costs and where it is reported.

    full      the paper's own size: the 325M model on 78.6 billion tokens, for anyone with the hardware
    scaled    smaller models and fewer tokens: minutes to hours of one H200
    debug     seconds on a CPU, to see that everything works; the numbers mean nothing

A further experiment is one Item of ITEMS, and a section of the report (scripts/paper/report/). Those beyond
the paper's figures and tables are in scripts/paper/further_items.py. The training runs are in
scripts/paper/experiment_runs.py and further_runs.py.
"""

from __future__ import annotations

from pathlib import Path

from scripts.paper.experiment_runs import (
    DEBUG_SMALL,
    FIGURE_1A,
    FIGURE_1B,
    FIGURE_4,
    FINE_TUNE_DEBUG,
    FINE_TUNE_FULL,
    FINE_TUNE_SHORT,
    FULL_LARGE,
    FULL_SMALL,
    GRADIENT_BIAS,
    LARGE,
    MILESTONES,
    PRESET_GRID,
    PUSHED,
    SCALES,
    SHORT,
    fine_tuning,
    one_seed,
    runs_of,
)
from scripts.paper.further_items import FURTHER_ITEMS
from scripts.paper.items import (
    RUNS,
    TRACES,
    Item,
    curves,
    duration_in_words,
    everywhere,
    on_gpu,
    one_after_the_other,
    traced,
)

__all__ = ["ITEMS", "RESULTS", "RUNS", "TRACES", "Item", "duration_in_words", "find", "total_cost"]

#: The committed results; `python -m scripts.reproduce --write-results` alone writes there.
RESULTS = Path("results")

#: scripts.bench.attention at the debug scale.
ATTENTION_DEBUG = (
    *("scripts.bench.attention", "--device", "cpu", "--lengths", "64", "--tokens", "64"),
    *("--width", "128", "--repetitions", "2"),
)


def training_step(name: str, *options: str) -> tuple[str, ...]:
    """scripts.bench.training with these options; its files' names begin with `name`."""
    steps = ("--accumulation", "4", "--steps", "8", "--warm-up", "2", "--profile-steps", "2")
    return "scripts.bench.training", *steps, *options, "--out", f"{{results}}/{name}"


TRAINING_SPEED = (
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
TRAINING_SPEED_DEBUG = (
    *("scripts.bench.training", "--device", "cpu", "--model", "llama_debug", "--contexts", "64"),
    *("--tokens-per-micro-batch", "256", "--attention", "fpa", "sagebwd", "--baselines"),
    *("--steps", "3", "--warm-up", "1", "--out", "{results}/bench_training"),
)


#: Of the item's runs and their milestones, under every setting.
BIAS_OF_GRADIENTS = (
    *("scripts.paper.gradient_bias", RUNS, "--milestones", "--out", "{results}/gradient_bias"),
)
#: The same at the debug scale.
BIAS_DEBUG = (
    *("--device", "cpu", "--batches", "3", "--tokens-per-batch", "128"),
    *("--settings", "control", "paper", "default", "only_o", "only_dq_dk"),
)


ITEMS = (
    Item(
        "table1",
        "Table 1: error on Gaussian inputs",
        "table1.json",
        everywhere("scripts.paper.table1", "--out", "{results}/table1.json"),
        minutes=dict.fromkeys(SCALES, 1),
    ),
    Item(
        "figure1a",
        "Figure 1a: loss at the large number of tokens per step",
        "figure1a.json",
        curves("figure1a"),
        stages=FIGURE_1A,
    ),
    Item(
        "figure1b",
        "Figure 1b: loss at an eighth of the tokens per step",
        "figure1b.json",
        curves("figure1b"),
        stages=FIGURE_1B,
    ),
    Item(
        "figures2-3",
        "Figures 2 and 3: speed of the attention",
        "bench_attention.json",
        on_gpu(
            *("scripts.bench.attention", "--graphs", "--configs", "default", "16-bit-p", "consistent"),
            *("--out", "{results}/bench_attention"),
            debug=(*ATTENTION_DEBUG, "--out", "{results}/bench_attention"),
        ),
        also=("figure2", "figure3"),
        minutes={"full": 15, "scaled": 15, "debug": 1},
    ),
    Item(
        "figure4",
        "Figure 4: smoothing of K and Q",
        "figure4.json",
        curves("figure4"),
        stages=FIGURE_4,
    ),
    Item(
        "layers",
        "Figures 5 and 6, Table 2, RMS of P, dP and dS (§4.2): error in the layers of trained models",
        "layers.json",
        everywhere("scripts.paper.layers", RUNS, "--out", "{results}/layers"),
        also=("figure5", "figure6", "table2", "rms"),
        stages=one_seed(FIGURE_1A, FIGURE_1B, FIGURE_4),
        minutes={"full": 10, "scaled": 5, "debug": 1},
        of_weights=True,
    ),
    Item(
        "gradient_formats",
        "S3: dP in INT8, and INT8 against FP8 gradients",
        "gradient_formats.json",
        traced("scripts.paper.gradient_formats", "gradient_formats"),
        stages=one_seed(MILESTONES),
        minutes={"full": 10, "scaled": 4, "debug": 1},
        of_weights=True,
    ),
    Item(
        "finetune",
        "S3: fine-tuning at parity",
        "finetune.json",
        curves("finetune"),
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
        curves("presets"),
        stages={
            "full": (runs_of(FULL_LARGE, PRESET_GRID),),
            "scaled": (runs_of(LARGE, PRESET_GRID) + runs_of(PUSHED, PRESET_GRID),),
            "debug": (runs_of(DEBUG_SMALL, PRESET_GRID),),
        },
    ),
    Item(
        "gradient_error",
        "Beyond the paper: where the error of dS comes from",
        "gradient_error.json",
        one_after_the_other(
            traced("scripts.paper.gradient_error", "gradient_error"),
            everywhere(
                *("scripts.paper.error_against_time", "--results", "{results}"),
                *("--out", "{results}/error_against_time"),
            ),
        ),
        stages=one_seed(MILESTONES),
        minutes={"full": 15, "scaled": 5, "debug": 1},
        of_weights=True,
    ),
    Item(
        "gradient_bias",
        "Beyond the paper: bias and noise in the gradients of all weights",
        "gradient_bias.json",
        {
            "full": ((*BIAS_OF_GRADIENTS, "--micro-batch", "4"),),
            "scaled": (BIAS_OF_GRADIENTS,),
            "debug": ((*BIAS_OF_GRADIENTS, *BIAS_DEBUG),),
        },
        stages=GRADIENT_BIAS,
        minutes={"full": 240, "scaled": 12, "debug": 1},
        of_weights=True,
    ),
    *FURTHER_ITEMS,
    Item(
        "accuracy",
        "Accuracy of the kernels, over shapes and product by product",
        "accuracy.json",
        on_gpu(
            *("scripts.paper.accuracy", "--device", "cuda", "--out", "{results}/accuracy.json"),
            debug=(
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
        {"full": TRAINING_SPEED, "scaled": TRAINING_SPEED, "debug": (TRAINING_SPEED_DEBUG,)},
        minutes={"full": 25, "scaled": 25, "debug": 1},
    ),
    Item(
        "many_gpus",
        "Training on several GPUs",
        "bench_gpus.json",
        on_gpu(
            *("scripts.bench.gpus", "--out", "{results}/bench_gpus"),
            debug=(
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
