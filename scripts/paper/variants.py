"""Names of what training runs compare, in JSON files, too: "SageBwd, no QK-norm", "full precision", …"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from sagebwd import SageConfig
from sagebwd.config import MATMULS, PRESETS, nearest_preset

FULL_PRECISION, SAGE = "full precision", "SageBwd"
#: Ending of the names of runs without QK-norm.
NO_QK_NORM = ", no QK-norm"
#: Full precision with another kernel than cuDNN's, which is the default on a Hopper.
SECOND_KERNELS = {"flash": "FlashAttention-2", "math": "plain PyTorch", "fa4": "FlashAttention-4"}

#: Presets that have a name of their own, as tables write it; the default is "SageBwd" alone.
NAMED_PRESETS = {name.replace("_", " ") for name in PRESETS if name != "default"}
SWITCHES = {field.name for field in fields(SageConfig)}
#: Settings that say how, not what, an attention computes.
OF_NO_VARIANT = {"backend", "kernels", "sdpa", "preset"}


def variant_of(config: dict[str, Any]) -> str:
    """The attention's settings and QK-norm of a run's config.yaml, in words: "SageBwd, no QK-norm"."""
    attention = config["attention"]
    if attention["backend"] == "sagebwd":
        name, *changes = settings_in_words(sage_config(attention), preset_of(attention))
    else:
        name = {"fpa": FULL_PRECISION}.get(attention["backend"], attention["backend"])
        own = {key: value for key, value in attention.items() if key not in OF_NO_VARIANT | SWITCHES}
        second = SECOND_KERNELS.get(attention.get("sdpa"))
        changes = [second] if second else []
        changes += [setting_in_words(key, value) for key, value in own.items() if value is not None]
    norm = [] if config["model"]["qk_norm"] else ["no QK-norm"]
    if changes and changes[0] in (*NAMED_PRESETS, *SECOND_KERNELS.values()):  # a preset comes first
        return ", ".join([name, changes[0], *norm, *changes[1:]])
    return ", ".join([name, *norm, *changes])


def base_of(variant: str) -> str:
    """What a variant is compared with: full precision, or of a change of smoothing the setting without it."""
    ending = NO_QK_NORM if variant.endswith(NO_QK_NORM) else ""
    name = variant.removesuffix(NO_QK_NORM)
    if name.endswith(" smoothing"):
        return name.rpartition(", ")[0] + ending
    return FULL_PRECISION + ending


def is_null(variant: str) -> bool:
    """Whether it is full precision with a second kernel."""
    return variant.startswith(FULL_PRECISION) and any(name in variant for name in SECOND_KERNELS.values())


def sage_config(attention: dict[str, Any]) -> SageConfig:
    """What the settings of a run's attention amount to. None, or none given: the preset's value."""
    given = {name: value for name, value in attention.items() if name in SWITCHES and value is not None}
    return replace(PRESETS[preset_of(attention)], **given)


def preset_of(attention: dict[str, Any]) -> str:
    """The preset that a run's attention names; "default" if none."""
    return attention.get("preset") or "default"


def settings_in_words(config: SageConfig, preset: str = "default") -> list[str]:
    """SAGE, the preset that it equals or is nearest to (`preset` of several), and what differs from it."""
    nearest, changes = nearest_preset(config, preset)
    words = [] if nearest == "default" else [nearest.replace("_", " ")]
    if {"smooth_k", "smooth_q"} & {*changes}:
        smoothed = [name for name, on in (("Q", config.smooth_q), ("K", config.smooth_k)) if on]
        words.append(f"{'+'.join(smoothed) or 'no'} smoothing")
    others = {name: value for name, value in changes.items() if name not in ("smooth_k", "smooth_q")}
    return [SAGE, *words, *(setting_in_words(name, value) for name, value in others.items())]


def setting_in_words(name: str, value: Any) -> str:
    if name == "int8_matmuls" and len(value) == len(MATMULS):
        return "dP in INT8"
    return f"{name}={json.dumps(value).strip(chr(34))}"
