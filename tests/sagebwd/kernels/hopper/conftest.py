"""The Hopper kernels on a CPU, with stand-ins for the instructions of a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from sagebwd.kernels.cuda import launch
from sagebwd.kernels.hopper import attention as hopper
from tests.sagebwd.kernels.cuda import sources_on_cpu

#: Headers that stand in for those of the same name in sagebwd/kernels/hopper.
ON_CPU = Path(__file__).parent / "on_cpu"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with all sources and stand-ins."""
    if not sources_on_cpu.has_compiler():
        pytest.skip("there is no g++ that knows C++20")
    folder = tmp_path_factory.mktemp("sources")
    sources_on_cpu.gather(folder, hopper.SOURCES, ON_CPU)
    return folder


@pytest.fixture
def emulated(folder, monkeypatch, poisoned_memory):
    """Whatever is launched runs on the CPU."""

    def load_kernel(sources, source, name, shared_bytes, **defines):
        return sources_on_cpu.load(folder, source, name, shared_bytes, defines)

    monkeypatch.setattr(launch, "load_kernel", load_kernel)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 2)


@pytest.fixture
def in_both_orders(folder):
    """in_both_orders(function): its results, which must be the same in whatever order threads run."""

    def set_order(reverse):
        for library in folder.glob("*.so"):
            ctypes.CDLL(str(library)).set_reverse_order(ctypes.c_bool(reverse))

    def in_both_orders(function):
        found = function()
        set_order(True)
        for x, y in zip(found, function(), strict=True):
            assert torch.equal(x.nan_to_num(777.0), y.nan_to_num(777.0))
        return found

    yield in_both_orders
    set_order(False)
