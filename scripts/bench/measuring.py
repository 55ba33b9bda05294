"""What benchmarks share: time, in milliseconds, and the record of a measurement."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from trainer.run_directory import find_commit

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
