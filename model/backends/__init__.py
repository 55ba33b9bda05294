"""The attentions a model can be built around, one module of this package each.

To add one, add a module here that has

    check(settings: AttentionSettings) -> None
        Raises ValueError for settings that are wrong or have no meaning with this backend.
    build(settings, *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> Backend
        `dtype` is what Q, K and V will have, `is_gqa` whether there are fewer key than query heads.
        Raises ValueError if this machine cannot run what the settings ask for.

and, for `python train.py attention=<name>`, a file configs/attention/<name>.yaml.
"""

import importlib
import pkgutil
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Protocol

from torch import Tensor


class AttentionFn(Protocol):
    """softmax(QKᵀ/√D)V: the arguments the model uses of torch.nn.functional.scaled_dot_product_attention."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        """q: (B, H, N, D); k, v: (B, G, N, D) with any strides → (B, H, N, D).

        G is H, or with `enable_gqa` a divisor of H: each key head then serves H/G consecutive query heads.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """An attention that is ready to run, and what to call it in a log."""

    attend: AttentionFn
    description: str


@dataclass
class AttentionSettings:
    """Settings of the attention (Hydra group `attention`). None means not set: the backend's own default."""

    backend: str = "fpa"  # a module of model/backends/

    # fpa
    sdpa: str | None = None  # "cudnn", "flash", "efficient" or "math"; None: the fastest there is

    # sagebwd: see sagebwd.SageConfig
    smooth_k: bool | None = None
    smooth_q: bool | None = None
    smooth_v: bool | None = None
    unsigned_p: bool | None = None
    operand_scales: str | None = None  # "block" or "token"
    granularity: str | None = None  # "block" or "row"
    int8_matmuls: list[str] | None = None
    add_mean_k_term: bool | None = None
    exact_delta: bool | None = None
    compensate_o: bool | None = None
    s_levels: int | None = None
    block_q: int | None = None
    block_kv: int | None = None
    implementation: str | None = None  # "auto" (what suits the device) or "reference" (plain PyTorch)


def available() -> list[str]:
    """Names of all backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(settings: AttentionSettings) -> ModuleType:
    """The module of the chosen backend. Raises ValueError if there is none of that name."""
    if settings.backend not in available():
        raise ValueError(
            f"attention.backend={settings.backend} is unknown; choose one of {', '.join(available())}"
        )
    return importlib.import_module(f"{__name__}.{settings.backend}")


def refuse_foreign(settings: AttentionSettings, own: set[str]) -> None:
    """Raise ValueError if a setting is on that the chosen backend does not read, `own` being those it does.

    Off (False or empty) is allowed: a sweep may turn a switch off for all backends.
    """
    foreign = {
        name: value
        for name, value in asdict(settings).items()
        if name != "backend" and name not in own and value not in (None, False, [])
    }
    if foreign:
        named = ", ".join(f"attention.{name}={value}" for name, value in foreign.items())
        others = " or ".join(f"attention={name}" for name in available() if name != settings.backend)
        raise ValueError(
            f"{named}: without meaning for attention={settings.backend}, which reads only "
            f"{', '.join(sorted(own))}; drop it, or use {others}"
        )
