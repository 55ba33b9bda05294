"""The Hopper kernels' runtime: what is compiled, kept on disk and handed to the driver."""

import ctypes
import enum
import os
import re
import struct
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from sagebwd.kernels import layout as operands
from sagebwd.kernels.hopper import runtime
from sagebwd.kernels.hopper.runtime import Driver, Kernel, Segments, TokenTensor
from tests.cli import ROOT

MINIMAL = """
#include "value.cuh"
extern "C" __global__ void store_kernel(int* x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = VALUE + OFFSET;
#ifdef IS_FLAGGED
    x[n] = VALUE;
#endif
}
extern "C" __global__ void structures_kernel(
    TokenTensor x, Segments segments, const int* nothing, float scale) {
    if (nothing != nullptr || segments.start == nullptr) return;
    extern __shared__ float room[];
    room[threadIdx.x] = scale;
    x.data[threadIdx.x * x.stride_d] = room[threadIdx.x] * segments.start[1] + x.stride_b;
}
"""
HEADER = """
#define OFFSET 1
using i64 = long long;
struct TokenTensor { float* data; i64 stride_b, stride_h, stride_n, stride_d; };
struct Segments { const int *document, *start, *first_block; };
"""


@pytest.fixture
def folder(tmp_path):
    """A folder of sources with one that compiles quickly."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "minimal.cu").write_text(MINIMAL)
    (tmp_path / "sources" / "value.cuh").write_text(HEADER)
    return tmp_path / "sources"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch):
    """The sources handed to the compiler so far."""
    done, compile_source = [], runtime.compile_source

    def compile_and_count(source, *arguments):
        done.append(source)
        return compile_source(source, *arguments)

    monkeypatch.setattr(runtime, "compile_source", compile_and_count)
    return done


@pytest.fixture(scope="module")
def nvrtc():
    """For tests that compile."""
    pytest.importorskip("cuda.core", exc_type=ImportError)
    if reason := runtime.why_no_compiler():
        pytest.skip(reason)


needs_nvrtc = pytest.mark.usefixtures("nvrtc")


# --- Compiling ---------------------------------------------------------------------------------------------


@needs_nvrtc
def test_compiles_for_hopper(folder):
    cubin, _ = runtime.compile_source("minimal", {"VALUE": 1}, folder)
    assert cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", cubin, 18) == (190,)  # EM_CUDA
    assert b"sm_90a" in cubin
    assert b".text.store_kernel" in cubin


@needs_nvrtc
def test_defines_reach_the_source(folder):
    plain = runtime.compile_source("minimal", {"VALUE": 1}, folder)[0]
    assert runtime.compile_source("minimal", {"VALUE": 1}, folder)[0] == plain
    assert runtime.compile_source("minimal", {"VALUE": 1, "IS_FLAGGED": False}, folder)[0] == plain
    other = runtime.compile_source("minimal", {"VALUE": 40}, folder)[0]
    flagged = runtime.compile_source("minimal", {"VALUE": 1, "IS_FLAGGED": True}, folder)[0]
    assert len({plain, other, flagged}) == 3


@needs_nvrtc
def test_what_does_not_compile_is_named_with_the_log(folder):
    with pytest.raises(RuntimeError, match=r"minimal\.cu \(IS_FLAGGED, SIZE=3\) does not compile") as raised:
        runtime.compile_source("minimal", {"SIZE": 3, "IS_FLAGGED": True}, folder)
    assert 'identifier "VALUE" is undefined' in str(raised.value)


# --- Keeping what was compiled -----------------------------------------------------------------------------


@needs_nvrtc
def test_compiles_once(folder, cache, compiled):
    cubins = {runtime.load_or_compile("minimal", {"VALUE": 1}, folder) for _ in range(3)}
    assert len(cubins) == len(compiled) == 1
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


@needs_nvrtc
@pytest.mark.parametrize("file", ["minimal.cu", "value.cuh", "new.cuh"])
def test_compiles_anew_when_a_source_changes(file, folder, cache, compiled):
    runtime.load_or_compile("minimal", {"VALUE": 1}, folder)
    with (folder / file).open("a") as source:
        source.write("// changed\n")
    runtime.load_or_compile("minimal", {"VALUE": 1}, folder)
    assert len(compiled) == 2


@needs_nvrtc
def test_compiles_anew_for_other_defines_and_compilers(folder, cache, compiled, monkeypatch):
    for defines in ({"VALUE": 1}, {"VALUE": 0}, {"VALUE": 1, "IS_FLAGGED": True}):
        runtime.load_or_compile("minimal", defines, folder)
    monkeypatch.setattr(runtime, "_nvrtc_version", lambda: (99, 1))
    runtime.load_or_compile("minimal", {"VALUE": 1}, folder)
    assert len(compiled) == 4


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:-1], lambda x: x[:-1] + bytes([x[-1] ^ 1])])
def test_damaged_files_are_compiled_anew(damage, folder, cache, compiled):
    cubin = runtime.load_or_compile("minimal", {"VALUE": 1}, folder)
    (path,) = cache.iterdir()
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert runtime.load_or_compile("minimal", {"VALUE": 1}, folder) == cubin
    assert len(compiled) == 2
    assert path.read_bytes() == intact


@needs_nvrtc
def test_a_folder_that_cannot_be_written_to_is_said_once(folder, cache, compiled):
    cache.write_text("no folder")
    with pytest.warns(UserWarning, match="set SAGEBWD_CACHE_DIR") as warned:
        cubins = {runtime.load_or_compile("minimal", {"VALUE": 1}, folder) for _ in range(2)}
    assert len(warned) == 1
    assert len(cubins) == 1
    assert len(compiled) == 2


@needs_nvrtc
def test_a_failed_write_leaves_nothing_behind(folder, cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="disk full"):
        runtime.load_or_compile("minimal", {"VALUE": 1}, folder)
    assert not list(cache.iterdir())


@needs_nvrtc
def test_processes_and_threads_at_once(folder, cache):
    code = (
        "import sys, pathlib; from sagebwd.kernels.hopper.runtime import load_or_compile; "
        "sys.stdout.buffer.write(load_or_compile('minimal', {'VALUE': 1}, pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(runtime.load_or_compile, "minimal", {"VALUE": 1}, folder) for _ in range(8)]
        cubins = {job.result() for job in jobs}
    cubins.update(process.communicate()[0] for process in processes)
    assert len(cubins) == 1
    assert len(list(cache.iterdir())) == 1


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime.cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("SAGEBWD_CACHE_DIR")
    assert runtime.cache_folder() == tmp_path / "xdg" / "sagebwd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert runtime.cache_folder() == tmp_path / ".cache" / "sagebwd"


# --- Arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [(TokenTensor, 40, [0, 8, 16, 24, 32]), (Segments, 24, [0, 8, 16])],
)
def test_structures_lie_as_in_c(structure, size, offsets):
    assert ctypes.sizeof(structure) == size
    assert [getattr(structure, field[0]).offset for field in structure._fields_] == offsets


def test_structures_have_the_fields_of_the_header():
    header = (runtime.SOURCES / "common.cuh").read_text()
    for structure in (TokenTensor, Segments):
        body = re.search(rf"struct {structure.__name__} {{(.*?)}}", header, re.DOTALL)[1]
        names = re.findall(r"(\w+)\s*[,;]", body)
        assert names == [field[0] for field in structure._fields_]


def test_structures_of_tensors():
    x = torch.zeros(2, 3, 5, 8).transpose(1, 2)
    packed = TokenTensor.of(x)
    assert packed.data == x.data_ptr()
    assert (packed.stride_b, packed.stride_h, packed.stride_n, packed.stride_d) == x.stride()
    documents = operands.Segments(*(torch.zeros(3, dtype=torch.int32) for _ in range(3)))
    packed = Segments.of(documents)
    assert packed.start == documents.start.data_ptr()
    assert packed.document == documents.document.data_ptr()
    assert packed.first_block == documents.first_block.data_ptr()
    assert bytes(Segments.of(None)) == bytes(24)


class Error(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


class FakeDriver:
    """Reads arguments as CUDA does: from each pointer as many bytes as the parameter has."""

    def __init__(self, sizes, errors=()):
        self.sizes, self.errors, self.launches, self.made_current = sizes, list(errors), [], []

    def launch(self, *arguments):
        *dimensions, pointers, extra = arguments
        assert extra == 0
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        values = [ctypes.string_at(*each) for each in zip(pointers, self.sizes, strict=True)]
        self.launches.append((dimensions, values))
        return (self.errors.pop(0) if self.errors else Error.CUDA_SUCCESS,)

    def kernel(self, **options):
        driver = Driver(self.launch, lambda device: 7000 + device, self.made_current.append)
        return Kernel("some_kernel", "function", 4096, 3, driver, **options)


def test_arguments_are_packed():
    fake = FakeDriver([8, 8, 4, 4, 24, 40, 4, 3])
    odd = type("Odd", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * 3)]})(b"abc")
    x = torch.zeros(2, 3, 5, 8)
    arguments = (x, None, -5, 0.5, Segments(1, 2, 3), TokenTensor.of(x), True, odd)
    fake.kernel(parameters=fake.sizes).launch(10, 384, *arguments)
    ((dimensions, values),) = fake.launches
    assert dimensions == ["function", 10, 1, 1, 384, 1, 1, 4096, 7003]
    assert values == [
        struct.pack("Q", x.data_ptr()),
        struct.pack("Q", 0),
        struct.pack("i", -5),
        struct.pack("f", 0.5),
        struct.pack("QQQ", 1, 2, 3),
        struct.pack("Qqqqq", x.data_ptr(), 120, 40, 8, 1),
        struct.pack("i", 1),
        b"abc",
    ]


def test_a_parameter_passed_as_tensor_or_none():
    fake = FakeDriver([8, 4])
    kernel, x = fake.kernel(), torch.zeros(1)
    for argument in (x, None, torch.nn.Parameter(x), x):
        kernel.launch(1, 128, argument, 0)
    pointers = [struct.unpack("Q", values[0])[0] for _, values in fake.launches]
    assert pointers == [x.data_ptr(), 0, x.data_ptr(), x.data_ptr()]


def test_no_arguments_and_no_blocks():
    fake = FakeDriver([])
    fake.kernel().launch(1, 32)
    fake.kernel().launch(0, 32)
    assert len(fake.launches) == 1


@pytest.mark.parametrize(
    ("argument", "error"),
    [("text", TypeError), (1j, TypeError), (2**31, struct.error), (1e39, OverflowError), ((1,), TypeError)],
)
def test_arguments_that_no_kernel_takes(argument, error):
    fake = FakeDriver([4])
    with pytest.raises(error):
        fake.kernel().launch(1, 32, argument)
    assert not fake.launches


@pytest.mark.parametrize("arguments", [(1.0, 2.0), (None,), (None, 1.0, 1.0), (None, None)])
def test_arguments_of_other_sizes_than_the_parameters(arguments):
    fake = FakeDriver([8, 4])
    with pytest.raises(TypeError, match=r"some_kernel has parameters of \[8, 4\] bytes"):
        fake.kernel(parameters=[8, 4]).launch(1, 32, *arguments)
    assert not fake.launches


def test_errors_are_named():
    fake = FakeDriver([], [Error.CUDA_ERROR_INVALID_VALUE])
    with pytest.raises(RuntimeError, match="some_kernel was not launched: CUDA_ERROR_INVALID_VALUE"):
        fake.kernel().launch(1, 32)
    assert not fake.made_current


@pytest.mark.parametrize("errors", [1, 2])
def test_a_thread_without_context_gets_one(errors):
    fake = FakeDriver([4], [Error.CUDA_ERROR_INVALID_CONTEXT] * errors)
    if errors == 1:
        fake.kernel().launch(1, 32, 5)
    else:
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT"):
            fake.kernel().launch(1, 32, 5)
    assert fake.made_current == [3]
    assert len(fake.launches) == 2


def test_threads_do_not_mix_their_arguments():
    barrier, seen = threading.Barrier(4), []

    def launch(*arguments):
        pointer = ctypes.c_void_p.from_address(arguments[-2]).value
        before = ctypes.c_int.from_address(pointer).value
        barrier.wait(timeout=10)  # all threads are inside the driver now
        seen.append((before, ctypes.c_int.from_address(pointer).value))
        return (Error.CUDA_SUCCESS,)

    kernel = Kernel("some_kernel", 1, 0, 0, Driver(launch, lambda device: 0, lambda device: None))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: kernel.launch(1, 32, i), range(40)))
    assert sorted(seen) == [(i, i) for i in range(40)]


# --- Which kernel, which GPU -------------------------------------------------------------------------------


def test_kernels_are_loaded_once(monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "_kernels", {})
    monkeypatch.setattr(runtime, "_load", lambda *arguments: loaded.append(arguments) or len(loaded))
    variants = [
        {"HEAD_DIM": 64, "IS_CAUSAL": 0},
        {"HEAD_DIM": 64, "IS_CAUSAL": 1},
        {"HEAD_DIM": 64, "IS_CAUSAL": False},
    ]
    for _ in range(2):
        assert [runtime.kernel("dq", "dq_kernel", 9, **defines) for defines in variants] == [1, 2, 3]
    assert loaded == [("dq", "dq_kernel", 9, 0, defines) for defines in variants]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert runtime.kernel("dq", "dq_kernel", 9, **variants[0]) == 4


def test_unavailable_without_a_gpu():
    cpu = torch.device("cpu")
    assert not runtime.is_available(cpu)
    assert runtime.why_unavailable(cpu) == "cpu is no CUDA device"
    if not torch.cuda.is_available():
        for device in (torch.device("cuda"), torch.device("cuda", 0)):
            assert runtime.why_unavailable(device) == "there is no CUDA device 0"


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
    assert runtime.why_unavailable(torch.device("cuda")) == reason
    assert not runtime.is_available(torch.device("cuda", 0))


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
def test_hopper_that_lacks_something(target, name, value, reason, fake_gpu, monkeypatch):
    fake_gpu(9, 0)
    assert runtime.is_available(torch.device("cuda"))
    runtime._why_unavailable.cache_clear()
    monkeypatch.setattr(target, name, value)
    assert runtime.why_unavailable(torch.device("cuda")) == reason


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    runtime.why_no_compiler.cache_clear()
    try:
        assert "install cuda-core and cuda-bindings" in runtime.why_no_compiler()
    finally:
        runtime.why_no_compiler.cache_clear()


def test_nvrtc_that_does_not_load_is_named(monkeypatch, nvrtc):
    def fail():
        raise RuntimeError("libnvrtc.so was not found")

    monkeypatch.setattr(runtime, "_nvrtc_version", fail)
    runtime.why_no_compiler.cache_clear()
    try:
        assert "libnvrtc.so was not found" in runtime.why_no_compiler()
    finally:
        runtime.why_no_compiler.cache_clear()


def test_the_package_imports_without_cuda():
    code = (
        "import sys; sys.modules['cuda.core'] = None; import sagebwd; "
        "import sagebwd.kernels.hopper.runtime as r; "
        "assert 'install cuda-core' in r.why_no_compiler(), r.why_no_compiler()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- The real sources --------------------------------------------------------------------------------------

SPILLED_BYTES = 64
ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


def entries():
    """(source, entry) of all kernels."""
    for path in sorted(runtime.SOURCES.glob("*.cu")):
        for name in ENTRY.findall(path.read_text(encoding="utf-8")):
            yield path.stem, name


#: Macros of the sources that know any; those together that can be.
MACROS = {
    "forward": ((), ("SMOOTH_V",), ("P_HALF",), ("P_HALF", "COMPENSATE_O")),
    "dk_dv": ((), ("P_HALF",)),
    "packets": ((), ("P_HALF", "COMPENSATE_O")),
}
#: Every pair of settings occurs in the quick ones.
QUICK = {(64, 0, False), (64, 1, True), (128, 0, True), (128, 1, False)}


def variants():
    """Every source with every combination of its macros."""
    for source in sorted({source for source, _ in entries()}):
        for d, causal, bf16, macros in product((64, 128), (0, 1), (False, True), MACROS.get(source, ((),))):
            names = (source, str(d), "causal" if causal else "full", "bf16" if bf16 else "fp16", *macros)
            defines = {"HEAD_DIM": d, "IS_CAUSAL": causal, "IS_BF16": bf16} | dict.fromkeys(macros, True)
            marks = () if (d, causal, bf16) in QUICK else pytest.mark.gpu
            yield pytest.param(source, defines, marks=marks, id="-".join(names))


@needs_nvrtc
@pytest.mark.parametrize(("source", "defines"), list(variants()))
def test_kernels_compile_without_spills(source, defines):
    cubin, log = runtime.compile_source(source, defines, ptxas_options=["-v"])
    for name in (name for file, name in entries() if file == source):
        assert f".text.{name}".encode() in cubin
        assert f"Compiling entry function '{name}'" in log
    assert_runs_freely(log)


def assert_runs_freely(log):
    """ptxas spilled hardly anything, and did not make each product wait for itself, which it says."""
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    assert spilled, log
    assert max(spilled) <= SPILLED_BYTES, log
    assert "serialized" not in log, log


def unsigned_variants():
    """The sources that round P to INT8 with every combination of their macros."""
    for source, d, causal, bf16 in product(("forward", "dk_dv"), (64, 128), (0, 1), (False, True)):
        for macros in (macros for macros in MACROS[source] if "P_HALF" not in macros):
            variant = (source, d, causal, bf16, macros)
            is_quick = variant in (("forward", 64, 1, True, ("SMOOTH_V",)), ("dk_dv", 128, 0, False, ()))
            yield pytest.param(*variant, marks=() if is_quick else pytest.mark.gpu)


@needs_nvrtc
@pytest.mark.parametrize(("source", "d", "causal", "bf16", "macros"), list(unsigned_variants()))
def test_unsigned_p_is_the_type_of_p_in_its_products_and_of_nothing_else(
    source, d, causal, bf16, macros, tmp_path
):
    """P in steps of 32 tokens for 64 channels each. dS and S stay signed."""
    defines = {"HEAD_DIM": d, "IS_CAUSAL": causal, "IS_BF16": bf16} | dict.fromkeys(macros, True)
    cubin, log = runtime.compile_source(source, {**defines, "UNSIGNED_P": True}, ptxas_options=["-v"])
    assert_runs_freely(log)
    file = tmp_path / f"{source}.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    found = Counter(re.findall(r"\bIGMMA\.\w+\.(\w+)\.(\w+)", text))
    assert found.keys() == {("U8", "S8"), ("S8", "S8")}
    tokens = 128 if source == "forward" else 64
    assert found["U8", "S8"] == d // 64 * tokens // 32


# --- On a GPU ----------------------------------------------------------------------------------------------


@pytest.fixture
def minimal(folder, cache, monkeypatch):
    """minimal(name, VALUE=…) -> a kernel of the small source."""
    if reason := runtime.why_unavailable(torch.device("cuda")):
        pytest.skip(reason)
    monkeypatch.setattr(runtime, "SOURCES", folder)
    monkeypatch.setattr(runtime, "_kernels", {})
    return lambda name, **defines: runtime.kernel("minimal", name, 200 * 1024, **defines)


@pytest.mark.gpu
def test_launches_on_the_current_stream_and_in_graphs(minimal):
    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    store = minimal("store_kernel", VALUE=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own, and the kernel's first launch
        store.launch(1, 128, x, 900)
    torch.cuda.synchronize()
    assert not x.any()
    graph.replay()
    assert x[:900].eq(5).all()
    assert not x[900:].any()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        x.zero_()
        store.launch(1, 128, x, 1000)
    stream.synchronize()
    assert x.eq(5).all()


@pytest.mark.gpu
def test_structures_arrive(minimal):
    x = torch.zeros(1, 1, 2, 256, device="cuda").transpose(2, 3)
    start = torch.tensor([0, 6], dtype=torch.int32, device="cuda")
    structures = minimal("structures_kernel", VALUE=0)
    segments = Segments.of(operands.Segments(start, start, start))
    structures.launch(1, 128, TokenTensor.of(x.transpose(2, 3)), segments, None, 0.5)
    assert x[0, 0, :128, 0].eq(0.5 * 6 + 512).all()
    assert not x[0, 0, 128:].any()


@pytest.mark.gpu
def test_launches_from_new_threads(minimal):
    x = torch.zeros(100, dtype=torch.int32, device="cuda")
    store, errors = minimal("store_kernel", VALUE=1), []

    def launch():
        try:
            store.launch(1, 128, x, 100)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert not errors
    assert x.eq(2).all()


@pytest.mark.gpu
def test_errors_of_the_driver_are_named(minimal):
    with pytest.raises(RuntimeError, match="store_kernel was not launched: CUDA_ERROR_INVALID_VALUE"):
        minimal("store_kernel", VALUE=1).launch(1, 4096, None, 0)
    with pytest.raises(TypeError, match=r"store_kernel has parameters of \[8, 4\] bytes"):
        minimal("store_kernel", VALUE=1).launch(1, 128, None, None)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        runtime.kernel("minimal", "store_kernel", 2**20, VALUE=1)
