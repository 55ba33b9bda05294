"""Compiles CUDA sources as C++ for the CPU; headers in on_cpu/ stand in for those of GPU instructions."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

from sagebwd.kernels.cuda.arguments import Signature
from sagebwd.kernels.cuda.compile import Sources

#: Headers that stand in for those of the same name in sagebwd/kernels/cuda.
ON_CPU = Path(__file__).parent / "on_cpu"
FLAGS = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC"]
DYNAMIC_SHARED = r"extern __shared__ __align__\(\d+\) u8 shared\[\];"  # of a size that the launch gives


def has_compiler() -> bool:
    """Whether there is a g++ that knows C++20."""
    probe = "#include <bit>\nint bits = std::bit_cast<int>(1.0f);\n"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return bool(shutil.which("g++")) and not subprocess.run(command, input=probe.encode()).returncode


def gather(folder: Path, sources: Sources, *stand_ins: Path) -> None:
    """Copy to ``folder`` all that ``sources`` consist of; headers in ``stand_ins`` replace those of GPUs."""
    for origin in (*reversed(sources.folders), ON_CPU, *stand_ins):
        for path in origin.glob("*.cu*"):
            text = path.read_text(encoding="utf-8")
            (folder / path.name).write_text(re.sub(DYNAMIC_SHARED, "u8* shared = shared_memory;", text))


def load(folder: Path, source: str, name: str, shared_bytes: int, defines: dict[str, int]) -> SimpleNamespace:
    """Kernel ``name`` of ``source``.cu in ``folder``, with the ``launch`` of a :class:`Kernel`."""
    run = getattr(_build(folder, source, defines), f"run_{name}")

    def launch(grid, threads, *arguments):
        if grid:
            frame = Signature(tuple(map(type, arguments))).pack(arguments)
            run(grid, threads, shared_bytes, ctypes.c_void_p(frame.address))

    return SimpleNamespace(launch=launch)


def _build(folder: Path, source: str, defines: dict[str, int]) -> ctypes.CDLL:
    """A library with run_NAME_kernel for each kernel of ``source``.cu."""
    names = re.findall(r"(\w+_kernel)\(", (folder / f"{source}.cu").read_text())
    main = f'#include "{source}.cu"\nusing A = void**;\n' + "".join(
        f'extern "C" void run_{name}(int g, int t, int bytes, A a) {{ launch(g, t, bytes, a, {name}); }}\n'
        for name in dict.fromkeys(names)
    )
    macros = [f"-D{key}={int(value)}" for key, value in defines.items() if value is not False]
    library = folder / f"{abs(hash((source, *macros)))}.so"
    if not library.exists():
        command = ["g++", *FLAGS, *macros, f"-I{folder}", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=main, text=True, check=True)
    return ctypes.CDLL(str(library))
