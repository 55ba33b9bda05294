"""Values at the edges: NaN and Inf, zeros, one token, constants, the largest fp16 values."""

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from sagebwd.reference import attention

CONFIGS = {
    "default": SageConfig(),
    "paper": SageConfig.paper(),
    "all INT8": SageConfig(int8_matmuls=MATMULS),
    "no INT8": SageConfig(int8_matmuls=()),
    "strictly causal": SageConfig.strictly_causal(),
}
GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def poisoned_channels(config):
    """Where a NaN in channel 3 of V (or dO) shows in O (or dV): everywhere, but in channel 3 outside INT8."""
    return slice(None) if config.int8_matmuls else 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_and_inf_reach_every_output_that_depends_on_them(draw, config, poison, name, dtype):
    """The last token of head 0 of batch 1 is poisoned. Without a mask all that depends on it must be NaN."""
    inputs = dict(zip(("q", "k", "v"), draw(150, dtype=dtype)[:3], strict=True))
    inputs[name][1, 0, -1, 3] = poison
    result = attention(**inputs, grad_out=torch.ones_like(inputs["q"]), config=config)
    if name == "q":
        assert result.out[1, 0, -1].isnan().all()
        assert result.dq[1, 0, -1].isnan().all()
    else:
        channels = poisoned_channels(config) if name == "v" else slice(None)
        assert result.out[1, 0, :, channels].isnan().all()
        assert result.dq[1, 0].isnan().all()
    assert result.dk[1, 0].isnan().all()
    assert name == "v" or result.dv[1, 0].isnan().all()  # dV = PᵀdO does not depend on V
    for output in ("out", *GRADIENTS):
        assert not getattr(result, output)[1, 0].isinf().any(), output
        assert getattr(result, output)[0].isfinite().all(), output
        assert getattr(result, output)[1, 1].isfinite().all(), output


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_inf_of_grad_out_reach_all_gradients(draw, config, poison):
    *inputs, grad_out = draw(150)
    grad_out[1, 0, 0, 3] = poison
    result = attention(*inputs, grad_out, config=config)
    assert result.delta[1, 0, 0].isnan()
    assert result.dq[1, 0, 0].isnan().all()
    assert result.dk[1, 0].isnan().all()
    assert result.dv[1, 0, :, poisoned_channels(config)].isnan().all()
    assert not any(getattr(result, name).isinf().any() for name in GRADIENTS)
    assert all(getattr(result, name)[0].isfinite().all() for name in GRADIENTS)


@pytest.mark.parametrize("scales", ["block", "token"])
def test_a_poisoned_query_poisons_its_block_or_itself(draw, scales):
    q, k, v, grad_out = draw(150)
    q[..., -1, 3] = torch.nan
    result = attention(q, k, v, grad_out, config=SageConfig(operand_scales=scales))
    first = 149 if scales == "token" else 128
    for output in (result.out, result.dq):
        assert output[..., :first, :].isfinite().all()
        assert output[..., first:, :].isnan().all()


def alternating(like, value):
    """± value on even and odd tokens."""
    signs = torch.where(torch.arange(like.shape[-2]) % 2 == 0, 1.0, -1.0).to(like)
    return value * signs.unsqueeze(-1).expand_as(like)


def test_fp32_sums_that_overflow_are_nan(config):
    """The largest values of fp32 in V and dO: O is their mean, but dP, δ and the sum in dV overflow."""
    zeros, large = torch.zeros(1, 1, 70, 16), torch.full((1, 1, 70, 16), 3e38)
    result = attention(zeros, zeros, large, large, config=config)
    assert result.delta.isnan().all()
    assert result.dq.isnan().all()
    assert result.dk.isnan().all()
    one_key = attention(zeros, zeros[:, :, :1], large[:, :, :1], large, config=config)
    assert one_key.dv.isnan().all()
    k, v, ones = alternating(zeros, 3e38), alternating(zeros, 10.0), torch.ones_like(zeros)
    assert attention(zeros, k, v, ones, config=config).dq.isnan().all()
    assert not attention(zeros, zeros, large, config=config).out.isinf().any()


def test_finite_gradients_that_overflow_fp16_become_inf(config):
    """As in torch's attention: loss scaling looks for them."""
    q, k = torch.zeros(2, 1, 1, 70, 16, dtype=torch.float16)
    grad_out = torch.full_like(q, 6e4)
    result = attention(q, k[:, :, :1], k[:, :, :1], grad_out, config=config)
    leaf = k[:, :, :1].clone().requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :1], leaf)
    (torchs,) = torch.autograd.grad(out, leaf, grad_out)
    assert torchs.isposinf().all()
    assert result.dv.isposinf().all()
    k, v = alternating(q, 6e4), alternating(q, 10.0)
    assert attention(q, k, v, torch.ones_like(q), config=config).dq.isposinf().all()


def test_hidden_tiles_are_never_touched(draw):
    """Under the causal mask a NaN reaches back to the first query that shares a tile with it, no further."""
    q, k, v, grad_out = draw(150)
    v[..., -1, :] = torch.nan
    config = SageConfig(block_q=16, block_kv=32)  # the last key lies in tile column 128 … 149
    result = attention(q, k, v, grad_out, is_causal=True, config=config)
    for output in (result.out, result.dq):
        assert output[..., :128, :].isfinite().all()
        assert output[..., 128:, :].isnan().all()


def test_zeros_average_the_values(draw, config):
    zeros = torch.zeros(1, 2, 70, 16)
    _, _, v, grad_out = draw(70, head_dim=16, batch=1)
    result = attention(zeros, zeros, v, grad_out, config=config)
    mean = v.mean(-2, keepdim=True)
    torch.testing.assert_close(result.out, mean.expand_as(v), rtol=0, atol=0.02 * v.abs().max().item() / 2)
    assert not result.dq.any()
    assert not result.dk.any()
    everything = attention(zeros, zeros, zeros, zeros, config=config)
    assert not any(getattr(everything, name).any() for name in ("out", *GRADIENTS))


def test_one_token_returns_its_value(draw, config):
    q, k, v, grad_out = draw(1)
    result = attention(q, k, v, grad_out, is_causal=True, config=config)
    step = v.abs().amax(-1, keepdim=True) / 127
    assert ((result.out - v).abs() <= 0.51 * step).all()
    assert ((result.dv - grad_out).abs() <= 0.51 * grad_out.abs().amax(-1, keepdim=True) / 127).all()
    # dS is not zero as it should be: O is quantized in δ = rowsum(dO∘O), V is not in dP.
    assert not attention(q, k, v, grad_out, exact_delta=True).ds.any()


def test_constant_rows(config):
    """Equal keys: K-smoothing leaves zeros, every weight is 1/N and the INT8 product has no error at all."""
    q, k, v, grad_out = (torch.full((1, 1, 64, 16), value) for value in (2.0, -3.0, 5.0, 1.0))
    result = attention(q, k, v, grad_out, config=config)
    torch.testing.assert_close(result.out, v, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.p, torch.full((1, 1, 64, 64), 1 / 64))
    torch.testing.assert_close(result.dv, grad_out, rtol=1e-6, atol=0)
    assert result.ds.abs().max() < 1e-6


def test_the_largest_fp16_numbers(config):
    """Products of 65504 overflow fp16 by far; fp32 sums and smoothing in fp32 must not."""
    largest = torch.finfo(torch.float16).max
    signs = torch.where(torch.arange(70) % 2 == 0, 1.0, -1.0).reshape(1, 1, 70, 1)
    q = torch.full((1, 1, 70, 32), largest, dtype=torch.float16)
    k = v = (signs * q).half()
    result = attention(q, k, v, 1e-4 * torch.ones_like(q), config=config)
    assert torch.equal(result.out, q)  # all weight on the keys that agree, whose values are q
    assert result.lse.isfinite().all()
    assert all(getattr(result, name).isfinite().all() for name in GRADIENTS)


def test_the_smallest_numbers_keep_their_direction(draw, config):
    """P and dS of long contexts are tiny; nothing may be flushed to zero before fp32 is at its end."""
    q, k, v, grad_out = draw(70)
    tiny = attention(q, k, v, 2.0**-80 * grad_out, config=config)
    normal = attention(q, k, v, grad_out, config=config)
    for name in GRADIENTS:
        assert torch.equal(2.0**80 * getattr(tiny, name), getattr(normal, name))
