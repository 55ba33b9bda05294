"""Quantized operands at the limits of what numbers hold; all others are in test_against_reference.py."""

import pytest
import torch

from sagebwd.kernels.layout import Axis
from sagebwd.kernels.triton.quantize import quantize
from tests.sagebwd.kernels.sets import triton_only

pytestmark = [triton_only, pytest.mark.usefixtures("poisoned_memory")]

TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("largest", [0.0, 1e-40, 100 * TINY, 126 * TINY])
def test_a_scale_that_would_be_subnormal_is_zero(device, largest):
    x = torch.full((1, 1, 5, 8), largest, dtype=torch.bfloat16, device=device)
    operand = quantize(x, Axis.of(5, 32, None), rows=True, token_scales=False)
    assert not operand.rows.any()
    assert not operand.scale.any()


def test_sums_of_the_largest_values(device):
    """128 tokens of ± 127, that is ± 16256, which 8 bits do not hold."""
    x = torch.ones(1, 1, 128, 8, dtype=torch.float16, device=device)
    x[..., 1] *= -1
    operand = quantize(x, Axis.of(128, 128, None), columns=True, sums=True, token_scales=False)
    wanted = torch.zeros(32, dtype=torch.int32)
    wanted[:8] = 127 * 128
    wanted[1] *= -1
    assert torch.equal(operand.sums.cpu(), wanted[None])
