"""Windows in the reference: exact attention against autograd, quantized against exact, tile by tile."""

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import PRESETS
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention, exact_attention
from tests.sagebwd.test_window import mask_of

NAMES = ("out", "dq", "dk", "dv")
SMALL_TILES = {"block_q": 32, "block_kv": 16}


def by_autograd(q, k, v, grad_out, mask):
    """{name: tensor} of one head, from the definition; a query without keys is left out of it."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    has_keys = mask.any(1)
    p = torch.zeros_like(s).index_copy(2, has_keys.nonzero()[:, 0], s[:, :, has_keys].softmax(-1))
    out = p @ v
    gradients = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return {"p": p, "lse": s.logsumexp(-1), "out": out, **dict(zip(NAMES[1:], gradients, strict=True))}


@pytest.mark.parametrize("elements_at_once", [1, 500, 2**24], ids=["row by row", "some rows", "at once"])
@pytest.mark.parametrize(("n_q", "n_kv"), [(40, 40), (13, 47), (47, 13)])
@pytest.mark.parametrize("window_size", [(0, 0), (5, 0), (3, 9), (-1, 4), (12, -1)])
def test_exact_attention_equals_autograd(draw, n_q, n_kv, window_size, elements_at_once):
    inputs = draw(n_q, n_kv, heads=1, batch=2)
    settings = {"window_size": window_size, "matrices": True, "elements_at_once": elements_at_once}
    found = exact_attention(*inputs, **settings)
    for name, x in by_autograd(*inputs, mask_of(n_q, n_kv, *window_size)).items():
        torch.testing.assert_close(getattr(found, name), x, rtol=1e-12, atol=1e-12)


def errors(inputs, config, **settings):
    found = attention(*inputs, config=config, enable_gqa=True, **settings)
    exact = exact_attention(*inputs, **settings)
    return [relative_l2(getattr(found, name), getattr(exact, name)) for name in NAMES]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("window_size", [(9, 0), (40, 20)])
def test_presets_err_as_without_a_window(draw, name, window_size):
    """The paper's scales of whole tiles cost as much as without one."""
    inputs = draw(150, 130, heads=2, kv_heads=1, batch=1)
    bound = 0.06 if name == "paper" else 0.026
    assert max(errors(inputs, PRESETS[name], window_size=window_size)) < bound


def test_tiles_that_are_skipped_have_no_part(draw):
    """One tile for all keys, of which most are masked, against small tiles, of which most are skipped."""
    inputs = draw(96, 80, batch=1)
    whole, tiled = (
        attention(*inputs, config=SageConfig(int8_matmuls=(), **tile), window_size=(20, 7))
        for tile in ({"block_q": 96, "block_kv": 80}, SMALL_TILES)
    )
    for name in (*NAMES, "p", "ds"):
        torch.testing.assert_close(getattr(tiled, name), getattr(whole, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_a_window_wider_than_the_sequence_changes_no_bit(draw, name):
    """Here nothing takes such limits away."""
    inputs = draw(70, 90, batch=1)
    for narrow, wide in (({}, (70, 90)), ({"is_causal": True}, (70, 0))):
        plain, windowed = (
            attention(*inputs, config=PRESETS[name], **x) for x in (narrow, {"window_size": wide})
        )
        assert all(torch.equal(getattr(plain, x), getattr(windowed, x)) for x in (*NAMES, "lse"))


@pytest.mark.parametrize("config", [SageConfig(), SageConfig(smooth_v=True), SageConfig.strictly_causal()])
def test_a_query_without_keys_gets_zeros_and_gives_none(draw, config):
    q, k, v, grad_out = draw(90, 30, batch=1)
    settings = {"window_size": (10, 0), "config": config}
    found = attention(q, k, v, grad_out, **settings)
    for name in ("out", "dq", "p", "ds", "delta"):
        assert not getattr(found, name)[:, :, 40:].any(), name
    assert (found.lse[:, :, 40:] == -torch.inf).all()
    assert found.lse[:, :, :40].isfinite().all()
    other = grad_out.clone()
    other[:, :, 64:] = 7.0  # they share no block with others
    changed = attention(q, k, v, other, **settings)
    assert torch.equal(changed.dk, found.dk)
    assert torch.equal(changed.dv, found.dv)


@pytest.mark.parametrize("change", ["other values", "NaN"])
@pytest.mark.parametrize(
    "config", [SageConfig.strictly_causal(), replace(SageConfig.strictly_causal(), **SMALL_TILES)]
)
def test_strictly_causal_tokens_outside_a_window_leave_no_trace(draw, config, change):
    """In out and dq of a token: it sees keys i − 12 … i, and they are those of queries i … i + 12."""
    inputs = draw(150, batch=1)
    settings = {"window_size": (12, 0), "config": config}
    before = attention(*inputs, **settings)
    changed = [x.clone() for x in inputs]
    for x in changed:
        for outside in (slice(0, 60 - 12), slice(91, None)):
            x[:, :, outside] = torch.nan if change == "NaN" else x[:, :, outside].flip(-1)
    after = attention(*changed, **settings)
    for name in ("out", "dq"):
        x, y = (getattr(result, name)[:, :, 60:91] for result in (before, after))
        assert x.isfinite().all()
        assert torch.equal(x, y), name


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_the_queries_that_see_a_poisoned_key_show_it(draw, poison):
    inputs = draw(150, batch=1)
    inputs[1][..., 75, 3] = poison
    result = attention(*inputs, window_size=(20, 5), config=SageConfig.strictly_causal())
    sees = mask_of(150, 150, 20, 5)[:, 75]
    for output in (result.out, result.dq):
        assert output[:, :, sees].isnan().all()
        assert output[:, :, ~sees].isfinite().all()
