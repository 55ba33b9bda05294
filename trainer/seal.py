"""The seal of a checkpoint: what it is of, and the size and checksum of each of its files, and of itself.

It finds damage: truncation, flipped bits, files of another checkpoint. It does not find tampering, because
anyone can compute a CRC. That a checkpoint runs no code when it is read does not rest on it: see
trainer/safe_load.py.
"""

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

FILE = "seal.json"
METADATA = ".metadata"  # torch.distributed.checkpoint's list of what is in the other files
NAME = re.compile(r"step_\d+")  # of a checkpoint's folder
FIELDS = {"step": int, "files": dict}  # that every seal has; the rest is what the trainer saves with it
CHECKSUM = "checksum"  # of the seal itself; seals from before it was added have none, and no "settings"


def write(folder: Path, contents: dict[str, Any]) -> None:
    """Seal all files of `folder`. They and the folder are on the disk when this returns."""
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    sealed = json.loads(json.dumps({**contents, "files": files}))
    with open(folder / FILE, "w") as file:
        json.dump({**sealed, CHECKSUM: _checksum(sealed)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read(folder: Path) -> dict[str, Any]:
    """The contents of the seal; the files are not looked at.

    Raises OSError, or ValueError if it is damaged.
    """
    try:
        sealed = json.loads((folder / FILE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{FILE} cannot be read: {error}") from error
    if not (isinstance(sealed, dict) and all(isinstance(sealed.get(k), kind) for k, kind in FIELDS.items())):
        raise ValueError(f"{FILE} has no {' or no '.join(FIELDS)}")
    checksum = sealed.pop(CHECKSUM, None)
    if checksum != _checksum(sealed) and (checksum is not None or "settings" in sealed):
        raise ValueError(f"{FILE} does not match its own checksum")
    if step_of(folder) != sealed["step"]:
        raise ValueError(f"{FILE} is that of step {sealed['step']}")
    return sealed


def verify(folder: Path) -> dict[str, Any]:
    """The contents of the seal. Raises ValueError or OSError naming what does not match it."""
    sealed = read(folder)
    for name, expected in {METADATA: None, **sealed["files"]}.items():
        path = folder / name
        if not (path.name == name and path.is_file()):  # not a path elsewhere, nor a pipe that never ends
            raise ValueError(f"{name} is missing, or no file of this folder")
        found = _fingerprint(path)
        if found != expected:
            raise ValueError(f"{name} is {found}, was written as {expected}")
    return sealed


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


def sync(path: Path) -> None:
    """Return when the content of the file, or the names in the folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(sealed: dict[str, Any]) -> str:
    return f"crc {zlib.crc32(json.dumps(sealed, sort_keys=True).encode()):08x}"


def _fingerprint(path: Path) -> str:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return f"{path.stat().st_size} bytes, crc {checksum:08x}"
