"""The arguments of train.py: unknown settings and options are answered with the nearest known ones."""

import shlex
import sys
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import ListConfig, OmegaConf

from data import command_line
from data.command_line import check_option_or_exit, chosen_options, options_in
from model import backends
from trainer.settings import Settings


def unresolved(overrides: ListConfig) -> list[str]:
    """Overrides as they were typed: ${oc.env:KEY} stays, so that no secret gets into a name or a message."""
    return OmegaConf.to_container(overrides, resolve=False)


def command_of(overrides: list[str]) -> str:
    """The command that trains a run with these overrides."""
    return shlex.join(["python", "train.py", *overrides])


def check_or_exit(arguments: list[str], configs: Path) -> None:
    """End the program with a message if an argument `name=value` has an unknown setting, group or option."""
    groups = {folder.name: options_in(folder) for folder in configs.iterdir() if folder.is_dir()}
    del groups["paper"]  # the experiments of scripts.reproduce
    parsed = command_line.check_or_exit(
        arguments, Settings, groups, program="python train.py", further=attention_settings()
    )
    for override in parsed:
        if override.key_or_group == "hydra/launcher" and not command_line.has_search_path(parsed):
            _check_launcher(override, configs / "hydra" / "launcher")


def _check_launcher(override: Override, folder: Path) -> None:
    """End the program with a message if the launcher is unknown, or its package is not installed."""
    Plugins.instance()  # installed launchers add themselves to the store
    installed = {name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")}
    if "submitit_slurm" not in installed and "slurm" in chosen_options(override):
        sys.exit(f"{override.input_line} needs hydra-submitit-launcher: pip install -e '.[slurm]'")
    check_option_or_exit(override, sorted(installed | set(options_in(folder))))


def attention_settings() -> set[str]:
    """Dotted names of the settings of all attentions."""
    kinds = map(backends.settings_of, backends.available())
    return {"attention.backend", *(f"attention.{name}" for kind in kinds for name in kind.names())}
