"""Read runs on disk: their settings and the text they were trained on."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import SettingsError
from data.corpus import Corpus, open_corpus
from data.loader import BatchLoader
from scripts.output import printable
from trainer import identity
from trainer.run_directory import RunDirectory, checkpoints_in, read_seal
from trainer.settings import Settings
from trainer.start import UNNAMED

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


def places(paths: Sequence[Path]) -> list[str]:
    """The paths below the folder that all share, for people to read."""
    paths = [path.resolve() for path in paths]
    shared = os.path.commonpath([path.parent for path in paths])
    return [printable(path.relative_to(shared).as_posix()) for path in paths]


# ---------------------------------------------------------------------- settings

CONFIGS = Path(__file__).parents[1] / "configs"
#: Groups whose options stand for their values: tps=260k instead of tps.tokens_per_step=262144 and the rest.
GROUPS = ("attention", "model", "tps", "optimizer")


def comparable_settings(path: Path) -> dict[str, Any]:
    """{name: value} of the settings of a run, and of each of GROUPS the option that they are nearest to.

    Without those that say where things are; none if there is no config.yaml. `text` is the fingerprint of
    its tokens, if it has a checkpoint. Raises ValueError if something is damaged.
    """
    config = RunDirectory(path).config
    if not config.exists():
        return {}
    try:
        settings = identity.completed(identity.read(config))
    except ValueError as error:
        raise ValueError(f"{config} is damaged ({error}); restore it") from error
    settings = {group: _nearest_option(group, settings) for group in GROUPS} | settings
    if text := fingerprint(RunDirectory(path)):
        settings["text"] = str(text)[:8]
    return {name: it for name, it in settings.items() if not f"{name}=".startswith(UNNAMED)}


def differing(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the settings of several runs those that differ, without what follows from the option of a group."""
    names = dict.fromkeys(name for one in settings for name in one)
    shown = [
        name
        for name in names
        if len({str(one[name]) for one in settings if name in one}) > 1
        and not all(_follows(name, one) for one in settings)
    ]
    texts = {(str([one.get(n) for n in shown if n.startswith("data.")]), one.get("text")) for one in settings}
    if "text" in shown and len({data for data, _ in texts}) == len(texts):
        shown.remove("text")  # it follows from the settings of the data
    return [{name: one[name] for name in shown if name in one} for one in settings]


def _follows(name: str, settings: dict[str, Any]) -> bool:
    """Whether the option of its group gives the setting this value."""
    group, _, key = name.partition(".")
    if group not in GROUPS or not key:
        return False
    return key == "backend" or settings.get(name) == _options(group).get(settings.get(group), {}).get(name)


def _nearest_option(group: str, settings: dict[str, Any]) -> str:
    """The option with the fewest values that are not these; of an attention without any, its backend."""
    own, backend = {n: it for n, it in settings.items() if n.startswith(f"{group}.")}, f"{group}.backend"
    others = {
        option: sum(value != values.get(name) for name, value in own.items())
        for option, values in _options(group).items()
        if own.get(backend) == values.get(backend)
    }
    return min(others, key=others.get) if others else str(own[backend])


@functools.cache
def _options(group: str) -> dict[str, dict[str, Any]]:
    """The settings that each option of a group amounts to."""
    found = {file.stem: {group: _values(file)} for file in sorted((CONFIGS / group).glob("*.yaml"))}
    return {option: identity.completed(values) for option, values in found.items()}


def _values(file: Path) -> dict[str, Any]:
    own = yaml.safe_load(file.read_text(encoding="utf-8"))
    inherited = [name for name in own.pop("defaults", ()) if name != "_self_"]
    return {key: value for name in inherited for key, value in _values(file.with_stem(name)).items()} | own


# ---------------------------------------------------------------------- what a run holds


def read_settings(directory: RunDirectory) -> Settings:
    """The settings in config.yaml. Raises ValueError if there is none, or it has unknown settings."""
    if not directory.config.exists():
        raise ValueError(
            f"{directory.path} has no config.yaml; give the directory of a run, for instance runs/NAME"
        )
    try:
        return OmegaConf.to_object(identity.restored(identity.read(directory.config)))
    except (OmegaConfBaseException, SettingsError, ValueError) as error:
        raise ValueError(
            f"{directory.config} is not of this version of the code: {str(error).splitlines()[0]}; use the "
            "commit that environment.jsonl in the same folder names"
        ) from error


def open_data(directory: RunDirectory, settings: Settings) -> Corpus:
    """The prepared text of the run: preparing would write where a stranger's config.yaml says.

    Raises ValueError if it is other text, or not prepared, FileNotFoundError if it is missing.
    """
    data = replace(settings.data, validation={})  # which may not be here any more
    corpus = open_corpus(data, small=0)
    trained_on = fingerprint(directory)
    if trained_on not in (None, corpus.manifest.fingerprint):
        raise ValueError(
            f"{directory.path} was trained on other text than data.root={settings.data.root} holds now; run "
            "this where its data is, or point data.root in its config.yaml there"
        )
    return corpus


def training_loader(settings: Settings, corpus: Corpus) -> BatchLoader:
    """The loader of a run for one process; the order does not depend on the number of processes."""
    return BatchLoader(
        corpus.train,
        context=settings.context,
        sequences_per_step=settings.tokens_per_step // settings.context,
        micro_batch=1,
        seed=settings.seed,
        sequences=settings.train_sequences,
    )


def fingerprint(directory: RunDirectory) -> str | None:
    """The fingerprint of the data of the newest checkpoint; None if there is no checkpoint.

    Raises ValueError if that checkpoint is damaged.
    """
    checkpoints = checkpoints_in(directory.checkpoints)
    if not checkpoints:
        return None
    try:
        return read_seal(checkpoints[-1])["data"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"checkpoint {checkpoints[-1]} is damaged ({error}); delete that folder, and the checkpoint "
            "before it is used"
        ) from error


def is_settled(directory: RunDirectory) -> bool:
    """Whether a run has come to an end of its own: finished or diverged."""
    return directory.is_finished or directory.diverged_at() is not None
