"""Trainable INT8 attention: the sagebwd library."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sagebwd
from model.backends import Attention, Backend, SavedBytes
from sagebwd import SageConfig, dispatch
from sagebwd.config import PRESETS
from sagebwd.interface import AttentionParams
from sagebwd.window import CAUSAL

KERNELS = ("auto", *dispatch.KERNEL_SETS)


@dataclass
class Settings(Attention):
    """A SageConfig, and the kernels that run it.

    The group `attention` names a preset and the fields of SageConfig that replace the preset's.
    """

    config: SageConfig = field(default_factory=SageConfig)
    kernels: str = "auto"  # "auto" (the fastest that run), or one of the library's kernel sets

    @classmethod
    def names(cls) -> set[str]:
        return {"preset", "kernels", *(one.name for one in fields(SageConfig))}

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Settings":
        own = {"preset": "default", "kernels": "auto", **given}
        for name, choices in (("preset", PRESETS), ("kernels", KERNELS)):
            if own[name] not in list(choices):
                raise ValueError(
                    f"attention.{name}={own[name]} is unknown; choose one of {', '.join(choices)}"
                )
        preset, kernels = PRESETS[own.pop("preset")], own.pop("kernels")
        try:
            return cls(replace(preset, **own), kernels)
        except (TypeError, ValueError) as error:
            raise ValueError(f"attention=sagebwd: {error}") from error

    def recorded(self) -> dict[str, Any]:
        """Every field of the SageConfig, so that a record does not depend on what a preset means."""
        config = asdict(self.config)
        products = list(self.config.int8_matmuls)  # YAML has no tuples
        return {"backend": "sagebwd", **config, "int8_matmuls": products, "kernels": self.kernels}

    def why_no_documents(self) -> None:
        """All kernel sets take packed documents."""

    def build(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        d_head: int,
        is_gqa: bool,
        longest_document: int | None = None,
    ) -> Backend:
        """INT8 attention. Raises ValueError if the chosen kernels cannot run here."""
        kernels = None if self.kernels == "auto" else self.kernels
        attend = partial(sagebwd.sage_attention, config=self.config, kernels=kernels)
        # The library knows best what it supports: try a small input.
        q = torch.zeros(1, 2, 16, d_head, device=device, dtype=dtype)
        kv = q[:, :1] if is_gqa else q
        cu_seqlens = torch.tensor([0, 16], device=device) if longest_document else None
        try:
            attend(q, kv, kv, is_causal=True, enable_gqa=is_gqa, cu_seqlens=cu_seqlens)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"attention=sagebwd cannot run on {device} with {dtype}, d_head={d_head}, is_gqa={is_gqa}: "
                f"{error}. attention.kernels=reference runs on any device, slowly"
            ) from error
        return Backend(
            attend,
            f"sagebwd, kernels {self.kernels}, {self.config}",
            title="SageBwd",
            saved_operators=(torch.ops.sagebwd.forward.default,),
        )

    def saved_bytes(self, q: Tensor, k: Tensor, *, device: str) -> SavedBytes:
        """What the operator keeps. Without a GPU here, "cuda" is a Hopper GPU."""
        kernels = _kernels(q, self.config, device) if self.kernels == "auto" else self.kernels
        params = AttentionParams(CAUSAL, q.shape[-1] ** -0.5, self.config, kernels, pack_for_backward=True)
        saved = torch.ops.sagebwd.forward(q, k, k, *params.flatten(), True)
        needed = params.needed_by_backward(q, k, k)
        results, inputs = (sum(x.nbytes for x in own if x is not None) for own in (saved, needed))
        return SavedBytes(total=inputs + results, results=results)


def _kernels(q: Tensor, config: SageConfig, device: str) -> str:
    """The kernel set that runs on this device; "reference" if none does."""
    gpu = None
    if device == "cuda":
        absent = dispatch.GPU("a Hopper GPU", dispatch.HOPPER)
        gpu = dispatch.gpu_of(0) if torch.cuda.is_available() else absent
    explained = dispatch.explain_call(dispatch.Call(device, gpu, q.dtype, q.shape[-1], config))
    return "reference" if explained.kernels == "none" else explained.kernels
