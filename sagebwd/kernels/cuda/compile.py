"""Compiles CUDA sources with NVRTC, NVIDIA's compiler as a library, so that nobody needs nvcc.

Compiled kernels are cached on disk, in $SAGEBWD_CACHE_DIR or the user's cache folder. Nothing of CUDA is
imported before it is needed.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: The folder of what kernel sets share: packing.cu and headers.
SHARED = Path(__file__).parent

#: What a source is compiled with: macros by name. True defines one without a value, False defines none.
Defines = dict[str, int]


@dataclass(frozen=True, eq=False)  # compared by identity: a launch looks kernels up by their sources
class Sources:
    """CUDA sources and the architecture that they are compiled for.

    Attributes:
        architecture: as NVRTC takes it, for example "sm_90a".
        folders: where sources and headers are searched, in this order. Usually the folder of the kernel set,
            then :data:`SHARED`.
    """

    architecture: str
    folders: tuple[Path, ...]

    def path(self, source: str) -> Path:
        """The file ``source``.cu, of the first folder that has one.

        Raises:
            FileNotFoundError: no folder has one.
        """
        for folder in self.folders:
            path = folder / f"{source}.cu"
            if path.exists():
                return path
        raise FileNotFoundError(f"there is no {source}.cu in {', '.join(map(str, self.folders))}")


# --- Compiling ---------------------------------------------------------------------------------------------


def compile_source(
    sources: Sources, source: str, defines: Defines, ptxas_options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compile ``source``.cu of ``sources``: the CUBIN and the compiler's log.

    Raises:
        RuntimeError: it does not compile; with the compiler's log.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{source}.cu",
        arch=sources.architecture,
        std="c++17",
        include_path=[str(folder) for folder in sources.folders],
        define_macro=_macros(defines),
        ptxas_options=list(ptxas_options) or None,
    )
    log = io.StringIO()
    try:
        program = Program(sources.path(source).read_text(encoding="utf-8"), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core does not export the class of its errors
        raise RuntimeError(f"{_describe(source, defines)} does not compile: {error}") from error
    return cubin, log.getvalue()


def load_or_compile(sources: Sources, source: str, defines: Defines) -> bytes:
    """The CUBIN of ``source``.cu, from the disk if it has been compiled before."""
    folder = cache_folder()
    if folder is None:
        return compile_source(sources, source, defines)[0]
    path = folder / f"{source}-{_fingerprint(sources, source, defines)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = compile_source(sources, source, defines)[0]
        try:
            _write(path, cubin)
        except OSError as error:
            _warn_not_cached(str(folder), str(error))
    return cubin


@functools.cache
def why_no_compiler() -> str | None:
    """Why this installation cannot compile CUDA sources; None if it can. Needs no GPU."""
    try:
        import cuda.core  # noqa: F401

        nvrtc_version()
    except ImportError as error:
        return f"cuda.core cannot be imported ({error}); install cuda-core and cuda-bindings"
    except RuntimeError as error:  # what cuda.bindings raises when a library is missing
        return f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc"
    return None


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the compiler."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error:
        raise RuntimeError(error.name)
    return major, minor


def _macros(defines: Defines) -> list[str | tuple[str, str]]:
    return [
        name if value is True else (name, str(value))
        for name, value in sorted(defines.items())
        if value is not False
    ]


def _describe(source: str, defines: Defines) -> str:
    macros = (name if value is True else f"{name}={value}" for name, value in sorted(defines.items()))
    return f"{source}.cu ({', '.join(macros)})"


# --- The cache on disk -------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where CUBINs are cached: $SAGEBWD_CACHE_DIR, else in the user's cache folder; None without a home."""
    if chosen := os.environ.get("SAGEBWD_CACHE_DIR"):
        return Path(chosen)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "sagebwd"
    try:
        return Path.home() / ".cache" / "sagebwd"
    except RuntimeError:  # a user without a home
        return None


def _fingerprint(sources: Sources, source: str, defines: Defines) -> str:
    """A hash of everything that the compiler's output depends on, all folders of ``sources`` included."""
    contents = [
        [
            (file.name, hashlib.sha256(file.read_bytes()).hexdigest())
            for file in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")])
        ]
        for folder in sources.folders
    ]
    inputs = (source, sources.architecture, _macros(defines), nvrtc_version(), contents)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    """What :func:`_write` wrote; None if there is nothing, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, cubin = content[:32], content[32:]
    return cubin if hashlib.sha256(cubin).digest() == checksum else None


def _write(path: Path, cubin: bytes) -> None:
    """Write a checksum and the CUBIN. Other processes see the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@functools.cache  # once for each folder, not for each kernel
def _warn_not_cached(folder: str, error: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be cached in {folder} ({error}), so every process compiles them again; "
        "set SAGEBWD_CACHE_DIR to a writable folder",
        stacklevel=2,
    )
