"""AdamW, or Muon with AdamW."""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from model.llama import Llama
from trainer.settings import OptimizerSettings

log = logging.getLogger(__name__)

#: How the step of a matrix depends on its shape, by torch's name (adjust_lr_fn of torch.optim.Muon).
MUON_SCALES = ("match_rms_adamw", "original")


def build_optimizer(llama: Llama, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that the settings name. Make it after the model is placed (trainer/parallel.py)."""
    return muon(llama, settings) if settings.name == "muon" else adamw(llama, settings)


def adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay applies to matrices only, not to the gains of norms."""
    return _adamw([p for p in model.parameters() if p.requires_grad], settings)


def _adamw(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
    )


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
        _adamw([p for p in parameters if p not in taken], settings),
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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set `rate` in every group, times the group's own `lr_ratio` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def problems(settings: OptimizerSettings) -> Iterator[str]:
    """What is wrong with the optimizer's settings, those of the schedule apart; each with its fix."""
    for name, value in (("beta1", settings.beta1), ("beta2", settings.beta2)):
        if not 0 <= value < 1:
            yield f"optimizer.{name}={value} must be at least 0 and below 1; usual is 0.9 or 0.95"
    if not settings.weight_decay >= 0:
        yield f"optimizer.weight_decay={settings.weight_decay} must not be negative"
    if settings.name == "muon":
        yield from _muon_problems(settings)
    elif settings.name == "adamw":
        for name, value in _muon_settings(settings).items():
            if value is not None:
                yield f"optimizer.{name}={value} is a setting of Muon; leave it out, or use optimizer=muon"
    else:
        yield f"optimizer.name={settings.name} is unknown; use optimizer=adamw or optimizer=muon"


def _muon_settings(settings: OptimizerSettings) -> dict[str, Any]:
    names = ("muon_lr", "muon_momentum", "muon_lr_scale")
    return {name: getattr(settings, name) for name in names}


def _muon_problems(settings: OptimizerSettings) -> Iterator[str]:
    if not hasattr(torch.optim, "Muon"):
        yield (
            f"optimizer=muon uses torch.optim.Muon, which PyTorch {torch.__version__} does not have; install "
            "PyTorch 2.11 or newer, or use optimizer=adamw"
        )
    rate, momentum, scale = _muon_settings(settings).values()
    if momentum is None or scale is None:
        yield (
            f"optimizer.muon_momentum={momentum} and optimizer.muon_lr_scale={scale} must be set for Muon; "
            "use optimizer=muon, which sets them, instead of optimizer.name=muon"
        )
        return
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        yield f"optimizer.muon_lr={rate} must be greater than zero; null uses optimizer.lr"
    if not 0 <= momentum < 1:
        yield f"optimizer.muon_momentum={momentum} must be at least 0 and below 1; usual is 0.95"
    if scale not in MUON_SCALES:
        yield f"optimizer.muon_lr_scale={scale} is unknown; choose one of {', '.join(MUON_SCALES)}"
    elif scale == "original" and rate is None:
        yield (
            "optimizer.muon_lr_scale=original needs a learning rate of its own, because optimizer.lr is for "
            "AdamW; use optimizer.muon_lr=0.02, or optimizer.muon_lr_scale=match_rms_adamw"
        )
