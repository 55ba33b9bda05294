"""What the benchmarks and experiments share: timing, options, files and tables, and a record of the machine.

Times are in milliseconds. Results are written as OUT.json (everything), OUT.md (tables) and OUT.png.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import shlex
import subprocess
import sys
import time
import zlib
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data.files import write_json, write_text
from trainer.run_directory import find_commit

#: Where benchmarks write if no --out is given. Git ignores it; results/ is for ``scripts.reproduce``.
SCRATCH = Path("runs/bench")

# --- Time --------------------------------------------------------------------------------------------------


def mark(device: torch.device) -> torch.cuda.Event | float:
    """A point in time: on a GPU when the work queued so far is done, on a CPU now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Time between two marks; on a GPU, synchronize first."""
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- Options ------------------------------------------------------------------------------------------------


def command_parser(program: str, description: str | None, examples: str | None = None) -> ArgumentParser:
    """A parser whose help shows the module's docstring and the examples as they are."""
    return ArgumentParser(
        prog=program,
        description=description,
        epilog=examples,
        formatter_class=RawDescriptionHelpFormatter,
    )


def add_output_options(add: Callable[..., Any], name: str) -> None:
    """--out and --draw. After parsing, `resolve_out` gives ``out`` its default."""
    default = SCRATCH / name
    add("--out", type=Path, metavar="PREFIX", help=f"write PREFIX.json, .md and .png (default {default})")
    text = "measure nothing: write the tables and pictures of this JSON again, next to it or at --out"
    add("--draw", type=Path, metavar="FILE.json", help=text)


def resolve_out(arguments: Namespace, name: str, parser: ArgumentParser) -> None:
    """Set ``arguments.out`` if it was not given. A --draw file that cannot be read ends the command."""
    if arguments.draw is None:
        arguments.out = arguments.out or SCRATCH / name
        return
    name = arguments.draw.name.removesuffix(".gz")
    if not name.endswith(".json") or not arguments.draw.is_file():
        parser.error(f"--draw {arguments.draw}: no such JSON file; give the one that a benchmark wrote")
    arguments.out = arguments.out or arguments.draw.with_name(name.removesuffix(".json"))


def say_written(arguments: Namespace, *endings: str) -> None:
    """Tell which files were written; --draw writes no JSON."""
    files = [
        with_ending(arguments.out, ending) for ending in endings if not (arguments.draw and ending == ".json")
    ]
    print(f"written: {', '.join(map(str, files))}")


def positive_int(text: str) -> int:
    """A type for options. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def choose_device(asked: str | None, parser: ArgumentParser) -> str:
    """The device asked for; by default a GPU if there is one. Ends the command if that GPU is missing."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"--device {device}: torch sees no GPU; run this where there is one, or use --device cpu"
        )
    return device


# --- Files and tables ---------------------------------------------------------------------------------------


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


def write_tables(out: Path, result: dict, rows: list[Any], markdown: str) -> None:
    """Write OUT.json, the result with its rows (dataclasses), and OUT.md."""
    write_markdown(out, markdown)
    write_json(with_ending(out, ".json"), finite(result | {"rows": [asdict(row) for row in rows]}))


def write_markdown(out: Path, markdown: str) -> None:
    """Write OUT.md, in a folder that is made if need be."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(with_ending(out, ".md"), markdown)


def read_result(path: Path) -> dict[str, Any]:
    """A result that `write_tables` wrote, or its gzip. Exits with a message if the file is something else."""
    try:
        content = path.read_bytes()
        result = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        sys.exit(f"{path} is damaged ({error}); restore it, or measure again")
    if not isinstance(result, dict) or "rows" not in result:
        sys.exit(f"{path} is not the result of a benchmark: it has no rows")
    return result


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG whole or not at all. A palette of 96 colours makes it a third of the size."""
    from PIL import Image  # comes with matplotlib, which is only needed for pictures

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    picture = Image.open(buffer).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    replace_file(path, lambda temporary: picture.save(temporary, format="png", optimize=True))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary name, then rename the file to `path`."""
    temporary = with_ending(path, f".{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- The record of a measurement ----------------------------------------------------------------------------

#: Options that say where results go, not what is measured.
NOT_SETTINGS = ("out", "draw")


def describe_run(
    program: str, argv: list[str] | None, arguments: Namespace, packages: Sequence[str]
) -> dict[str, Any]:
    """How to repeat the measurement: command, commit, hardware, settings, versions (also of `packages`)."""
    return {
        "command": shlex.join([*program.split(), *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "hardware": describe_hardware(torch.device(arguments.device)),
        "versions": {
            "torch": torch.__version__,
            "triton": installed("triton"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **{package.replace("-", "_"): installed(package) for package in packages},
            "python": sys.version.split()[0],
        },
        "settings": {name: value for name, value in vars(arguments).items() if name not in NOT_SETTINGS},
    }


def origin_of(result: dict[str, Any]) -> str:
    """The record of `describe_run` in one line, for the top of a Markdown file."""
    driver = result["hardware"]["driver"]
    known = ", ".join(f"{name} {text}" for name, text in result["versions"].items() if text is not None)
    return (
        f"`{result['command']}` on {result['hardware']['name']}, {result['date']}, commit "
        f"{result['commit'] or 'unknown'}. {f'Driver {driver}; ' if driver else ''}{known}."
    )


def describe_hardware(device: torch.device) -> dict:
    """The name; for a GPU also compute capability, multiprocessors, memory and driver."""
    if device.type == "cpu":
        return {"name": "cpu", "cores": os.cpu_count(), "driver": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": read_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_line(*command: str) -> str | None:
    """The first line that ``command`` prints; None if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
