"""The record of a measurement: how to repeat it, on what hardware, and the state of the GPU meanwhile."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from types import TracebackType
from typing import Any

import torch

from sagebwd import SageConfig
from trainer.software import find_commit


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
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
    }


def origin_of(result: dict[str, Any]) -> str:
    """The record of `describe_run` in one line, for the top of a Markdown file."""
    driver = result["hardware"]["driver"]
    known = ", ".join(f"{name} {text}" for name, text in result["versions"].items() if text is not None)
    return (
        f"`{result['command']}` on {result['hardware']['name']}, {result['date']}, commit "
        f"{result['commit'] or 'unknown'}. {f'Driver {driver}; ' if driver else ''}{known}."
    )


def describe_config(config: SageConfig, head_dim: int) -> dict[str, Any]:
    """Every setting of SageBwd, with the tile that this head size gets."""
    return asdict(config) | dict(zip(("block_q", "block_kv"), config.tile(head_dim), strict=True))


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


# --- The GPU, as nvidia-smi tells it ------------------------------------------------------------------------

#: Fields of ``describe_limits``, and what nvidia-smi calls them.
LIMITS = {
    "power_limit_watts": "power.limit",
    "default_power_limit_watts": "power.default_limit",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.memory",
}
#: Fields of ``Monitor.medians``, the same.
STATE = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_watts": "power.draw",
    "temperature_celsius": "temperature.gpu",
}


def describe_limits(device: torch.device) -> dict[str, float | None]:
    """The limits that the driver has set; None for what it does not tell, or without an NVIDIA GPU."""
    query = _query(device, LIMITS)
    line = read_line(*query) if query else None
    return dict(zip(LIMITS, parse(line, len(LIMITS)), strict=True))


class Monitor:
    """Looks at a GPU every two seconds while the block runs: nvidia-smi does, in a process of its own."""

    def __init__(self, device: torch.device) -> None:
        self._query = _query(device, STATE)
        self._process: subprocess.Popen | None = None
        self._seen = ""

    def __enter__(self) -> Monitor:
        if self._query:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            try:
                self._process = subprocess.Popen([*self._query, "--loop=2"], **pipes)
            except OSError:
                self._process = None  # there is no nvidia-smi: the summary says so by None
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process:
            self._process.terminate()
            self._seen = self._process.communicate()[0]

    def medians(self) -> dict[str, float | None]:
        """After the block: the median of each field; None if nothing was seen."""
        samples = [parse(line, len(STATE)) for line in self._seen.splitlines()]
        columns = [[x for x in column if x is not None] for column in zip(*samples, strict=True)]
        found = dict(zip(STATE, columns or [[]] * len(STATE), strict=True))
        return {name: median(seen) if seen else None for name, seen in found.items()}


def parse(line: str | None, fields: int) -> list[float | None]:
    """Numbers of a line of nvidia-smi; None for each that is none, such as "[N/A]"."""
    cells = [cell.strip() for cell in (line or "").split(",")]
    cells += [""] * (fields - len(cells))
    return [_number(cell) for cell in cells[:fields]]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _query(device: torch.device, fields: dict[str, str]) -> list[str] | None:
    """The command that asks for these fields; None without an NVIDIA GPU. CUDA may number GPUs otherwise."""
    if device.type != "cuda" or torch.version.hip:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    what = (f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(fields.values())}")
    return ["nvidia-smi", *what, "--format=csv,noheader,nounits"]
