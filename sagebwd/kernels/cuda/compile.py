"""Compiles CUDA sources with NVRTC, NVIDIA's compiler as a library, so that nobody needs nvcc.

Compiled kernels are cached on disk, in $SAGEBWD_CACHE_DIR or the user's cache folder. They are loaded only if
no other user can write to the file and its folder. Nothing of CUDA is imported before it is needed.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shlex
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        """The file ``source``.cu, of the first folder that has one; of the last if none has."""
        paths = [folder / f"{source}.cu" for folder in self.folders]
        return next(filter(Path.exists, paths), paths[-1])


# --- Compiling ---------------------------------------------------------------------------------------------


def compile_source(
    sources: Sources, source: str, defines: Defines, options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compile ``source``.cu of ``sources``: the CUBIN and the compiler's log.

    Args:
        options: more options of NVRTC, for example "--ptxas-options=--verbose".

    Raises:
        RuntimeError: it does not compile; with the compiler's log.
    """
    macros = _macros(defines)
    arguments = [
        f"--gpu-architecture={sources.architecture}",
        "--std=c++17",
        *(f"--include-path={folder}" for folder in sources.folders),
        *(f"--define-macro={macro}" for macro in macros),
        *options,
    ]
    error, cubin, log = _run_nvrtc(sources.path(source), arguments)
    if error:
        raise RuntimeError(f"{source}.cu ({', '.join(macros)}) does not compile: {error}\n{log}")
    return cubin, log


def _run_nvrtc(path: Path, arguments: list[str]) -> tuple[str, bytes, str]:
    """The name of NVRTC's error ("" if there is none), the CUBIN and the log."""
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
    try:
        options = [os.fsencode(argument) for argument in arguments]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        cubin = bytearray(0 if error else checked(nvrtc.nvrtcGetCUBINSize(program)))
        if cubin:
            checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return error.name if error else "", bytes(cubin), log.rstrip(b"\0").decode(errors="replace")


_cubins: dict[tuple[Any, ...], Future[bytes]] = {}
_cubins_lock = threading.Lock()
#: One for each compiler that may run at a time.
_cores = threading.Semaphore(os.cpu_count() or 1)


def start_compiling(sources: Sources, source: str, defines: Defines) -> Future[bytes]:
    """The CUBIN of :func:`load_or_compile`, made once, in a thread. What failed is tried again.

    NVRTC does not hold Python's lock, and compiles several sources at a time. When the main thread ends, what
    has not begun is cancelled.
    """
    key = (sources, source, *_macros(defines))
    with _cubins_lock:
        future = _cubins.get(key)
        if future is None or future.cancelled() or (future.done() and future.exception()):
            future = Future()
            threading.Thread(target=_compile_into, args=(future, sources, source, defines)).start()
            _cubins[key] = future
    return future


def _compile_into(future: Future[bytes], *arguments: Any) -> None:
    with _cores:
        if not threading.main_thread().is_alive():  # the process waits for this thread to end
            future.cancel()
            return
        try:
            future.set_result(load_or_compile(*arguments))
        except BaseException as error:
            future.set_exception(error)


def finish_compiling(sources: Sources, source: str, defines: Defines) -> bytes:
    """Wait for the CUBIN of :func:`start_compiling`.

    Raises:
        RuntimeError: it does not compile; with the compiler's log.
    """
    try:
        return start_compiling(sources, source, defines).result()
    except CancelledError:  # the main thread has ended, and this one goes on
        return load_or_compile(sources, source, defines)


def load_or_compile(sources: Sources, source: str, defines: Defines) -> bytes:
    """The CUBIN of ``source``.cu, from the disk if it has been compiled before.

    Warns if the folder of the cache cannot be used, or if other users can write to it, and compiles then.
    """
    folder = cache_folder()
    if folder is None or not make_private(folder):
        return compile_source(sources, source, defines)[0]
    path = folder / f"{source}-{_fingerprint(sources, source, defines)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = compile_source(sources, source, defines)[0]
        try:
            _write(path, cubin)
        except OSError as error:
            _warn_not_cached(folder, str(error), "set SAGEBWD_CACHE_DIR to a writable folder")
    return cubin


@functools.cache
def why_no_compiler() -> str | None:
    """Why this installation cannot compile CUDA sources; None if it can. Needs no GPU."""
    try:
        nvrtc_version()
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error}); install cuda-bindings"
    except RuntimeError as error:  # what cuda.bindings raises when a library is missing
        return f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc"
    return None


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the compiler."""
    from cuda.bindings import nvrtc

    return checked(nvrtc.nvrtcVersion())


def checked(returned: tuple[Any, ...]) -> Any:
    """What a function of ``cuda.bindings`` returned, without its error code.

    Raises:
        RuntimeError: with the name of the error.
    """
    error, *values = returned
    if error:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else tuple(values)


def _macros(defines: Defines) -> list[str]:
    """NAME or NAME=VALUE of each macro, in the order of their names."""
    given = ((name, value) for name, value in sorted(defines.items()) if value is not False)
    return [name if value is True else f"{name}={value}" for name, value in given]


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


def use_private_caches() -> None:
    """Let PyTorch's compiler and Triton cache where no other user can write. Call it before their import.

    They run what they find there, and PyTorch's default is a folder in /tmp, which anybody can make first. A
    folder that the user chose is used if it passes the check that ours does. Where there is none that does,
    one is made for this process and those that it starts.
    """
    ours = cache_folder()
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        if chosen := os.environ.get(variable):
            is_private = make_private(Path(chosen), variable)
        elif is_private := ours is not None and make_private(ours) and make_private(ours / name):
            os.environ[variable] = str(ours / name)
        if not is_private:
            os.environ[variable] = tempfile.mkdtemp(prefix=f"sagebwd-{name}-")
            atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)
    # PyTorch keeps precompiled C++ headers in its default folder, whatever the variable says.
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def make_private(folder: Path, variable: str = "SAGEBWD_CACHE_DIR") -> bool:
    """Create the folder for this user alone. Whether it can be used; if not, warns.

    variable: the environment variable that names another.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        _warn_not_cached(folder, str(error), f"set {variable} to a writable folder")
        return False
    if problem := _why_not_trusted(status):
        fix = f"if nobody else uses it: chmod go-w {shlex.quote(str(folder))}"
        _warn_not_cached(folder, problem, f"set {variable} to a folder of your own, or {fix}")
        return False
    return True


def _why_not_trusted(status: os.stat_result) -> str | None:
    """Why another user may have written a file or folder; None if only this user and root can."""
    if os.name != "posix":
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users write there"
    return None


def _read(path: Path) -> bytes | None:
    """What :func:`_write` wrote; None if there is nothing, or it is damaged, or it may be of another user."""
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            if problem := _why_not_trusted(status):
                warnings.warn(f"{path} is not used, because {problem}; compiling it again", stacklevel=2)
                return None
            content = file.read()
    except OSError:
        return None
    checksum, cubin = content[:32], content[32:]
    return cubin if _checksum(path, cubin) == checksum else None


def _checksum(path: Path, cubin: bytes) -> bytes:
    """Of the name, too: under another name it is another kernel."""
    return hashlib.sha256(path.name.encode() + b"\0" + cubin).digest()


def _open_no_link(path: str, flags: int) -> int:
    """Open a file that is no link, without waiting for the writer of a FIFO."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _write(path: Path, cubin: bytes) -> None:
    """Write a checksum and the CUBIN. Other processes see the whole file or nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_checksum(path, cubin) + cubin)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@functools.cache  # once for each folder, not for each kernel
def _warn_not_cached(folder: Path, problem: str, fix: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be cached in {folder} ({problem}), so every process compiles them again; "
        f"{fix}",
        stacklevel=2,
    )
