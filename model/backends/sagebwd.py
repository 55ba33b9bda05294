"""Trainable INT8 attention: the sagebwd library."""

from dataclasses import asdict, fields
from functools import partial

import torch

import sagebwd
from model.backends import AttentionSettings, Backend, refuse_foreign
from sagebwd import SageConfig

CONFIG_FIELDS = {field.name for field in fields(SageConfig)}
IMPLEMENTATIONS = {
    "auto": sagebwd.sage_attention,
    "reference": partial(sagebwd.sage_attention, kernels="reference"),
}


def check(settings: AttentionSettings) -> None:
    """Raise ValueError for settings that SageConfig refuses and for those that only other backends have."""
    refuse_foreign(settings, own=CONFIG_FIELDS | {"implementation"})
    if settings.implementation is not None and settings.implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention.implementation={settings.implementation} is unknown; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    sage_config(settings)


def sage_config(settings: AttentionSettings) -> SageConfig:
    """The library's config with what is set, and its own defaults for the rest. Raises ValueError."""
    given = {name: value for name, value in asdict(settings).items() if name in CONFIG_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    if "int8_matmuls" in given:
        given["int8_matmuls"] = tuple(given["int8_matmuls"])
    try:
        return SageConfig(**given)
    except ValueError as error:
        raise ValueError(f"attention=sagebwd: {error}") from error


def build(
    settings: AttentionSettings, *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool
) -> Backend:
    """INT8 attention. Raises ValueError if the chosen implementation cannot run here."""
    check(settings)
    implementation = settings.implementation or "auto"
    config = sage_config(settings)
    attend = partial(IMPLEMENTATIONS[implementation], config=config)
    # The library knows best what it supports: ask it with a small input.
    q = torch.zeros(1, 2, 16, d_head, device=device, dtype=dtype)
    kv = q[:, :1] if is_gqa else q
    try:
        attend(q, kv, kv, is_causal=True, enable_gqa=is_gqa)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"attention=sagebwd cannot run on {device} with {dtype}, d_head={d_head}, is_gqa={is_gqa}: "
            f"{error}. attention.implementation=reference runs on any device, slowly"
        ) from error
    return Backend(attend, f"sagebwd, implementation {implementation}, {config}")
