"""A small source that compiles quickly, and fixtures of tests that compile or need a GPU."""

from types import SimpleNamespace

import pytest
import torch

from sagebwd.dispatch import gpu_of
from sagebwd.kernels.cuda import plan
from sagebwd.kernels.cuda.compile import Sources
from tests.sagebwd.kernels.cuda import sources_on_cpu

MINIMAL = """
#include "value.cuh"
extern "C" __global__ void store_kernel(int* x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = VALUE + OFFSET;
#ifdef IS_FLAGGED
    x[n] = VALUE;
#endif
}
"""
HEADER = "#define OFFSET 1\n"


@pytest.fixture
def sources(tmp_path):
    """Sources in two folders: minimal.cu, which includes value.cuh from the second."""
    folders = tmp_path / "own", tmp_path / "shared"
    for folder, name, text in zip(folders, ("minimal.cu", "value.cuh"), (MINIMAL, HEADER), strict=True):
        folder.mkdir()
        (folder / name).write_text(text)
    return Sources("sm_90a", folders)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the cache on disk, which does not exist yet."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Events(list):
    """("begun", variant) when a kernel is asked for, ("loaded", variant) when a call waits for it."""

    def of(self, what):
        return {variant for kind, variant in self if kind == what}


@pytest.fixture
def events(monkeypatch):
    """CUDA kernel sets run on CPU tensors, as far as the host goes; a variant is (source, kernel, macros)."""
    events = Events()

    def start_loading(sources, source, name, shared_bytes, **defines):
        variant = (source, name, frozenset(item for item in defines.items() if item[1] is not False))
        events.append(("begun", variant))
        kernel = SimpleNamespace(name=name, parameters=None, start=lambda *_: None)
        return lambda: events.append(("loaded", variant)) or kernel

    sources_on_cpu.no_gpu(monkeypatch, start_loading)
    plan.load_ahead.cache_clear()
    yield events
    plan.plan_of.cache_clear()
    plan.load_ahead.cache_clear()


@pytest.fixture
def architecture():
    """That of the current GPU, as NVRTC takes it; tests skip on a GPU that cannot run CUDA kernels."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    capability = torch.cuda.get_device_capability()
    if reason := gpu_of(torch.cuda.current_device()).no_cuda_kernels:
        pytest.skip(reason)
    return "sm_{}{}{}".format(*capability, "a" if capability == (9, 0) else "")  # "a": as hopper/ has it
