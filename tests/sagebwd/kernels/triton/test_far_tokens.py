"""Tokens that lie far apart in memory, in Triton's interpreter."""

import os
import subprocess
import sys

from tests.cli import ROOT


def test_tokens_may_lie_far_apart():
    """So far that offsets in one tile take 64 bits. A wrong one ends the process, hence one of its own."""
    code = """
import torch
from sagebwd import sage_attention
tokens, stride = 130, 2**24 + 2**20
memory = torch.empty(4, tokens * stride, dtype=torch.float16)  # the system gives it when it is touched
far = memory.as_strided((4, 1, 1, tokens, 32), (tokens * stride, 1, 1, stride, 1))
far.copy_(torch.randn(4, 1, 1, tokens, 32))
results = []
for x in (far, far.contiguous()):
    *inputs, grad_out = x
    leaves = [x.requires_grad_() for x in inputs]
    out = sage_attention(*leaves, is_causal=True, kernels="triton")
    results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
assert all(torch.equal(x, y) for x, y in zip(*results))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
