"""The learning rate of every step."""

import math
from collections.abc import Callable, Iterator

from trainer.settings import OptimizerSettings

#: Share of the peak that is left after `progress` (0 to 1) of the decay, before the floor is added.
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}

# What schedule=wsd uses if its settings are null. Hägele et al. (arXiv 2405.18392) compare shapes and
# lengths: this shape beats the linear one, and a decay of 10% to 20% of the run reaches a cosine's loss.
DECAY_RATIO = 0.2
DECAY_TYPE = "1-sqrt"

SCHEDULES = ("cosine", "linear", "wsd")
DECAY_TYPES = ("linear", "1-sqrt")


def learning_rate(step: int, *, steps: int, warmup_steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of optimizer step `step` (0-based) of `steps`.

    Rises linearly to the peak over `warmup_steps`. With "cosine" and "linear" it falls from there on, with
    "wsd" (warmup-stable-decay) it stays at the peak until the last decay_ratio · steps. The last step has
    min_lr_ratio · peak. (Cosine and warm-up are the paper's, the floor is a choice. SageAttention3 fine-tunes
    with linear decay.)
    """
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    decay = decay_steps(settings, steps=steps, warmup_steps=warmup_steps)
    progress = (step + 1 - (steps - decay)) / decay
    if progress <= 0:
        return settings.lr
    floor = settings.lr * settings.min_lr_ratio
    return floor + (settings.lr - floor) * SHAPES[_shape(settings)](progress)


def decay_steps(settings: OptimizerSettings, *, steps: int, warmup_steps: int) -> int:
    """How many steps at the end of the run have a falling learning rate: one or more."""
    if settings.schedule != "wsd":
        return steps - warmup_steps
    ratio = DECAY_RATIO if settings.decay_ratio is None else settings.decay_ratio
    return max(1, round(ratio * steps))


def _shape(settings: OptimizerSettings) -> str:
    return settings.schedule if settings.schedule != "wsd" else settings.decay_type or DECAY_TYPE


def problems(settings: OptimizerSettings) -> Iterator[str]:
    """What is wrong with the schedule's own settings, each with its fix."""
    ratio, shape = settings.decay_ratio, settings.decay_type
    if settings.schedule not in SCHEDULES:
        yield f"optimizer.schedule={settings.schedule} is unknown; choose one of {', '.join(SCHEDULES)}"
        return
    if not 0 <= settings.min_lr_ratio <= 1:
        yield (
            f"optimizer.min_lr_ratio={settings.min_lr_ratio} must lie between 0 and 1: "
            "it is the final learning rate as a fraction of optimizer.lr"
        )
    if settings.schedule != "wsd":
        for name, value in (("decay_ratio", ratio), ("decay_type", shape)):
            if value is not None:
                yield (
                    f"optimizer.{name}={value} is a setting of optimizer.schedule=wsd, not of "
                    f"optimizer.schedule={settings.schedule}, which falls from the warm-up to the end; "
                    "leave it out, or use optimizer.schedule=wsd"
                )
        return
    if ratio is not None and not 0 < ratio <= 1:
        yield (
            f"optimizer.decay_ratio={ratio} must be above 0 and at most 1: it is the share of the run's "
            "steps in which the learning rate falls; usual is 0.1 to 0.2"
        )
    if shape is not None and shape not in DECAY_TYPES:
        yield f"optimizer.decay_type={shape} is unknown; choose one of {', '.join(DECAY_TYPES)}"


def length_problems(settings: OptimizerSettings, *, steps: int, warmup_steps: int) -> Iterator[str]:
    """Whether warm-up and decay fit into the run, if they can be computed."""
    if warmup_steps >= steps:
        yield (
            f"tps.warmup_steps={warmup_steps} takes the whole run of {steps} steps; "
            f"use tps.warmup_steps={steps // 10}, or train longer"
        )
    elif settings.schedule == "wsd" and not any(problems(settings)):
        decay = decay_steps(settings, steps=steps, warmup_steps=warmup_steps)
        if warmup_steps + decay > steps:
            yield (
                f"tps.warmup_steps={warmup_steps} and the decay of {decay} steps (optimizer.decay_ratio) are "
                f"more than the run's {steps} steps; use tps.warmup_steps={steps - decay}, or a smaller "
                "optimizer.decay_ratio"
            )
