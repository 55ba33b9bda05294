"""Tiles that do not fit a GPU. What else Triton's kernels do not take: test_dispatch.py."""

from collections import defaultdict

import pytest
from triton.runtime.errors import OutOfResources

from sagebwd import sage_attention
from sagebwd.kernels.triton import forward as triton_forward
from tests.sagebwd.kernels.sets import triton_only


@triton_only
def test_tiles_that_do_not_fit_name_the_fix(sample_on_device, kernel_set, monkeypatch):
    def fail(*inputs, **settings):
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(triton_forward, "_forward_kernel", defaultdict(lambda: fail))
    q, k, v, _ = sample_on_device(40)
    message = r"tiles of 64 x 128 .* do not fit this GPU.*; set smaller ones, or pass kernels=\"reference\""
    with pytest.raises(ValueError, match=message):
        sage_attention(q, k, v, kernels="triton")
