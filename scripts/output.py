"""What commands write: OUT.json (everything), OUT.md (tables) and OUT.png, each whole or not at all.

A JSON file may be compressed: readers name NAME.json and find NAME.json.gz as well.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.files import write_bytes, write_json, write_text

#: Where benchmarks write if no --out is given. Git ignores it; results/ is for ``scripts.reproduce``.
SCRATCH = Path("runs/bench")

# Control characters, those that change the direction of text, and bytes of names that are no UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# --- Tables -------------------------------------------------------------------------------------------------


def printable(text: str, *, keep: str = "") -> str:
    """Text of others, or a file's name, with escapes for what a terminal obeys and for what is no text."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def number(value: float | None, form: str) -> str:
    """The formatted value; an empty cell for None."""
    return "" if value is None else f"{value:{form}}"


def align(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table that is readable as plain text: first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in (header, rule, *rows)
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns of numbers, but for the first, are aligned to the right."""
    rows = [list(row) for row in rows]
    columns = list(zip(*rows, strict=True))[1:]
    are_numbers = (all(cell[:1] in ("", *"0123456789.+-±<>∞") for cell in column) for column in columns)
    rule = ["---", *("---:" if right else "---" for right in are_numbers)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


# --- Files --------------------------------------------------------------------------------------------------


def with_ending(out: Path, ending: str) -> Path:
    """OUT with an ending appended, whatever dots its name has."""
    return out.with_name(out.name + ending)


def finite(value: Any) -> Any:
    """The same value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def stored(path: Path) -> Path:
    """Where `path` lies: plain, or compressed as `path`.gz. Raises ValueError if both are there."""
    packed = with_ending(path, ".gz")
    if path.exists() and packed.exists():
        raise ValueError(f"both {path} and {packed.name} are there; delete the older one")
    return packed if packed.exists() else path


def read_json(path: Path) -> dict[str, Any]:
    """The object in NAME.json or NAME.json.gz. Raises FileNotFoundError, or ValueError if it is damaged."""
    found = stored(path)
    content = found.read_bytes()
    try:
        result = json.loads(gzip.decompress(content) if found.suffix == ".gz" else content)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{found} is damaged ({error}); restore it, or measure again") from error
    if not isinstance(result, dict):
        raise ValueError(f"{found} holds a {type(result).__name__}, not an object; restore it")
    return result


def write_tables(out: Path, result: dict, rows: list[Any], markdown: str) -> None:
    """Write OUT.json, the result with its rows (dataclasses), and OUT.md."""
    write_markdown(out, markdown)
    write_json(with_ending(out, ".json"), finite(result | {"rows": [asdict(row) for row in rows]}))


def write_compressed(out: Path, result: dict[str, Any]) -> Path:
    """OUT.json.gz in place of an older OUT.json. It holds no date, so equal content gives equal bytes."""
    plain = with_ending(out, ".json")
    packed = with_ending(plain, ".gz")
    text = json.dumps(finite(result), indent=1) + "\n"
    content = gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)
    packed.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(packed, content)
    plain.unlink(missing_ok=True)
    return packed


def write_markdown(out: Path, markdown: str) -> None:
    """Write OUT.md, in a folder that is made if need be."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(with_ending(out, ".md"), markdown)


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG whole or not at all. A palette of 96 colours makes it a third of the size."""
    from PIL import Image  # comes with matplotlib, which is only needed for pictures

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    picture = Image.open(buffer).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, buffer.getvalue())
