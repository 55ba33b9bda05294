"""Reading what torch.distributed.checkpoint wrote without running code from it.

Its own reader unpickles `.metadata`, and every value that is not a tensor, and a pickle may call any
function. Here the metadata may name the classes of CLASSES only, and values are read by torch's
weights_only unpickler, as torch itself reads the tensors.
"""

import io
import pathlib
import pickle
import pickletools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from common.files import read_bytes
from trainer.seal import METADATA


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


# What pickle writes for these. Others reach into its memory: PUT makes room for as many values as it names.
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "REDUCE"),
    *("NEWOBJ", "BUILD", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND"),
    *("APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1"),
    *("BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
}


def load(state: dict[str, Any], folder: Path, files: Collection[str], *, alone: bool = False) -> None:
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
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name not in OPCODES:
                raise pickle.UnpicklingError(f"it has {opcode.name}, which no checkpoint needs")
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
