"""A folder of results: reading and writing JSON and JSON Lines files, plain or compressed with gzip.

A file may lie as NAME.json or as NAME.json.gz (NAME.jsonl or NAME.jsonl.gz); readers name the plain one and
find either. Compressed files hold no date, so equal content gives equal bytes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.files import write_text
from scripts.output import finite, replace_file, with_ending
from trainer.run_directory import RunDirectory

#: Commands write below this folder by default, never into results/.
OUT = Path("runs/paper")
FIX = "restore it (git checkout), or delete it and run its command again"


class DamagedResult(ValueError):
    """A file of the results cannot be used; the message names it and says how to fix that."""


def compressed(path: Path) -> Path:
    """The name under which `path` lies when it is compressed."""
    return path.with_name(f"{path.name}.gz")


def stored(path: Path) -> Path:
    """Where `path` lies: plain or compressed; `path` itself if neither is there.

    Raises DamagedResult if both are there: one of them is out of date.
    """
    packed = compressed(path)
    if path.exists() and packed.exists():
        raise DamagedResult(f"both {path} and {packed.name} are there; delete the older one")
    return packed if packed.exists() else path


def read_text(path: Path) -> str:
    """The text of a plain or compressed file. Raises FileNotFoundError or DamagedResult."""
    found = stored(path)
    content = found.read_bytes()
    try:
        return (gzip.decompress(content) if found.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DamagedResult(f"{found} is damaged ({error}); {FIX}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError or DamagedResult."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DamagedResult(f"{stored(path)} is damaged ({error}); {FIX}") from error
    if not isinstance(content, dict):
        raise DamagedResult(f"{stored(path)} holds a {type(content).__name__}, not an object; {FIX}")
    return content


def read_records(path: Path) -> list[dict[str, Any]]:
    """One record a line. Raises FileNotFoundError or DamagedResult."""
    lines = read_text(path).splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise DamagedResult(f"{stored(path)} is damaged ({error}); {FIX}") from error


def write_compressed_json(path: Path, content: dict[str, Any]) -> Path:
    """Write `content` to `path`.gz, remove an older plain file, and return where it lies."""
    return write_compressed(path, json.dumps(finite(content), indent=1) + "\n")


def write_result(out: Path, result: dict[str, Any], rows: Sequence[Any], markdown: str) -> None:
    """OUT.json.gz, the result with its rows (dataclasses), and OUT.md."""
    write_numbers(out, result, rows)
    write_text(with_ending(out, ".md"), markdown)


def write_numbers(out: Path, result: dict[str, Any], rows: Sequence[Any]) -> None:
    """OUT.json.gz alone."""
    write_compressed_json(with_ending(out, ".json"), result | {"rows": [asdict(row) for row in rows]})


def write_compressed(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)
    packed = compressed(path)
    replace_file(packed, lambda temporary: temporary.write_bytes(content))
    path.unlink(missing_ok=True)
    return packed


class Results:
    """The files below `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def has(self, *names: str) -> bool:
        return all(stored(self.folder / name).exists() for name in names)

    def name(self, name: str) -> str:
        """The name under which a file lies: `name`, or `name`.gz."""
        return stored(self.folder / name).relative_to(self.folder).as_posix()

    def json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file. Raises FileNotFoundError or DamagedResult."""
        return read_json(self.folder / name)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The records of a metrics.jsonl. Raises FileNotFoundError or DamagedResult."""
        return read_records(self.folder / name)

    def run(self, name: str) -> list[dict[str, Any]]:
        """The metrics of the copied run directory `name`."""
        return self.metrics(str(RunDirectory(Path(name)).metrics))

    def environment(self, name: str) -> dict[str, Any]:
        """What the first start of the copied run directory `name` ran on."""
        return self.metrics(f"{name}/environment.jsonl")[0]


@contextmanager
def naming(name: str, results: Results) -> Iterator[None]:
    """Turn errors about missing parts of a JSON into a DamagedResult that names the file."""
    try:
        yield
    except DamagedResult:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration, ValueError) as error:
        path = results.folder / results.name(name)
        raise DamagedResult(f"{path} lacks what the report needs ({error!r}); {FIX}") from error
