"""Triton's kernels at limits: tiles that do not fit, numbers too large or small, tokens far apart."""

from collections import defaultdict

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sagebwd import sage_attention
from sagebwd.kernels.layout import Axis
from sagebwd.kernels.triton import forward as triton_forward
from sagebwd.kernels.triton.quantize import quantize
from tests.sagebwd.kernels.sets import triton_only
from tests.warm import SERVER

TINY = torch.finfo(torch.float32).tiny


@triton_only
def test_tiles_that_do_not_fit_name_the_fix(sample_on_device, kernel_set, monkeypatch):
    def fail(*inputs, **settings):
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(triton_forward, "_forward_kernel", defaultdict(lambda: fail))
    q, k, v, _ = sample_on_device(40)
    message = r"tiles of 64 x 128 .* do not fit this GPU.*; set smaller ones, or pass kernels=\"reference\""
    with pytest.raises(ValueError, match=message):
        sage_attention(q, k, v, kernels="triton")


@triton_only
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("largest", [0.0, 1e-40, 100 * TINY, 126 * TINY])
def test_a_scale_that_would_be_subnormal_is_zero(device, largest):
    x = torch.full((1, 1, 5, 8), largest, dtype=torch.bfloat16, device=device)
    operand = quantize(x, Axis.of(5, 32, None), rows=True, token_scales=False)
    assert not operand.rows.any()
    assert not operand.scale.any()


@triton_only
@pytest.mark.usefixtures("poisoned_memory")
def test_sums_of_the_largest_values(device):
    """128 tokens of ± 127, that is ± 16256, which 8 bits do not hold."""
    x = torch.ones(1, 1, 128, 8, dtype=torch.float16, device=device)
    x[..., 1] *= -1
    operand = quantize(x, Axis.of(128, 128, None), columns=True, sums=True, token_scales=False)
    wanted = torch.zeros(32, dtype=torch.int32)
    wanted[:8] = 127 * 128
    wanted[1] *= -1
    assert torch.equal(operand.sums.cpu(), wanted[None])


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
