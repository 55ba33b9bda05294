"""Trainable INT8 attention: the sagebwd library."""

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sagebwd
from model.backends import Backend, SavedBytes
from sagebwd import SageConfig, dispatch
from sagebwd.config import PRESETS, encode
from sagebwd.kernels.ops import needed_by_backward

CONFIG_FIELDS = {field.name for field in fields(SageConfig)}
KERNELS = ("auto", *dispatch.KERNEL_SETS)


@dataclass
class Settings:
    """Settings of SageBwd: a preset, and values that replace the preset's. None: as in the preset."""

    preset: str = "default"  # one of PRESETS
    kernels: str = "auto"  # "auto" (the fastest that run), or one of the library's kernel sets

    # See sagebwd.SageConfig.
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


def check(settings: Settings, *, deterministic: bool) -> None:
    """Raise ValueError for settings that SageConfig refuses. All of them can be deterministic."""
    for name, choices in (("preset", PRESETS), ("kernels", KERNELS)):
        value = getattr(settings, name)
        if value not in choices:
            raise ValueError(f"attention.{name}={value} is unknown; choose one of {', '.join(choices)}")
    sage_config(settings)


def sage_config(settings: Settings) -> SageConfig:
    """The preset with what is set on top. Raises ValueError if SageConfig refuses the combination."""
    given = {name: value for name, value in asdict(settings).items() if name in CONFIG_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return replace(PRESETS[settings.preset], **given)
    except ValueError as error:
        raise ValueError(f"attention=sagebwd: {error}") from error


def resolve(settings: Settings) -> dict[str, Any]:
    """Every field of the SageConfig, so that a run's config.yaml does not depend on what a preset means."""
    config = asdict(sage_config(settings))
    return {**config, "int8_matmuls": list(config["int8_matmuls"]), "kernels": settings.kernels}


def build(
    settings: Settings, *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool
) -> Backend:
    """INT8 attention. Raises ValueError if the chosen kernels cannot run here."""
    config = sage_config(settings)
    kernels = None if settings.kernels == "auto" else settings.kernels
    attend = partial(sagebwd.sage_attention, config=config, kernels=kernels)
    # The library knows best what it supports: try a small input.
    q = torch.zeros(1, 2, 16, d_head, device=device, dtype=dtype)
    kv = q[:, :1] if is_gqa else q
    try:
        attend(q, kv, kv, is_causal=True, enable_gqa=is_gqa)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"attention=sagebwd cannot run on {device} with {dtype}, d_head={d_head}, is_gqa={is_gqa}: "
            f"{error}. attention.kernels=reference runs on any device, slowly"
        ) from error
    return Backend(
        attend,
        f"sagebwd, kernels {settings.kernels}, {config}",
        title="SageBwd",
        saved_operators=(torch.ops.sagebwd.forward.default,),
        advice=advice(config),
    )


def saved_bytes(settings: Settings, q: Tensor, k: Tensor, *, device: str) -> SavedBytes:
    """What the operator keeps. Without a GPU here, "cuda" is a Hopper GPU."""
    config = sage_config(settings)
    kernels = _kernels(q, config, device) if settings.kernels == "auto" else settings.kernels
    scale = q.shape[-1] ** -0.5
    saved = torch.ops.sagebwd.forward(q, k, k, None, None, -1, 0, scale, encode(config), kernels, True)
    needed = needed_by_backward(q, k, k, saved, encode(config), kernels, has_documents=False)
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


def advice(config: SageConfig) -> tuple[str, ...]:
    """Settings that could make dQ, dK and dV more accurate. The first is the paper's (its figure 4)."""
    has_consistent_delta = config.exact_delta or config.compensate_o
    suggestions = [
        (not config.smooth_k and config.is_int8("s_fwd"), "attention.smooth_k=true"),
        (config.granularity == "block", "attention.granularity=row, while logits are small"),
        (not has_consistent_delta, "attention=sagebwd_consistent, if full precision is inaccurate too"),
    ]
    return tuple(text for applies, text in suggestions if applies)
