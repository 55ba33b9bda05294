"""The emulation of one head: the reference where both can say the same, exact where nothing is rounded."""

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention, exact_attention
from scripts.paper import products, roundings
from scripts.paper.attention_emulation import DELTAS, EXACT, Head, Result, emulate, scheme_of

CONFIGS = [
    SageConfig.paper(),
    SageConfig(),
    SageConfig.strictly_causal(),
    SageConfig(smooth_q=True, smooth_v=True),
    SageConfig(smooth_k=False, exact_delta=True),
    SageConfig(unsigned_p=True),
    replace(SageConfig.strictly_causal(), unsigned_p=True),
    SageConfig(s_levels=2),
    SageConfig(int8_matmuls=("o", "dv", "dq", "dk")),
    SageConfig(int8_matmuls=("s_fwd", "s_bwd", "o"), block_q=32, block_kv=48),
]


def draw(tokens: int = 150, channels: int = 24, sigma: float = 2.0) -> list[torch.Tensor]:
    """q, k, v and dO (1, 1, N, D) that bf16 holds, q and k with a mean."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = torch.randn(4, 1, 1, tokens, channels, generator=generator)
    mean = torch.randn(2, channels, generator=generator)
    return [x.bfloat16().float() for x in (sigma * q + mean[0], sigma * k + mean[1], v, grad_out)]


def head_of(tensors: list[torch.Tensor]) -> Head:
    return Head(*(x[0, 0] for x in tensors))


def exact_head(tensors: list[torch.Tensor]) -> Result:
    whole = exact_attention(*tensors, is_causal=True)
    return Result(*(getattr(whole, name)[0, 0] for name in Result._fields))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_agrees_with_the_reference(config):
    tensors = draw()
    found = emulate(head_of(tensors), scheme_of(config, 24, torch.bfloat16))
    wanted = attention(*(x.bfloat16() for x in tensors), is_causal=True, config=config)
    for name, x in found._asdict().items():
        assert relative_l2(x.bfloat16(), getattr(wanted, name)[0, 0]) < 5e-4, name  # values next to ties


def test_without_rounding_it_is_attention():
    tensors = draw()
    for delta in DELTAS:
        found = emulate(head_of(tensors), replace(EXACT, delta=delta))
        for x, wanted in zip(found, exact_head(tensors), strict=True):
            assert relative_l2(x, wanted) < 2e-6


def test_roundings_group_by_group():
    """Odd sizes: groups at the end are short, and each has its own scale."""
    x = torch.randn(70, 50, generator=torch.Generator().manual_seed(0))
    x[64:, :] *= 100
    found = roundings.int8(64, 32)(x)
    for rows in (slice(0, 64), slice(64, 70)):
        for columns in (slice(0, 32), slice(32, 50)):
            scale = x[rows, columns].abs().max() / 127
            wanted = (x[rows, columns] / scale).round() * scale
            torch.testing.assert_close(found[rows, columns], wanted)
    assert torch.equal(roundings.int8(None, None)(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_stochastic_rounding_is_right_on_average():
    torch.manual_seed(0)
    x = torch.rand(20, 30) - 0.5
    rounding = roundings.stochastic_int8(1, None)
    step = x.abs().amax(-1, keepdim=True) / 127
    draws = torch.stack([rounding(x) for _ in range(1000)])
    assert ((draws - x).abs() <= step * 1.001).all()
    # The mean of 1000 errors of a standard deviation up to half a step; 5 standard deviations.
    assert ((draws.mean(0) - x).abs() < 5 * 0.5 * step / 1000**0.5).all()


def test_unsigned_steps_are_half_as_wide():
    p = torch.rand(64, 64)
    signed, unsigned = ((f(1, 32)(p) - p).square().mean().sqrt() for f in (roundings.int8, roundings.uint8))
    assert unsigned / signed == pytest.approx(127 / 255, rel=0.1)
    assert not roundings.uint8(1, 32)(torch.zeros(4, 40)).any()


@pytest.mark.parametrize("wrap", [roundings.rotated, roundings.per_channel])
def test_a_change_of_basis_alone_changes_nothing(wrap):
    for channels in (24, 64):
        x = torch.randn(40, channels)
        torch.testing.assert_close(wrap(roundings.exact)(x), x)


def test_a_rotation_spreads_an_outlier_and_a_scale_per_channel_isolates_it():
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 50
    plain = roundings.int8(128, None)
    others = [channel for channel in range(64) if channel != 5]

    def error(rounding):
        return relative_l2(rounding(x)[:, others], x[:, others])

    assert error(roundings.per_channel(plain)) < 0.1 * error(plain)
    assert error(roundings.rotated(plain)) < 0.6 * error(plain)
    assert error(roundings.but_channels(plain, 1 / 64)) < 0.1 * error(plain)


def test_the_largest_tiles_stay_exact():
    x = torch.ones(8, 8).tril() / 3
    x[4:, :4] *= 10
    found = roundings.but_hard_tiles(torch.zeros_like, 4, 4, 1 / 3)(x)  # of three tiles that are not empty
    assert torch.equal(found[4:, :4], x[4:, :4])
    assert not found[:4].any()
    assert not found[4:, 4:].any()


def test_delta():
    """What the wrong δ put into dQ and dK is removed, whatever made δ wrong."""
    tensors = draw()
    wrong = replace(EXACT, stored=lambda out: 0.8 * out)
    wanted = exact_head(tensors)
    errors = {}
    for delta in DELTAS:
        found = emulate(head_of(tensors), replace(wrong, delta=delta))
        errors[delta] = [relative_l2(x, y) for x, y in zip(found, wanted, strict=True)]
    assert min(errors["output"][1:3]) > 0.02
    assert max(errors["exact"] + errors["projected"]) < 2e-6
    assert errors["exact in dK"][1] == errors["output"][1]
    assert errors["exact in dK"][2] < 2e-6


def test_sums_of_rounded_p_leave_constant_values_as_they_are():
    """Which no rounding of P does otherwise; other values come out as near as ever."""
    p = torch.rand(40, 60, generator=torch.Generator().manual_seed(0)).softmax(-1)
    v = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    constant = torch.linspace(-3, 3, 8)
    bf16, exact = roundings.to_dtype(torch.bfloat16), roundings.exact
    plain, compensated = (make(bf16, exact) for make in (products.product_of, products.over_rounded_sums))
    wanted = constant.expand(40, 8)
    torch.testing.assert_close(compensated(p, constant.expand(60, 8)), wanted, rtol=1e-6, atol=1e-6)
    assert relative_l2(plain(p, constant.expand(60, 8)), wanted) > 1e-4
    assert relative_l2(compensated(p, v), p @ v) < 1.5 * relative_l2(plain(p, v), p @ v) < 0.01


def test_compensation_fixes_delta_where_values_are_similar():
    """Not compared with the reference, which rounds a 16-bit P at another scale."""
    q, k, v, grad_out = draw()
    v = (0.01 * v + 1).bfloat16().float()
    wanted = exact_head([q, k, v, grad_out]).dq

    def error(**settings):
        config = SageConfig(int8_matmuls=("dv", "dk"), **settings)
        found = emulate(head_of([q, k, v, grad_out]), scheme_of(config, 24, torch.bfloat16))
        return relative_l2(found.dq, wanted)

    plain, compensated = error(), error(compensate_o=True)
    assert compensated < 0.01 < plain / 10


def test_smooth_values_are_exact_for_constant_values():
    p = torch.rand(30, 30).softmax(-1)
    v = torch.randn(1, 8).expand(30, 8)
    output = products.product_of(nothing, roundings.exact)
    torch.testing.assert_close(products.smooth_values(output)(p, v), v)


def nothing(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize(
    "config",
    [
        SageConfig(add_mean_k_term=True),
        SageConfig(int8_matmuls=("s_fwd",)),
        SageConfig(int8_matmuls=("dp",)),
    ],
)
def test_refuses_what_it_cannot_say(config):
    with pytest.raises(ValueError, match="has no emulation; leave add_mean_k_term off"):
        scheme_of(config, 64, torch.bfloat16)


def test_refuses_an_unknown_delta():
    with pytest.raises(ValueError, match="delta is 'none'; choose from 'output', 'exact'"):
        replace(EXACT, delta="none")
