"""dP with fp16 accumulators, where V and dO differ most in size: kernels against the reference, in bf16 too.

Lengths, masks, documents and heads are tested as for other settings: see test_crossed.py.
"""

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels.inputs import outlier_value, rows_far_apart, tiny_grad_out
from tests.sagebwd.kernels.sets import emulated_too, every_head_dim, needs

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), needs(dp_fp16_accumulation=True)]

DEFAULT = SageConfig(dp_fp16_accumulation=True)
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
