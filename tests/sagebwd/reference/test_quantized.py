"""What INT8 costs, against float64 attention, and the claims of the papers about it."""

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG, MATMULS
from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import attention

NAMES = ("out", "dq", "dk", "dv")
CONFIGS = [
    {},
    {"smooth_k": False},
    {"smooth_q": True},
    {"smooth_v": True},
    {"unsigned_p": True},
    {"operand_scales": "token"},
    *({"int8_matmuls": matmuls} for matmuls in (MATMULS, *((name,) for name in MATMULS))),
]
CASES = [
    *({"config": SageConfig(**settings)} for settings in CONFIGS),
    *({name: value} for name, value in (("add_mean_k_term", True), ("exact_delta", True), ("s_levels", 2))),
    {"s_levels": 2, "config": SageConfig(operand_scales="token", smooth_q=True)},
]


@pytest.fixture
def errors(exact):
    """Relative L2 of out, dq, dk, dv (in this order) against float64 attention."""

    def errors(inputs, config=DEFAULT_CONFIG, *, is_causal=False, **switches):
        wanted = exact(*inputs, is_causal=is_causal)
        result = attention(*inputs, config=config, is_causal=is_causal, **switches)
        return [relative_l2(getattr(result, name), wanted[name]) for name in NAMES]

    return errors


@pytest.mark.parametrize("switches", CASES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_kv"), [(150, 150), (70, 131), (131, 70)])
def test_close_to_attention_under_every_switch(draw, errors, switches, is_causal, n_q, n_kv):
    inputs = draw(n_q, n_kv, head_dim=40)
    assert max(errors(inputs, is_causal=is_causal, **switches)) < 0.026


@pytest.mark.parametrize("is_causal", [False, True])
def test_row_scales_halve_the_gradient_error(draw, errors, is_causal):
    inputs = draw(512, head_dim=64, batch=1)
    _, *block = errors(inputs, SageConfig(granularity="block"), is_causal=is_causal)
    _, *row = errors(inputs, SageConfig(granularity="row"), is_causal=is_causal)
    assert all(fine < 0.6 * coarse for fine, coarse in zip(row, block, strict=True))


def test_a_scale_per_token_is_a_little_better_and_far_better_for_unequal_tokens(draw, errors):
    """A token ten times as large as its neighbours sets the scale of its whole block, or only its own."""
    block, token = SageConfig(smooth_k=False), SageConfig.strictly_causal()
    inputs = draw(512, head_dim=64, batch=1)
    pairs = zip(errors(inputs, token, is_causal=True), errors(inputs, block, is_causal=True), strict=True)
    assert all(fine < coarse for fine, coarse in pairs)
    for x in inputs[2:]:
        x[..., ::50, :] *= 10
    fine, coarse = (errors(inputs, config, is_causal=True) for config in (token, block))
    assert fine[0] < 0.8 * coarse[0]


@pytest.mark.parametrize(("head_dim", "tile"), [(64, (64, 128)), (130, (64, 64))])
def test_the_tile_is_that_of_the_settings(draw, head_dim, tile):
    inputs = draw(200, head_dim=head_dim)
    found = attention(*inputs)
    for block_q, block_kv in ((64, 64), (64, 128), (128, 64)):
        wanted = attention(*inputs, config=SageConfig(block_q=block_q, block_kv=block_kv))
        same = all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in NAMES)
        assert same == ((block_q, block_kv) == tile)


def test_int8_dp_is_much_worse_where_dp_is_large_against_ds(draw, exact):
    """Why dP stays in 16 bit: what all values share cancels in dP − δ, but its error in INT8 does not."""
    q, k, v, grad_out = draw(512, head_dim=64, batch=1)
    v = v + 10 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    wanted = exact(q, k, v, grad_out)
    paper = attention(q, k, v, grad_out, config=SageConfig.paper())
    int8 = attention(q, k, v, grad_out, config=SageConfig(granularity="block", int8_matmuls=MATMULS))
    assert relative_l2(int8.dq, wanted["dq"]) > 2 * relative_l2(paper.dq, wanted["dq"])
    assert relative_l2(int8.dk, wanted["dk"]) > 2 * relative_l2(paper.dk, wanted["dk"])
    assert cosine_similarity(paper.dq, wanted["dq"]) > 0.998
    assert cosine_similarity(int8.dq, wanted["dq"]) < 0.985


def test_k_smoothing_takes_a_channel_bias_away(draw, errors):
    q, k, v, grad_out = draw(256, head_dim=64, batch=1)
    biased = k + 10 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    plain = errors([q, k, v, grad_out], SageConfig())
    smoothed = errors([q, biased, v, grad_out], SageConfig())
    unsmoothed = errors([q, biased, v, grad_out], SageConfig(smooth_k=False))
    assert all(error < 1.15 * reference for error, reference in zip(smoothed, plain, strict=True))
    assert all(error > 2 * reference for error, reference in zip(unsmoothed, smoothed, strict=True))


@pytest.mark.parametrize("operand_scales", ["block", "token"])
def test_v_smoothing_takes_what_all_values_share_out_of_o_dq_and_dk(draw, errors, operand_scales):
    """What P loses by rounding times the mean of V is an error of O, and by way of δ of dQ and dK."""
    q, k, v, grad_out = draw(256, head_dim=64, batch=1)
    biased = v + 5 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    plain, smooth = (SageConfig(smooth_v=on, operand_scales=operand_scales) for on in (False, True))
    unsmoothed = errors([q, k, biased, grad_out], plain)
    smoothed = errors([q, k, biased, grad_out], smooth)
    without_mean = errors([q, k, v, grad_out], plain)
    assert smoothed[0] < 0.35 * unsmoothed[0]
    assert smoothed[1:3] == pytest.approx(without_mean[1:3], rel=0.01)
    assert all(error > 1.1 * best for error, best in zip(unsmoothed[1:3], smoothed[1:3], strict=True))
    assert smoothed[3] == unsmoothed[3]


@pytest.mark.parametrize("operand_scales", ["block", "token"])
def test_unsigned_p_halves_what_rounding_p_costs_o_and_dv(draw, operand_scales):
    """V and dO of ± 1 are exact in INT8, so that of the errors of O and dV there is left that of P."""
    q, k, v, grad_out = draw(300, head_dim=64, batch=1)
    inputs = q, k, v.sign(), grad_out.sign()

    def result(int8_matmuls, unsigned_p):
        config = SageConfig(
            int8_matmuls=int8_matmuls, unsigned_p=unsigned_p, operand_scales=operand_scales, smooth_k=False
        )
        return attention(*inputs, is_causal=True, config=config)

    wanted = result((), False)
    signed, unsigned = (result(("o", "dv"), on) for on in (False, True))
    for name in ("out", "dv"):
        coarse, fine = (relative_l2(getattr(x, name), getattr(wanted, name)) for x in (signed, unsigned))
        assert fine / coarse == pytest.approx(127 / 255, rel=0.05), name
    assert torch.equal(unsigned.lse, wanted.lse)


@pytest.mark.parametrize("name", ["o", "dv"])
def test_unsigned_p_changes_the_products_of_p_that_are_int8_and_no_others(draw, name):
    inputs = [x.bfloat16() for x in draw(150, head_dim=24)]
    signed, unsigned = (
        attention(*inputs, config=SageConfig(int8_matmuls=(name, "dq", "dk"), unsigned_p=on))
        for on in (False, True)
    )
    same = {x for x in NAMES if torch.equal(getattr(signed, x), getattr(unsigned, x))}
    assert same == ({"dv"} if name == "o" else {"out", "dq", "dk"})


@pytest.mark.parametrize("mean", [0, 5])
def test_unsigned_p_lessens_the_error_of_o_and_dv_and_with_a_mean_of_v_that_of_dq_and_dk(draw, errors, mean):
    """On Gaussians little of dQ's error is P's; a mean of V, times what P loses, gets into δ."""
    q, k, v, grad_out = draw(512, head_dim=64, batch=1)
    v = v + mean * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    signed, unsigned = (
        errors([q, k, v, grad_out], SageConfig(unsigned_p=on), is_causal=True) for on in (False, True)
    )
    falls = [1 - fine / coarse for fine, coarse in zip(unsigned, signed, strict=True)]
    assert min(falls[0], falls[3]) > 0.1
    assert min(falls[1:3]) > (0.05 if mean else -0.01)


def test_the_mean_k_term_adds_error_when_k_has_a_mean(draw, errors):
    q, k, v, grad_out = draw(256, head_dim=64, batch=1)
    k = k + 10 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    dropped = errors([q, k, v, grad_out], SageConfig())
    added = errors([q, k, v, grad_out], add_mean_k_term=True)
    assert added[1] > 3 * dropped[1]
    assert added[2:] == dropped[2:]


def test_q_smoothing_takes_a_query_bias_away(draw, errors):
    q, k, v, grad_out = draw(256, head_dim=64, batch=1, heads=4)
    q = q + 3 * torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    smoothed = errors([q, k, v, grad_out], SageConfig(smooth_q=True))
    unsmoothed = errors([q, k, v, grad_out], SageConfig())
    assert all(error > 1.3 * reference for error, reference in zip(unsmoothed, smoothed, strict=True))


def test_exact_delta_makes_rows_of_ds_sum_to_zero(draw):
    inputs = draw(200, head_dim=64)

    def largest_row_sum(**switches):
        ds = attention(*inputs, is_causal=True, **switches).ds.double()
        return (ds.sum(-1).abs() / ds.abs().sum(-1).amax(-1, keepdim=True)).max().item()

    assert largest_row_sum(exact_delta=True) < 2e-6
    assert largest_row_sum() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_compensation_gives_the_delta_of_the_backwards_own_p_and_dp(draw, dtype, is_causal):
    """Up to the rounding of the residual, and that of P where its values differ."""
    q, k, v, grad_out = draw(200, head_dim=64)
    inputs = [x.to(dtype) for x in (q, k, 0.005 * v + 1, grad_out)]

    def row_sums(compensate_o, **switches):
        config = SageConfig.consistent(compensate_o=compensate_o)
        ds = attention(*inputs, is_causal=is_causal, config=config, **switches).ds.double()
        return (ds.sum(-1).norm() / ds.norm()).item()

    assert row_sums(False) > 0.2
    assert row_sums(True) < 0.005
    assert row_sums(False, exact_delta=True) < 0.001


def test_two_levels_and_exact_delta_end_the_growth_with_the_logits(draw, errors):
    inputs = draw(512, head_dim=64, batch=1, sigma=8.0)
    assert max(errors(inputs, is_causal=True, s_levels=2, exact_delta=True)) < 0.015
    assert errors(inputs, SageConfig(), is_causal=True)[1] > 0.3


@pytest.mark.parametrize(("sigma", "factor"), [(1.0, 0.75), (3.0, 0.2), (8.0, 0.05)])
def test_the_accurate_preset_is_better_in_everything_most_of_all_with_large_logits(
    draw, errors, sigma, factor
):
    inputs = [x.bfloat16() for x in draw(512, head_dim=64, batch=1, sigma=sigma)]
    accurate = errors(inputs, SageConfig.accurate(), is_causal=True)
    default = errors(inputs, SageConfig(), is_causal=True)
    assert all(fine < coarse for fine, coarse in zip(accurate, default, strict=True))
    assert all(fine < factor * coarse for fine, coarse in zip(accurate[1:3], default[1:3], strict=True))


def test_the_consistent_preset_has_the_same_error_whatever_values_have_in_common(draw, errors):
    q, k, v, grad_out = (x.bfloat16() for x in draw(512, head_dim=64, batch=1))
    for inputs in ((q, k, v, grad_out), (q, k, 0.05 * v + 1, grad_out), (q, k, 0.01 * v - 2, grad_out)):
        consistent = errors(inputs, SageConfig.consistent(), is_causal=True)
        default = errors(inputs, SageConfig(), is_causal=True)
        assert all(fine <= 1.001 * coarse for fine, coarse in zip(consistent, default, strict=True))
        assert max(consistent[1:3]) < 0.025
    assert min(default[1:3]) > 0.5


def test_p_of_the_backward_is_normalised(draw):
    inputs = draw(150, head_dim=64)
    for levels in (1, 2):
        p = attention(*inputs, is_causal=True, s_levels=levels).p
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:-1]), rtol=0, atol=2e-6)
        assert not p.triu(1).any()


@pytest.mark.parametrize(
    ("config", "switches", "message"),
    [
        ({}, {"s_levels": 3}, "s_levels is 3; set it to 1 or 2"),
        ({"int8_matmuls": ("s_fwd",)}, {"s_levels": 2}, "add 's_fwd' and 's_bwd' to int8_matmuls"),
        ({"int8_matmuls": (), "compensate_o": True}, {"exact_delta": True}, "set compensate_o=False"),
        ({}, {"exact_delta": None}, "exact_delta is None; set it to true or false"),
        ({"smooth_k": False}, {"add_mean_k_term": True}, "set smooth_k=True"),
    ],
)
def test_refuses_switches_that_contradict_the_settings(draw, config, switches, message):
    with pytest.raises(ValueError, match=message):
        attention(*draw(20), config=SageConfig(**config), **switches)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_delta_takes_the_output_as_the_forward_rounded_it(draw, dtype):
    """The backward of a kernel reads O from memory; δ from an unrounded O would not be the same."""
    *inputs, grad_out = draw(150, dtype=dtype)
    result = attention(*inputs, grad_out)
    assert torch.equal(result.delta, (grad_out.float() * result.out.float()).sum(-1))
