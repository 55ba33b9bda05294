"""Compiles CUDA sources as C++ for the CPU; headers in on_cpu/ stand in for those of GPU instructions."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagebwd.kernels.cuda import launch, plan
from sagebwd.kernels.cuda.compile import Sources
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper import tensor_map

#: Headers that stand in for those of the same name in sagebwd/kernels/cuda.
ON_CPU = Path(__file__).parent / "on_cpu"
# A fortified longjmp, some distributions' default, takes the switch to another fiber's stack for an attack.
FLAGS = ["-std=c++20", "-Og", "-march=native", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC"]
FLAGS += ["-U_FORTIFY_SOURCE"]
#: All that is linked: of the C++ library only headers are used, and the linker would read all of it.
LIBRARIES = ["-nodefaultlibs", "-lgcc", "-lm", "-lc"]
#: Libraries that this process has loaded.
LOADED: dict[Path, ctypes.CDLL] = {}
DYNAMIC_SHARED = r"extern __shared__ __align__\(\d+\) u8 shared\[\];"  # of a size that the launch gives


@functools.cache
def has_compiler() -> bool:
    """Whether there is a g++ that knows C++20."""
    probe = "#include <bit>\nint bits = std::bit_cast<int>(1.0f);\n"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return bool(shutil.which("g++")) and not subprocess.run(command, input=probe.encode()).returncode


def gather(tmp_path_factory: pytest.TempPathFactory, sources: Sources, *stand_ins: Path) -> Path:
    """A folder with all that ``sources`` consist of; headers in ``stand_ins`` replace those of GPUs.

    All processes of pytest-xdist share it, and the libraries in it.
    """
    texts = {
        path.name: re.sub(DYNAMIC_SHARED, "u8* shared = shared_memory;", path.read_text(encoding="utf-8"))
        for origin in (*reversed(sources.folders), ON_CPU, *stand_ins)
        for path in origin.glob("*.cu*")
    }
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"sources-{digest(texts)}"
    if not folder.exists():
        made = tmp_path_factory.mktemp("sources")
        for name, text in texts.items():
            (made / name).write_text(text)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def digest(x: object) -> str:
    """The same for the same x in every process."""
    return hashlib.sha256(repr(x).encode()).hexdigest()[:16]


def load(folder: Path, source: str, name: str, shared_bytes: int, defines: dict[str, int]) -> SimpleNamespace:
    """Kernel ``name`` of ``source``.cu in ``folder``, with what a plan uses of a :class:`Kernel`."""
    run = getattr(_build(folder, source, defines), f"run_{name}")

    def start(grid, threads, arguments):
        run(grid, threads, shared_bytes, ctypes.c_void_p(arguments))

    return SimpleNamespace(name=name, parameters=None, start=start)


def encode(address: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> bytes:
    """What ``TensorMap`` in hopper/on_cpu/ptx_sm90.cuh takes."""
    return bytes((ctypes.c_uint64 * 16)(address, *reversed(shape), *reversed(strides[:3])))


def no_gpu(patch, start_loading, encode=lambda *_: bytes(128)):
    """The host's part of CUDA kernels runs without a GPU; ``start_loading`` takes the place of launch's."""
    patch.setattr(launch, "start_loading", start_loading)
    patch.setattr(hopper, "_multiprocessors", lambda device: 2)
    patch.setattr(tensor_map, "encode", encode)
    plan.plan_of.cache_clear()


def run_in_order(*, reverse: bool = False, random: bool = False, first: int = 0, count: int = 0) -> None:
    """Threads run in reverse, or warps at random; ``count``, from ``first`` on, only when no other can."""
    for library in LOADED.values():
        library.set_reverse_order(ctypes.c_bool(reverse))
        library.set_random_order(ctypes.c_bool(random))
        library.starve(ctypes.c_uint(first), ctypes.c_uint(count))


def _build(folder: Path, source: str, defines: dict[str, int]) -> ctypes.CDLL:
    """A library with run_NAME_kernel for each kernel of ``source``.cu."""
    names = re.findall(r"(\w+_kernel)\(", (folder / f"{source}.cu").read_text())
    main = f'#include "{source}.cu"\nusing A = void**;\n' + "".join(
        f'extern "C" void run_{name}(int g, int t, int bytes, A a) {{ launch(g, t, bytes, a, {name}); }}\n'
        for name in dict.fromkeys(names)
    )
    macros = [f"-D{key}={int(value)}" for key, value in defines.items() if value is not False]
    library = folder / f"{digest((source, macros))}.so"
    with _making(library) as unfinished:
        if unfinished:
            headers = ["-include", str(_headers(folder)), f"-I{folder}"]
            command = ["g++", *FLAGS, "-shared", *macros, *headers, "-x", "c++", "-", "-o", str(unfinished)]
            command += LIBRARIES
            subprocess.run(command, input=main, text=True, check=True)
    LOADED[library] = ctypes.CDLL(str(library))
    return LOADED[library]


def _headers(folder: Path) -> Path:
    """A header of the stand-ins for instructions, compiled once: with each source it was a sixth of the time.

    g++ reads it anew where a macro changes it, which only IS_BF16 does.
    """
    header = folder / "stand_ins.h"
    with _making(header.with_suffix(".h.gch")) as unfinished:
        if unfinished:
            stand_ins = sorted(path.name for path in folder.glob("ptx*.cuh"))
            header.write_text("".join(f'#include "{name}"\n' for name in stand_ins))
            command = ["g++", *FLAGS, f"-I{folder}", "-x", "c++-header", str(header), "-o", str(unfinished)]
            subprocess.run(command, check=True)
    return header


@contextlib.contextmanager
def _making(file: Path) -> Iterator[Path | None]:
    """A path for what becomes ``file`` at the end, or None if it exists; other processes wait."""
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            yield None
            return
        unfinished = Path(f"{file}.unfinished")
        yield unfinished
        unfinished.rename(file)
