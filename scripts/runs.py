"""Read runs on disk: their settings and the text they were trained on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.command_line import escaped
from data.corpus import Corpus, open_corpus
from scripts.output import printable
from trainer import identity, seal
from trainer.checkpoint import steps_in
from trainer.errors import SettingsError
from trainer.run_directory import RunDirectory
from trainer.settings import Settings

#: Folders of a run that hold no runs, and may hold many files.
INSIDE_A_RUN = {"checkpoints", "weights", "export", "wandb", "tensorboard"}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among `paths` and below them, each once."""
    found: list[Path] = []
    seen: set[Path] = set()
    for top in paths:
        for name, folders, files in os.walk(top, followlinks=True):  # runs may lie on another disk
            folder = Path(name)
            if folder.resolve() in seen:
                folders.clear()
                continue
            seen.add(folder.resolve())
            if "metrics.jsonl" in files or {"config.yaml", "DONE"} <= {*files}:  # may have lost its curve
                found.append(folder)
            folders[:] = sorted(inner for inner in folders if inner not in INSIDE_A_RUN)
    return found


def labels_of(paths: Sequence[Path]) -> list[str]:
    """A name for each run: its path below the folder that all share, without the overrides that all share."""
    paths = [path.resolve() for path in paths]
    shared = os.path.commonpath([path.parent for path in paths])
    return distinct([printable(path.relative_to(shared).as_posix()) for path in paths])


def distinct(names: list[str]) -> list[str]:
    """The names without the overrides that all runs share; as they are, where that leaves two the same."""
    parts = [name.split("+") for name in names]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    short = ["+".join(part for part in name if part not in shared) or "+".join(name) for name in parts]
    return short if len(set(short)) == len(short) else names


def read_settings(directory: RunDirectory) -> Settings:
    """The settings in config.yaml. Raises ValueError if there is none, or it has unknown settings."""
    if not directory.config.exists():
        raise ValueError(
            f"{directory.path} has no config.yaml; give the directory of a run, for instance runs/NAME"
        )
    try:
        stored = escaped(identity.read(directory.config))
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), stored))
    except (OmegaConfBaseException, SettingsError, ValueError) as error:
        raise ValueError(
            f"{directory.config} is not of this version of the code: {str(error).splitlines()[0]}; use the "
            "commit that environment.jsonl in the same folder names"
        ) from error


def open_data(directory: RunDirectory, settings: Settings) -> Corpus:
    """The text of the run. Raises ValueError if it is other text, FileNotFoundError if it is missing."""
    corpus = open_corpus(replace(settings.data, validation={}))  # which may not be here any more
    trained_on = fingerprint(directory)
    if trained_on not in (None, corpus.manifest.fingerprint):
        raise ValueError(
            f"{directory.path} was trained on other text than data.root={settings.data.root} holds now; run "
            "this where its data is, or point data.root in its config.yaml there"
        )
    return corpus


def milestones(directory: RunDirectory, settings: Settings) -> list[int]:
    """The steps of the checkpoints that exist because of milestone_every."""
    every = settings.milestone_every
    return [step for step in steps_in(directory.checkpoints) if every and step % every == 0]


def fingerprint(directory: RunDirectory) -> str | None:
    """The fingerprint of the data of the newest checkpoint; None if there is no checkpoint.

    Raises ValueError if that checkpoint is damaged.
    """
    checkpoints = seal.checkpoints_in(directory.checkpoints)
    if not checkpoints:
        return None
    try:
        return seal.read(checkpoints[-1])["data"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"checkpoint {checkpoints[-1]} is damaged ({error}); delete that folder, and the checkpoint "
            "before it is used"
        ) from error


def is_settled(directory: RunDirectory) -> bool:
    """Whether a run has come to an end of its own: finished or diverged."""
    return directory.is_finished or directory.diverged_at() is not None
