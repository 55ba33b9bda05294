"""Command-line overrides: unknown settings and options are answered with the nearest known ones."""

import difflib
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import ListConfig, OmegaConf

from model import backends
from trainer.settings import Settings

#: Settings whose next part is a name that the user chooses; data/texts.py checks what follows.
NAMED = ("data.validation.", "data.sources.")


def unresolved(overrides: ListConfig) -> list[str]:
    """Overrides as they were typed: ${oc.env:KEY} stays, so that no secret gets into a name or a message."""
    return OmegaConf.to_container(overrides, resolve=False)


def check_or_exit(arguments: list[str], configs: Path) -> None:
    """End the program with a message if an argument `name=value` has an unknown setting, group or option.

    Hydra refuses these too. But its advice is to append an unknown setting with `+`, which the typed settings
    refuse next, and an unknown option prints its search path.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(
            [a for a in arguments if "=" in a and not a.startswith("-")]
        )
    except HydraException:
        return  # not an override; Hydra explains its grammar
    groups = {folder.name: _options(folder) for folder in configs.iterdir() if folder.is_dir()}
    known = known_settings() | groups.keys()
    elsewhere = any(override.key_or_group == "hydra.searchpath" for override in parsed)  # options of the user
    for override in parsed:
        key = override.key_or_group
        if key == "hydra/launcher" and not elsewhere:
            _check_launcher(override, configs / "hydra" / "launcher")
        if key.split(".")[0].split("/")[0] == "hydra":
            continue
        if key not in known and not key.startswith(NAMED):
            near = difflib.get_close_matches(key, known, n=3) or _same_ending(key, known)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else "python train.py --help lists all settings"
            )
            sys.exit(f"{override.input_line}: there is no setting {key!r}; {hint}")
        for option in _chosen_options(override) if key in groups and not elsewhere else ():
            if option not in groups[key]:
                sys.exit(f"{override.input_line}: {_unknown_option(key, option, groups[key])}")


def _check_launcher(override: Override, folder: Path) -> None:
    """End the program with a message if the launcher is unknown, or its package is not installed."""
    Plugins.instance()  # installed launchers add themselves to the store
    installed = {name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")}
    known = sorted(installed | set(_options(folder)))
    for option in _chosen_options(override):
        if option in ("slurm", "submitit_slurm", "submitit_local") and "submitit_slurm" not in installed:
            sys.exit(f"{override.input_line} needs hydra-submitit-launcher: pip install -e '.[slurm]'")
        if option not in known:
            sys.exit(f"{override.input_line}: {_unknown_option('hydra/launcher', option, known)}")


def known_settings() -> set[str]:
    """Dotted names of all settings, those of every attention included."""
    names = setting_names(Settings) | {"attention.backend"}
    for backend in backends.available():
        names |= {f"attention.{name}" for name in backends.setting_names(backend)}
    return names


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


def _options(group: Path) -> list[str]:
    return sorted(file.stem for file in group.glob("*.yaml"))


def _chosen_options(override: Override) -> Iterator[str]:
    """The options that an override of a group names: one, or several of a sweep. None for null or glob(…)."""
    value = override.value()
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        if isinstance(one, (str, int, float, QuotedString)):
            yield one.text if isinstance(one, QuotedString) else str(one)


def _unknown_option(group: str, option: str, options: list[str]) -> str:
    lowered = {name.lower(): name for name in options}  # of options that differ in case, any one will do
    near = difflib.get_close_matches(option.lower(), lowered, n=1)
    hint = f"did you mean {group}={lowered[near[0]]}? Choose" if near else "choose"
    return f"{group} has no option {option!r}; {hint} one of {', '.join(options)}"
