"""Kernels against float64 attention, in out and every gradient: as close to it as the reference is.

Both make the same INT8 values, but for a few (see test_against_reference.py), so that their errors differ by
far less than 5%. Memory is poisoned: what a kernel leaves unwritten is NaN and fails every bound.
"""

import math

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG, MATMULS
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from tests.sagebwd.kernels.inputs import HARD_VALUES, NAMES, constant
from tests.sagebwd.kernels.sets import every_head_dim, full_first, named, over

pytestmark = pytest.mark.usefixtures("poisoned_memory")

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


@pytest.fixture
def check_errors(kernels_and_reference):
    """check_errors(inputs, config, is_causal=…): those of the kernels are at most 1.05 times the reference's.

    They are relative L2 errors of out, dq, dk and dv, which it returns. On top comes what a P̃ that lies
    between two steps of INT8 does, if it is rounded to the other: it moves its row of O by up to 2⁻¹⁰.
    """

    def check_errors(inputs, config, **settings):
        truth = vars(exact_attention(*inputs, **settings))
        found, reference = kernels_and_reference(inputs, config, **settings)
        other_p = 2**-10 / math.sqrt(inputs[0][..., 0].numel())
        errors = []
        for name in NAMES:
            assert found[name].isfinite().all(), name
            error, of_reference = (relative_l2(result[name], truth[name]) for result in (found, reference))
            assert error <= math.hypot(1.05 * of_reference, other_p), name
            errors.append(error)
        return errors

    return check_errors


@over("sigma", lambda kernel_set: [0.1, 1, 3, 5, 8, 10, 30] if kernel_set.is_gpu else [0.1, 3, 30])
@over("n, head_dim, heads", lambda kernel_set: kernel_set.float64_sizes)
@over("config", default_first)
def test_table1_and_beyond(check_errors, sample, config, sigma, n, head_dim, heads):
    """σ of Q and K from logits that hardly differ to a softmax of one key."""
    inputs = sample(n, head_dim=head_dim, heads=heads, sigma=sigma)
    found = check_errors(inputs, config, is_causal=True)
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
    check_errors([x.half() for x in values(*inputs)], config, is_causal=is_causal)


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
