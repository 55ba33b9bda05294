"""dP with fp16 accumulators, where V and dO differ most in size: kernels against the reference, in bf16 too.

Lengths, masks, documents and heads are tested as for other settings: see test_crossed.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels.inputs import assert_bit_equal, outlier_value, rows_far_apart, tiny_grad_out
from tests.sagebwd.kernels.sets import emulated_too, every_head_dim, fp16_and_bf16, needs, on_gpu

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), needs(dp_fp16_accumulation=True)]

DEFAULT = SageConfig(dp_fp16_accumulation=True)
PAPER = replace(SageConfig.paper(), dp_fp16_accumulation=True)
SIZES = pytest.mark.parametrize("values", [tiny_grad_out, rows_far_apart, outlier_value])


@emulated_too
@SIZES
@every_head_dim
def test_sizes_far_apart_in_bf16(check, kernels, attend_reference, sample, values, head_dim):
    """The kernels convert V and dO; queries with the smaller dO are compared on their own."""
    inputs = [x.bfloat16() for x in values(*sample(201, head_dim=head_dim, dtype=torch.float32))]
    options = {"config": DEFAULT, "is_causal": True}
    found = check(inputs, **options)
    wanted = attend_reference(*inputs, saved_out=found["out"], **options)
    assert relative_l2(found["dq"][..., ::2, :], wanted["dq"][..., ::2, :]) < 8e-3


@emulated_too
def test_a_grad_out_without_a_scale_counts_as_zero(check, sample):
    """Its scale in INT8 would be subnormal. That of V is so large that dP would be normal."""
    q, k, v, grad_out = sample(130, head_dim=128, dtype=torch.float32)
    inputs = [x.bfloat16() for x in (q, k, 2.0**110 * v, 2.0**-122 * grad_out)]
    check(inputs, config=DEFAULT, is_causal=True)


@on_gpu
@SIZES
@fp16_and_bf16
@pytest.mark.parametrize("config", [DEFAULT, PAPER], ids=["default", "paper"])
@every_head_dim
def test_no_gradient_errs_a_tenth_more(errors, kernels, sample, values, dtype, config, head_dim):
    """Against float64, with and without. In fp16 a dO of 2⁻²⁰ and its gradients would be subnormal."""
    if dtype == torch.float16 and values is not outlier_value:
        pytest.skip("fp16 does not hold these values")
    inputs = [x.to(dtype) for x in values(*sample(1000, head_dim=head_dim, dtype=torch.float32))]
    plain = replace(config, dp_fp16_accumulation=False)
    found, without = (errors(kernels, inputs, config=x, is_causal=True) for x in (config, plain))
    assert all(x < 1.1 * y + 1e-4 for x, y in zip(found, without, strict=True))


@on_gpu
@pytest.mark.parametrize("config", [DEFAULT, PAPER], ids=["default", "paper"])
@every_head_dim
def test_the_same_bits_every_time(kernels, sample, config, head_dim):
    inputs = sample(1500, heads=4, kv_heads=2, head_dim=head_dim)
    first = kernels(*inputs, config=config, is_causal=True)
    for _ in range(3):
        assert_bit_equal(kernels(*inputs, config=config, is_causal=True), first)
