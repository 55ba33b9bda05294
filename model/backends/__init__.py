"""The attentions a model can be built around, one module of this package each.

To add one, write two files. A module here with a dataclass

    class Settings(Attention)
        What this attention reads. Every field has a default; `__post_init__` raises ValueError for what is
        wrong.

and in it

    def build(self, *, device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> Backend
        device: a torch.device. dtype: of Q, K and V. is_gqa: there are fewer key heads than query heads.
        Raises ValueError if this machine cannot run what the settings ask for.
    def why_no_documents(self) -> str | None
        Optional. Without it data.mask_documents=true is refused. None if `build` has one more argument,
        `longest_document: int | None`, and the attention takes `cu_seqlens` unless that is None.
    def saved_bytes(self, q, k, *, device: str) -> SavedBytes
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
from typing import Any, NamedTuple, Protocol

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

log = logging.getLogger(__name__)

#: The attention that every comparison is made against.
FULL_PRECISION = {"backend": "fpa"}


class AttentionFn(Protocol):
    """softmax(QKᵀ/√D)V: the arguments the model uses of torch.nn.functional.scaled_dot_product_attention.

    With packed documents there is one more, cu_seqlens: (documents + 1,) int32, boundaries of documents that
    attend to themselves only. B is then 1, no document is longer than `longest_document`, and none lies
    across a multiple of it: sequences of that length lie end to end. Documents without tokens may follow.
    """

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


class Attention:
    """The settings of an attention, read and checked. A backend's `Settings` derives from this."""

    @property
    def backend(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    def names(cls) -> set[str]:
        """Of the settings, as the Hydra group `attention` has them."""
        return {field.name for field in fields(cls)}

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Attention":
        """The settings from those that are set. Raises ValueError."""
        if "${" in str(given):  # nothing here is resolved, or not once more
            raise ValueError(f"attention={given}: no setting of an attention has ${{…}} in it")
        try:
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), given))
        except OmegaConfBaseException as error:
            name = error.full_key
            raise ValueError(f"attention.{name}={given.get(name)}: {str(error).splitlines()[0]}") from error

    def recorded(self) -> dict[str, Any]:
        """The group `attention` with all defaults filled in. The same record is the same attention."""
        return {"backend": self.backend, **asdict(self)}

    def build(self, *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> "Backend":
        raise NotImplementedError

    def why_no_documents(self) -> str | None:
        """Why this attention takes no packed documents, and what to use instead; None if it does."""
        return f"attention.backend={self.backend} takes no packed documents; use fpa or sagebwd"

    def saved_bytes(self, q: Tensor, k: Tensor, *, device: str) -> SavedBytes:
        """q, k, v, O, and the logsumexp (B, H, N) in float32."""
        results = q.nbytes + 4 * q[..., 0].numel()
        return SavedBytes(total=q.nbytes + 2 * k.nbytes + results, results=results)


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


def available() -> list[str]:
    """Names of all backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def settings_of(backend: str) -> type[Attention]:
    """The Settings of a backend. Raises ValueError if there is none of that name."""
    if backend not in available():
        raise ValueError(f"attention.backend={backend} is unknown; choose one of {', '.join(available())}")
    return importlib.import_module(f"{__name__}.{backend}").Settings


def read(group: Mapping[str, Any]) -> Attention:
    """The Hydra group `attention` as the Settings of its backend. None means not set.

    Settings of other backends are left out: a sweep over several attentions sets them for all. Raises
    ValueError if no backend has a setting, or a value is wrong.
    """
    if not isinstance(group, Mapping):
        raise ValueError(f"attention={group} must be a group of settings; choose attention=fpa or sagebwd")
    kind = settings_of(group.get("backend", ""))
    given = {name: value for name, value in group.items() if name != "backend"}
    known = set().union(*(settings_of(backend).names() for backend in available()))
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean attention.{near[0]}?" if near else f"choose from {', '.join(sorted(known))}"
            raise ValueError(f"attention.{name}={given[name]}: no attention has this setting; {hint}")
    own = kind.names()
    return kind.read({name: value for name, value in given.items() if name in own and value is not None})


def build(group: Mapping[str, Any], **shape: Any) -> Backend:
    """The attention that the group `attention` describes; takes the keywords of its `build`.

    Raises ValueError.
    """
    return read(group).build(**shape)


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
