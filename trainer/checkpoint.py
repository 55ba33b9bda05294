"""Checkpoints that are whole or absent.

A checkpoint is a folder `step_<n>`: written under a temporary name, sealed with the size and checksum of
every file in it, and renamed. Reading verifies the seal; a folder that fails is passed over for the one
before. The state itself is stored by torch.distributed.checkpoint, which lets a run continue on another
number of devices.
"""

import errno
import json
import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainer.distributed import Ranks
from trainer.errors import TrainingError

log = logging.getLogger(__name__)

SEAL = "seal.json"


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest `keep` stay."""

    def __init__(self, folder: Path, *, keep: int, ranks: Ranks):
        self.folder, self.keep, self.ranks = folder, keep, ranks

    def save(self, step: int, model: nn.Module, optimizer, extra: dict[str, Any]) -> None:
        """Store everything the run needs to continue after `step` steps.

        Raises TrainingError if it cannot be written (a full disk, say); older checkpoints are untouched.
        """
        final, temporary = self._path(step), self.folder / f".writing_step_{step:08d}"
        try:
            if self.ranks.is_main:
                for leftover in self.folder.glob(".writing_*"):  # of a process that was killed
                    shutil.rmtree(leftover)
                temporary.mkdir(parents=True)
            self.ranks.barrier()
            weights, moments = get_state_dict(model, optimizer)
            with _one_process_is_fine():
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=temporary)
            if self.ranks.is_main:
                _seal(temporary, {"step": step, **extra})
                shutil.rmtree(final, ignore_errors=True)  # exists only if it was damaged
                os.rename(temporary, final)
                _sync_folder(self.folder)
                self._drop_old()
            self.ranks.barrier()
        except (OSError, dcp.CheckpointException) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise TrainingError(
                f"could not write the checkpoint of step {step} to {self.folder}: {_reason(error)}. "
                f"{self._remaining()} Make room or fix the folder; the same command then continues from there"
            ) from error

    def load_newest(self, model: nn.Module, optimizer) -> dict[str, Any] | None:
        """Restore the newest checkpoint that verifies; what was saved beside it, or None if there is none.

        Raises TrainingError when there are checkpoints but none is whole: the user decides to start over.
        """
        sealed = self.ranks.from_main(self._newest_whole)
        if sealed is None:
            return None
        weights, moments = get_state_dict(model, optimizer)
        with _one_process_is_fine():
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=self._path(sealed["step"]))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return sealed

    def _newest_whole(self) -> dict[str, Any] | None:
        paths = sorted(self.folder.glob("step_*"), reverse=True)
        for path in paths:
            try:
                return _verify(path)
            except (OSError, ValueError) as error:
                log.warning("checkpoint %s is damaged (%s); trying the one before it", path, error)
        if paths:
            raise TrainingError(
                f"every checkpoint in {self.folder} is damaged. Restore one from a copy, or delete that "
                "folder to train from the start"
            )
        return None

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _drop_old(self) -> None:
        for path in sorted(self.folder.glob("step_*"))[: -self.keep]:
            shutil.rmtree(path)

    def _remaining(self) -> str:
        steps = sorted(path.name for path in self.folder.glob("step_*"))
        return f"Still there: {', '.join(steps)}." if steps else "There is no earlier checkpoint."


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Silence torch's warning that there is no process group: training on one device needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _reason(error: BaseException) -> str:
    """The operating system's words, dug out of torch's wrapping."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _seal(folder: Path, contents: dict[str, Any]) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    with open(folder / SEAL, "w") as file:
        json.dump({**contents, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _verify(folder: Path) -> dict[str, Any]:
    """The contents of the seal. Raises ValueError or OSError naming what does not match it."""
    sealed = json.loads((folder / SEAL).read_text())
    for name, expected in sealed["files"].items():
        found = _fingerprint(folder / name)
        if found != expected:
            raise ValueError(f"{name} is {found}, was written as {expected}")
    return sealed


def _fingerprint(path: Path) -> str:
    """Size and CRC-32: guards against truncation and decay, not against an adversary."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return f"{path.stat().st_size} bytes, crc {checksum:08x}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
