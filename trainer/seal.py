"""The seal of a checkpoint: what it is of, and the size and checksum of each of its files, and of itself.

DONE of a finished run is one, too, of its results.

It finds damage: truncation, flipped bits, files of another checkpoint. It does not find tampering, because
anyone can compute a CRC. That a checkpoint runs no code when it is read does not rest on it: see
trainer/checkpoint.py.
"""

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from common.files import read_bytes

FILE = "seal.json"
METADATA = ".metadata"  # torch.distributed.checkpoint's list of what is in the other files
NAME = re.compile(r"step_\d+")  # of a checkpoint's folder
CHECKSUM = "checksum"  # of the seal itself


def write(folder: Path, contents: dict[str, Any]) -> None:
    """Seal all files of `folder`. They and the folder are on the disk when this returns."""
    files = {path.name: fingerprint(path) for path in sorted(folder.iterdir())}
    with open(folder / FILE, "w") as file:
        file.write(dumps({**contents, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def dumps(sealed: dict[str, Any]) -> str:
    """A seal as JSON."""
    sealed = json.loads(json.dumps(sealed))
    return json.dumps({**sealed, CHECKSUM: _checksum(sealed)}, indent=1)


def read(folder: Path) -> dict[str, Any]:
    """The contents of the seal; the files are not looked at.

    Raises OSError, or ValueError if it is damaged.
    """
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link; put there what it leads to")
    sealed = read_file(folder / FILE)
    if step_of(folder) != sealed.get("step"):
        raise ValueError(f"{FILE} is that of step {sealed.get('step')}")
    return sealed


def read_file(path: Path) -> dict[str, Any]:
    """What `dumps` wrote. Raises OSError, or ValueError if it is damaged."""
    try:
        sealed = json.loads(read_bytes(path, links=False))
        checksum = sealed.pop(CHECKSUM, None) if isinstance(sealed, dict) else None
        found = _checksum(sealed)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not (isinstance(sealed, dict) and isinstance(sealed.get("files"), dict)):
        raise ValueError(f"{path.name} lists no files")
    if checksum != found:
        raise ValueError(f"{path.name} does not match its own checksum")
    return sealed


def verify(folder: Path) -> dict[str, Any]:
    """The contents of the seal. Raises ValueError or OSError naming what does not match it."""
    sealed = read(folder)
    verify_files(folder, {METADATA: None, **sealed["files"]})
    return sealed


def verify_files(folder: Path, files: dict[str, Any]) -> None:
    """Compare files, by their paths in `folder`, with their fingerprints. Raises as `verify` does."""
    for name, expected in files.items():
        path = folder / name
        outside = {"/", ".."} & {*Path(name).parts}
        if outside or path.is_symlink() or not path.is_file():  # nor a pipe that never ends
            raise ValueError(f"{name} is missing, or no file of this folder")
        found = size = f"{path.stat().st_size} bytes"
        if str(expected).startswith(f"{size}, "):  # a sparse file of a stranger may have any size
            found = fingerprint(path)
        if found != expected:
            raise ValueError(f"{name} is {found}, was written as {expected}")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; none if there is no folder.

    Raises OSError if the folder cannot be read, or is a link to a place that is not there.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
    return sorted(folder / name for name in names if NAME.fullmatch(name))


def step_of(folder: Path) -> int:
    """The step that the name of a checkpoint's folder, step_<n>, says. Raises ValueError if it says none."""
    return int(folder.name.removeprefix("step_"))


def checkpoint_of(folder: Path, step: int) -> Path:
    """The checkpoint of one step. Raises ValueError, naming the steps that exist, if there is none."""
    path = path_of(folder, step)
    if not path.is_dir():
        there = ", ".join(map(str, steps_in(folder))) or "none"
        raise ValueError(f"{folder} has no checkpoint of step {step}; there: {there}")
    return path


def steps_in(folder: Path) -> list[int]:
    """The steps whose checkpoints are in `folder`."""
    return [step_of(path) for path in checkpoints_in(folder)]


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint of `folder`. Raises ValueError if there is none."""
    if steps := steps_in(folder):
        return steps[-1]
    raise ValueError(f"{folder} holds no checkpoint; train the run, or restore them")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step_{step:08d}"


def sync(path: Path) -> None:
    """Return when the content of the file, or the names in the folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(sealed: dict[str, Any]) -> str:
    return f"crc {zlib.crc32(json.dumps(sealed, sort_keys=True).encode()):08x}"


def fingerprint(path: Path) -> str:
    """Size and checksum of a file, some 2 GB/s."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return f"{path.stat().st_size} bytes, crc {checksum:08x}"
