"""Every error of the Triton kernels names what is wrong and the fix."""

import re

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sagebwd import SageConfig
from sagebwd import sage_attention as public
from sagebwd.kernels.triton import attention as triton_attention
from tests.sagebwd.kernels.sets import triton_only

pytestmark = triton_only

#: The fix that always works.
REFERENCE = 'pass kernels="reference", which runs, slowly, anywhere'


def sage_attention(*inputs, **settings):
    return public(*inputs, **{"kernels": "triton", **settings})


@pytest.fixture
def tensor(device):
    """Return zeros, fp16, on the device; 2 sequences, 4 heads, 40 tokens, 32 channels."""

    def tensor(batch=2, heads=4, tokens=40, head_dim=32, dtype=torch.float16):
        return torch.zeros(batch, heads, tokens, head_dim, dtype=dtype, device=device)

    return tensor


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported; use dropout_p=0.0"),
        ({"scale": -0.5}, "scale is -0.5; pass one that is not negative and change the sign of q"),
        ({"scale": float("inf")}, "scale is inf; pass a finite number, or None for 1/√(head size)"),
        ({"config": {"smooth_k": True}}, "config is a dict; pass a sagebwd.SageConfig"),
        (
            {"cu_seqlens_kv": [0, 40]},
            "cu_seqlens_kv is given without cu_seqlens; pass cu_seqlens, or neither",
        ),
    ],
)
def test_refuses_settings(tensor, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sage_attention(tensor(), tensor(), tensor(), **settings)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"block_q": 16}, ValueError, "block_q is 16; use one of 32, 64, 128, or"),
        ({"block_kv": 16}, ValueError, "block_kv is 16; use one of 32, 64, 128, or"),
        ({"block_q": 48}, ValueError, "block_q is 48; use one of 32, 64, 128, or"),
        ({"block_kv": 256}, ValueError, "block_kv is 256; use one of 32, 64, 128, or"),
        ({"s_levels": 2}, NotImplementedError, "s_levels=2 has no kernel; use s_levels=1, or"),
        (
            {"exact_delta": True},
            NotImplementedError,
            "exact_delta=True has no kernel; use compensate_o=True, or",
        ),
        (
            {"add_mean_k_term": True},
            NotImplementedError,
            "add_mean_k_term=True has no kernel; use add_mean_k_term=False, or",
        ),
    ],
)
def test_refuses_configs_that_the_reference_takes(tensor, config, error, message):
    config = SageConfig(**config)
    q = tensor()
    with pytest.raises(error) as caught:
        sage_attention(q, q, q, config=config)
    assert str(caught.value) == f"{message} {REFERENCE}"
    assert public(q, q, q, config=config, kernels="reference").shape == q.shape


@pytest.mark.parametrize("head_dim", [4, 20, 100, 257, 264])
def test_refuses_head_sizes(tensor, head_dim):
    q = tensor(1, 1, head_dim=head_dim)
    with pytest.raises(
        ValueError, match=f"the head size is {head_dim}; use a multiple of 8 up to 256, or pass"
    ):
        sage_attention(q, q, q)
    assert public(q, q, q, kernels="reference").shape == q.shape


def test_refuses_fp32(tensor):
    q = tensor(dtype=torch.float32)
    with pytest.raises(ValueError, match="q, k, v are float32; cast them to bfloat16 or float16, or pass"):
        sage_attention(q, q, q)
    assert public(q, q, q, kernels="reference").dtype == torch.float32


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda x: (x().double(), x(), x()), "q is float64; cast it to float16, bfloat16 or float32"),
        (lambda x: (x(), x().int(), x()), "k is int32; cast it to float16, bfloat16 or float32"),
        (
            lambda x: (x(), x(), x().bfloat16()),
            "q, k, v are float16, float16, bfloat16; cast them to one dtype",
        ),
        (lambda x: (x(), x(), x().to("meta")), "meta; move them to one device"),
        (lambda x: (x(), x(), None), "v is a NoneType; pass a torch.Tensor"),
        (lambda x: (x()[0], x()[0], x()[0]), "each must be (batch, heads, tokens, head size)"),
        (lambda x: (x(), x(tokens=41), x()), "k and v must have the same shape"),
        (lambda x: (x(), x(1), x(1)), "batch and head size must be the same for all"),
        (lambda x: (x(head_dim=40), x(), x()), "batch and head size must be the same for all"),
        (lambda x: (x(), x(heads=2), x(heads=2)), "q has 4 heads and k 2; pass enable_gqa=True"),
    ],
)
def test_refuses_tensors(tensor, inputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sage_attention(*inputs(tensor))


def test_refuses_heads_that_do_not_divide(tensor):
    with pytest.raises(ValueError, match="q has 4 heads, not a multiple of the 3 of k; change one of them"):
        sage_attention(tensor(), tensor(heads=3), tensor(heads=3), enable_gqa=True)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 40], "cu_seqlens is a list; pass a torch.Tensor"),
        (torch.tensor([0.0, 40.0]), "cu_seqlens is float32; cast it to int32 or int64"),
        (torch.tensor([0, 1], dtype=torch.bool), "cu_seqlens is bool; cast it to int32 or int64"),
        (torch.tensor([40]), "cu_seqlens has shape (1,); pass (documents + 1,)"),
        (torch.tensor([[0, 40]]), "cu_seqlens has shape (1, 2); pass (documents + 1,)"),
        (torch.tensor([0, 40], device="meta"), "cu_seqlens is on meta and q on"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_kv"])
def test_refuses_boundaries(tensor, device, name, cu_seqlens, message):
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type == "cpu":
        cu_seqlens = cu_seqlens.to(device)
    settings = {"cu_seqlens": torch.tensor([0, 40], device=device), name: cu_seqlens}
    with pytest.raises(ValueError, match=re.escape(message.replace("cu_seqlens", name))):
        sage_attention(tensor(1), tensor(1), tensor(1), **settings)


def test_refuses_boundaries_that_do_not_fit_the_tensors(tensor, device):
    cu_seqlens = torch.tensor([0, 40], device=device)
    with pytest.raises(ValueError, match="q has batch size 2; lay all documents end to end in a batch of 1"):
        sage_attention(tensor(), tensor(), tensor(), cu_seqlens=cu_seqlens)
    longer = tensor(1, tokens=50)
    with pytest.raises(ValueError, match="q has 40 tokens and k 50; pass cu_seqlens_kv"):
        sage_attention(tensor(1), longer, longer, cu_seqlens=cu_seqlens)
    with pytest.raises(
        ValueError, match="cu_seqlens has 2 entries and cu_seqlens_kv 3; give both one for each"
    ):
        sage_attention(
            tensor(1),
            longer,
            longer,
            cu_seqlens=cu_seqlens,
            cu_seqlens_kv=torch.tensor([0, 9, 50]).to(device),
        )


@pytest.mark.parametrize(("head_dim", "block"), [(8, 32), (8, 128), (256, 32)])
def test_takes_the_sizes_at_the_limits(tensor, head_dim, block):
    q = tensor(1, 1, head_dim=head_dim)
    config = SageConfig(block_q=block, block_kv=block)
    assert sage_attention(q, q, q, scale=0.0, config=config).count_nonzero() == 0


def test_tiles_that_do_not_fit_name_the_fix(tensor, monkeypatch):
    def fail(*inputs, **settings):
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(triton_attention._forward, "forward", fail)
    q = tensor()
    message = "tiles of 64 x 128 (block_q x block_kv) do not fit this GPU with head size 32 and this config ("
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        sage_attention(q, q, q)
    assert str(caught.value).endswith(f"; set smaller ones, or {REFERENCE}")
