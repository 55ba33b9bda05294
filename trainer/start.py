"""Where a run starts: the settings, weights or checkpoint it takes, and the directory that it trains in.

A run begins with trained weights (`init_from`), with a checkpoint of another run (`branch_from`), or anew.
"""

import fcntl
import json
import logging
import os
import platform
import re
import shutil
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import model.config
import model.huggingface
from common.errors import SettingsError, TrainingError, explain, user_facing
from common.files import append_line, read_lines, write_text
from common.overrides import escaped
from common.redaction import redact
from data.huggingface_tokenizer import TOKENIZER_FILE
from data.tokenizers import VOCABULARY_SIZES, tokenizer_identity
from model.config import LlamaConfig
from trainer import identity
from trainer.run_directory import (
    RunDirectory,
    checkpoint_of,
    checkpoints_in,
    newest_step,
    read_metrics,
    verify_seal,
)
from trainer.settings import Settings
from trainer.software import software

log = logging.getLogger(__name__)

#: Settings that a branch does not take from its run, which may be a stranger's: places, accounts, and code.
OWN = (
    *("run_dir", "runs_dir", "plan", "init_from", "branch_from", "branch_step"),
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
    begun = own.config.exists()
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
        sealed = verify_seal(path)
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


# ---------------------------------------------------------------------- the directory to train in


# Overrides that say where things are, not what the run computes.
UNNAMED = (
    "run_dir=",
    "runs_dir=",
    "plan=",
    "data.root=",
    "data.processes=",
    "logger=",
    "logger.",
)

NAME_BYTES = 255  # of a file's name, on Linux


def default_name(overrides: list[str]) -> str:
    """A readable folder name for a run with these command-line overrides, which no others share."""
    kept = sorted(text for text in overrides if not text.startswith(UNNAMED))
    if not kept:
        return "default"
    exact = "+".join(kept)
    name = re.sub(r"[^\w.+-]", "-", exact.replace("=", "-"))
    if name != exact.replace("=", "-") or len(name) > 120 or len(name.encode()) > NAME_BYTES:
        kept = name[:110].encode()[: NAME_BYTES - 9].decode(errors="ignore")
        return f"{kept}-{zlib.crc32(os.fsencode(exact)):08x}"  # something was replaced or cut off
    return name


def name_directory(settings: Settings, overrides: list[str]) -> None:
    """Give the run a `run_dir` named after its overrides if it has none. settings: or Hydra's."""
    settings.run_dir = settings.run_dir or str(Path(settings.runs_dir) / default_name(overrides))


class TrainingDirectory(RunDirectory):
    """The folder of the run that this process trains, or is about to."""

    def is_finished_with(self, settings: Settings) -> bool:
        """Whether the run is finished, with all of its results.

        False if its text has moved: the trainer then compares the text itself. Raises TrainingError if a
        result is damaged, the run was trained with other settings, which it names, or the folder cannot be
        read.
        """
        try:
            if not self.is_finished:
                return False
            self.check()
        except ValueError as error:
            raise TrainingError(str(error)) from error
        except OSError as error:
            raise TrainingError(f"cannot use the run directory: {explain(error)}; set run_dir=…") from error
        stored = _stored_settings(self)
        _refuse_other(self, stored, settings)
        was, now = stored.get("data", {}), settings.recorded()["data"]
        return all((was.get(key) or None) == (now[key] or None) for key in ("path", "val_path", "sources"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and lock it against a second process that trains the same run.

        A new folder goes again if an error comes before the first step.
        """
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        with user_facing(ValueError):
            self.refuse_links()
        with open(self.path / ".lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(
                    f"{self.path} is in use by another process that trains this run; wait for it, or give "
                    "this one another run_dir=…"
                ) from None
            try:
                for folder in (self.path, self.weights):
                    for leftover in folder.glob("*.[0-9]*.tmp"):  # of a process that was killed
                        leftover.unlink()
                yield
            except BaseException:
                if is_new and not (self.has_metrics or self.diverged.exists()):
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def open(self, settings: Settings) -> None:
        """Store the settings. Raises TrainingError, and changes nothing, if the folder is of another run.

        Or if its checkpoints are gone, or cannot be read.
        """
        if self.environment.exists():
            with user_facing(ValueError):
                read_lines(self.environment)  # the model card needs it, at the end
        if _find_checkpoints(self) or self.has_metrics:
            _refuse_other(self, _stored_settings(self), settings)
        for mark in (self.diverged, self.done):  # what it claims begins to change
            mark.unlink(missing_ok=True)
        write_text(self.config, identity.as_yaml(settings.recorded()))

    def note_environment(self, device: torch.device, devices: int) -> None:
        """Add what this process runs on to environment.jsonl: a line for every start of the run."""
        line = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": redact(sys.argv),
            "device": _device_name(device),
            "devices": devices,
            "cuda": torch.version.cuda,
            **software(),
        }
        append_line(self.environment, line)

    def note_checkpoint(self, step: int) -> None:
        """Remember that there has been a checkpoint, so that a lost folder of them is not taken for none."""
        write_text(self.saved, f"{step}\n")

    def truncate_metrics(self, step: int) -> None:
        """Drop metrics and spikes after `step`, and incomplete last lines: these steps will run again.

        step: that of the checkpoint that was loaded. Raises ValueError if another line is damaged.
        """
        for path in (self.metrics, self.spikes):
            if path.exists():
                kept = [json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= step]
                write_text(path, "".join(kept))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def _find_checkpoints(directory: RunDirectory) -> list[Path]:
    """The checkpoints. Raises TrainingError if they are gone, or cannot be read."""
    try:
        found = checkpoints_in(directory.checkpoints)
    except OSError as error:
        raise TrainingError(
            f"the checkpoints of this run cannot be read: {explain(error)}. Mount that place or correct "
            "its permissions, and run the same command again"
        ) from error
    if not found and directory.saved.exists():
        step = directory.saved.read_text().strip()
        raise TrainingError(
            f"{directory.path} was saved at step {step}, but {directory.checkpoints} holds no checkpoint. "
            f"Restore them and run the same command again, or delete {directory.path} to train from the start"
        )
    return found


def _stored_settings(directory: RunDirectory) -> dict[str, Any]:
    """The settings of the run, in its config.yaml. Raises TrainingError if it does not say them."""
    try:
        return identity.read(directory.config)
    except (FileNotFoundError, ValueError) as error:
        raise TrainingError(
            f"{directory.config} does not say the settings of its run ({error}); restore it from a copy, or "
            f"delete {directory.path} to train from the start"
        ) from error


def check_checkpoint(path: Path, sealed: dict[str, Any], settings: Settings) -> None:
    """Raise TrainingError if the checkpoint is of a run with other settings; `sealed` is its seal."""
    try:
        stored = identity.checked(sealed.get("settings"))
    except ValueError as error:
        raise TrainingError(f"checkpoint {path} is damaged ({error}); delete that folder") from error
    if changed := identity.changes(stored, settings):
        raise TrainingError(
            f"checkpoint {path} is of a run with other settings:\n{changed}\n"
            "Move it to where it came from, or give this run its own run_dir=…"
        )


def _refuse_other(directory: RunDirectory, stored: dict[str, Any], settings: Settings) -> None:
    if changed := identity.changes(stored, settings):
        raise TrainingError(
            f"{directory.path} holds a run with other settings:\n{changed}\n"
            "Give the changed run its own run_dir=…, or delete that folder to start over. "
            f"branch_from={directory.path} goes on from a checkpoint there with other settings, such as steps"
        )
