"""What can keep CUDA kernels from a GPU; none of it needs one."""

import pytest
import torch

from sagebwd.kernels.cuda import runtime
from sagebwd.kernels.cuda.runtime import why_unavailable


def cuda_fails(*_):
    raise RuntimeError("no driver")


@pytest.mark.parametrize(
    ("target", "name", "value", "reason"),
    [
        (torch.cuda, "get_device_capability", cuda_fails, "CUDA does not start (no driver)"),
        (runtime, "why_no_compiler", lambda: "no compiler", "no compiler"),
        (runtime, "_why_no_driver", lambda: "old driver", "old driver"),
    ],
)
def test_a_gpu_that_lacks_something(target, name, value, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(runtime, "why_no_compiler", lambda: None)
    monkeypatch.setattr(runtime, "_why_no_driver", lambda: None)
    assert why_unavailable.__wrapped__(0) is None
    monkeypatch.setattr(target, name, value)
    assert why_unavailable.__wrapped__(0) == reason


def test_an_old_driver_is_named(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12030))
    reason = "the driver is for CUDA 12.3, older than 12.4; update the NVIDIA driver"
    assert runtime._why_no_driver() == reason
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12040))
    assert runtime._why_no_driver() is None
