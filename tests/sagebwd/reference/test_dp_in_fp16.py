"""dP with fp16 accumulators: no sum overflows, none is lost, and gradients hardly change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sagebwd import SageConfig
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention
from sagebwd.reference.quantization import PER_BLOCK, PER_ROW, product_in_fp16, to_fp16
from tests.sagebwd.kernels.inputs import outlier_value, rows_far_apart, tiny_grad_out

BF16 = torch.bfloat16
PRESETS = {
    "default": SageConfig(),
    "paper": SageConfig.paper(),
    "accurate": SageConfig.accurate(),
}


def in_fp16(config):
    return replace(config, dp_fp16_accumulation=True)


# --- Operands and products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [PER_BLOCK, PER_ROW])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 6e4, 1e30])
def test_operands_keep_their_digits(shared, size):
    """Of values down to 2⁻¹⁵ of the largest: bf16 has fewer digits than fp16."""
    x = (size * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    x[x.abs() < 2**-15 * x.abs().max()] = 0.0
    values, scale = to_fp16(x, x.abs().amax(shared, keepdim=True))
    assert torch.equal(values * scale, x)
    assert torch.equal(scale, 2.0 ** scale.log2().round())
    largest = values.abs().amax(shared)
    assert ((largest >= 1) & (largest < 2)).all()


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.full((3, 4), 1e-40)])
def test_zero_and_subnormal_blocks_are_zero(x):
    values, scale = to_fp16(x, x.max())
    assert not values.any()
    assert not scale.any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_the_scale_nan(poison):
    x = torch.ones(3, 4)
    x[1, 2] = poison
    values, scale = to_fp16(x, x.abs().amax(PER_ROW, keepdim=True))
    assert values.isfinite().all()
    assert scale.flatten().isnan().tolist() == [False, True, False]


def test_products_are_numpy_s():
    """A step of 16 in float64, rounded by NumPy, at a size where several of the sums are subnormal."""
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(40, 56, generator=generator) for _ in range(2))
    a, b = (to_fp16(x, 64 * x.abs().amax(PER_BLOCK, keepdim=True)) for x in tensors)
    total = np.zeros((40, 40))
    for i in range(0, 56, 16):
        x, y = (side.values[:, i : i + 16].double().numpy() for side in (a, b))
        total = (total + x @ y.T).astype(np.float16).astype(np.float64)
    wanted = torch.from_numpy(total) * float(a.scale * b.scale)
    assert (product_in_fp16(a, b.mT).double() == wanted).double().mean() > 0.999  # fp32 rounds twice


# --- Gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 256])
@pytest.mark.parametrize("size", [1.0, 1.99])
def test_the_largest_sums_do_not_overflow(head_dim, size):
    """All elements of V and dO equal: dP is D times their product. A power of two, or just below the next."""
    ones = torch.full((1, 1, 70, head_dim), size).bfloat16()
    found = attention(ones, ones, ones, -ones, config=SageConfig(dp_fp16_accumulation=True))
    wanted = -head_dim * ones[0, 0, 0, 0].double() ** 2
    torch.testing.assert_close(found.dp.double(), wanted.expand_as(found.dp), rtol=2e-3, atol=0)


def as_they_are(*inputs):
    return inputs


@pytest.mark.parametrize("values", [as_they_are, tiny_grad_out, rows_far_apart, outlier_value])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_no_gradient_errs_a_tenth_more(draw, exact, values, head_dim, preset):
    """Against float64; of dQ, queries with the smaller dO alone, too."""
    inputs = [x.to(BF16) for x in values(*draw(201, head_dim=head_dim, batch=1, dtype=torch.float32))]
    wanted = exact(*inputs, is_causal=True)
    for name, rows in (("dq", slice(None)), ("dq", slice(0, None, 2)), ("dk", slice(None))):
        plain, fp16 = (
            relative_l2(getattr(result, name)[..., rows, :], wanted[name][..., rows, :])
            for result in (attention(*inputs, is_causal=True, config=x) for x in (preset, in_fp16(preset)))
        )
        assert fp16 < 1.1 * plain, (name, rows)


def test_dp_errs_by_what_fp16_sums_err(draw):
    """Four roundings of 2⁻¹² or so, of each sum: not fp32, and not bf16."""
    inputs = draw(100, head_dim=64, dtype=torch.float16)
    plain, fp16 = (attention(*inputs, config=config) for config in (SageConfig(), in_fp16(SageConfig())))
    assert 2e-4 < relative_l2(fp16.dp, plain.dp) < 5e-4
    assert torch.equal(fp16.out, plain.out)
    assert torch.equal(fp16.dv, plain.dv)
