# ruff: noqa
"""What the host pays for: launches by several ways, allocations, autograd's floor. Median µs of batches."""

import ctypes, statistics, time, torch, threading
from cuda.bindings import driver, nvrtc

torch.cuda.init()
torch.zeros(1, device="cuda")


def ok(r):
    assert int(r[0]) == 0, r[0]
    return r[1] if len(r) == 2 else r[1:]


src = b'extern "C" __global__ void k(char* a, char* b, int n, float s){ if (n == 12345) a[0]=b[0]; }'
p = ok(nvrtc.nvrtcCreateProgram(src, b"k.cu", 0, [], []))
ok(nvrtc.nvrtcCompileProgram(p, 1, [b"-arch=sm_90"]) + (None,))
n = ok(nvrtc.nvrtcGetCUBINSize(p))
cub = b" " * n
nvrtc.nvrtcGetCUBIN(p, cub)
lib = ok(driver.cuLibraryLoadData(cub, [], [], 0, [], [], 0))
kern = ok(driver.cuLibraryGetKernel(lib, b"k"))
fn = ok(driver.cuKernelGetFunction(kern))
vals = bytearray(32)
base = ctypes.addressof(ctypes.c_char.from_buffer(vals))
arr = (ctypes.c_void_p * 4)(base, base + 8, base + 16, base + 24)
addr = ctypes.addressof(arr)
from torch._C import _cuda_getCurrentRawStream as raw


def bindings():
    driver.cuLaunchKernel(fn, 4, 1, 1, 128, 1, 1, 0, raw(0), addr, 0)


st = raw(0)


def bindings_stream_known():
    driver.cuLaunchKernel(fn, 4, 1, 1, 128, 1, 1, 0, st, addr, 0)


cu = ctypes.CDLL("libcuda.so.1")
L = cu.cuLaunchKernel
L.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
fi = int(fn)


def by_ctypes():
    L(fi, 4, 1, 1, 128, 1, 1, 0, st, addr, None)


py = ctypes.PyDLL("libcuda.so.1")
LP = py.cuLaunchKernel
LP.argtypes = L.argtypes


def by_pydll():
    LP(fi, 4, 1, 1, 128, 1, 1, 0, st, addr, None)


q, k, v = (
    torch.randn(2, 16, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
)
g = torch.randn_like(q)
x = torch.zeros(64, device="cuda")


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)


class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ts = [torch.empty(100, device="cuda") for _ in range(6)]
        ctx.save_for_backward(None, None, v, *ts, None, None, None, None)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors
        return torch.empty_like(g), torch.empty_like(g), torch.empty_like(g)


class S(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return q.view_as(q)

    @staticmethod
    def backward(ctx, g):
        return g, g, g


def graph():
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        gr = torch.cuda.CUDAGraph()
        with torch.cuda.graph(gr):
            for _ in range(5):
                driver.cuLaunchKernel(fn, 4, 1, 1, 128, 1, 1, 0, raw(0), addr, 0)
    return gr


gr = graph()


def with_gil_held_backward():
    torch.autograd.grad(F.apply(q, k, v), (q, k, v), g)


ways = {
    "launch, cuda.bindings": bindings,
    "launch, cuda.bindings, stream known": bindings_stream_known,
    "launch, ctypes": by_ctypes,
    "launch, PyDLL": by_pydll,
    "raw stream": lambda: raw(0),
    "graph of 5 launches": gr.replay,
    "torch add_": lambda: x.add_(1),
    "fill_": lambda: x.fill_(0),
    "empty": lambda: torch.empty(100000, dtype=torch.uint8, device="cuda"),
    "empty_strided": lambda: torch.empty_strided(
        (2, 16, 128, 64), (131072, 8192, 64, 1), dtype=torch.bfloat16, device="cuda"
    ),
    "empty_like": lambda: torch.empty_like(q),
    "empty(0)": lambda: torch.empty(0, device="cuda"),
    "data_ptr": lambda: q.data_ptr(),
    "current_device": torch.cuda.current_device,
    "is_cuda": lambda: q.is_cuda,
    "view as_strided": lambda: torch.as_strided(x, (4, 4), (4, 1), 8),
    "Function, forward": lambda: F.apply(q, k, v),
    "Function, both": with_gil_held_backward,
    "Function with 6 saved, both": lambda: torch.autograd.grad(G.apply(q, k, v), (q, k, v), g),
    "Function, nothing, both": lambda: torch.autograd.grad(S.apply(q, k, v), (q, k, v), g),
    "python loop of 100 additions": lambda: [i + 1 for i in range(100)],
    "mul, both": lambda: torch.autograd.grad(q * k, (q, k), g),
}
for name, f in ways.items():
    for _ in range(30):
        f()
    torch.cuda.synchronize()
    times = []
    for _ in range(30):
        b = time.perf_counter()
        for _ in range(20):
            f()
        times.append((time.perf_counter() - b) / 20 * 1e6)
        torch.cuda.synchronize()
    print(f"{name:40s} {statistics.median(times):8.2f} min {min(times):8.2f}", flush=True)
