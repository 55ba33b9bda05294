"""Whether a device can run the CUDA kernels of a kernel set: the GPU, the driver, the compiler."""

from __future__ import annotations

import functools

import torch

from sagebwd.kernels.cuda.compile import why_no_compiler

#: The CUDA version of the oldest driver with cuFuncLoad and cuKernelGetParamInfo.
OLDEST_DRIVER = (12, 4)


def why_unavailable(device: torch.device, *capabilities: tuple[int, int]) -> str | None:
    """Why ``device`` cannot run CUDA kernels written for these compute capabilities; None if it can.

    Args:
        capabilities: (major, minor) of each, for example (9, 0).
    """
    if device.type != "cuda":
        return f"{device} is not a CUDA device"
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return _why_unavailable(index, capabilities)


@functools.cache
def _why_unavailable(index: int, capabilities: tuple[tuple[int, int], ...]) -> str | None:
    if torch.version.hip:
        return "AMD GPUs do not run CUDA"
    if index >= torch.cuda.device_count():
        return f"there is no CUDA device {index}"
    try:
        capability = torch.cuda.get_device_capability(index)
    except RuntimeError as error:  # a driver that does not fit, or a forked process
        return f"CUDA does not start ({error})"
    if capability not in capabilities:
        have, *want = (f"{major}.{minor}" for major, minor in (capability, *capabilities))
        return f"{torch.cuda.get_device_name(index)} has compute capability {have}, not {' or '.join(want)}"
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
