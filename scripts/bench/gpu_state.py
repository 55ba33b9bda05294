"""Power limit, clocks and temperature of a GPU, as nvidia-smi tells them."""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import Any

import numpy as np
import torch

from scripts.bench.measuring import read_line

#: Fields of ``describe_limits``, and what nvidia-smi calls them.
LIMITS = {
    "power_limit_watts": "power.limit",
    "default_power_limit_watts": "power.default_limit",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.memory",
}
#: Fields of ``Monitor.summary``, the same.
STATE = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_watts": "power.draw",
    "temperature_celsius": "temperature.gpu",
}
FORMAT = "--format=csv,noheader,nounits"
#: Seconds between two looks at the GPU.
EVERY = 2


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
                self._process = subprocess.Popen([*self._query, f"--loop={EVERY}"], **pipes)
            except OSError:
                self._process = None  # there is no nvidia-smi: the summary says so by None
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process:
            self._process.terminate()
            self._seen = self._process.communicate()[0]

    def summary(self) -> dict[str, dict[str, float] | None]:
        """After the block: 10th percentile, median and 90th of each field; None if nothing was seen."""
        return summarise([parse(line, len(STATE)) for line in self._seen.splitlines()])


def summarise(samples: list[list[float | None]]) -> dict[str, dict[str, float] | None]:
    """:meth:`Monitor.summary` of these samples, each with a value for every field of STATE."""
    found: dict[str, dict[str, float] | None] = {}
    for name, values in zip(STATE, zip(*samples, strict=True) if samples else [()] * len(STATE), strict=True):
        seen = [value for value in values if value is not None]
        quantiles = np.percentile(seen, (10, 50, 90)).tolist() if seen else None
        found[name] = dict(zip(("p10", "median", "p90"), quantiles, strict=True)) if quantiles else None
    return found


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
    return ["nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(fields.values())}", FORMAT]
