"""What this machine has: code and packages, memory and speed."""

import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch

ROOT = Path(__file__).parents[1]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class Gpu(NamedTuple):
    """A GPU by its datasheet."""

    tflops: float  # peak of dense bf16 matrix products, without sparsity
    gib: float  # memory that PyTorch finds there, to a percent; of an A100 the larger one


GPUS = {
    "A100": Gpu(312.0, 79.2),
    "H100": Gpu(989.0, 79.2),  # SXM
    "H100 NVL": Gpu(835.0, 93.1),
    "H100 PCIe": Gpu(756.0, 79.2),
    "H200": Gpu(989.0, 139.8),  # SXM
    "H200 NVL": Gpu(835.0, 139.8),
    "B200": Gpu(2250.0, 178.3),
    "L40S": Gpu(362.0, 44.4),
    "RTX 3090": Gpu(71.0, 23.6),
    "RTX 4090": Gpu(165.2, 23.6),
    "RTX 5090": Gpu(209.5, 31.4),
}

#: Words in the driver's names of GPUs that do not change the peak: the maker, the socket and the memory.
NEUTRAL = re.compile(r"NVIDIA|GeForce|SXM\d?|PCIe?|\d+GB|HBM\d", re.IGNORECASE)


def software() -> dict[str, str | None]:
    """What a run is trained with: code, by commit and by a checksum of all its files, and packages."""
    checksum = 0
    for folder in ("common", "data", "model", "sagebwd", "trainer"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cu", ".cuh"):
                checksum = crc32(file.read_bytes(), checksum)
    return {
        "commit": find_commit(),
        "code_checksum": f"{checksum:08x}",
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build, which the package's own version may leave out
        "triton": _version("triton"),
        "numpy": _version("numpy"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a git checkout."""
    # status would otherwise write the index, and leave its lock behind where it cannot
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        commit, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed else "")


def available_memory(device: str, ranks: int, gpu: str | None) -> tuple[int | None, str]:
    """Bytes that a device of this kind has here for one rank, and its name; gpu: a name, for one elsewhere.

    Bytes that others use count as there: a run that has just ended, or a page cache, gives them back.
    """
    if device == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        installed = host_memory()
        return (None if installed is None else installed // here), "RAM" if here == 1 else "RAM for each rank"
    if gpu:
        return memory_of(gpu), gpu
    if not torch.cuda.is_available():
        return None, "no GPU here; gpu=… names one"
    _, installed = torch.cuda.mem_get_info()
    return installed, torch.cuda.get_device_name()


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
            with suppress(OSError, ValueError):  # there is none, or it is "max"
                yield int((folder / file).read_text())


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


def peak_tflops(device: torch.device) -> float | None:
    """Peak of the device in dense bf16, in TFLOP/s, if it is a known GPU, else None."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Peak of a GPU by the driver's name for it; None for one that is not known."""
    known = known_gpu(name)
    return GPUS[known].tflops if known else None


def memory_of(name: str) -> int:
    """Bytes of a known GPU, or fewer if its name says so: "A100 40GB"."""
    said = re.search(r"(\d+)GB", name.upper())
    gib = min(GPUS[known_gpu(name)].gib, 0.99 * int(said[1]) if said else math.inf)
    return int(gib * 2**30)


def known_gpu(name: str) -> str | None:
    """The longest name of GPUS within the driver's, or a user's, name of a GPU.

    None if there is no such GPU, or the name has a word of unknown meaning, such as "Laptop".
    """
    words = set(re.split(r"[ -]", name.upper()))
    inside = [known for known in GPUS if {*known.upper().split()} <= words]
    if not inside:
        return None
    longest = max(inside, key=len)
    return longest if all(map(NEUTRAL.fullmatch, words - {*longest.upper().split()})) else None


def peak_memory_gib(device: torch.device, *, cuda_graphs: bool = False) -> float | None:
    """Peak memory of tensors on this GPU so far, in GiB; None on a CPU.

    PyTorch's count of tensors leaves out the memory of CUDA graphs. With them this is all memory that PyTorch
    reserved, used or not.
    """
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved if cuda_graphs else torch.cuda.max_memory_allocated
    return peak(device) / 2**30
