"""Which settings make a run what it is: those that may not differ when its directory is used again."""

import functools
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf

from common.files import read_bytes
from common.overrides import escaped
from model import backends
from trainer.settings import Settings
from trainer.software import software

#: Settings that say where a text is. Ranks may find it in different places, and compare the text itself.
PLACES = re.compile(r"data\.(.+\.)?(root|path|val_path|processes)")


@functools.cache
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


def of_rank(settings: Settings) -> dict[str, Any]:
    """What all ranks of a run must have in common, besides its text: settings, code and versions."""
    kept = {name: value for name, value in flat(settings.recorded()).items() if not PLACES.fullmatch(name)}
    return kept | software()


def as_yaml(stored: dict[str, Any]) -> str:
    """The text of a config.yaml."""
    return yaml.safe_dump(stored, sort_keys=False)


def read(config: Path) -> dict[str, Any]:
    """What a config.yaml says, which may be a stranger's: it is data, and nothing in it is interpolated.

    Raises FileNotFoundError, or ValueError if it is damaged.
    """
    try:
        return checked(yaml.safe_load(read_bytes(config, links=False)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(str(error).splitlines()[0]) from error


def checked(stored: Any) -> dict[str, Any]:
    """The same, if it may be what `Settings.recorded` gives; else raises ValueError."""
    if not (isinstance(stored, dict) and all(isinstance(stored.get(k), dict) for k in ("attention", "data"))):
        raise ValueError("it has no settings of a run")
    return stored


def restored(stored: dict[str, Any]) -> DictConfig:
    """Recorded settings as OmegaConf has them; `OmegaConf.to_object` makes Settings of them.

    Raises OmegaConfBaseException if this version of the code has no such settings.
    """
    return OmegaConf.merge(OmegaConf.structured(Settings), escaped(stored))


def changes(stored: dict[str, Any], settings: Settings) -> str:
    """Lines with the settings that make it another run than the `recorded` one; none if it is the same."""
    old, new = completed(stored), flat(settings.recorded())
    return "\n".join(
        f"  - {key} was {old.get(key)}, is now {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not may_change(key)
    )


def completed(stored: dict[str, Any]) -> dict[str, Any]:
    """{"optimizer.lr": 3e-5, …}: settings that were recorded, those that came later with their defaults."""
    if "attention" in stored:
        with suppress(ValueError):  # a backend or setting that was removed is compared as stored
            stored = {**stored, "attention": backends.read(stored["attention"]).recorded()}
    return _defaults() | flat(stored)


@functools.cache
def _defaults() -> dict[str, Any]:
    defaults = flat(OmegaConf.to_container(OmegaConf.structured(Settings)))
    return {name: value for name, value in defaults.items() if value != MISSING}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optimizer.lr": 3e-5, …}, of settings within settings."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
