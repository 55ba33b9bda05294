"""Compiles and loads kernels, which plans launch.

dq = start_loading(SOURCES, "dq", "dq_kernel", shared_bytes, HEAD_DIM=128, IS_CAUSAL=1, IS_BF16=True)
plan.launch(dq, grid, threads, packed_q, CTokenTensor.of(grad), CSegments.of(None), n, scale)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sagebwd.interface import AttentionParams
from sagebwd.kernels.cuda.compile import Defines, Sources, checked, finish_compiling, start_compiling
from sagebwd.kernels.cuda.plan import Operand
from sagebwd.window import CAUSAL

#: The CUDA version of the oldest driver with cuFuncLoad and cuKernelGetParamInfo.
OLDEST_DRIVER = (12, 4)


def why_no_driver() -> str | None:
    """Why the driver cannot load or launch kernels; None if it can."""
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if error:
        return f"the driver does not answer ({error.name})"
    have = (version // 1000, version % 1000 // 10)
    if have < OLDEST_DRIVER:
        versions = "the driver is for CUDA {}.{}, older than {}.{}".format(*have, *OLDEST_DRIVER)
        return f"{versions}; update the NVIDIA driver"
    return None


class Driver(NamedTuple):
    """The driver calls of a launch.

    launch: cuLaunchKernel; it reads the arguments before it returns.
    stream: device -> handle of torch's current stream there.
    make_current: device -> None; after it this thread can launch on the device.
    """

    launch: Callable[..., tuple[Any, ...]]
    stream: Callable[[int], int]
    make_current: Callable[[int], None]


@functools.cache
def _driver() -> Driver:
    from cuda.bindings import driver

    # The public torch.cuda.current_stream() builds an object each time; Triton calls this one too.
    from torch._C import _cuda_getCurrentRawStream

    return Driver(driver.cuLaunchKernel, _cuda_getCurrentRawStream, make_current)


def make_current(device: int) -> None:
    """Make the context that torch uses on ``device`` this thread's current one.

    torch.cuda.set_device would not: it does nothing for the device that CUDA calls current, which is 0 in a
    thread that has no context yet.

    Raises:
        RuntimeError: with the name of CUDA's error.
    """
    from cuda.bindings import driver

    checked(driver.cuCtxSetCurrent(_primary_context(device)))


@functools.cache  # each call takes a reference, which this process never gives back
def _primary_context(device: int) -> Any:
    from cuda.bindings import driver

    return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))


@dataclass
class Kernel:
    """A kernel that is loaded on one device.

    parameters: size of each parameter in bytes; None if unknown.
    """

    name: str
    function: Any
    shared_bytes: int
    device: int
    driver: Driver
    parameters: list[int] | None = None

    def start(self, grid: int, threads: int, arguments: int, *, is_again: bool = False) -> None:
        """Launch ``grid`` CTAs of ``threads`` on torch's current stream; neither synchronizes nor allocates.

        The kernel's device must be the current one.

        Args:
            arguments: address of an array of pointers to them. The driver reads them before this returns.

        Raises:
            RuntimeError: CUDA refuses the launch; with the name of its error.
        """
        launch, stream, make_current = self.driver
        error = launch(
            self.function, grid, 1, 1, threads, 1, 1, self.shared_bytes, stream(self.device), arguments, 0
        )[0]
        if not error:
            return
        if is_again or error.name != "CUDA_ERROR_INVALID_CONTEXT":
            raise RuntimeError(f"{self.name} was not launched: {error.name}")
        # This thread has not called CUDA before: autograd runs the backward in threads of its own.
        make_current(self.device)
        self.start(grid, threads, arguments, is_again=True)


#: Waits until a kernel is compiled, loads it at the first call, and returns it.
Loader = Callable[[], Kernel]


def start_loading(sources: Sources, source: str, name: str, shared_bytes: int, **defines: int) -> Loader:
    """Begin to compile the kernel ``name`` of ``source``.cu, to be loaded on the current device.

    Do not call the loader for the first time while a CUDA graph is captured. It raises RuntimeError if the
    kernel does not compile or load.

    Args:
        sources: where to find ``source``.cu, and what to compile it for.
        source: name of the file, without .cu.
        name: of an ``extern "C"`` function in it.
        shared_bytes: dynamic shared memory of each CTA.
        defines: macros; True defines one without a value, False none.
    """
    # 1 and True define the same, but 0 and False do not, though they are equal: a key has no False.
    macros = tuple(macro for macro in defines.items() if macro[1] is not False)
    return _loader(sources, source, name, shared_bytes, torch.cuda.current_device(), macros)


@functools.cache
def _loader(
    sources: Sources, source: str, name: str, shared_bytes: int, device: int, macros: tuple[Any, ...]
) -> Loader:
    defines = dict(macros)
    start_compiling(sources, source, defines)
    return functools.cache(lambda: _load(sources, source, name, shared_bytes, device, defines))


def start_loading_attention(
    sources: Sources,
    name: str,
    q: Operand,
    params: AttentionParams,
    *,
    head_dim: int,
    threads: int,
    shared_bytes: int,
    **defines: int,
) -> Loader:
    """The kernel of the source ``name`` for attention with q, by :func:`start_loading`.

    Args:
        head_dim: as padded.
        threads, shared_bytes: of a CTA; the source does not compile if it has others.
    """
    return start_loading(
        sources,
        name,
        f"{name}_kernel",
        shared_bytes,
        HEAD_DIM=head_dim,
        IS_CAUSAL=int(params.window == CAUSAL),
        IS_WINDOWED=params.window.is_sliding,
        IS_BF16=q.dtype == torch.bfloat16,
        LAUNCH_THREADS=threads,
        LAUNCH_BYTES=shared_bytes,
        **defines,
    )


def _load(
    sources: Sources, source: str, name: str, shared_bytes: int, device: int, defines: Defines
) -> Kernel:
    """Wait for the compiler, and load on a device, whose context becomes this thread's current one."""
    cubin = finish_compiling(sources, source, defines)
    launcher = _driver()
    try:
        launcher.make_current(device)
        function, parameters = _load_function(cubin, name, shared_bytes)
    except RuntimeError as error:
        raise RuntimeError(f"{name} was not loaded: {error}") from None
    return Kernel(name, function, shared_bytes, device, launcher, parameters)


def _load_function(cubin: bytes, name: str, shared_bytes: int) -> tuple[Any, list[int]]:
    """A kernel of a CUBIN in the current context, and the sizes of its parameters in bytes.

    It is never unloaded: a CUDA graph may launch it as long as the process lives.
    """
    from cuda.bindings import driver

    library = checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    kernel = checked(driver.cuLibraryGetKernel(library, name.encode()))
    function = checked(driver.cuKernelGetFunction(kernel))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    checked(driver.cuFuncLoad(function))  # now: otherwise CUDA does it at the first launch
    return function, _parameter_sizes(kernel)


def _parameter_sizes(kernel: Any) -> list[int]:
    """Size in bytes of each parameter: CUDA reports an invalid value for the first that does not exist."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        error, _, size = driver.cuKernelGetParamInfo(kernel, len(sizes))
        if error == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return sizes
        checked((error,))
        sizes.append(size)
