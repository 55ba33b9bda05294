"""AdamW, Muon with AdamW or a class by its path, and the learning rate of every step."""

import logging
import math
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from common.errors import TrainingError
from model.llama import Llama
from trainer.settings import OptimizerSettings, Settings

log = logging.getLogger(__name__)


def build_optimizer(llama: Llama, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that the settings name. Make it after the model is placed (trainer/parallel.py)."""
    return by_target(llama, settings) if settings._target_ else OPTIMIZERS[settings.name](llama, settings)


def by_target(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """A user's class, called as torch's: with groups of parameters, lr and its own arguments.

    Nothing is made of the arguments, as Hydra's instantiate would. Raises TrainingError if that fails.
    """
    try:
        make = pkgutil.resolve_name(settings._target_)
        made = make(_groups(model.parameters(), settings), lr=settings.lr, **settings.arguments)
    except (Exception, SystemExit) as error:  # whatever that code raises
        raise TrainingError(
            f"optimizer._target_={settings._target_} cannot be made with optimizer.arguments="
            f"{settings.arguments}: {error}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TrainingError(f"optimizer._target_={settings._target_} is no torch.optim.Optimizer")
    return made


def adamw(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay applies to matrices only, not to the gains of norms."""
    return torch.optim.AdamW(
        _groups(parameters, settings),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def _groups(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> list[dict[str, Any]]:
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def muon(llama: Llama, settings: OptimizerSettings) -> "MuonWithAdamW":
    """Muon for the matrices of the blocks; AdamW for embedding, head and the gains of norms.

    Every matrix is orthogonalized as a whole. Q, K and V are matrices of their own here, and so are the two
    of SwiGLU, so nothing is split; the heads within one are not separated, as in Muon's own code.
    """
    parameters = [p for p in llama.parameters() if p.requires_grad]
    matrices = [p for p in llama.layers.parameters() if p.requires_grad and p.dim() == 2]
    taken = set(matrices)
    optimizer = MuonWithAdamW(
        torch.optim.Muon(
            matrices,
            lr=settings.lr,  # times lr_ratio, from the first step on
            momentum=settings.muon_momentum,
            weight_decay=settings.weight_decay,
            adjust_lr_fn=settings.muon_lr_scale,
        ),
        adamw([p for p in parameters if p not in taken], settings),
    )
    if settings.muon_lr is not None:
        optimizer.muon.param_groups[0]["lr_ratio"] = settings.muon_lr / settings.lr
    log.info(
        "optimizer: Muon for %d matrices (%s parameters), AdamW for the other %s parameters",
        len(matrices),
        f"{sum(p.numel() for p in matrices):,}",
        f"{sum(p.numel() for p in parameters if p not in taken):,}",
    )
    return optimizer


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that look like one: their parameter groups one after the other, their states together.

    Both work on the groups and the state of this object, so whatever reads, changes, saves or loads these
    (the learning rate, checkpoints, the check for NaN) needs to know of this object only.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], defaults={})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of both. There is no closure: torch's checkpointing calls step(closure=None)."""
        self.muon.step()
        self.adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # replaces groups and state
        self._share()

    def _share(self) -> None:
        count = len(self.muon.param_groups)
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self.muon.state = self.adamw.state = self.state


#: By settings.name.
OPTIMIZERS: dict[str, Callable[[Llama, OptimizerSettings], torch.optim.Optimizer]] = {
    "adamw": lambda llama, settings: adamw(llama.parameters(), settings),
    "muon": muon,
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set `rate` in every group, times the group's own `lr_ratio` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


# ---------------------------------------------------------------------- learning rate

#: Share of the peak that is left after `progress` (0 to 1) of the decay, before the floor is added. Of wsd:
#: Hägele et al. (arXiv 2405.18392) compare shapes and lengths; this one beats the linear one, and a decay of
#: 10% to 20% of the run reaches a cosine's loss.
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - math.sqrt(progress),
}


def learning_rate(step: int, *, steps: int, warmup_steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of optimizer step `step` (0-based) of `steps`.

    Rises linearly to the peak over `warmup_steps`. With "cosine" and "linear" it falls from there on, with
    "wsd" (warmup-stable-decay) it stays at the peak until the last decay_ratio · steps, with "constant" to
    the end. The last step of a decay has min_lr_ratio · peak. (Cosine and warm-up are the paper's, the floor
    is a choice. SageAttention3 fine-tunes with linear decay.)
    """
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    decay = decay_steps(settings, steps=steps, warmup_steps=warmup_steps)
    if step < steps - decay:
        return settings.lr
    progress = (step + 1 - (steps - decay)) / decay
    floor = settings.lr * settings.min_lr_ratio
    return floor + (settings.lr - floor) * SHAPES[settings.schedule](progress)


def decay_steps(settings: OptimizerSettings, *, steps: int, warmup_steps: int) -> int:
    """How many steps at the end of the run have a falling learning rate."""
    if settings.schedule == "constant":
        return 0
    if settings.schedule != "wsd":
        return steps - warmup_steps
    return max(1, round(settings.decay_ratio * steps))


def warmup_steps(settings: Settings) -> int:
    """tps.warmup_steps, or a tenth of a run that is too short for them."""
    steps, asked, optimizer = settings.total_steps, settings.tps.warmup_steps, settings.optimizer
    falling = decay_steps(optimizer, steps=steps, warmup_steps=steps - 1)
    return asked if asked + falling <= steps else min(steps // 10, steps - falling)
