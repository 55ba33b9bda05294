"""What benchmark scripts share: time, files and tables of results, and what they were measured on."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data.files import write_json, write_text
from trainer.run_directory import find_commit

# --- Time --------------------------------------------------------------------------------------------------


def mark(device: torch.device) -> torch.cuda.Event | float:
    """A point in time: on a GPU when its work so far is done, on a CPU now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- Arguments ----------------------------------------------------------------------------------------------


def choose_device(asked: str | None, parser: ArgumentParser) -> str:
    """The device asked for, or a GPU if there is one; a GPU that is not there ends the command."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no GPU; use --device cpu")
    return device


# --- Files and tables ---------------------------------------------------------------------------------------


def beside(out: Path, ending: str) -> Path:
    return out.with_name(out.name + ending)


def finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def align(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns line up in plain text, too; all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in (header, rule, *rows)
    ]


def write_tables(out: Path, result: dict, rows: list[Any], markdown: str) -> None:
    """OUT.json, the result with its rows (dataclasses), and OUT.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(beside(out, ".json"), finite(result | {"rows": [asdict(row) for row in rows]}))
    write_text(beside(out, ".md"), markdown)


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture whole or not at all."""
    replace_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under a temporary name, then move it into place."""
    temporary = beside(path, f".{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- What it ran on -----------------------------------------------------------------------------------------


def describe_run(
    program: str, argv: list[str] | None, arguments: Namespace, packages: Sequence[str]
) -> dict[str, Any]:
    """What is needed to measure it again, and what on; versions of torch, triton and `packages`."""
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
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
    }


def origin_of(result: dict[str, Any]) -> str:
    """What `describe_run` kept, as the line below a file's title."""
    driver = result["hardware"]["driver"]
    known = ", ".join(f"{name} {text}" for name, text in result["versions"].items() if text is not None)
    return (
        f"`{result['command']}` on {result['hardware']['name']}, {result['date']}, commit "
        f"{result['commit'] or 'unknown'}. {f'Driver {driver}; ' if driver else ''}{known}."
    )


def describe_hardware(device: torch.device) -> dict:
    """Name, and of a GPU what speed depends on."""
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
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_line(*command: str) -> str | None:
    """The first line that ``command`` prints; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
