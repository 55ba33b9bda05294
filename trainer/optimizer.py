"""AdamW and its learning-rate schedule."""

import math

import torch
from torch import nn

from trainer.settings import OptimizerSettings


def adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay applies to matrices only, not to the gains of norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
    )


def learning_rate(step: int, *, steps: int, warmup_steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of optimizer step `step` (0-based) of `steps`.

    Rises linearly to the peak over `warmup_steps`, then falls, as a half cosine or linearly, to min_lr_ratio
    · peak at the last step. (Cosine and warm-up are the paper's, the floor is a choice. SageAttention3
    fine-tunes with linear decay.)
    """
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    progress = (step + 1 - warmup_steps) / (steps - warmup_steps)
    floor = settings.lr * settings.min_lr_ratio
    left = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (settings.lr - floor) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
