"""What a sweep's runs are checked for before the first of them begins."""

import sys

from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from trainer.errors import SettingsError
from trainer.overrides import command_of, refuse_without_effect
from trainer.plan import make_plan
from trainer.sweep_directories import directory_of


def refuse_what_cannot_be_trained(config: DictConfig, runs: list[list[str]]) -> None:
    """End the program with a message that lists the runs of the sweep `config` with impossible settings.

    If they run one after the other: other launchers check them when all begin, maybe on other machines.
    """
    if config.hydra.runtime.choices.get("hydra/launcher") != "basic":
        return
    own = [text for text in config.hydra.overrides.hydra if text.startswith("hydra.searchpath=")]
    name = config.hydra.job.config_name
    found = [f"{command_of(run)}\n{problem}" for run in runs if (problem := _problem(name, run, own))]
    if found:
        sys.exit("\n".join(["no run of this sweep was started:", *found]))


def _problem(config_name: str, run: list[str], search_path: list[str]) -> str | None:
    try:
        settings = OmegaConf.to_object(compose(config_name, overrides=[*run, *search_path]))
        if settings.run_dir is None and (directory := directory_of(run)):
            settings.run_dir = str(directory)
        refuse_without_effect(run, settings)
        make_plan(settings, settings.hardware.devices)
    except InterpolationResolutionError:  # of Hydra's own values, such as the number of the job
        return None
    except (HydraException, OmegaConfBaseException) as error:
        reasons = [str(error), *str(error.__cause__ or "").splitlines()[:1]]
        return "\n".join(reasons)
    except SettingsError as error:
        return str(error)
    return None
