"""What INT8 costs, against float64 attention; what the specification in NumPy leaves out."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import SageConfig
from sagebwd.config import PRESETS
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention, exact_attention
from tests.inputs import gradients
from tests.sagebwd.kernels.inputs import outlier_value, rows_far_apart, tiny_grad_out

NAMES = ("out", "dq", "dk", "dv")


def errors(inputs, config, **mask):
    """Relative L2 of out, dq, dk, dv (in this order) against float64 attention."""
    wanted, result = exact_attention(*inputs, **mask), attention(*inputs, config=config, **mask)
    return [relative_l2(getattr(result, name), getattr(wanted, name)) for name in NAMES]


@pytest.mark.parametrize(("dtype", "is_causal"), [(torch.float16, True), (torch.bfloat16, False)])
def test_compensation_gives_the_delta_of_the_backwards_own_p_and_dp(draw, dtype, is_causal):
    """Up to the rounding of the residual, and that of P where its values differ."""
    q, k, v, grad_out = draw(200, head_dim=64)
    inputs = [x.to(dtype) for x in (q, k, 0.005 * v + 1, grad_out)]

    def row_sums(compensate_o):
        config = SageConfig.consistent(compensate_o=compensate_o)
        ds = attention(*inputs, is_causal=is_causal, config=config).ds.double()
        return (ds.sum(-1).norm() / ds.norm()).item()

    assert row_sums(False) > 0.2
    assert row_sums(True) < 0.005


def test_the_consistent_preset_has_the_same_error_whatever_values_have_in_common(draw):
    q, k, v, grad_out = (x.bfloat16() for x in draw(512, head_dim=64, batch=1))
    for inputs in ((q, k, v, grad_out), (q, k, 0.05 * v + 1, grad_out), (q, k, 0.01 * v - 2, grad_out)):
        consistent = errors(inputs, SageConfig.consistent(), is_causal=True)
        default = errors(inputs, SageConfig(), is_causal=True)
        assert all(fine <= 1.001 * coarse for fine, coarse in zip(consistent, default, strict=True))
        assert max(consistent[1:3]) < 0.025
    assert min(default[1:3]) > 0.5


# --- In 16 bit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "smooth_k"), [(1, True), (3, False), (8, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_int8_the_error_is_within_twice_that_of_torchs_attention(draw, dtype, sigma, smooth_k):
    inputs = draw(150, head_dim=32, dtype=dtype, sigma=sigma)
    wanted = vars(exact_attention(*inputs, is_causal=True))
    result = attention(*inputs, is_causal=True, config=SageConfig(int8_matmuls=(), smooth_k=smooth_k))
    torchs = gradients(scaled_dot_product_attention, *inputs, is_causal=True)
    for name, x in zip(NAMES, torchs, strict=True):
        ours = getattr(result, name)
        assert ours.dtype == dtype
        assert relative_l2(ours, wanted[name]) <= 2 * relative_l2(x, wanted[name]), name


def test_gradients_of_a_saturated_softmax_are_as_near_zero_as_torchs(draw):
    """Each query has one key: dQ and dK are the error of O."""
    q, k, v, grad_out = draw(64, head_dim=64, sigma=12000.0)
    inputs = [x.clamp(-6e4, 6e4).half() for x in (q, k, v, 30 * grad_out)]
    _, dq, dk, _ = gradients(scaled_dot_product_attention, *inputs)
    result = attention(*inputs, config=SageConfig.consistent())
    assert result.dq.norm() <= 2 * dq.norm()
    assert result.dk.norm() <= 2 * dk.norm()


# --- dP in fp16 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 64, 256])
@pytest.mark.parametrize("size", [1.0, 1.96, 1.99])
def test_the_largest_sums_of_dp_do_not_overflow_fp16(head_dim, size):
    """All elements of V and dO equal: dP is D times their product. A power of two, or just below the next.

    The scale of dO is a 127th of it: that of 1.96 is just below a power of two.
    """
    ones = torch.full((1, 1, 70, head_dim), size).bfloat16()
    found = attention(ones, ones, ones, -ones, config=SageConfig(dp_fp16_accumulation=True))
    wanted = -head_dim * ones[0, 0, 0, 0].double() ** 2
    torch.testing.assert_close(found.dp.double(), wanted.expand_as(found.dp), rtol=2e-3, atol=0)


@pytest.mark.parametrize("values", [lambda *x: x, tiny_grad_out, rows_far_apart, outlier_value])
@pytest.mark.parametrize(("preset", "head_dim"), [("default", 128), ("paper", 64), ("strictly_causal", 256)])
def test_with_dp_in_fp16_no_gradient_errs_a_tenth_more(draw, values, preset, head_dim):
    """Against float64; of dQ, queries with the smaller dO alone, too."""
    inputs = [x.bfloat16() for x in values(*draw(201, head_dim=head_dim, batch=1))]
    wanted = vars(exact_attention(*inputs, is_causal=True))
    configs = [replace(PRESETS[preset], dp_fp16_accumulation=on) for on in (False, True)]
    results = [attention(*inputs, is_causal=True, config=config) for config in configs]
    for name, rows in (("dq", slice(None)), ("dq", slice(0, None, 2)), ("dk", slice(None))):
        exact = wanted[name][..., rows, :]
        plain, fp16 = (relative_l2(getattr(x, name)[..., rows, :], exact) for x in results)
        assert fp16 < 1.1 * plain, (name, rows)


def test_dp_in_fp16_errs_by_what_fp16_sums_err(draw):
    """Four roundings of 2⁻¹² or so, of each sum: not fp32, and not bf16."""
    inputs = draw(100, head_dim=64, dtype=torch.float16)
    plain, fp16 = (attention(*inputs, config=SageConfig(dp_fp16_accumulation=on)) for on in (False, True))
    assert 2e-4 < relative_l2(fp16.dp, plain.dp) < 5e-4
    assert torch.equal(fp16.out, plain.out)
    assert torch.equal(fp16.dv, plain.dv)
