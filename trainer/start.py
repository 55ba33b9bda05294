"""What a run starts from: trained weights (`init_from`), or a checkpoint of another run (`branch_from`)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import model.config
import model.huggingface
from common.errors import SettingsError, TrainingError, explain
from common.overrides import escaped
from data.huggingface_tokenizer import TOKENIZER_FILE
from data.tokenizers import VOCABULARY_SIZES, tokenizer_identity
from model.config import LlamaConfig
from trainer import identity, seal
from trainer.run_directory import RunDirectory, name_directory
from trainer.seal import checkpoint_of, checkpoints_in, newest_step
from trainer.settings import Settings

if TYPE_CHECKING:  # importing it takes seconds
    import torch

    from model.llama import Llama
    from trainer.checkpoint import Checkpoints

log = logging.getLogger(__name__)

#: Settings that a branch does not take from its run, which may be a stranger's: places, accounts, and code.
OWN = (
    *("run_dir", "runs_dir", "rerun_finished", "plan", "init_from", "branch_from", "branch_step"),
    *("data.root", "logger", "optimizer._target_", "optimizer.arguments", "callbacks"),
)


def inherited(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The settings, with those from where the run starts, unless an override of the command line has them.

    Of weights these are the shape of the model and the tokenizer, of a run all of its settings. A run that
    has begun takes them from its own record. Raises TrainingError if there is nothing to start from.
    """
    if config.branch_from is None and config.init_from is None:
        return config
    typed = {text.partition("=")[0].lstrip("+~") for text in overrides}
    name_directory(config, overrides)
    own = RunDirectory(Path(config.run_dir))
    for name in ("init_from", "branch_from"):
        if (source := config[name]) and Path(source).resolve().is_relative_to(own.path.resolve()):
            raise SettingsError(f"{name}={source} is in run_dir={own.path}; give this run another run_dir=…")
    begun = own.config.exists() and not config.rerun_finished
    try:
        if config.branch_from is None:
            return _of_weights(config, typed, own if begun else None)
        return _of_run(config, typed, own if begun else None)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        place = f"branch_from={config.branch_from}" if config.branch_from else f"init_from={config.init_from}"
        why = explain(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        what = "the directory of a run" if config.branch_from else WEIGHTS
        raise TrainingError(f"{place}: {why}; give {what}") from error


WEIGHTS_ALONE = "its weights alone (python -m scripts.export, then init_from)"
WEIGHTS = "the weights/ folder of a finished run, or a model in the Hugging Face layout"


def _of_weights(config: DictConfig, typed: Collection[str], begun: RunDirectory | None) -> DictConfig:
    if begun:
        stored = identity.read(begun.config)
        shape, tokenizer = stored["model"], stored["data"]["tokenizer"]
    else:
        tokenizer = _tokenizer_in(Path(config.init_from))
        shape = asdict(model.huggingface.read_config(config.init_from))
    found = OmegaConf.merge(config, {"model": escaped(shape)})
    _set(found, config, [name for name in typed if name.split(".")[0] == "model"])
    if tokenizer and "data.tokenizer" not in typed:
        found.data.tokenizer = escaped(tokenizer)
    return found


def _of_run(config: DictConfig, typed: Collection[str], begun: RunDirectory | None) -> DictConfig:
    if config.init_from is not None or "experiment" in typed:
        raise SettingsError(
            f"branch_from={config.branch_from} has weights and settings; leave init_from and experiment out"
        )
    run = RunDirectory(Path(config.branch_from))
    found = identity.restored(identity.read((begun or run).config))
    tokenizer, step = found.data.tokenizer, found.branch_step if begun else newest_step(run.checkpoints)
    _set(found, config, [*OWN, *typed])
    if "data.tokenizer" not in typed:  # data=… chooses a text
        found.data.tokenizer = escaped(tokenizer)
    if found.branch_step is None:
        found.branch_step = step
    return found


def _set(found: DictConfig, config: DictConfig, names: Collection[str]) -> None:
    for name in names:
        OmegaConf.update(found, name, OmegaConf.select(config, name), merge=False, force_add=True)


def _tokenizer_in(weights: Path) -> str | None:
    """The tokenizer of the weights: by its name if their run knows it, so that its prepared text is used.

    Raises ValueError for a run with links.
    """
    for folder in weights.absolute().parents[:2]:
        run = RunDirectory(folder)
        if run.config.exists() and weights.absolute().parent in (run.path, run.exports):
            run.refuse_links()
            name = identity.read(run.config)["data"].get("tokenizer")
            if name in VOCABULARY_SIZES:
                return name
    return str(weights) if (weights / TOKENIZER_FILE).exists() else None


def find_weights(settings: Settings, directory: RunDirectory) -> str | None:
    """The folder of weights to start from, if one is set and there is no checkpoint yet.

    Raises TrainingError if it holds no model of this shape, or one that is not what its run left.
    """
    folder = settings.init_from
    if folder is None or checkpoints_in(directory.checkpoints):
        return None
    try:
        weights = Path(folder).absolute()
        if (run := RunDirectory(weights.parent)).weights == weights:
            run.check(weights)
        stored = model.huggingface.read_config(folder)
    except (OSError, ValueError) as error:
        why = explain(error) if isinstance(error, OSError) else error
        raise TrainingError(f"init_from={folder}: {why}; give {WEIGHTS}") from error
    if wrong := model.config.differences(stored, settings.model):
        use = " ".join(f"model.{name}={theirs}" for name, theirs, _ in wrong)
        here = ", ".join(f"{name}={ours}" for name, _, ours in wrong)
        raise TrainingError(f"init_from={folder} holds a model of another shape; use {use} (here {here})")
    return folder


def find_branch(settings: Settings, directory: RunDirectory) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to start from, and its seal, if one is set and there is none of this run yet.

    Raises TrainingError if its weights or its optimizer's state are not those of this model and optimizer.
    """
    if settings.branch_from is None or checkpoints_in(directory.checkpoints):
        return None
    try:
        folder = RunDirectory(Path(settings.branch_from)).checkpoints
        path = checkpoint_of(folder, settings.branch_step or newest_step(folder))
        sealed = seal.verify(path)
        stored = identity.checked(sealed.get("settings"))
        shape = LlamaConfig(**stored["model"])
        wrong = [f"model.{name}={old}" for name, old, _ in model.config.differences(shape, settings.model)]
        if (old := stored["optimizer"].get("name")) != settings.optimizer.name:
            wrong.append(f"optimizer.name={old}")
        if (old := stored["optimizer"].get("_target_")) != settings.optimizer._target_:
            raise ValueError(
                f"{path} has the moments of another optimizer, {old}, not {settings.optimizer._target_}. A "
                "branch takes no code from its run: give optimizer._target_ and optimizer.arguments of a "
                f"class that you know, or use {WEIGHTS_ALONE}"
            )
        if sealed.get("tokenizer") != tokenizer_identity(settings.data.tokenizer):
            wrong.append(f"data.tokenizer={stored['data']['tokenizer']}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = explain(error) if isinstance(error, OSError) else error
        raise TrainingError(f"branch_from={settings.branch_from}: {why}") from error
    if wrong:
        raise SettingsError(f"{path} was trained with {' '.join(wrong)}; use that, or {WEIGHTS_ALONE}")
    if sealed["step"] >= settings.total_steps:
        raise SettingsError(f"{path} has done all {settings.total_steps} steps of this run; raise steps")
    return path, sealed


def load_branch(
    branch: tuple[Path, dict[str, Any]],
    checkpoints: Checkpoints,
    llama: Llama,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Restore what `find_branch` found, and return what of its seal holds for the branch, too.

    The settings of the optimizer stay as they are: torch would take those of the checkpoint.
    """
    path, sealed = branch
    own = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
    checkpoints.load(path, sealed, llama, optimizer)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    log.info("going on from %s", path)
    return {name: sealed[name] for name in ("step", "recent") if name in sealed}
