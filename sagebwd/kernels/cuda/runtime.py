"""Whether a device can run the CUDA kernels of a kernel set: the GPU, the driver, the compiler."""

from __future__ import annotations

import functools

import torch

from sagebwd.kernels.cuda.compile import why_no_compiler

#: The CUDA version of the oldest driver with cuFuncLoad and cuKernelGetParamInfo.
OLDEST_DRIVER = (12, 4)


@functools.cache
def why_unavailable(index: int) -> str | None:
    """Why CUDA kernels cannot be made for the GPU with this index, or run on it; None if they can."""
    try:
        torch.cuda.get_device_capability(index)
    except RuntimeError as error:  # a driver that does not fit, or a forked process
        return f"CUDA does not start ({error})"
    return why_no_compiler() or _why_no_driver()


def _why_no_driver() -> str | None:
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if error:
        return f"the driver does not answer ({error.name})"
    have = (version // 1000, version % 1000 // 10)
    if have < OLDEST_DRIVER:
        versions = "the driver is for CUDA {}.{}, older than {}.{}".format(*have, *OLDEST_DRIVER)
        return f"{versions}; update the NVIDIA driver"
    return None
