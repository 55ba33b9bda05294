"""The experiments beyond the paper's figures and tables, as items: what its claims would lead one to try."""

from __future__ import annotations

from scripts.paper.experiment_runs import GRADIENT_BIAS, SCALES
from scripts.paper.further_runs import ASSAYS, EQUAL_LOSS, LEARNING_RATE, LONG_RUNS, gain_stages
from scripts.paper.items import RUNS, Item, curves, everywhere

ASSAY_TITLES = {
    "large_logits": "Beyond the paper: losses where logits are large, by gain of QK-norm",
    "one_batch": "Beyond the paper: losses without minibatch noise, one batch again and again",
}

REMEDIES = (
    *("scripts.paper.remedies", RUNS, "--sigmas", "1", "3", "5", "--batches", "16"),
    *("--times", "{results}", "--out", "{results}/remedies"),
)
REMEDIES_DEBUG = (
    *("--device", "cpu", "--batches", "3", "--tokens-per-batch", "128", "--tokens", "64", "--sequences", "1"),
)


def compared(assay: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The command that compares the runs of an assay, at every scale."""
    command = "scripts.paper.large_logits", RUNS, "--out", f"{{results}}/{assay}"
    return {scale: ((*command, "--scale", scale),) for scale in SCALES}


FURTHER_ITEMS = (
    *(
        Item(
            assay,
            ASSAY_TITLES[assay],
            f"{assay}.json",
            compared(assay),
            stages=gain_stages(assay),
            keeps_weights=False,
        )
        for assay in ASSAYS
    ),
    Item(
        "long_runs",
        "Beyond the paper: the gap at both numbers of tokens per step after a billion tokens",
        "long_runs.json",
        curves("long_runs"),
        stages=LONG_RUNS,
        keeps_weights=False,
    ),
    Item(
        "learning_rate",
        "Beyond the paper: the learning rate at which each attention breaks",
        "learning_rate.json",
        curves("learning_rate"),
        stages=LEARNING_RATE,
        keeps_weights=False,
    ),
    Item(
        "equal_loss",
        "Beyond the paper: errors in the layers at equal loss, by depth, and the mean of K",
        "equal_loss.json",
        everywhere("scripts.paper.equal_loss", RUNS, "--out", "{results}/equal_loss"),
        stages=EQUAL_LOSS,
        minutes={"full": 6, "scaled": 6, "debug": 1},
        of_weights=True,
    ),
    Item(
        "remedies",
        "Beyond the paper: what takes the bias out of the gradients, and its cost",
        "remedies.json",
        {"full": (REMEDIES,), "scaled": (REMEDIES,), "debug": ((*REMEDIES, *REMEDIES_DEBUG),)},
        stages=GRADIENT_BIAS,
        minutes={"full": 240, "scaled": 8, "debug": 2},
        of_weights=True,
    ),
)
