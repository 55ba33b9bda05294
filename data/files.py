"""Finding input files, detecting whether they changed, and writing files atomically."""

import glob
import hashlib
import json
import os
from pathlib import Path
from typing import Any

FULL_HASH_LIMIT = 256 << 20  # bytes; up to this many in all, files are identified by all of their content
SAMPLE = 1 << 20  # bytes read from each end of a file that is too large to hash whole


def matching(pattern: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a path setting names, sorted: a file, a folder's files with these suffixes, or a glob.

    Raises ValueError when there are none.
    """
    path = Path(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        if not files:
            raise ValueError(
                f"the folder holds no {' or '.join(suffixes)} file; give a file or a glob instead"
            )
        return files
    files = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    if not files:
        raise ValueError("no such file, and no file matches it as a glob; check the spelling")
    return files


def identity(files: list[Path]) -> list[dict]:
    """A JSON object per file that identifies its content, wherever the file is.

    Small inputs are identified by all of their content, so that copying or touching them changes nothing.
    Beyond FULL_HASH_LIMIT it is the size, the modification time and the content of both ends.
    """
    whole = sum(file.stat().st_size for file in files) <= FULL_HASH_LIMIT
    return [_file_identity(file, whole) for file in files]


def _file_identity(file: Path, whole: bool) -> dict:
    status = file.stat()
    if whole:
        return {"name": file.name, "bytes": status.st_size, "sha256": sha256(file)}
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        digest.update(handle.read(SAMPLE))
        handle.seek(max(status.st_size - SAMPLE, 0))
        digest.update(handle.read(SAMPLE))
    return {
        "name": file.name,
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "sha256_of_ends": digest.hexdigest(),
    }


def sha256(file: Path) -> str:
    """Checksum of a file's content, as hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_text(file: Path, text: str) -> None:
    """Write atomically: `file` is always absent, the complete old one or the complete new one."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, file)


def write_json(file: Path, content: object) -> None:
    """Write JSON atomically."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> Any:
    """The content of a JSON file that write_json wrote, or None when there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and run data.prepare again") from None
