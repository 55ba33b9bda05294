"""What is handed to the driver, and when kernels are loaded; the last part needs a GPU, of any kind."""

import enum
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sagebwd.kernels.cuda import compile as compiler
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.compile import Sources
from sagebwd.kernels.cuda.launch import Driver, Kernel, start_loading
from sagebwd.kernels.cuda.plan import Plan

#: More dynamic shared memory than 48 KiB, so that it must be asked for; every GPU since Ampere has it.
SHARED_BYTES = 96 * 1024

# --- Launching ---------------------------------------------------------------------------------------------


def start(kernel, grid, threads, *arguments):
    """Launch a kernel in a plan of its own, on tensors that have addresses."""
    plan = Plan(torch.device("cpu"))
    plan.launch(lambda: kernel, grid, threads, *arguments)
    plan.finish(0, [])
    plan.run([])


class Error(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


@pytest.mark.parametrize(
    ("errors", "named"), [(["VALUE"], "VALUE"), (["CONTEXT"], None), (["CONTEXT"] * 2, "CONTEXT")]
)
def test_errors_are_named_and_a_thread_without_context_gets_one(errors, named):
    answers, made_current = [Error[f"CUDA_ERROR_INVALID_{error}"] for error in errors], []
    launch = Mock(side_effect=[(answer,) for answer in (*answers, Error.CUDA_SUCCESS)])
    kernel = Kernel("some_kernel", "function", 4096, 3, Driver(launch, int, made_current.append))
    message = f"some_kernel was not launched: CUDA_ERROR_INVALID_{named}"
    with pytest.raises(RuntimeError, match=message) if named else nullcontext():
        start(kernel, 1, 32, 5)
    gets_one = errors[0] == "CONTEXT"
    assert made_current == [3] * gets_one
    assert launch.call_count == 1 + gets_one


# --- Loading -----------------------------------------------------------------------------------------------


@pytest.fixture
def starts(monkeypatch):
    """The names of the sources whose compilation began; all end with the CUBIN b"CUBIN"."""
    begun, ready = [], Future()
    ready.set_result(b"CUBIN")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (launch, compiler):
        monkeypatch.setattr(module, "start_compiling", lambda _, source, __: begun.append(source) or ready)
    launch._loader.cache_clear()
    yield begun
    launch._loader.cache_clear()


def test_kernels_are_loaded_once(starts, monkeypatch):
    """For each device, each set of sources and each variant."""
    loaded, ours = [], Sources("sm_90a", ())
    monkeypatch.setattr(launch, "_load", lambda *arguments: loaded.append(arguments) or len(loaded))
    variants = [{"HEAD_DIM": 64, "IS_CAUSAL": x} for x in (0, 1, False)]
    for _ in range(2):
        loaders = [start_loading(ours, "dq", "dq_kernel", 9, **defines) for defines in variants]
        assert starts == ["dq"] * 3
        assert [load() for load in loaders] == [1, 2, 3]
    given = [*variants[:2], {"HEAD_DIM": 64}]
    assert loaded == [(ours, "dq", "dq_kernel", 9, 0, defines) for defines in given]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for number, sources in ((4, ours), (5, Sources("sm_80", ours.folders))):
        assert start_loading(sources, "dq", "dq_kernel", 9, **variants[0])() == number


def test_a_kernel_that_was_not_loaded_is_tried_again(starts, monkeypatch):
    """Another call may find the memory."""
    answers = [RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), "kernel"]
    monkeypatch.setattr(launch, "_load", Mock(side_effect=answers))
    load = start_loading(Sources("sm_90a", ()), "dq", "dq_kernel", 9)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        load()
    assert [load(), load()] == ["kernel"] * 2


class FakeLoader:
    """The part of ``cuda.bindings.driver`` that loads kernels: records the calls, returns what it is told.

    A kernel's parameters have 8 and 4 bytes. ``fails`` names the function that returns an error.
    """

    CUresult = Error
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared bytes")

    def __init__(self, fails=None):
        self.fails, self.calls = fails, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(x for x in arguments if x not in ([], 0))))
            if name == self.fails:
                return (Error.CUDA_ERROR_INVALID_CONTEXT, None)
            return (Error.CUDA_SUCCESS, f"result of {name}")

        return call

    def cuKernelGetParamInfo(self, kernel, index):
        self.calls.append(("cuKernelGetParamInfo", kernel, index))
        return (Error.CUDA_SUCCESS, 8 * index, (8, 4)[index]) if index < 2 else (Error(1), None, None)


@pytest.fixture
def loads(monkeypatch, starts):
    """loads(driver) -> what launch._load returns with this driver."""
    bindings = pytest.importorskip("cuda.bindings", exc_type=ImportError)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)

    def load(driver):
        monkeypatch.setattr(bindings, "driver", driver, raising=False)
        for function in (launch._driver, launch._primary_context):
            function.cache_clear()
        return launch._load(Sources("sm_90a", ()), "minimal", "store_kernel", SHARED_BYTES, 3, {})

    yield load
    launch._driver.cache_clear()
    launch._primary_context.cache_clear()


def test_a_kernel_is_loaded_in_the_context_of_torch(loads):
    fake = FakeLoader()
    kernel = loads(fake)
    function = "result of cuKernelGetFunction"
    assert fake.calls == [
        ("cuDeviceGet", 3),
        ("cuDevicePrimaryCtxRetain", "result of cuDeviceGet"),
        ("cuCtxSetCurrent", "result of cuDevicePrimaryCtxRetain"),
        ("cuLibraryLoadData", b"CUBIN"),
        ("cuLibraryGetKernel", "result of cuLibraryLoadData", b"store_kernel"),
        ("cuKernelGetFunction", "result of cuLibraryGetKernel"),
        ("cuFuncSetAttribute", function, "shared bytes", SHARED_BYTES),
        ("cuFuncLoad", function),
        *(("cuKernelGetParamInfo", "result of cuLibraryGetKernel", index) for index in range(3)),
    ]
    start(kernel, 5, 128, torch.zeros(1), 7)
    assert fake.calls[-1][:-1] == ("cuLaunchKernel", function, 5, 1, 1, 128, 1, 1, SHARED_BYTES, 7)
    with pytest.raises(TypeError, match=r"store_kernel has parameters of \[8, 4\] bytes"):
        start(kernel, 5, 128, 7, 7)


@pytest.mark.parametrize("fails", ["cuDevicePrimaryCtxRetain", "cuLibraryLoadData", "cuFuncSetAttribute"])
def test_a_kernel_that_is_not_loaded_is_named(fails, loads):
    with pytest.raises(RuntimeError, match="store_kernel was not loaded: CUDA_ERROR_INVALID_CONTEXT"):
        loads(FakeLoader(fails))


# --- On a GPU ----------------------------------------------------------------------------------------------


@pytest.fixture
def minimal(sources, cache, architecture):
    """minimal(value) -> the kernel of minimal.cu."""
    sources = Sources(architecture, sources.folders)
    return lambda value: start_loading(sources, "minimal", "store_kernel", SHARED_BYTES, VALUE=value)()


@pytest.mark.gpu
def test_launches_on_the_current_stream_and_in_graphs(minimal):
    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    store = minimal(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own, and the kernel's first launch
        start(store, 1, 128, x, 900)
    torch.cuda.synchronize()
    assert not x.any()
    graph.replay()
    assert x[:900].eq(5).all()
    assert not x[900:].any()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        x.zero_()
        start(store, 1, 128, x, 1000)
    stream.synchronize()
    assert x.eq(5).all()


@pytest.mark.gpu
def test_loads_in_a_new_thread(minimal):
    """Which has no context of CUDA: autograd runs the first backward in a thread of its own."""
    x = torch.zeros(100, dtype=torch.int32, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: start(minimal(2), 1, 128, x, 100)).result()
    torch.cuda.synchronize()
    assert x.eq(3).all()


@pytest.mark.gpu
def test_errors_of_the_driver_are_named(minimal):
    with pytest.raises(RuntimeError, match="store_kernel was not launched: CUDA_ERROR_INVALID_VALUE"):
        start(minimal(1), 1, 4096, None, 0)
    with pytest.raises(TypeError, match=r"store_kernel has parameters of \[8, 4\] bytes"):
        start(minimal(1), 1, 128, None, None)


@pytest.mark.gpu
def test_more_shared_memory_than_there_is(sources, cache, architecture):
    with pytest.raises(RuntimeError, match="store_kernel was not loaded: CUDA_ERROR_INVALID_VALUE"):
        start_loading(Sources(architecture, sources.folders), "minimal", "store_kernel", 2**20, VALUE=1)()


def test_an_old_driver_is_named(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12030))
    reason = "the driver is for CUDA 12.3, older than 12.4; update the NVIDIA driver"
    assert launch.why_no_driver() == reason
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12040))
    assert launch.why_no_driver() is None
