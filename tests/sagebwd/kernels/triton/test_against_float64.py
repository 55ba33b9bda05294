"""Kernels against float64 attention, in out and every gradient: as close to it as the reference is.

Both make the same INT8 numbers, but for a few (see test_against_reference.py), so that their errors differ by
far less than 5%. Memory is poisoned: what a kernel leaves unwritten is NaN and fails every bound.
"""

from __future__ import annotations

import math

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from sagebwd.metrics import relative_l2

pytestmark = pytest.mark.usefixtures("poisoned_memory")
gpu = pytest.mark.gpu

NAMES = ("out", "dq", "dk", "dv")
CONFIGS = {
    "default": SageConfig(),
    "paper": SageConfig(granularity="block", block_q=64, block_kv=64),  # tiles that one CTA owns whole
    "strictly causal": SageConfig.strictly_causal(),
    "smooth_q": SageConfig(smooth_q=True),
    "all INT8": SageConfig(int8_matmuls=MATMULS),
    "no INT8": SageConfig(int8_matmuls=()),
}
#: Tokens, head size and heads for the interpreter, and for a GPU.
SIZES = [
    pytest.param((150, 64, 1), id="150 tokens"),
    pytest.param((1024, 128, 4), marks=gpu, id="1024 tokens"),
    pytest.param((777, 80, 3), marks=gpu, id="777 tokens"),
]
#: Every kind of values meets the default here, and every setting on a GPU.
DEFAULT_FIRST = [
    pytest.param(config, id=name, marks=() if name == "default" else gpu) for name, config in CONFIGS.items()
]


@pytest.fixture
def errors(exact):
    """Return the relative L2 errors of out, dq, dk, dv of an attention."""

    def errors(attention, inputs, *, is_causal, **settings):
        result = attention(*inputs, is_causal=is_causal, **settings)
        assert all(result[name].isfinite().all() for name in NAMES)
        wanted = exact(*inputs, is_causal=is_causal)
        return [relative_l2(result[name], wanted[name]) for name in NAMES]

    return errors


@pytest.fixture
def check(errors, kernels, attend_reference):
    """Assert that the kernels' errors are those of the reference, at most 1.05 times; return them.

    On top comes one P̃ that lies between two numbers of fp16 and is rounded to the other: it moves its row by
    up to 2⁻¹⁰, which shows where no product is INT8 and few rows hold most of the result.
    """

    def check(inputs, **settings):
        found, allowed = (errors(attention, inputs, **settings) for attention in (kernels, attend_reference))
        other_side = 2**-10 / math.sqrt(inputs[0][..., 0].numel())
        for name, error, bound in zip(NAMES, found, allowed, strict=True):
            assert error <= math.hypot(1.05 * bound, other_side), name
        return found

    return check


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sigma", [0.1, 1, 3, 5, 8, 10, 30])
@pytest.mark.parametrize("config", DEFAULT_FIRST)
def test_table1_and_beyond(check, sample, config, sigma, size):
    """σ of Q and K from logits that hardly differ to a softmax of one key."""
    n, head_dim, heads = size
    inputs = sample(n, head_dim=head_dim, heads=heads, sigma=sigma)
    found = check(inputs, config=config, is_causal=True)
    if sigma <= 1:
        assert max(found) < (0.05 if config.granularity == "block" else 0.026)


def outlier_channel(q, k, v, grad_out):
    """One channel of each tensor far larger than the others."""
    for x in (q, k, v, grad_out):
        x[..., 5] *= 20
    return q / 4, k / 4, v, grad_out


def outlier_tokens(q, k, v, grad_out):
    """One token in 50 ten times as large: it sets the scale of its block."""
    for x in (q, k, v, grad_out):
        x[..., ::50, :] *= 10
    return q, k, v, grad_out


def common_mean(q, k, v, grad_out):
    """Every token of a tensor near the same vector, K most of all."""
    shift = torch.randn(4, q.shape[-1], generator=torch.Generator().manual_seed(1))
    return q + shift[0], k + 10 * shift[1], v + shift[2], grad_out + shift[3]


def sizes_far_apart(q, k, v, grad_out):
    """Tokens of V and dO from 2⁻⁸ to 2⁸, in opposite order."""
    sizes = 2.0 ** torch.linspace(-8, 8, q.shape[-2]).unsqueeze(-1)
    return q, k, v * sizes, grad_out * sizes.flip(0)


def few_values(q, k, v, grad_out):
    """±1: every number of Q, K, V and dO is exact in INT8, and many logits are equal."""
    return tuple(x.sign() for x in (q, k, v, grad_out))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "values", [outlier_channel, outlier_tokens, common_mean, sizes_far_apart, few_values]
)
@pytest.mark.parametrize("config", DEFAULT_FIRST)
@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=gpu)], ids=["full", "causal"])
def test_values_that_are_hard_to_quantize(check, sample, config, values, size, is_causal):
    n, head_dim, heads = size
    inputs = sample(n, head_dim=head_dim, heads=heads, dtype=torch.float32)
    check([x.half() for x in values(*inputs)], config=config, is_causal=is_causal)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "default"])
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=gpu)], ids=["causal", "full"])
def test_other_settings(check, sample, name, is_causal):
    inputs = sample(100, heads=2, kv_heads=1, sigma=2.0)
    check(inputs, config=CONFIGS[name], is_causal=is_causal)


def test_k_smoothing_takes_a_common_mean_away(errors, kernels, sample):
    inputs = [x.half() for x in common_mean(*sample(100, head_dim=64, dtype=torch.float32))]
    smoothed = errors(kernels, inputs, config=SageConfig(), is_causal=False)
    unsmoothed = errors(kernels, inputs, config=SageConfig(smooth_k=False), is_causal=False)
    assert max(smoothed) < 0.05
    for name, error, bound in zip(NAMES, smoothed, unsmoothed, strict=True):
        assert error < 0.5 * bound, name


def test_compensated_o_fixes_gradients_where_values_are_similar(errors, kernels, sample):
    """dS is a small difference of dP and δ. 16-bit O alone is not enough: its rounding spoils δ."""
    q, k, v, grad_out = sample(100, head_dim=64, dtype=torch.float32)
    inputs = [x.half() for x in (q, k, 0.005 * v + 1, grad_out)]
    products = ("s_fwd", "s_bwd", "dv", "dq", "dk")
    plain, compensated = (
        errors(kernels, inputs, config=SageConfig(int8_matmuls=products, compensate_o=on), is_causal=False)
        for on in (False, True)
    )
    dq, dk = NAMES.index("dq"), NAMES.index("dk")
    assert min(plain[dq], plain[dk]) > 0.04
    assert max(compensated[dq], compensated[dk]) < 0.03


def test_q_smoothing_takes_a_mean_of_queries_away(errors, kernels, sample):
    q, k, v, grad_out = sample(100, head_dim=64, dtype=torch.float32)
    q = q + 3 * torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1))
    inputs = [x.half() for x in (q, k, v, grad_out)]
    smoothed = errors(kernels, inputs, config=SageConfig(smooth_q=True), is_causal=False)
    unsmoothed = errors(kernels, inputs, config=SageConfig(), is_causal=False)
    assert all(fine < coarse / 1.3 for fine, coarse in zip(smoothed, unsmoothed, strict=True))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def test_zeros(kernels, config):
    zeros = torch.zeros(1, 1, 70, 32, dtype=torch.float16)
    result = kernels(zeros, zeros, zeros, zeros, config=config)
    for name in NAMES:
        assert torch.equal(result[name], zeros), name


def test_equal_logits_average_the_values(kernels, sample, config):
    """Q = K = 0: every weight is 1/70, and P̃ = 1 has no error in INT8. V's is at most half a step."""
    _, _, v, grad_out = sample(70)
    zeros = torch.zeros_like(v)
    result = kernels(zeros, zeros, v, grad_out, config=config)
    for name, x in (("out", v), ("dv", grad_out)):
        mean = x.double().mean(-2, keepdim=True).expand_as(x)
        bound = 0.5 * x.double().abs().max() / 127 + 2**-10 * mean.abs()
        assert ((result[name].double() - mean).abs() <= bound).all(), name
    assert not result["dq"].any()
    assert not result["dk"].any()


def test_all_tokens_equal(kernels, config):
    """Each number is the largest of its tile, which INT8 holds exactly, and every weight is 1/70."""
    q, k, v, grad_out = (
        torch.full((1, 1, 70, 32), value, dtype=torch.float16) for value in (2.0, -3.0, 5.0, 1.0)
    )
    result = kernels(q, k, v, grad_out, config=config)
    ulp = 2.0**-10
    torch.testing.assert_close(result["out"], v, rtol=ulp, atol=0)
    torch.testing.assert_close(result["dv"], grad_out, rtol=ulp, atol=0)
    # dP = 32 · 5, and so is δ, but for what fp16 rounds away from O: a relative 2⁻¹¹.
    for name, other in (("dq", k), ("dk", q)):
        assert (result[name].abs() <= 32 * 5 * 2**-11 * other.abs() * 32**-0.5).all(), name


def test_one_token_returns_its_value(kernels, sample, config):
    q, k, v, grad_out = sample(1)
    result = kernels(q, k, v, grad_out, is_causal=True, config=config)
    for name, x in (("out", v), ("dv", grad_out)):
        step = x.float().abs().max() / 127
        bound = 0.5 * step + 2**-10 * x.float().abs()  # and fp16 rounds the result
        assert ((result[name] - x).float().abs() <= bound).all(), name
    # dS would be zero, but O has errors that V in dP has not: at most half a step of V in each channel.
    # 1.1 leaves room for what fp16 adds to O, and INT8 to dS and K.
    error = 0.5 * v.float().abs().max() / 127 * grad_out.float().abs().sum()
    for name, other in (("dq", k), ("dk", q)):
        assert (result[name].float().abs() <= 1.1 * error * other.float().abs().max() * 32**-0.5).all(), name
