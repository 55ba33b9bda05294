"""What the Triton kernels do not take is named with the fix. For other bad calls see test_attention.py."""

from collections import defaultdict

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sagebwd import SageConfig
from sagebwd import sage_attention as public
from sagebwd.kernels.triton import forward as triton_forward
from tests.sagebwd.kernels.sets import triton_only

pytestmark = triton_only

#: The fix that always works.
REFERENCE = 'pass kernels="reference", which runs, slowly, anywhere'


def sage_attention(q, **settings):
    return public(q, q, q, **{"kernels": "triton", **settings})


@pytest.fixture
def tensor(device):
    """Return zeros, fp16, on the device; 2 sequences, 4 heads, 40 tokens, 32 channels."""

    def tensor(head_dim=32, dtype=torch.float16):
        return torch.zeros(2, 4, 40, head_dim, dtype=dtype, device=device)

    return tensor


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_q": 16}, "block_q is 16; use one of 32, 64, 128, or"),
        ({"block_kv": 256}, "block_kv is 256; use one of 32, 64, 128, or"),
    ],
)
def test_refuses_configs_that_the_reference_takes(tensor, config, message):
    config = SageConfig(**config)
    q = tensor()
    with pytest.raises(ValueError, match=f"^{message} {REFERENCE}$"):
        sage_attention(q, config=config)
    assert sage_attention(q, config=config, kernels="reference").shape == q.shape


@pytest.mark.parametrize(
    "unfit", [{"head_dim": size} for size in (4, 20, 257, 264)] + [{"dtype": torch.float32}], ids=str
)
def test_refuses_head_sizes_and_dtypes(tensor, unfit):
    q = tensor(**unfit)
    with pytest.raises(ValueError, match=r"use a multiple of 8 up to 256|cast them to bfloat16 or float16"):
        sage_attention(q)
    assert sage_attention(q, kernels="reference").shape == q.shape


def test_refuses_a_negative_scale(tensor):
    with pytest.raises(ValueError, match="change the sign of q"):
        sage_attention(tensor(), scale=-0.5)


@pytest.mark.parametrize(("head_dim", "block"), [(8, 32), (8, 128), (256, 32)])
def test_takes_the_sizes_at_the_limits(tensor, head_dim, block):
    q = tensor(head_dim)[:1, :1]
    config = SageConfig(block_q=block, block_kv=block)
    assert sage_attention(q, scale=0.0, config=config).count_nonzero() == 0


def test_tiles_that_do_not_fit_name_the_fix(tensor, monkeypatch):
    def fail(*inputs, **settings):
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(triton_forward, "_forward_kernel", defaultdict(lambda: fail))
    with pytest.raises(ValueError, match=r"tiles of 64 x 128 .* do not fit this GPU") as caught:
        sage_attention(tensor())
    assert str(caught.value).endswith(f"; set smaller ones, or {REFERENCE}")
