"""``SageConfig.strictly_causal``: what the mask hides leaves no trace, not a bit. Other settings leak."""

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from sagebwd.reference import attention
from tests.sagebwd.kernels.inputs import INPUTS, LATER, change_after

STRICT = SageConfig.strictly_causal()
SMALL_TILES = replace(STRICT, block_q=32, block_kv=16)
UNSIGNED_P = replace(STRICT, unsigned_p=True)
FINITE = ("other values", "huge")


def results(inputs, config):
    return attention(*inputs, is_causal=True, enable_gqa=True, config=config)


def leaks(inputs, cut, config, laters=LATER):
    """{change of the tokens from ``cut`` on: which of out and dq before it are no longer the same bits}."""
    before, found = results(inputs, config), {}
    for later in laters:
        after = results([change_after(x, cut, later) for x in inputs], config)
        for name in ("out", "dq"):
            x, y = (getattr(result, name)[..., :cut, :] for result in (before, after))
            assert x.isfinite().all()
            if not torch.equal(x, y):
                found.setdefault(later, []).append(name)
    return found


@pytest.mark.parametrize("cut", [1, 17, 63, 64, 65, 127, 128, 129, 144])
@pytest.mark.parametrize(
    "config", [STRICT, SMALL_TILES, UNSIGNED_P], ids=["default tiles", "small tiles", "unsigned_p"]
)
def test_hidden_tokens_leave_no_trace(draw, config, cut):
    assert not leaks(draw(145, batch=1), cut, config)  # one token in the last small tile of keys


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_finite_hidden_tokens_leave_no_trace_with_the_accurate_preset(draw, cut):
    assert not leaks(draw(130, batch=1, dtype=torch.bfloat16), cut, SageConfig.accurate(), FINITE)


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
def test_hidden_tokens_leave_no_trace_in_any_shape(draw, n, cut, head_dim, heads, kv_heads, dtype):
    inputs = draw(n, head_dim=head_dim, batch=1, heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert not leaks(inputs, cut, STRICT)


@pytest.mark.parametrize("name", range(4), ids=INPUTS)
def test_one_hidden_tensor_leaves_no_trace(draw, name):
    inputs = draw(150)
    before = results(inputs, STRICT)
    for later in LATER:
        changed = [change_after(x, 100, later) if n == name else x for n, x in enumerate(inputs)]
        after = results(changed, STRICT)
        for found in ("out", "lse", "delta", "dq", "p", "dp", "ds"):
            x, y = (getattr(result, found)[:, :, :100] for result in (before, after))
            assert torch.equal(x, y), (later, found)


def test_an_int8_dp_keeps_it(draw):
    assert not leaks(draw(150, batch=1), 75, replace(STRICT, int8_matmuls=MATMULS))


@pytest.mark.parametrize("matmul", MATMULS)
def test_products_outside_int8_keep_it_for_numbers(draw, matmul):
    config = replace(STRICT, int8_matmuls=tuple(m for m in MATMULS if m != matmul))
    assert not leaks(draw(150, batch=1), 75, config, FINITE)


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
def test_every_other_setting_leaks(draw, config, leaking):
    laters = ("other values", "NaN")
    assert leaks(draw(150, batch=1), 75, config, laters) == dict.fromkeys(laters, leaking)


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
