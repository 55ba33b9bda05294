"""Without INT8 the reference is attention itself: it must equal float64 attention to fp32 rounding."""

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.reference import attention

NAMES = ("out", "p", "dp", "ds", "delta", "dq", "dk", "dv")
SMALL_TILES = {"int8_matmuls": (), "block_q": 16, "block_kv": 32}
SWITCHES = [
    {},
    {"smooth_k": False},
    {"smooth_q": True},
    {"compensate_o": True},
    {"granularity": "block"},
    {"operand_scales": "token"},
]


def assert_equal_to_fp32_rounding(result, exact):
    # dS = P ∘ (dP − δ) cancels; where a query sees one key only, what is left is the rounding of dP alone.
    cancellation = 2**-21 * exact["dp"].abs().max().item()
    for name in NAMES:
        found, wanted = getattr(result, name), exact[name]
        assert found.shape == wanted.shape
        error = (found.double() - wanted).abs().max().item()
        assert error <= 1e-5 * wanted.abs().max().item() + cancellation, f"{name}: {error}"


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_switch_keeps_attention(draw, exact, switches, is_causal):
    q, k, v, grad_out = draw()
    k = k + 3  # a mean for the smoothing to take
    config = SageConfig(**SMALL_TILES, **switches)
    result = attention(q, k, v, grad_out, is_causal=is_causal, config=config)
    assert_equal_to_fp32_rounding(result, exact(q, k, v, grad_out, is_causal=is_causal))


@pytest.mark.parametrize(
    ("n_q", "n_kv"), [(1, 1), (1, 50), (50, 1), (15, 17), (16, 32), (20, 18), (33, 65), (97, 40), (40, 97)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_lengths(draw, exact, n_q, n_kv, is_causal):
    inputs = draw(n_q, n_kv, head_dim=7)
    result = attention(*inputs, is_causal=is_causal, config=SageConfig(**SMALL_TILES, smooth_q=True))
    assert_equal_to_fp32_rounding(result, exact(*inputs, is_causal=is_causal))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1), (3, 3)])
def test_grouped_queries(draw, exact, heads, kv_heads):
    inputs = draw(40, 50, heads=heads, kv_heads=kv_heads)
    result = attention(*inputs, is_causal=True, enable_gqa=True, config=SageConfig(**SMALL_TILES))
    assert result.dk.shape == result.dv.shape == inputs[1].shape
    assert_equal_to_fp32_rounding(result, exact(*inputs, is_causal=True))


@pytest.mark.parametrize("scale", [0.0, 0.7, -0.3])
def test_scale(draw, exact, scale):
    inputs = draw()
    result = attention(*inputs, scale=scale, config=SageConfig(**SMALL_TILES))
    assert_equal_to_fp32_rounding(result, exact(*inputs, scale=scale))


@pytest.mark.parametrize("head_dim", [1, 130, 1100])
def test_any_head_size(draw, exact, head_dim):
    inputs = draw(20, head_dim=head_dim)
    result = attention(*inputs, config=SageConfig(**SMALL_TILES))
    assert_equal_to_fp32_rounding(result, exact(*inputs))


def test_lse_is_that_of_the_smoothed_logits(draw):
    q, k, v, _ = draw()
    k = k + 3
    config = SageConfig(int8_matmuls=("dq",), block_q=16, block_kv=32)  # which takes K in INT8
    lse = attention(q, k, v, is_causal=False, scale=0.2, config=config).lse.double()
    plain = (q.double() @ k.double().mT * 0.2).logsumexp(-1)
    shift = 0.2 * (q.double() @ k.double().mean(-2, keepdim=True).mT).squeeze(-1)
    torch.testing.assert_close(lse + shift, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("sigma", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_inputs_round_as_sixteen_bit_attention_does(draw, exact, dtype, sigma, smooth_k):
    """The error stays within twice that of torch's own attention in the same dtype."""
    inputs = draw(150, head_dim=32, dtype=dtype, sigma=sigma)
    wanted = exact(*inputs, is_causal=True)
    result = attention(*inputs, is_causal=True, config=SageConfig(int8_matmuls=(), smooth_k=smooth_k))
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3])
    for name, torchs in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        ours = getattr(result, name)
        assert ours.dtype == dtype
        error, torchs_error = ((x.double() - wanted[name]).norm().item() for x in (ours, torchs))
        assert error <= 2 * torchs_error, name


def test_without_grad_out_there_is_no_backward(draw):
    q, k, v, _ = draw(20)
    result = attention(q, k, v)
    assert result.out is not None
    assert result.lse.shape == (2, 2, 20)
    assert all(getattr(result, name) is None for name in NAMES[1:])


@pytest.mark.parametrize("preset", ["consistent", "accurate"])
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_gradients_of_a_saturated_softmax_are_as_near_zero_as_torchs(draw, preset, size):
    """Each query has one key: dQ and dK are the error of O. That of an INT8 O overflows fp16 at 3000."""
    q, k, v, grad_out = draw(64, head_dim=64, sigma=12000.0)
    q, k, v, grad_out = (x.clamp(-6e4, 6e4).half() for x in (q, k, v, size * grad_out))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    torchs = torch.autograd.grad(out, leaves, grad_out)
    result = attention(q, k, v, grad_out, config=getattr(SageConfig, preset)())
    for ours, theirs in zip((result.dq, result.dk), torchs[:2], strict=True):
        assert ours.norm() <= 2 * theirs.norm()
