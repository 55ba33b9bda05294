"""Names of what training runs compare: "SageBwd, no QK-norm", "full precision", …

JSON files hold these names; older ones spell out the settings of what is a preset by now.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from sagebwd import SageConfig

FULL_PRECISION, SAGE = "full precision", "SageBwd"

#: Presets that have a name of their own; the default is "SageBwd" alone.
PRESETS = {
    "paper": SageConfig.paper(),
    "accurate": SageConfig.accurate(),
    "consistent": SageConfig.consistent(),
    "strictly causal": SageConfig.strictly_causal(),
}
#: As older files name presets: as they are named now.
OLD_NAMES = {"SageBwd, granularity=block, block_q=128, block_kv=64": "SageBwd, paper"}


def variant_of(config: dict[str, Any]) -> str:
    """The attention's settings and QK-norm of a run's config.yaml, in words: "SageBwd, no QK-norm"."""
    attention = dict(config["attention"])
    if preset := preset_of(attention):
        return ", ".join([f"{SAGE}, {preset}", *([] if config["model"]["qk_norm"] else ["no QK-norm"])])
    backend, smooth_k, smooth_q = (attention.pop(name, None) for name in ("backend", "smooth_k", "smooth_q"))
    parts = [{"fpa": FULL_PRECISION, "sagebwd": SAGE}.get(backend, backend)]
    if not config["model"]["qk_norm"]:
        parts.append("no QK-norm")
    if backend == "sagebwd" and not (smooth_k and not smooth_q):
        smoothed = [name for name, on in (("Q", smooth_q), ("K", smooth_k)) if on]
        parts.append(f"{'+'.join(smoothed) or 'no'} smoothing")
    defaults = json.loads(json.dumps(asdict(SageConfig())))  # config.yaml has every setting, and lists
    for name, value in attention.items():
        if value not in (None, defaults.get(name)) and name not in ("implementation", "sdpa"):
            parts.append(f"{name}={json.dumps(value).strip(chr(34))}")
    return ", ".join(parts)


def preset_of(attention: dict[str, Any]) -> str | None:
    """The name of the preset whose settings these are, if of any but the default."""
    switches = {field.name for field in fields(SageConfig)}
    given = {name: value for name, value in attention.items() if name in switches and value is not None}
    if attention["backend"] != "sagebwd":
        return None
    return next((name for name, preset in PRESETS.items() if SageConfig(**given) == preset), None)


def title_of(variant: str) -> str:
    """The name that is shown for a variant of a JSON file, which may be an older one."""
    return OLD_NAMES.get(variant, variant)
