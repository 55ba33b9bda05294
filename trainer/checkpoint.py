"""Checkpoints that are complete or absent.

A checkpoint is a folder `step_<n>`. It is written under a temporary name, sealed, and renamed. Reading
verifies the seal; if that fails the previous checkpoint is used. The state itself is stored by
torch.distributed.checkpoint, so a run can resume on another number of devices, and read without running code.

Training pauses only while the state is copied to CPU memory. A thread then writes, seals, renames and deletes
old checkpoints. With several ranks each has such a thread and writes its part. The
threads use a process group of their own, because the order of collectives within a group must be the same on
all ranks, and training goes on in the other group.
"""

import io
import logging
import os
import pathlib
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from common.errors import TrainingError, explain
from common.files import read_bytes
from trainer.distributed import Ranks
from trainer.run_directory import (
    METADATA,
    checkpoint_of,
    checkpoints_in,
    path_of,
    step_of,
    sync,
    verify_seal,
    write_seal,
)

log = logging.getLogger(__name__)

NO_PROCESS_GROUP = "torch.distributed is disabled, unavailable or uninitialized"  # a warning of torch


class Checkpoints:
    """The checkpoints of one run, in `folder`.

    The newest `keep` are kept; those whose step is a multiple of `milestone_every` permanently. `save`
    returns as soon as the state is copied; every rank then calls `poll` in each step, and `wait` before it
    relies on the checkpoint. All ranks make all calls, in the same order. `published` is called with the step
    of each complete checkpoint, on the main rank, in the thread that wrote it. `completed` is called with
    step and folder of each on all ranks, by `save`, `poll` or `wait`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        ranks: Ranks,
        milestone_every: int | None = None,
        published: Callable[[int], None] | None = None,
        completed: Callable[[int, Path], None] | None = None,
    ):
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self.milestone_every, self.published, self.completed = milestone_every, published, completed
        self._group = dist.new_group(backend="gloo") if ranks.count > 1 else None
        # Keeps its memory for the next copy. (The public DefaultStager works only once in torch 2.11.)
        self._stager = StateDictStager(pin_memory=ranks.device.type == "cuda")
        # Of every rank the thread would otherwise allocate memory on the first GPU.
        gpu = (torch.cuda.set_device, (ranks.device,)) if ranks.device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "checkpoint", *gpu)
        self._writing: Future[Path] | None = None  # one at a time; on all ranks or on none
        # Training on one device needs no process group. (Silencing around the calls is not thread-safe.)
        warnings.filterwarnings("ignore", message=NO_PROCESS_GROUP)

    def save(self, step: int, model: nn.Module, optimizer, extra: dict[str, Any]) -> None:
        """Store everything the run needs to resume after `step` steps.

        Waits for the previous write. Raises TrainingError if that failed (on a full disk, for example). Older
        checkpoints are untouched.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        copy = self._copy(_state(model, optimizer))
        self._writing = self._thread.submit(self._write, copy, {"step": step, **extra})
        paused = time.perf_counter() - began
        before = f", {waited:.2f} s of it for the previous write" if waited > 0.1 else ""
        log.info("step %d: training paused %.2f s for a checkpoint%s", step, paused, before)

    def reserve(self, model: nn.Module, optimizer) -> None:
        """Allocate the CPU memory for copies once, which takes seconds. Call it after a first step."""
        # If that step was skipped the optimizer is empty, and reading its state would make torch count a
        # step.
        if optimizer.state:
            self._copy(_state(model, optimizer))

    def status(self) -> tuple[bool, bool]:
        """Of this rank's background write: whether it is running, and whether it has failed."""
        if self._writing is None:
            return False, False
        done = self._writing.done()
        return not done, done and self._writing.exception() is not None

    def poll(self, *, writing: bool, failed: bool) -> None:
        """Raise the TrainingError of a write that failed in the background, on all ranks at the same step.

        `writing` and `failed`: whether `status` said so on any rank, since the last `save`.
        """
        if failed or not writing:
            self.wait()

    def wait(self) -> None:
        """Wait for the background write. Raises TrainingError if it failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            path = writing.result()
            if self.completed:
                self.completed(step_of(path), path)

    def close(self) -> None:
        """Complete a write in progress. Its failure is only logged: another error is ending the run."""
        try:
            self.wait()
        except Exception as error:
            log.error("the last checkpoint is incomplete: %s", error)
        self._thread.shutdown()
        self._stager.close()

    def load_newest(
        self, model: nn.Module, optimizer, check: Callable[[Path, dict[str, Any]], None] | None = None
    ) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint. Returns the `extra` saved with it, or None if there is none.

        check: is called on the main rank, before anything is restored, with the checkpoint and what was saved
        with it. It raises TrainingError if that is not of this run. This raises TrainingError if there are
        checkpoints but none is intact, because starting over is the user's decision.
        """
        path, sealed = self.ranks.from_main(lambda: _newest_intact(self.folder, check))
        if path is None:
            return None
        restore(path, sealed, model, optimizer)
        return sealed

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the current state in CPU memory."""
        on_gpu = self.ranks.device.type == "cuda"
        copied = self._stager.stage(state, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(self.ranks.device)
        return copied

    def _write(self, state: dict[str, Any], sealed: dict[str, Any]) -> Path:
        """Write every rank's part of `state`, then on the main rank seal and name the checkpoint's folder.

        Raises TrainingError, on all ranks, if any of it fails.
        """
        final = path_of(self.folder, sealed["step"])
        temporary = self.folder / f".writing_{final.name}"
        try:
            self.ranks.from_main(lambda: _make_folder(self.folder, temporary), self._group)
            dcp.save(state, checkpoint_id=temporary, process_group=self._group)  # returns when all ranks have
            self.ranks.from_main(lambda: self._publish(temporary, final, sealed), self._group)
        except (OSError, dcp.CheckpointException) as error:
            if self.ranks.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise TrainingError(
                f"could not write the checkpoint of step {sealed['step']} to {self.folder}: "
                f"{_reason(error)}. Make room or fix the folder; the same command then continues from the "
                "checkpoint before it"
            ) from error
        return final

    def _publish(self, temporary: Path, final: Path, sealed: dict[str, Any]) -> None:
        write_seal(temporary, sealed)
        shutil.rmtree(final, ignore_errors=True)  # exists only if it was damaged
        os.rename(temporary, final)
        sync(self.folder)
        sync(self.folder.parent)  # which names that folder
        if self.published:
            self.published(sealed["step"])
        _drop_old(self.folder, sealed["step"], keep=self.keep, milestone_every=self.milestone_every)


def _make_folder(folder: Path, temporary: Path) -> None:
    if not folder.parent.is_dir():
        raise OSError(f"{folder.parent} was removed while the run trains")
    folder.mkdir(exist_ok=True)
    for leftover in folder.glob(".writing_*"):  # of a process that was killed
        shutil.rmtree(leftover)
    temporary.mkdir()


def _drop_old(folder: Path, newest: int, *, keep: int, milestone_every: int | None) -> None:
    """Later ones than `newest` do not count: they are damaged, or the run would have begun there."""
    done = [path for path in checkpoints_in(folder) if step_of(path) <= newest]
    for path in done[:-keep]:
        if milestone_every is None or step_of(path) % milestone_every:
            shutil.rmtree(path)


def _newest_intact(
    folder: Path, check: Callable[[Path, dict[str, Any]], None] | None
) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The newest checkpoint whose files are what its seal says, and the seal's contents."""
    paths = checkpoints_in(folder)
    for path in reversed(paths):
        try:
            sealed = verify_seal(path)
        except (OSError, ValueError) as error:
            log.warning("checkpoint %s is damaged (%s); trying the previous one", path, error)
            continue
        if check:
            check(path, sealed)
        return path, sealed
    if paths:
        raise TrainingError(
            f"every checkpoint in {folder} is damaged. Restore one from a copy, or delete the run "
            f"directory {folder.parent} to train from the start"
        )
    return None, None


def restore(path: Path, sealed: dict[str, Any], model: nn.Module, optimizer) -> None:
    """Restore a checkpoint, of this run or another, whose seal was verified."""
    state = _state(model, optimizer)
    try:
        load_safely(state, path, sealed["files"])
    except ValueError as error:
        raise TrainingError(
            f"checkpoint {path} cannot be loaded: {error}. Delete that folder, and the same command "
            "continues from the checkpoint before it"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def load_weights(folder: Path, step: int, model: nn.Module) -> None:
    """Read only the weights of one checkpoint of `folder` into a model on one device.

    Raises ValueError if there is none of that step, or it is damaged.
    """
    weights = get_model_state_dict(model)
    load_alone({"model": weights}, checkpoint_of(folder, step))
    set_model_state_dict(model, weights)


def load_alone(state: dict[str, Any], path: Path) -> None:
    """Read the values of `state` from the checkpoint `path` in a single process.

    Raises ValueError if it is damaged.
    """
    try:
        sealed = verify_seal(path)
        with warnings.catch_warnings():  # of no process group, which takes none here
            warnings.filterwarnings("ignore", message=NO_PROCESS_GROUP)
            load_safely(state, path, sealed["files"], alone=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} is damaged ({error}); use another step, or delete that folder"
        ) from error


def _state(model: nn.Module, optimizer) -> dict[str, Any]:
    if not optimizer.state:
        # torch initializes the moments only if there are no gradients; otherwise it silently omits them.
        optimizer.zero_grad(set_to_none=True)
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _reason(error: BaseException) -> str:
    """The operating system's message, out of torch's wrapper."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    # torch.save says where in the file it failed, and in its context why, which is not sent to other ranks.
    for one in (error, error.__context__):
        if isinstance(one, OSError):
            return explain(one)
    if "unexpected pos" in str(error):
        return "the disk is full, or refused the rest of a file"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---------------------------------------------------------------------- reading without running code
#
# torch's own reader unpickles `.metadata`, and every value that is not a tensor, and a pickle may call any
# function. Here the metadata may name the classes of CLASSES only, and values are read by torch's
# weights_only unpickler, as torch itself reads the tensors.


def _layout(name: str) -> torch.layout:
    """What torch.serialization._get_layout gives for the only layout in a checkpoint."""
    return {"torch.strided": torch.strided}[name]


def _enum_member(kind: type, name: str) -> parts._MEM_FORMAT_ENCODING:
    """getattr(kind, name), as Python 3.11.0 to 3.11.3 pickle the members of an enum. Of this enum only."""
    if kind is not parts._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r}, which no checkpoint needs")
    return parts._MEM_FORMAT_ENCODING[name]


CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        (parts.__name__, kind.__name__): kind
        for kind in (
            Metadata,
            StorageMeta,
            parts.MetadataIndex,
            parts.TensorStorageMetadata,
            parts.BytesStorageMetadata,
            parts.ChunkStorageMetadata,
            parts.TensorProperties,
            parts._MEM_FORMAT_ENCODING,
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("builtins", "getattr"): _enum_member,
    # Where it was written: only a name, on any system. Python 3.13 moved the class.
    **{
        (module, f"{kind}Path"): getattr(pathlib, f"Pure{kind}Path")
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows")
    },
}


def load_safely(state: dict[str, Any], folder: Path, files: Collection[str], *, alone: bool = False) -> None:
    """Read the values of `state` from the checkpoint in `folder`, into its tensors.

    files: the names of the checkpoint's files, as its seal has them. alone: without the other ranks. Raises
    ValueError or OSError if the checkpoint is damaged, asks for code, or does not hold what `state` has.
    """
    read_metadata(folder, files)  # before torch sees it: its errors come wrapped
    try:
        dcp.load(state, storage_reader=_Reader(folder, files), planner=_Planner(), no_dist=alone)
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise ValueError(str(causes[0] if causes else error)) from error


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """`.metadata` of a checkpoint. Raises ValueError if it names other classes, or files outside `files`."""
    content = read_bytes(folder / METADATA, links=False)
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # damaged pickles raise whatever their bytes lead to
        raise ValueError(f"{METADATA} cannot be read: {error}") from error
    if not (isinstance(metadata, Metadata) and isinstance(metadata.storage_data, dict)):
        raise ValueError(f"{METADATA} is not that of a checkpoint")
    for place in metadata.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not (isinstance(place, _StorageInfo) and isinstance(name, str) and name in files):
            name = name if isinstance(name, str) else "nothing"
            raise ValueError(f"{METADATA} points to {name}, which is no file of this checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = CLASSES.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return known


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, files: Collection[str]):
        super().__init__(folder)
        self.files = files

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = read_metadata(Path(self.path), self.files)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
