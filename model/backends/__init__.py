"""The attentions a model can be built around, one module of this package each.

To add one, write two files. A module here with

    Settings
        A dataclass of the settings that this attention reads. Every field has a default.
    check(settings: Settings, *, deterministic: bool) -> None
        Raises ValueError if a setting is wrong, or if `deterministic` is asked for and these settings cannot
        give the same bits every time. Runs in milliseconds, before anything is built.
    build(settings: Settings, *, device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> Backend
        device: a torch.device. dtype: of Q, K and V. is_gqa: there are fewer key heads than query heads.
        Raises ValueError if this machine cannot run what the settings ask for.
    resolve(settings: Settings) -> dict[str, Any]
        Optional. The settings with all defaults filled in; this is what config.yaml records.
    saved_bytes(settings: Settings, q, k, *, device: str) -> SavedBytes
        Optional. What autograd keeps of the attention of q (B, H, N, D) and k (B, G, N, D), which are meta
        tensors, on "cuda" or "cpu"; for the estimate of memory. Without it: q, k, v, O and the logsumexp.

and configs/attention/<name>.yaml, which sets `backend: <module>` and any of the settings.
`python train.py attention=<name>` then trains with it.
"""

import difflib
import importlib
import logging
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

log = logging.getLogger(__name__)

#: The attention that every comparison is made against.
FULL_PRECISION = {"backend": "fpa"}

OLD_NAMES = {"implementation": "kernels"}  # in config.yaml of older runs


class AttentionFn(Protocol):
    """softmax(QKᵀ/√D)V: the arguments the model uses of torch.nn.functional.scaled_dot_product_attention."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        """q: (B, H, N, D); k, v: (B, G, N, D) with any strides → (B, H, N, D).

        G is H, or with `enable_gqa` a divisor of H: each key head then serves H/G consecutive query heads.
        """
        ...


class SavedBytes(NamedTuple):
    """Bytes that autograd keeps between forward and backward of one attention.

    total: of everything, the inputs q, k and v included if the backward reads them.
    results: those of them that activation checkpointing keeps, too: results of `saved_operators`.
    """

    total: int
    results: int


@dataclass(frozen=True)
class Backend:
    """An attention that is ready to run, and what the trainer needs to know of it."""

    attend: AttentionFn
    description: str  # of the kernel and its settings, for the log
    title: str = "attention"  # what messages call it

    #: Forward operators whose outputs activation checkpointing saves instead of running them again.
    saved_operators: tuple[torch._ops.OpOverload, ...] = ()

    #: Attentions whose error the probe measures in a run of this one: the first that can be built. Empty:
    #: this one's own error.
    probe_instead: tuple[Mapping[str, Any], ...] = ()

    #: Settings that make its gradients more accurate, each as the end of a sentence; for the probe's alarm.
    advice: tuple[str, ...] = ()


def available() -> list[str]:
    """Names of all backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """The module of a backend. Raises ValueError if there is none of that name."""
    if name not in available():
        raise ValueError(f"attention.backend={name} is unknown; choose one of {', '.join(available())}")
    return importlib.import_module(f"{__name__}.{name}")


def check(attention: Mapping[str, Any], *, deterministic: bool = False) -> None:
    """Raise ValueError if the Hydra group `attention` is wrong. See the module's `check`."""
    module, settings = read(attention)
    module.check(settings, deterministic=deterministic)


def build(
    attention: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool
) -> Backend:
    """The attention that the group `attention` describes. Raises ValueError. See the module's `build`."""
    module, settings = read(attention)
    module.check(settings, deterministic=False)
    return module.build(settings, device=device, dtype=dtype, d_head=d_head, is_gqa=is_gqa)


def build_first(choices: Sequence[Mapping[str, Any]], **shape: Any) -> Backend:
    """The first of several attentions that can be built; takes the keywords of `build`.

    Raises the ValueError of the last one if none can.
    """
    for choice in choices[:-1]:
        try:
            return build(choice, **shape)
        except ValueError as error:
            log.info("%s; trying the next choice", error)
    return build(choices[-1], **shape)


def resolve(attention: Mapping[str, Any]) -> dict[str, Any]:
    """The group `attention` with the backend's defaults filled in and without what it does not read.

    Two groups with the same result describe the same attention. Raises ValueError if it is wrong.
    """
    module, settings = read(attention)
    return {"backend": attention["backend"], **getattr(module, "resolve", asdict)(settings)}


def saved_bytes(attention: Mapping[str, Any], q: Tensor, k: Tensor, *, device: str) -> SavedBytes:
    """What autograd keeps of this attention. q, k: meta tensors, see the module's `saved_bytes`."""
    module, settings = read(attention)
    if not hasattr(module, "saved_bytes"):
        return saved_by_flash_attention(q, k)
    return module.saved_bytes(settings, q, k, device=device)


def saved_by_flash_attention(q: Tensor, k: Tensor) -> SavedBytes:
    """q, k, v, O, and the logsumexp (B, H, N) in float32."""
    results = q.nbytes + 4 * q[..., 0].numel()
    return SavedBytes(total=q.nbytes + 2 * k.nbytes + results, results=results)


def read(attention: Mapping[str, Any]) -> tuple[ModuleType, Any]:
    """The backend's module, and its Settings filled from the Hydra group `attention`.

    None means not set: the default of Settings. A setting of another backend is ignored if it is off (None,
    False or empty), because a sweep may turn a switch off for all backends. Raises ValueError if such a
    setting is on, if no backend has it, or if a value has the wrong type.
    """
    module = load(attention.get("backend", ""))
    attention = {OLD_NAMES.get(name, name): value for name, value in attention.items()}
    own = {field.name for field in fields(module.Settings)}
    _refuse_foreign(attention, own)
    given = {name: value for name, value in attention.items() if name in own and value is not None}
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(module.Settings), given))
    except OmegaConfBaseException as error:
        name = error.full_key
        raise ValueError(f"attention.{name}={given.get(name)}: {str(error).splitlines()[0]}") from error
    return module, settings


def setting_names(backend: str) -> set[str]:
    """Names of the settings that a backend reads."""
    return {field.name for field in fields(load(backend).Settings)}


def _refuse_foreign(attention: Mapping[str, Any], own: set[str]) -> None:
    """Raise ValueError for a setting that is on and not read here, or that no backend has."""
    foreign = {name: value for name, value in attention.items() if name not in own | {"backend"}}
    if not foreign:
        return
    backend = attention["backend"]
    readers = {
        name: [other for other in available() if other != backend and name in setting_names(other)]
        for name in foreign
    }
    unknown = [name for name in foreign if not readers[name]]
    if unknown:
        near = difflib.get_close_matches(unknown[0], own, n=1)
        raise ValueError(
            f"attention.{unknown[0]}={foreign[unknown[0]]}: no attention has this setting; "
            + (f"did you mean attention.{near[0]}?" if near else f"{backend} reads {', '.join(sorted(own))}")
        )
    on = {name: value for name, value in foreign.items() if value not in (None, False, [])}
    if on:
        listed = ", ".join(f"attention.{name}={value}" for name, value in on.items())
        others = sorted(set.intersection(*(set(readers[name]) for name in on)))
        switch = f", or use {' or '.join(f'attention={name}' for name in others)}" if others else ""
        raise ValueError(
            f"{listed}: has no effect with attention={backend}, which reads only {', '.join(sorted(own))}; "
            f"drop it{switch}"
        )
