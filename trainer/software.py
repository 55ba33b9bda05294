"""What a run is trained with: the commit and a checksum of the code, and versions of packages."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from zlib import crc32

import torch

ROOT = Path(__file__).parents[1]


def software() -> dict[str, str | None]:
    """What a run is trained with: code, by commit and by a checksum of all its files, and packages."""
    checksum = 0
    for folder in ("common", "data", "model", "sagebwd", "trainer"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cu", ".cuh"):
                checksum = crc32(file.read_bytes(), checksum)
    return {
        "commit": find_commit(),
        "code_checksum": f"{checksum:08x}",
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build, which the package's own version may leave out
        "triton": _version("triton"),
        "numpy": _version("numpy"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a git checkout."""
    # status would otherwise write the index, and leave its lock behind where it cannot
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        commit, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed else "")
