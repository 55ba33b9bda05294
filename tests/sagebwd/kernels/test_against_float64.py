"""Kernels against float64 attention, in out and every gradient: as close to it as the reference is.

Both make the same INT8 values, but for a few (see test_against_reference.py), so that their errors differ by
far less than 5%. Memory is poisoned: what a kernel leaves unwritten is NaN and fails every bound.
"""

from __future__ import annotations

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG, MATMULS
from tests.sagebwd.kernels.inputs import HARD_VALUES, NAMES, common_mean, constant
from tests.sagebwd.kernels.sets import (
    every_head_dim,
    full_first,
    named,
    needs,
    over,
    without_int8,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OUT, DQ, DK, DV = range(4)
CONFIGS = {
    "default": SageConfig(),
    "paper": SageConfig(granularity="block", block_q=64, block_kv=64),  # tiles that one CTA owns whole
    "strictly causal": SageConfig.strictly_causal(),
    "smooth_q": SageConfig(smooth_q=True),
    "all INT8": SageConfig(int8_matmuls=MATMULS),
    "no INT8": SageConfig(int8_matmuls=()),
}


def configs_of(kernel_set):
    return kernel_set.those_it_runs(CONFIGS)


def default_first(kernel_set):
    """Every kind of values meets the default in the interpreter, and every setting on a GPU."""
    return named(configs_of(kernel_set) if kernel_set.is_gpu else {"default": DEFAULT_CONFIG})


@over("sigma", lambda kernel_set: [0.1, 1, 3, 5, 8, 10, 30] if kernel_set.is_gpu else [0.1, 3, 30])
@over("n, head_dim, heads", lambda kernel_set: kernel_set.float64_sizes)
@over("config", default_first)
def test_table1_and_beyond(check_errors, sample, config, sigma, n, head_dim, heads):
    """σ of Q and K from logits that hardly differ to a softmax of one key."""
    inputs = sample(n, head_dim=head_dim, heads=heads, sigma=sigma)
    found = check_errors(inputs, config=config, is_causal=True)
    if sigma <= 1:
        assert max(found) < (0.05 if config.granularity == "block" else 0.026)


@over("n, head_dim, heads", lambda kernel_set: kernel_set.float64_sizes)
@pytest.mark.parametrize("values", HARD_VALUES)
@over("config", default_first)
@full_first
def test_values_that_are_hard_to_quantize(
    check_errors, sample, config, values, n, head_dim, heads, is_causal
):
    inputs = sample(n, head_dim=head_dim, heads=heads, dtype=torch.float32)
    check_errors([x.half() for x in values(*inputs)], config=config, is_causal=is_causal)


# --- What settings are for ---------------------------------------------------------------------------------


def test_k_smoothing_takes_a_common_mean_away(errors, kernels, sample):
    inputs = [x.half() for x in common_mean(*sample(100, head_dim=64, dtype=torch.float32))]
    smoothed = errors(kernels, inputs, config=SageConfig(), is_causal=False)
    unsmoothed = errors(kernels, inputs, config=SageConfig(smooth_k=False), is_causal=False)
    assert max(smoothed) < 0.05
    for name, error, bound in zip(NAMES, smoothed, unsmoothed, strict=True):
        assert error < 0.5 * bound, name


@needs(smooth_q=True)
def test_q_smoothing_takes_a_mean_of_queries_away(errors, kernels, sample):
    q, k, v, grad_out = sample(100, head_dim=64, dtype=torch.float32)
    q = q + 3 * torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1))
    inputs = [x.half() for x in (q, k, v, grad_out)]
    smoothed = errors(kernels, inputs, config=SageConfig(smooth_q=True), is_causal=False)
    unsmoothed = errors(kernels, inputs, config=SageConfig(), is_causal=False)
    assert all(fine < coarse / 1.3 for fine, coarse in zip(smoothed, unsmoothed, strict=True))


def test_compensated_o_fixes_gradients_where_values_are_similar(errors, kernels, sample):
    """dS is a small difference of dP and δ. 16-bit O alone is not enough: its rounding spoils δ."""
    q, k, v, grad_out = sample(100, head_dim=64, dtype=torch.float32)
    inputs = [x.half() for x in (q, k, 0.005 * v + 1, grad_out)]
    plain, compensated = (
        errors(kernels, inputs, config=without_int8("o", compensate_o=on), is_causal=False)
        for on in (False, True)
    )
    assert min(plain[DQ], plain[DK]) > 0.04
    assert max(compensated[DQ], compensated[DK]) < 0.03


# --- Closed forms ------------------------------------------------------------------------------------------


def lengths_and_configs(*lengths):
    """(tokens, is_causal, config): 70 tokens with every setting, and on a GPU these with the default."""

    def cases(kernel_set):
        configs = {**configs_of(kernel_set), **kernel_set.variants}
        if kernel_set.name == "triton" and not kernel_set.is_gpu:
            configs = {name: configs[name] for name in ("default", "no INT8")}
        yield from (pytest.param(70, config, id=f"70-{name}") for name, config in configs.items())
        if kernel_set.is_gpu:
            yield from (pytest.param(n, DEFAULT_CONFIG, id=f"{n}-default") for n in lengths)

    return over("n, config", cases)


@lengths_and_configs(1, 40, 63, 129, 300)
@full_first
@every_head_dim
def test_zeros(kernels, n, is_causal, head_dim, config):
    zeros = constant(n, head_dim)
    result = kernels(zeros, zeros, zeros, zeros, is_causal=is_causal, config=config)
    for name in NAMES:
        assert torch.equal(result[name], zeros), name


@lengths_and_configs(129, 301)
@every_head_dim
def test_equal_logits_average_the_values(kernels, sample, n, head_dim, config):
    """Q = K = 0: every weight is 1/n, and P̃ = 1 has no error in INT8. V's is at most half a step."""
    _, _, v, grad_out = sample(n, head_dim=head_dim)
    zeros = torch.zeros_like(v)
    result = kernels(zeros, zeros, v, grad_out, config=config)
    for name, x in (("out", v), ("dv", grad_out)):
        mean = x.double().mean(-2, keepdim=True).expand_as(x)
        bound = 0.5 * x.double().abs().max() / 127 + 2**-10 * mean.abs()
        assert ((result[name].double() - mean).abs() <= bound).all(), name
    assert not result["dq"].any()
    assert not result["dk"].any()


@lengths_and_configs(129, 150, 301)
@every_head_dim
def test_all_tokens_equal(kernels, n, head_dim, config):
    """Each element is the largest of its tile, which INT8 holds exactly, and every weight is 1/n. Sums in
    INT32 are the largest that can be.
    """
    q, k, v, grad_out = (constant(n, head_dim, value) for value in (2.0, -3.0, 5.0, 1.0))
    result = kernels(q, k, v, grad_out, config=config)
    ulp = 2.0**-10
    torch.testing.assert_close(result["out"], v, rtol=ulp, atol=0)
    torch.testing.assert_close(result["dv"], grad_out, rtol=ulp, atol=0)
    # dP = 5 D, and so is δ, but for what fp16 rounds away from O: a relative 2⁻¹¹.
    for name, other in (("dq", k), ("dk", q)):
        assert (result[name].abs() <= 5 * 2**-11 * other.abs() * head_dim**0.5).all(), name


@over("config", lambda kernel_set: named(configs_of(kernel_set)))
@every_head_dim
def test_one_token_returns_its_value(kernels, sample, head_dim, config):
    q, k, v, grad_out = sample(1, head_dim=head_dim)
    result = kernels(q, k, v, grad_out, is_causal=True, config=config)
    for name, x in (("out", v), ("dv", grad_out)):
        step = x.float().abs().max() / 127
        bound = 0.5 * step + 2**-10 * x.float().abs()  # and fp16 rounds the result
        assert ((result[name] - x).float().abs() <= bound).all(), name
    # dS would be zero, but O has errors that V in dP has not: at most half a step of V in each channel.
    # 1.1 leaves room for what fp16 adds to O, and INT8 to dS and K.
    error = 0.5 * v.float().abs().max() / 127 * grad_out.float().abs().sum()
    for name, other in (("dq", k), ("dk", q)):
        bound = 1.1 * error * other.float().abs().max() * head_dim**-0.5
        assert (result[name].float().abs() <= bound).all(), name
