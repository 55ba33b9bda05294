# ruff: noqa
"""Host µs of a forward and backward of the sagebwd on PYTHONPATH, beside cuDNN; and its first call in an empty cache."""

import os, statistics, sys, tempfile, time

os.environ["SAGEBWD_CACHE_DIR"] = tempfile.mkdtemp()
import torch, sagebwd
from torch.nn.attention import SDPBackend, sdpa_kernel

F = torch.nn.functional.scaled_dot_product_attention


def inputs(s):
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3) for i in range(4)]


def both(call, x):
    b = time.perf_counter()
    out = call(*x[:3])
    m = time.perf_counter()
    torch.autograd.grad(out, x[:3], x[3])
    e = time.perf_counter()
    return (m - b) * 1e6, (e - m) * 1e6


def cudnn(q, k, v):
    return F(q, k, v, is_causal=True)


sage = lambda q, k, v: sagebwd.sage_attention(q, k, v, is_causal=True)
x = inputs((2, 16, 128, 64))
torch.cuda.synchronize()
both(cudnn, x)
torch.cuda.synchronize()
f, b = both(sage, x)
torch.cuda.synchronize()
print(sys.argv[1], f"first call: forward {f / 1e6:.2f} s, backward {b / 1e6:.2f} s", flush=True)
for shape in ((2, 16, 128, 64), (16, 16, 1024, 128), (1, 24, 512, 128)):
    x = inputs(shape)
    times = {"sagebwd": [], "cudnn": []}
    for r in range(60):
        for name, call in (("sagebwd", sage), ("cudnn", cudnn)):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                both(call, x)
                torch.cuda.synchronize()
                own = [both(call, x) for _ in range(15)]
                torch.cuda.synchronize()
            times[name] += own
    text = {
        n: " ".join(f"{statistics.median(c):.0f}" for c in (*zip(*t), [sum(y) for y in t]))
        for n, t in times.items()
    }
    print(sys.argv[1], shape, text, flush=True)
