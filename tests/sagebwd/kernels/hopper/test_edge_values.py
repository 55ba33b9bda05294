"""The Hopper kernels with extreme values: NaN and Inf, the largest and the smallest."""

from __future__ import annotations

import pytest
import torch

from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels.hopper.cases import (
    BF16,
    FP16,
    GRADIENTS,
    INPUTS,
    NAMES,
    both_head_dims,
    causal_and_full,
    constant,
    every_input,
    every_poison,
    poison_one,
)
from tests.sagebwd.kernels.triton import test_edge_values as edge_values

# --- NaN and Inf -------------------------------------------------------------------------------------------

#: In both blocks of 64 queries that share a tile of 128 keys, in the next tile, and the last token of all.
TOKENS = (0, 40, 69, 130, 139)
poisoned_anywhere = pytest.mark.parametrize("token", TOKENS)


@every_input
@every_poison
@poisoned_anywhere
@both_head_dims
def test_nan_and_inf_reach_what_they_reach_in_the_reference(
    kernels, attend_reference, sample, name, poison, token, head_dim
):
    inputs = poison_one(sample(140, head_dim=head_dim), name, token, poison)
    found, wanted = (attention(*inputs) for attention in (kernels, attend_reference))
    for x in NAMES:
        assert not found[x].isinf().any(), x
        assert torch.equal(found[x].isnan(), wanted[x].isnan()), x


@every_input
@every_poison
@poisoned_anywhere
@both_head_dims
def test_nan_and_inf_under_the_causal_mask(kernels, attend_reference, sample, name, poison, token, head_dim):
    """All that depends on the poison is NaN, and nothing but what shares a tile with something that does."""
    inputs = poison_one(sample(140, head_dim=head_dim), name, token, poison)
    found, wanted = (attention(*inputs, is_causal=True) for attention in (kernels, attend_reference))
    assert not any(found[x].isinf().any() for x in NAMES)
    for x in ("out", "dq"):  # for dK and dV the hidden half of a tile of keys may be left out
        assert torch.equal(found[x].isnan(), wanted[x].isnan()), x

    out, dq, dk, dv = (found[x][0, 0] for x in NAMES)
    query, seeing, seen = slice(token, token + 1), slice(token, None), slice(token + 1)
    must_be_nan = {
        "q": [out[query], dq[query], dk[seen], dv[seen]],
        "k": [out, dq, dk, dv],  # by way of the mean of K
        "v": [out[seeing], dq[seeing], dk],
        "grad_out": [dq[query], dk[seen], dv[seen]],
    }
    block, tile = slice(token // 64 * 64), slice(token // 128 * 128)
    hidden = slice(-(-(token // 64 * 64 + 64) // 128) * 128, None)  # tiles of keys after the block of queries
    must_be_finite = {
        "q": [out[block], dq[block], dk[hidden], dv[hidden]],
        "k": [],
        "v": [out[tile], dq[tile], dv],
        "grad_out": [out, dq[block], dk[hidden], dv[hidden]],
    }
    assert all(x.isnan().all() for x in must_be_nan[name])
    assert all(x.isfinite().all() for x in must_be_finite[name])


@both_head_dims
def test_another_batch_and_another_group_stay_clean(kernels, sample, head_dim):
    """A poisoned key of batch 1, head 0 shows in the two query heads that share it, and nowhere else."""
    inputs = sample(140, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    inputs[1][1, 0, 7, 3] = torch.nan
    found = kernels(*inputs)
    for name in NAMES:
        poisoned = torch.zeros_like(found[name], dtype=torch.bool)
        poisoned[1, : 2 if name in ("out", "dq") else 1] = True
        assert torch.equal(found[name].isnan(), poisoned), name
        assert not found[name].isinf().any(), name


# --- Large values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv", [70, 202])
@pytest.mark.parametrize("size", [22, 24, 26, 28, 100, 300, 3000, 10000, 60000])
@both_head_dims
def test_large_logits_choose_the_keys_that_agree(kernels, size, n_kv, head_dim):
    """As in test_edge_values.py. Around size² · √D · log₂e = 2¹³, the four smallest sizes, kernels begin to
    round the product before they subtract the maximum; just below, that costs up to a step of fp16.
    """
    q = constant(40, head_dim, size)
    ones = constant(n_kv, head_dim, 1)
    k, v = (edge_values.alternating(ones, x) for x in (float(size), 6e4))
    found = kernels(q, k, v, 1e-4 * torch.ones_like(q))
    assert (found["out"].double() - 6e4).abs().max() <= (32 if size < 100 else 0)
    assert all(found[name].isfinite().all() for name in GRADIENTS)


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize(("n_q", "n_kv"), [(40, 70), (130, 200)])
@both_head_dims
def test_large_logits_of_random_numbers(kernels, attend_reference, sample, scale, n_q, n_kv, head_dim):
    """As in test_edge_values.py: O is one value, dV dO of its queries, the rest noise of the same size."""
    inputs = sample(n_q, n_kv, head_dim=head_dim)
    inputs[3] *= 2**-6  # so that the noise does not overflow
    found, wanted = (attention(*inputs, scale=scale) for attention in (kernels, attend_reference))
    for name in ("out", "dv"):
        assert relative_l2(found[name], wanted[name]) < 1e-3, name
    for name in ("dq", "dk"):
        assert found[name].isfinite().all(), name
        assert found[name].float().norm() < 4 * wanted[name].float().norm(), name


@both_head_dims
def test_the_largest_powers_of_two(kernels, attend_reference, exact, sample, head_dim):
    """As in test_edge_values.py: ± 2¹⁵, every key next to its negative, with ties at the top."""
    q, k, v, grad_out = (x.sign() for x in sample(40, 70, head_dim=head_dim))
    k[..., 1::2, :] = -k[..., ::2, :]
    inputs = 2**15 * q, 2**15 * k, 2**15 * v, 2**-20 * grad_out
    found, wanted = (attention(*inputs) for attention in (kernels, attend_reference))
    assert relative_l2(found["out"], exact(*inputs)["out"]) < 1e-3
    for name in NAMES:
        assert found[name].isfinite().all(), name
        assert relative_l2(found[name], wanted[name]) < (1 / 127 if name in ("dq", "dk") else 1e-3), name


@both_head_dims
def test_finite_gradients_that_overflow_fp16_become_inf(kernels, head_dim):
    """As in torch's attention: loss scaling looks for them."""
    zeros = constant(40, head_dim)
    one_key = kernels(zeros, zeros[:, :, :1], zeros[:, :, :1], torch.full_like(zeros, 6e4))
    assert one_key["dv"].isposinf().all()
    k, v = (edge_values.alternating(zeros, x) for x in (6e4, 10.0))
    assert kernels(zeros, k, v, torch.ones_like(zeros))["dq"].isposinf().all()


@both_head_dims
def test_fp32_sums_that_overflow_are_nan(kernels, head_dim):
    """3e38 in V and dO: O is their mean, but dP, δ and the sum in dV overflow. Inf would be plausible."""
    zeros = constant(40, head_dim, dtype=BF16)
    large = torch.full_like(zeros, 3e38)
    found = kernels(zeros, zeros, large, large)
    assert not found["out"].isinf().any()
    assert found["dq"].isnan().all()
    assert found["dk"].isnan().all()
    one_key = kernels(zeros, zeros[:, :, :1], large[:, :, :1], large)
    assert one_key["dv"].isnan().all()


# --- Small values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [INPUTS, ("grad_out",)], ids=["all", "grad_out"])
@pytest.mark.parametrize("n", [40, 140])
@both_head_dims
def test_subnormal_values_of_fp16_count(kernels, attend_reference, sample, names, n, head_dim):
    """2⁻²⁰ times Gaussian, in steps of 2⁻²⁴. fp32 holds them exactly; results may differ by one step."""
    inputs = [
        (2.0**-20 * x.float()).half() if name in names else x
        for name, x in zip(INPUTS, sample(n, head_dim=head_dim), strict=True)
    ]
    found, wanted = (attention(*inputs) for attention in (kernels, attend_reference))
    for name in NAMES if names == INPUTS else GRADIENTS:
        assert (found[name].float() - wanted[name].float()).abs().max() <= 2**-24, name
        assert name in ("dq", "dk") or found[name].any(), name


@pytest.mark.parametrize("exponent", [-80, -60, 60])
@causal_and_full
@both_head_dims
def test_gradients_scale_with_grad_out_bit_for_bit(kernels, sample, exponent, is_causal, head_dim):
    """bf16 reaches as far down as fp32. Nothing is flushed to zero, and no constant hides in a division."""
    *inputs, grad_out = sample(140, head_dim=head_dim, dtype=BF16)
    scaled = kernels(*inputs, 2.0**exponent * grad_out, is_causal=is_causal)
    plain = kernels(*inputs, grad_out, is_causal=is_causal)
    for name in GRADIENTS:
        assert torch.equal(scaled[name], 2.0**exponent * plain[name]), name


@pytest.mark.parametrize(("size", "dtype"), [(1e-4, FP16), (1e-20, BF16)], ids=["1e-4", "1e-20"])
@pytest.mark.parametrize(("n_q", "n_kv"), [(63, 63), (129, 129), (257, 257), (100, 131), (131, 100)])
@causal_and_full
@both_head_dims
def test_the_mask_holds_where_logits_are_near_zero(
    check, sample, size, dtype, n_q, n_kv, is_causal, head_dim
):
    """A hidden logit, −2³⁰ in INT32, times the scales of such values is near zero as well."""
    q, k, v, grad_out = sample(n_q, n_kv, head_dim=head_dim, dtype=torch.float32)
    inputs = [x.to(dtype) for x in (size * q, size * k, v, grad_out)]
    found = check(inputs, ("out", "dv"), is_causal=is_causal)
    # The others are subnormal, so that one step of fp16 shows.
    assert all(found[name].isfinite().all() for name in ("dq", "dk"))
    visible = torch.ones(n_q, n_kv, dtype=torch.float64)
    visible = visible.tril() if is_causal else visible
    mean = visible / visible.sum(-1, keepdim=True) @ v.double()
    assert relative_l2(found["out"], mean) < 0.02


@pytest.mark.parametrize("n", [1, 40, 63, 129, 300])
@both_head_dims
def test_zeros(kernels, n, head_dim):
    zeros = constant(n, head_dim)
    found = kernels(zeros, zeros, zeros, zeros, is_causal=True)
    for name in NAMES:
        assert torch.equal(found[name], zeros), name


@pytest.mark.parametrize("n", [70, 129, 301])
@causal_and_full
@both_head_dims
def test_equal_logits_average_the_values(kernels, sample, n, is_causal, head_dim):
    """Q = K = 0: P̃ = 1 has no error in INT8, and V's is at most half a step of its block."""
    _, _, v, grad_out = sample(n, head_dim=head_dim)
    zeros = torch.zeros_like(v)
    found = kernels(zeros, zeros, v, grad_out, is_causal=is_causal)
    visible = torch.ones(n, n, dtype=torch.float64)
    p = visible.tril() if is_causal else visible
    p = p / p.sum(-1, keepdim=True)
    # Where P varies along a column, a dV adds half a step of it for each query.
    loss_of_p = (0.5 / 127 * p.amax(0)[:, None] * grad_out.double().abs().sum(-2)) if is_causal else 0
    for name, x, weights, loss in (("out", v, p, 0), ("dv", grad_out, p.mT, loss_of_p)):
        mean = weights @ x.double()
        rounding = 0.5 * x.double().abs().max() / 127 * weights.sum(-1, keepdim=True)
        assert ((found[name].double() - mean).abs() <= 1.01 * rounding + 2**-10 * mean.abs() + loss).all(), (
            name
        )
    assert not found["dq"].any()
    assert not found["dk"].any()


@both_head_dims
def test_all_tokens_equal(kernels, head_dim):
    """Each value is the largest of its tile, which INT8 holds exactly, and every weight is 1/150."""
    q, k, v, grad_out = (constant(150, head_dim, value) for value in (2.0, -3.0, 5.0, 1.0))
    found = kernels(q, k, v, grad_out)
    ulp = 2.0**-10
    torch.testing.assert_close(found["out"], v, rtol=ulp, atol=0)
    torch.testing.assert_close(found["dv"], grad_out, rtol=ulp, atol=0)
    # dP = 5 D, and so is δ, but for what fp16 rounds away from O: a relative 2⁻¹¹.
    for name, other in (("dq", k), ("dk", q)):
        assert (found[name].abs() <= 5 * 2**-11 * other.abs() * head_dim**0.5).all(), name
