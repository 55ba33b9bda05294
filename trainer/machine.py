"""What this machine has: memory for a process, and the speed of its matrix products."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory() -> int | None:
    """Bytes of RAM, or fewer if a control group (a container, a SLURM job) limits this process.

    None if the operating system does not tell. Swap does not count: training into it is hopeless.
    """
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return min([installed, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """The memory limits of this process's control groups and of those above them, versions 1 and 2."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2 has one tree
            root, file = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, of which only the root is mounted here.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            limit = _read_number(folder / file)
            if limit is not None:
                yield limit


def _read_number(file: Path) -> int | None:
    """The number in a file; None if there is none, as "max" is."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def own_memory() -> int:
    """Bytes of RAM that this process takes now, shared libraries included; 0 where /proc does not exist."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def matmul_flops(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product of this dtype on the CPU, measured."""
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    a @ b  # the first one starts threads
    products, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < 0.05:
        a @ b
        products += 1
    return products * 2 * 512**3 / elapsed
