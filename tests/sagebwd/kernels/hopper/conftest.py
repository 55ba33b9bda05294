"""The Hopper kernels on a CPU, with stand-ins for the instructions of a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from sagebwd.kernels.cuda import launch
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper.tensor_map import CTensorMap
from tests.sagebwd.kernels.cuda import sources_on_cpu

#: Headers that stand in for those of the same name in sagebwd/kernels/hopper.
ON_CPU = Path(__file__).parent / "on_cpu"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with all sources and stand-ins."""
    if not sources_on_cpu.has_compiler():
        pytest.skip("there is no g++ that knows C++20")
    return sources_on_cpu.gather(tmp_path_factory, hopper.SOURCES, ON_CPU)


def tensor_map_on_cpu(x):
    """What ``TensorMap`` in on_cpu/ptx_sm90.cuh takes."""
    values = (x.data_ptr(), *reversed(x.shape), *reversed(x.stride()[:3]))
    return CTensorMap((ctypes.c_uint64 * 16)(*values))


@pytest.fixture
def emulated(folder, monkeypatch, poisoned_memory):
    """Whatever is launched runs on the CPU."""

    def load_kernel(sources, source, name, shared_bytes, **defines):
        return sources_on_cpu.load(folder, source, name, shared_bytes, defines)

    monkeypatch.setattr(launch, "load_kernel", load_kernel)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 2)
    monkeypatch.setattr(hopper, "tensor_map", tensor_map_on_cpu)


#: (whether threads run in the reverse order, the first that runs only when no other can, and how many)
AS_THEY_COME = (False, 0, 0)
ORDERS = ((True, 0, 0), *((False, 128 * warpgroup, 128) for warpgroup in range(4)), (False, 416, 32))


@pytest.fixture
def in_all_orders():
    """in_all_orders(function): its results, which must be the same in whatever order threads run."""

    def set_order(reverse, first, count):
        for library in sources_on_cpu.LOADED.values():
            library.set_reverse_order(ctypes.c_bool(reverse))
            library.starve(first, count)

    def in_all_orders(function):
        found = function()
        for order in ORDERS:
            set_order(*order)
            for x, y in zip(found, function(), strict=True):
                assert torch.equal(x.nan_to_num(777.0), y.nan_to_num(777.0)), order
        return found

    yield in_all_orders
    set_order(*AS_THEY_COME)
