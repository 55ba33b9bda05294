"""Which GPUs can run CUDA kernels, and why others cannot; none of it needs a GPU."""

from __future__ import annotations

import pytest
import torch

from sagebwd.kernels.cuda import runtime
from sagebwd.kernels.cuda.runtime import why_unavailable


def test_unavailable_without_a_gpu():
    assert why_unavailable(torch.device("cpu"), (9, 0)) == "cpu is not a CUDA device"
    if not torch.cuda.is_available():
        for device in (torch.device("cuda"), torch.device("cuda", 0)):
            assert why_unavailable(device, (9, 0)) == "there is no CUDA device 0"


def cuda_fails(*_):
    raise RuntimeError("no driver")


@pytest.fixture
def fake_gpu(monkeypatch):
    """Says that there is one GPU, of a compute capability to be set."""
    runtime._why_unavailable.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(runtime, "why_no_compiler", lambda: None)
    monkeypatch.setattr(runtime, "_why_no_driver", lambda: None)
    yield lambda *capability: monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: capability
    )
    runtime._why_unavailable.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus(capability, fake_gpu):
    fake_gpu(*capability)
    reason = "Some GPU has compute capability {}.{}, not 9.0".format(*capability)
    assert why_unavailable(torch.device("cuda"), (9, 0)) == reason
    assert why_unavailable(torch.device("cuda", 0), (9, 0)) == reason


def test_kernels_for_several_architectures(fake_gpu):
    fake_gpu(8, 6)
    assert why_unavailable(torch.device("cuda"), (8, 0), (8, 6)) is None
    reason = "Some GPU has compute capability 8.6, not 8.0 or 9.0"
    assert why_unavailable(torch.device("cuda"), (8, 0), (9, 0)) == reason


@pytest.mark.parametrize(
    ("target", "name", "value", "reason"),
    [
        (torch.version, "hip", "6.2", "AMD GPUs do not run CUDA"),
        (torch.cuda, "device_count", lambda: 0, "there is no CUDA device 0"),
        (torch.cuda, "get_device_capability", cuda_fails, "CUDA does not start (no driver)"),
        (runtime, "why_no_compiler", lambda: "no compiler", "no compiler"),
        (runtime, "_why_no_driver", lambda: "old driver", "old driver"),
    ],
)
def test_a_gpu_that_lacks_something(target, name, value, reason, fake_gpu, monkeypatch):
    fake_gpu(9, 0)
    assert why_unavailable(torch.device("cuda"), (9, 0)) is None
    runtime._why_unavailable.cache_clear()
    monkeypatch.setattr(target, name, value)
    assert why_unavailable(torch.device("cuda"), (9, 0)) == reason


def test_an_old_driver_is_named(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12030))
    reason = "the driver is for CUDA 12.3, older than 12.4; update the NVIDIA driver"
    assert runtime._why_no_driver() == reason
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12040))
    assert runtime._why_no_driver() is None
