"""Which settings make a run what it is: those that may not differ when its directory is used again."""

import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf

from model import backends
from trainer.redaction import redact
from trainer.settings import Settings

# Settings that may differ when a run resumes: they change how it executes or reports, not what it computes.
# (Text may have moved; whether it is the same text is checked against the checkpoint.)
MAY_CHANGE = re.compile(
    r"hardware\.(?!dtype)|logger\.|probe\.|spike\.|profile\.|"
    r"data\.(root|path|val_path|processes|validation|sources\.[^.]+\.(path|val_path)$)|"
    r"(log_every|eval_every|eval_sequences|sample_tokens|sample_prompt|checkpoint_every|"
    r"checkpoint_background|keep_checkpoints|milestone_every|skip_nonfinite|runs_dir|run_dir|rerun_finished|plan)$"
)

Difference = tuple[str, Any, Any]  # name of a setting, stored value, current value


def may_change(name: str) -> bool:
    """Whether the setting (`hardware.micro_batch`) may differ when a run resumes."""
    return bool(MAY_CHANGE.match(name))


def recorded(settings: Settings) -> dict[str, Any]:
    """The settings as config.yaml and the seals of checkpoints record them, without secrets."""
    container = OmegaConf.to_container(OmegaConf.structured(settings))
    return redact({**container, "attention": backends.resolve(settings.attention)})


def differences(
    stored: dict[str, Any], current: dict[str, Any], also: Collection[str] = ()
) -> list[Difference]:
    """The settings that make it another run, and those of `also`. Both as `recorded` gives them."""
    if "attention" in stored:
        with suppress(ValueError):  # a backend or setting that was removed is compared as stored
            stored = {**stored, "attention": backends.resolve(stored["attention"])}
    # A setting that came later has its default in the runs before it.
    old, new = _defaults() | _flat(stored), _flat(current)
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (key in also or not may_change(key))
    ]


def listed(changed: list[Difference]) -> str:
    return "\n".join(f"  - {key} was {old}, is now {new}" for key, old, new in changed)


def absent(stored: dict[str, Any]) -> list[str]:
    """The settings that every run has, and this record of one has not: it is incomplete."""
    there = _flat(stored)
    return [
        key
        for key, default in _defaults().items()
        if default == "???" and key not in there and not may_change(key)
    ]


def _defaults() -> dict[str, Any]:
    return _flat(OmegaConf.to_container(OmegaConf.structured(Settings)))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
