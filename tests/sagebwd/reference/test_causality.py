"""``SageConfig.strictly_causal``: what the mask hides leaves no trace, not a bit. Other settings leak."""

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from sagebwd.reference import attention

STRICT = SageConfig.strictly_causal()
SMALL_TILES = replace(STRICT, block_q=32, block_kv=16)
UNSIGNED_P = replace(STRICT, unsigned_p=True)
LATER = {
    "other values": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x),
    "huge": lambda x: 0.9 * torch.finfo(x.dtype).max * x.sign(),
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "Inf": lambda x: torch.full_like(x, torch.inf),
    "-Inf": lambda x: torch.full_like(x, -torch.inf),
}


def change_after(inputs, cut, later):
    """The inputs with tokens ``cut`` and later of each replaced by what ``later`` makes of them."""
    return [torch.cat((x[..., :cut, :], later(x[..., cut:, :])), -2) for x in inputs]


def results(inputs, config):
    return attention(*inputs, is_causal=True, enable_gqa=True, config=config)


def leaks(inputs, cut, later, config):
    """Which of out and dq of the tokens before ``cut`` are not bit for bit the same after the change."""
    before, after = results(inputs, config), results(change_after(inputs, cut, later), config)
    names = ("out", "dq")
    assert all(getattr(before, name).isfinite().all() for name in names)
    return [
        name
        for name in names
        if not torch.equal(getattr(before, name)[..., :cut, :], getattr(after, name)[..., :cut, :])
    ]


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
@pytest.mark.parametrize("cut", [1, 17, 63, 64, 65, 127, 128, 129, 144])
@pytest.mark.parametrize(
    "config", [STRICT, SMALL_TILES, UNSIGNED_P], ids=["default tiles", "small tiles", "unsigned_p"]
)
def test_hidden_tokens_leave_no_trace(draw, config, cut, later):
    inputs = draw(145, head_dim=24, batch=1)  # one token in the last small tile of keys
    assert leaks(inputs, cut, later, config) == []


@pytest.mark.parametrize("later", ["other values", "huge"])
@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_finite_hidden_tokens_leave_no_trace_with_the_accurate_preset(draw, cut, later):
    inputs = draw(130, head_dim=24, batch=1, dtype=torch.bfloat16)
    assert leaks(inputs, cut, LATER[later], SageConfig.accurate()) == []


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
@pytest.mark.parametrize(
    ("n", "cut", "head_dim", "heads", "kv_heads", "dtype"),
    [
        (70, 40, 1, 4, 2, torch.float32),
        (131, 130, 64, 6, 1, torch.float16),
        (193, 128, 40, 3, 3, torch.bfloat16),  # one token in the last tile of queries and of keys
        (129, 128, 16, 2, 2, torch.float32),
        (90, 77, 130, 4, 2, torch.float16),
        (20, 11, 1100, 1, 1, torch.float32),
    ],
)
def test_hidden_tokens_leave_no_trace_in_any_shape(draw, later, n, cut, head_dim, heads, kv_heads, dtype):
    inputs = draw(n, head_dim=head_dim, batch=1, heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert leaks(inputs, cut, later, STRICT) == []


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
@pytest.mark.parametrize("name", range(4), ids=["q", "k", "v", "grad_out"])
def test_one_hidden_tensor_leaves_no_trace(draw, name, later):
    inputs = draw(150)
    changed = [later if n == name else (lambda x: x) for n in range(4)]
    after = [change_after([x], 100, change)[0] for x, change in zip(inputs, changed, strict=True)]
    before, after = results(inputs, STRICT), results(after, STRICT)
    for output in ("out", "lse", "delta", "dq"):
        assert torch.equal(*(getattr(x, output)[:, :, :100] for x in (before, after))), output
    for tile in ("p", "dp", "ds"):
        assert torch.equal(*(getattr(x, tile)[:, :, :100] for x in (before, after))), tile


@pytest.mark.parametrize(
    "switches",
    [{"s_levels": 2}, {"exact_delta": True}, {"int8_matmuls": MATMULS}, {"s_levels": 2, "exact_delta": True}],
    ids=str,
)
@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
def test_switches_that_keep_it(draw, switches, later):
    assert leaks(draw(150, batch=1), 75, later, replace(STRICT, **switches)) == []


@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize("later", ["other values", "huge"])
def test_products_outside_int8_keep_it_for_numbers(draw, matmul, later):
    config = replace(STRICT, int8_matmuls=tuple(m for m in MATMULS if m != matmul))
    assert leaks(draw(150, batch=1), 75, LATER[later], config) == []


@pytest.mark.parametrize(
    ("config", "leaking"),
    [
        (SageConfig(), ["out", "dq"]),
        (SageConfig.paper(), ["out", "dq"]),
        (replace(STRICT, smooth_k=True), ["out", "dq"]),
        (replace(STRICT, smooth_q=True), ["out", "dq"]),
        (replace(STRICT, operand_scales="block"), ["out", "dq"]),
        (replace(STRICT, granularity="block"), ["dq"]),
    ],
)
@pytest.mark.parametrize("later", ["other values", "NaN"])
def test_every_other_setting_leaks(draw, config, leaking, later):
    assert leaks(draw(150, batch=1), 75, LATER[later], config) == leaking


def test_a_nan_of_an_earlier_query_does_not_reach_keys_that_it_cannot_see(draw):
    """The other direction of the same mask: dk and dv of a token come from the queries that see it."""
    for name in (0, 3):  # q, grad_out
        inputs = draw(150)
        inputs[name][..., 40, :] = torch.nan
        result = results(inputs, STRICT)
        for output in (result.dk, result.dv):
            assert output[..., :41, :].isnan().all()
            assert output[..., 41:, :].isfinite().all()
        assert result.ds[..., 40, :41].isnan().all()
        assert not any(x.triu(1).any() for x in (result.p, result.dp, result.ds))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [1, 2], ids=["k", "v"])
def test_every_query_that_sees_a_poisoned_token_shows_it(draw, poison, name):
    inputs = draw(150)
    inputs[name][..., 75, 3] = poison
    result = results(inputs, STRICT)
    for output in (result.out, result.dq):
        assert output[..., :75, :].isfinite().all()
        assert output[..., 75:, :].isnan().all()
