"""Finding input files, detecting whether they changed, and writing files atomically."""

import glob
import hashlib
import json
import logging
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FULL_HASH_LIMIT = 256 << 20  # bytes; up to this many in all, files are identified by all of their content
LARGEST_RECORD = 256 << 20  # bytes of JSON: the manifest of 2 TB of tokens, or twice the largest tokenizers
LARGEST_LINES = 4 << 30  # bytes of lines of JSON: a curve of ten million steps
SAMPLE = 1 << 20  # bytes read from each end of a file that is too large to hash whole

log = logging.getLogger(__name__)


def matching(pattern: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a path setting names, sorted: a file, a folder's files with these suffixes, or a glob.

    Each file once, however many links lead to it: text that is read twice would be in both splits. Raises
    ValueError when there are none.
    """
    path = Path(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.name.endswith(suffixes))
        fault = f"the folder holds no {' or '.join(suffixes)} file; give a file or a glob instead"
    else:
        found = map(Path, _expanded(pattern))
        fault = "no such file, and no file matches it as a glob; check the spelling"
    files = _each_once(file for file in found if file.is_file())
    if not files:
        raise ValueError(fault)
    return files


def inode(file: Path) -> tuple[int, int]:
    """What identifies a file on this machine, whatever the name or link that leads to it."""
    status = file.stat()
    return status.st_dev, status.st_ino


def _each_once(files: Iterable[Path]) -> list[Path]:
    """The files, sorted, without further names of one that is there already."""
    names: dict[tuple[int, int], Path] = {}
    for file in sorted(files, key=lambda file: (file.is_symlink(), file)):
        first = names.setdefault(inode(file), file)
        if first != file:
            log.warning("%s is %s under another name, and is left out", file, first)
    return sorted(names.values())


def _expanded(pattern: str) -> Iterator[str]:
    """What a glob matches. `**` enters each folder once, so that a loop of links ends."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    rest = Path(*parts[at + 1 :] or ("*",))
    for start in glob.glob(os.path.join(*parts[:at])) if at else ["."]:
        for folder in _folders(start):
            yield from _expanded(os.path.join(glob.escape(folder), rest))


def _folders(start: str) -> Iterator[str]:
    """A folder and all within it that are not hidden, each once; links are followed after the folders."""
    seen = set()
    for folder, inner, _ in os.walk(start, followlinks=True):
        if (here := inode(Path(folder))) in seen:
            inner.clear()
            continue
        seen.add(here)
        inner[:] = sorted(
            (name for name in inner if not name.startswith(".")),
            key=lambda name: (os.path.islink(os.path.join(folder, name)), name),
        )
        yield folder


def identity(files: list[Path]) -> list[dict]:
    """A JSON object per file that identifies its content, wherever the file is.

    Small inputs are identified by all of their content, so that copying or touching them changes nothing.
    Beyond FULL_HASH_LIMIT it is the size, the modification time and the content of both ends.
    """
    return checksums(files) if identified_whole(files) else [_identity_of_ends(file) for file in files]


def identified_whole(files: list[Path]) -> bool:
    """Whether `identity` reads all of these files."""
    return sum(file.stat().st_size for file in files) <= FULL_HASH_LIMIT


def _identity_of_ends(file: Path) -> dict:
    status = file.stat()
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


def checksums(files: list[Path]) -> list[dict]:
    """A JSON object per file with the checksum of all of its content. Reads them, some 2 GB/s."""
    return [{"name": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)} for file in files]


def sha256(file: Path) -> str:
    """Checksum of a file's content, as hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_text(file: Path, text: str) -> None:
    """Write atomically: `file` is always absent, the complete old one or the complete new one."""
    write_bytes(file, text.encode("utf-8"))


def write_bytes(file: Path, content: bytes) -> None:
    """The same, of bytes."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, file)


def write_json(file: Path, content: object) -> None:
    """Write JSON atomically."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_bytes(file: Path, limit: int = LARGEST_RECORD, *, links: bool = True) -> bytes:
    """The content of a file, which may be a link if `links`.

    Raises ValueError if it has more than `limit` bytes, or is a pipe, say.
    """
    status = file.stat(follow_symlinks=links)
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise ValueError(f"{file} is no regular file of at most {limit:,} bytes")
    return file.read_bytes()


def no_link(file: str, flags: int) -> int:
    """An opener for open(): a link, which may lead anywhere, is an OSError."""
    return os.open(file, flags | os.O_NOFOLLOW, 0o666)


def read_json(file: Path) -> Any:
    """The content of a JSON file that write_json wrote, or None when there is none."""
    try:
        return json.loads(read_bytes(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and run data.prepare again") from None


# ---------------------------------------------------------------------- lines of JSON


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines. A last line that a crash cut short is left out.

    Raises ValueError, naming the line, if any other is damaged.
    """
    records = []
    for number, line in enumerate(read_bytes(path, LARGEST_LINES, links=False).split(b"\n")[:-1], start=1):
        try:
            record = read_line(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(damaged_line(path, number, str(error))) from error
        if not isinstance(record, dict):
            raise ValueError(damaged_line(path, number, "it is no JSON object"))
        records.append(record)
    return records


def read_line(line: str | bytes) -> Any:
    """The value in a line of JSON. Raises ValueError."""
    return json.loads(line, parse_int=_whole)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON, in place of one that a crash or a full disk cut short."""
    with open(path, "ab+", opener=no_link) as file:
        file.seek(0)
        complete = file.read().rfind(b"\n") + 1
        file.truncate(complete)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def damaged_line(path: Path, number: int, problem: str) -> str:
    """What is wrong with a line, and how to go on without it."""
    fix = shlex.join(["sed", "-i", f"{number}d", str(path)])
    return f"line {number} of {path} is damaged ({problem}). To go on without it, delete that line: {fix}"


def _whole(digits: str) -> int:
    if len(digits) > 18:
        raise ValueError(f"{digits[:20]} is a whole number of more than 18 digits; log it as a float")
    return int(digits)
