"""Tokens that lie far apart in memory, in Triton's interpreter."""

import torch

from sagebwd import sage_attention
from tests.warm import SERVER


def attend_to_far_tokens():
    tokens, stride = 34, 2**26
    memory = torch.empty(4, tokens * stride, dtype=torch.float16)  # the system gives it when it is touched
    far = memory.as_strided((4, 1, 1, tokens, 32), (tokens * stride, 1, 1, stride, 1))
    far.copy_(torch.randn(4, 1, 1, tokens, 32))
    results = []
    for x in (far, far.contiguous()):
        *inputs, grad_out = x
        leaves = [x.requires_grad_() for x in inputs]
        out = sage_attention(*leaves, is_causal=True, kernels="triton")
        results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_tokens_may_lie_far_apart():
    """So far that offsets in one tile take 64 bits. A wrong one ends the process, hence one of its own."""
    process = SERVER.Process(target=attend_to_far_tokens)
    process.start()
    process.join(120)
    assert process.exitcode == 0
