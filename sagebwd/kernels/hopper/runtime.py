"""Compiles the CUDA sources of this folder when first needed, and launches them on tensors.

    dq = kernel("dq", "dq_kernel", shared_bytes, HEAD_DIM=128, IS_CAUSAL=1, IS_BF16=True)
    dq.launch(grid, threads, q_rows, TokenTensor.of(grad), Segments.of(None), n, scale)

NVRTC, NVIDIA's compiler as a library, does the compiling, so nobody needs nvcc. Results are kept on disk, in
$SAGEBWD_CACHE_DIR or the user's cache folder. Nothing of CUDA is imported before it is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import os
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.kernels import layout as operands

SOURCES = Path(__file__).parent
#: wgmma and setmaxnreg exist on this one architecture, neither before nor after.
ARCHITECTURE = "sm_90a"
COMPUTE_CAPABILITY = (9, 0)
#: Of CUDA; the first with cuFuncLoad and cuKernelGetParamInfo.
OLDEST_DRIVER = (12, 4)

#: What a source is compiled with: macros by name. True defines one without a value, False defines none.
Defines = dict[str, int]

# --- Which GPUs --------------------------------------------------------------------------------------------


def is_available(device: torch.device) -> bool:
    """Whether the kernels of this folder run on ``device``; if not, :func:`why_unavailable` says why."""
    return why_unavailable(device) is None


def why_unavailable(device: torch.device) -> str | None:
    """What keeps ``device`` from running the kernels of this folder; None if nothing does."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return _why_unavailable(index)


@functools.cache
def _why_unavailable(index: int) -> str | None:
    if torch.version.hip:
        return "AMD GPUs do not run CUDA"
    if index >= torch.cuda.device_count():
        return f"there is no CUDA device {index}"
    try:
        capability = torch.cuda.get_device_capability(index)
    except RuntimeError as error:  # a driver that does not fit, or a forked process
        return f"CUDA does not start ({error})"
    if capability != COMPUTE_CAPABILITY:
        have, want = (f"{major}.{minor}" for major, minor in (capability, COMPUTE_CAPABILITY))
        return f"{torch.cuda.get_device_name(index)} has compute capability {have}, not {want}"
    return why_no_compiler() or _why_no_driver()


def _why_no_driver() -> str | None:
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if error:
        return f"the driver does not answer ({error.name})"
    have = (version // 1000, version % 1000 // 10)
    if have < OLDEST_DRIVER:
        return "the driver is for CUDA {}.{}, older than {}.{}".format(*have, *OLDEST_DRIVER)
    return None


@functools.cache
def why_no_compiler() -> str | None:
    """What keeps this installation from compiling the kernels; None if nothing does. Needs no GPU."""
    try:
        import cuda.core  # noqa: F401

        _nvrtc_version()
    except ImportError as error:
        return f"cuda.core cannot be imported ({error}); install cuda-core and cuda-bindings"
    except RuntimeError as error:  # what cuda.bindings raises when a library is missing
        return f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc"
    return None


def _nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error:
        raise RuntimeError(error.name)
    return major, minor


# --- Compiling ---------------------------------------------------------------------------------------------


def compile_source(
    source: str, defines: Defines, folder: Path = SOURCES, ptxas_options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compile ``folder``/``source``.cu: the CUBIN, and what the compiler said.

    Raises:
        RuntimeError: it does not compile; with the compiler's log.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{source}.cu",
        arch=ARCHITECTURE,
        std="c++17",
        include_path=[str(folder)],
        define_macro=_macros(defines),
        ptxas_options=list(ptxas_options) or None,
    )
    log = io.StringIO()
    try:
        program = Program((folder / f"{source}.cu").read_text(encoding="utf-8"), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core keeps the class of its errors to itself
        raise RuntimeError(f"{_describe(source, defines)} does not compile: {error}") from error
    return cubin, log.getvalue()


def load_or_compile(source: str, defines: Defines, folder: Path = SOURCES) -> bytes:
    """The CUBIN of ``folder``/``source``.cu, from the disk if it has been compiled before."""
    cache = cache_folder()
    if cache is None:
        return compile_source(source, defines, folder)[0]
    path = cache / f"{source}-{_fingerprint(source, defines, folder)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = compile_source(source, defines, folder)[0]
        try:
            _write(path, cubin)
        except OSError as error:
            _warn_not_kept(str(cache), str(error))
    return cubin


def _macros(defines: Defines) -> list[str | tuple[str, str]]:
    return [
        name if value is True else (name, str(value))
        for name, value in sorted(defines.items())
        if value is not False
    ]


def _describe(source: str, defines: Defines) -> str:
    macros = (name if value is True else f"{name}={value}" for name, value in sorted(defines.items()))
    return f"{source}.cu ({', '.join(macros)})"


# --- Keeping what was compiled -----------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where CUBINs are kept: $SAGEBWD_CACHE_DIR, else in the user's cache folder; None without a home."""
    if chosen := os.environ.get("SAGEBWD_CACHE_DIR"):
        return Path(chosen)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "sagebwd"
    try:
        return Path.home() / ".cache" / "sagebwd"
    except RuntimeError:  # a user without a home
        return None


def _fingerprint(source: str, defines: Defines, folder: Path) -> str:
    """A hash of all that decides what comes out of the compiler."""
    files = sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")])
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    inputs = (source, ARCHITECTURE, _macros(defines), _nvrtc_version(), contents)
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
    """Write a checksum and the CUBIN. Other processes see all of the file or nothing."""
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
def _warn_not_kept(folder: str, error: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({error}), so that every process compiles them anew; "
        "set SAGEBWD_CACHE_DIR to a folder that can be written to",
        stacklevel=2,
    )


# --- Arguments ---------------------------------------------------------------------------------------------


class TokenTensor(ctypes.Structure):
    """TokenTensor of common.cuh: a tensor (B, H, N, D), its strides in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride_b", ctypes.c_int64),
        ("stride_h", ctypes.c_int64),
        ("stride_n", ctypes.c_int64),
        ("stride_d", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, x: Tensor) -> TokenTensor:
        """``x`` as kernels take it. It keeps no memory alive: ``x`` has to outlive the launch."""
        return cls(x.data_ptr(), *x.stride())


class Segments(ctypes.Structure):
    """Segments of common.cuh: where packed documents lie; null pointers without packing."""

    _fields_ = [
        ("document", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("first_block", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, segments: operands.Segments | None) -> Segments:
        """``segments`` as kernels take them; they have to outlive the launch."""
        return cls() if segments is None else cls(*(x.data_ptr() for x in segments))


def _null(_: None) -> int:
    return 0


def _packing(kind: type) -> tuple[str, int, Callable[[Any], Any]]:
    """How arguments of a type are packed: format of :mod:`struct`, bytes, and what makes the value."""
    if issubclass(kind, Tensor):
        return "Q", 8, Tensor.data_ptr
    if kind is type(None):
        return "Q", 8, _null
    if issubclass(kind, int):
        return "i", 4, int
    if issubclass(kind, float):
        return "f", 4, float
    if issubclass(kind, ctypes.Structure):
        size = ctypes.sizeof(kind)
        return f"{size}s", size, bytes
    raise TypeError(f"kernels take tensors, None, int, float and ctypes structures, not {kind.__name__}")


class _Frame:
    """Room for the arguments of one launch, and the array of pointers to them that the driver reads."""

    def __init__(self, offsets: Sequence[int], size: int) -> None:
        self.values = ctypes.create_string_buffer(size)
        base = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)


class _Signature:
    """How arguments of certain types are packed: worked out once, used for every launch."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        formats, self.sizes, self._converters = [], [], []
        for kind in kinds:
            code, size, convert = _packing(kind)
            formats.append(f"{code}{-size % 8}x")
            self.sizes.append(size)
            self._converters.append(convert)
        self._format = struct.Struct("=" + "".join(formats))
        room = [size + -size % 8 for size in self.sizes]
        self._offsets = [sum(room[:i]) for i in range(len(room))]
        # Frames that no launch is using. Threads take and return them; list.pop and append are atomic.
        self._frames: list[_Frame] = []

    def pack(self, arguments: tuple[Any, ...]) -> _Frame:
        """The arguments in a frame, to be given back by :meth:`release` when the driver has read it."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._offsets, max(1, self._format.size))
        values = [convert(x) for convert, x in zip(self._converters, arguments, strict=True)]
        self._format.pack_into(frame.values, 0, *values)
        return frame

    def release(self, frame: _Frame) -> None:
        self._frames.append(frame)


# --- Launching ---------------------------------------------------------------------------------------------


class Driver(NamedTuple):
    """What a launch calls.

    launch: cuLaunchKernel; it reads the arguments before it returns.
    stream: device -> handle of torch's current stream there.
    make_current: device -> None, so that this thread can launch on it.
    """

    launch: Callable[..., tuple[Any, ...]]
    stream: Callable[[int], int]
    make_current: Callable[[int], None]


@functools.cache
def _driver() -> Driver:
    from cuda.bindings import driver
    from cuda.core import Device

    # The public torch.cuda.current_stream() builds an object each time; Triton calls this one too.
    from torch._C import _cuda_getCurrentRawStream

    return Driver(
        driver.cuLaunchKernel, _cuda_getCurrentRawStream, lambda device: Device(device).set_current()
    )


class Kernel:
    """A kernel that is loaded on one device.

    parameters: bytes of each of its parameters; None if not known.
    owner: kept alive, and with it the code on the device.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        shared_bytes: int,
        device: int,
        driver: Driver,
        parameters: list[int] | None = None,
        owner: Any = None,
    ) -> None:
        self.name = name
        self.device = device
        self._function = function
        self._shared_bytes = shared_bytes
        self._driver = driver
        self._parameters = parameters
        self._owner = owner
        self._signatures: dict[tuple[type, ...], _Signature] = {}

    def launch(self, grid: int, threads: int, *arguments: Tensor | ctypes.Structure | float | None) -> None:
        """Launch ``grid`` blocks of ``threads`` on torch's current stream; nothing if there are no blocks.

        Tensors and None are passed as pointers, int as 32-bit int, float as fp32, structures by value. The
        kernel's device has to be the current one. Does not wait, nor allocate on the device.

        Raises:
            TypeError: an argument of another type, or not what the kernel takes.
            RuntimeError: CUDA refuses, with the name of its error.
        """
        if grid == 0:
            return
        kinds = tuple(map(type, arguments))
        signature = self._signatures.get(kinds) or self._new_signature(kinds)
        frame = signature.pack(arguments)
        error = self._launch(grid, threads, frame.address)
        if error and error.name == "CUDA_ERROR_INVALID_CONTEXT":
            # This thread has not called CUDA before; autograd runs a backward in threads of its own.
            self._driver.make_current(self.device)
            error = self._launch(grid, threads, frame.address)
        signature.release(frame)
        if error:
            raise RuntimeError(f"{self.name} was not launched: {error.name}")

    def _launch(self, grid: int, threads: int, arguments: int) -> Any:
        launch, stream, _ = self._driver
        return launch(
            self._function, grid, 1, 1, threads, 1, 1, self._shared_bytes, stream(self.device), arguments, 0
        )[0]

    def _new_signature(self, kinds: tuple[type, ...]) -> _Signature:
        signature = _Signature(kinds)
        if self._parameters is not None and signature.sizes != self._parameters:
            raise TypeError(
                f"{self.name} has parameters of {self._parameters} bytes, the arguments {signature.sizes}"
            )
        return self._signatures.setdefault(kinds, signature)


_kernels: dict[tuple[Any, ...], Kernel] = {}
_kernels_lock = threading.Lock()


def kernel(source: str, name: str, shared_bytes: int, **defines: int) -> Kernel:
    """The kernel ``name`` of ``source``.cu on the current device; compiled and loaded at the first call.

    Do not make that first call while a CUDA graph is captured.

    Args:
        source: a file of this folder, without .cu.
        name: of an ``extern "C"`` function in it.
        shared_bytes: dynamic shared memory of each block.
        defines: macros; True defines one without a value, False none.

    Raises:
        RuntimeError: it does not compile or load.
    """
    device = torch.cuda.current_device()
    # 1 and True define the same, but 0 and False do not, though they are equal: a key has no False.
    macros = tuple(item for item in defines.items() if item[1] is not False)
    key = (source, name, shared_bytes, device, macros)
    found = _kernels.get(key)
    if found is None:
        with _kernels_lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _load(source, name, shared_bytes, device, defines)
    return found


def _load(source: str, name: str, shared_bytes: int, device: int, defines: Defines) -> Kernel:
    """Compile if need be, and load on a device, which becomes this thread's current one."""
    cubin = load_or_compile(source, defines, SOURCES)
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    launcher = _driver()
    launcher.make_current(device)
    loaded = ObjectCode.from_cubin(cubin, name=name).get_kernel(name)
    function = _checked(name, driver.cuKernelGetFunction(loaded.handle))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(name, driver.cuFuncSetAttribute(function, limit, shared_bytes))
    _checked(name, driver.cuFuncLoad(function))  # now: CUDA would else do it at the first launch
    parameters = [parameter.size for parameter in loaded.arguments_info]
    return Kernel(name, function, shared_bytes, device, launcher, parameters, owner=loaded)


def _checked(name: str, result: tuple[Any, ...]) -> Any:
    """What a call of the driver returned, without its error code."""
    error, *values = result
    if error:
        raise RuntimeError(f"{name} was not loaded: {error.name}")
    return values[0] if values else None
