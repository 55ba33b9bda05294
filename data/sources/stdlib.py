"""The sources of Python's standard library: text that needs no network and no files."""

import hashlib
import os
import sysconfig
from pathlib import Path

from data.sources import Source
from data.sources.text import units

STDLIB_BYTES = 4 << 20  # of the standard library
# Not the library itself: other people's packages, tests, applications, generated tables.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo",
              "ensurepip", "encodings", "__pycache__"}  # fmt: skip


def stdlib_files() -> list[Path]:
    """Source files of the standard library, STDLIB_BYTES bytes of them, in an order that mixes subjects.

    First comes the text of Python's language reference (pydoc_data/topics.py); the order of the others is
    that of their names' hashes, so that both the limit and the validation text at the end take a fair sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        Path(folder, name)
        for folder, folders, names in os.walk(root)
        if not _prune(folders)
        for name in names
        if name.endswith(".py") and Path(folder, name).stat().st_size
    ]
    found.sort(key=lambda file: _rank(file.relative_to(root).as_posix()))
    chosen, size = [], 0
    for file in found:
        size += file.stat().st_size
        if size > STDLIB_BYTES:
            break
        chosen.append(file)
    if not chosen:
        raise ValueError(
            f"this Python ships no source files in {root}; use data=text data.path=FILE with a text of your "
            "own"
        )
    return chosen


def _prune(folders: list[str]) -> None:
    """Keep os.walk out of what is skipped."""
    folders[:] = [name for name in folders if name not in NOT_STDLIB and not name.startswith("config-")]


def _rank(name: str) -> bytes:
    if name == "pydoc_data/topics.py":
        return b""
    return hashlib.sha256(name.encode()).digest()


SOURCE = Source(units, files=lambda settings: (stdlib_files(), []))
