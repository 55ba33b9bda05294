"""Command-line overrides: unknown names are met with the nearest known ones."""

import difflib
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainer.settings import Settings


def check_or_exit(arguments: list[str], configs: Path) -> None:
    """End the program with a message if an argument `key=value` names no setting and no config group.

    Hydra refuses such keys too, but advises to append them with a `+`, which the typed settings refuse next.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(
            [a for a in arguments if "=" in a and not a.startswith("-")]
        )
    except HydraException:
        return  # not even an override; Hydra explains its grammar
    known = setting_names(Settings) | {path.name for path in configs.iterdir() if path.is_dir()}
    for override in parsed:
        key = override.key_or_group
        if key in known or key.split(".")[0].split("/")[0] == "hydra":
            continue
        near = difflib.get_close_matches(key, known, n=3) or _same_ending(key, known)
        hint = f"did you mean {' or '.join(near)}?" if near else "python train.py --help lists all settings"
        sys.exit(f"{override.input_line}: there is no setting {key!r}; {hint}")


def setting_names(cls: type, prefix: str = "") -> set[str]:
    """Dotted names of all settings in a dataclass and the dataclasses within it."""
    hints = get_type_hints(cls)
    names: set[str] = set()
    for field in fields(cls):
        name = f"{prefix}{field.name}"
        names.add(name)
        if is_dataclass(hints[field.name]):
            names |= setting_names(hints[field.name], f"{name}.")
    return names


def _same_ending(key: str, known: set[str]) -> list[str]:
    """Settings of another group with this last name: `lr` is `optimizer.lr`."""
    last = key.split(".")[-1]
    return sorted(name for name in known if name.split(".")[-1] == last)
