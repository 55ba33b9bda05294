"""Which settings make a run what it is: those that may not differ when its directory is used again."""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from model import backends
from trainer.machine import software
from trainer.redaction import redact
from trainer.settings import Settings

Difference = tuple[str, Any, Any]  # name of a setting, stored value, current value

#: Settings that say where a text is. Ranks may find it in different places, and compare the text itself.
PLACES = re.compile(r"data\.(.+\.)?(root|path|val_path|processes)")


def may_change(name: str) -> bool:
    """Whether the setting (`hardware.micro_batch`) may differ when a run resumes: see trainer.settings."""
    name = re.sub(r"^data\.sources\.[^.]+\.", "data.", name)  # a text of a mixture has the settings of one
    kind, mark = Settings, False
    for part in name.split("."):
        known = {field.name: field for field in fields(kind)} if is_dataclass(kind) else {}
        if isinstance(mark, tuple):
            mark = part in mark
        if part in known:
            mark = known[part].metadata.get("may_change", mark)
            kind = get_type_hints(kind)[part]
    return mark is True


def recorded(settings: Settings) -> dict[str, Any]:
    """The settings as config.yaml and the seals of checkpoints record them, without secrets."""
    return redact({**asdict(settings), "attention": settings.attention.recorded()})


def of_rank(settings: Settings) -> dict[str, Any]:
    """What all ranks of a run must have in common, besides its text: settings, code and versions."""
    kept = {name: value for name, value in _flat(recorded(settings)).items() if not PLACES.fullmatch(name)}
    return kept | software()


def differences(
    stored: dict[str, Any], current: dict[str, Any], also: Collection[str] = ()
) -> list[Difference]:
    """The settings that make it another run, and those of `also`. Both as `recorded` gives them."""
    if "attention" in stored:
        with suppress(ValueError):  # a backend or setting that was removed is compared as stored
            stored = {**stored, "attention": backends.read(stored["attention"]).recorded()}
    # A setting that came later has its default in the runs before it.
    old, new = _defaults() | _flat(stored), _flat(current)
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (key in also or not may_change(key))
    ]


def listed(changed: list[Difference]) -> str:
    return "\n".join(f"  - {key} was {old}, is now {new}" for key, old, new in changed)


def _defaults() -> dict[str, Any]:
    return _flat(OmegaConf.to_container(OmegaConf.structured(Settings)))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
