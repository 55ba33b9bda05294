"""Masks that hide keys: exact on the keys that are left, and nothing comes from the others."""

import functools
from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import SageConfig, sage_attention
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from sagebwd.window import CAUSAL, Window
from tests.inputs import assert_same, gradients, mask_of

NO_INT8 = SageConfig(int8_matmuls=())
#: One row of (3, 41): holes, right padding, no key at all.
MASK = torch.zeros(3, 41, dtype=torch.bool)
MASK[0, ::3] = MASK[0, 30:] = MASK[1, :17] = True
LOWEST = torch.finfo(torch.float32).min

gradients_of = functools.partial(gradients, sage_attention, enable_gqa=True)


def exact_on_visible(inputs, mask, is_causal):
    """Float64 attention of each sequence's visible tokens alone, zeros for all others."""
    wanted = [torch.zeros(x.shape, dtype=torch.float64) for x in (inputs[0], *inputs[:3])]
    for row, keys in enumerate(mask):
        queries = keys if is_causal else torch.ones(inputs[0].shape[2], dtype=torch.bool)
        if not keys.any():
            continue
        tokens = (queries, keys, keys, queries)
        alone = exact_attention(
            *(x[row : row + 1, :, some] for x, some in zip(inputs, tokens, strict=True)), is_causal=is_causal
        )
        found = (alone.out, alone.dq, alone.dk, alone.dv)
        for x, some, part in zip(wanted, (queries, queries, keys, keys), found, strict=True):
            x[row, :, some] = part[0]
    return wanted


@pytest.fixture
def sample(draw):
    """q, k, v, grad_out of 3 sequences of 41 keys; hidden keys hold NaN and Inf."""

    def sample(n_q=41, *, is_causal=False):
        inputs = draw(n_q, 41, head_dim=16, batch=3, heads=4, kv_heads=2)
        hidden = ~MASK[:, None, :, None]
        clean = [x.clone() for x in inputs]
        for x in inputs if is_causal else inputs[1:3]:
            x.masked_fill_(hidden, torch.nan)
        inputs[1][2, :, 5] = torch.inf
        return inputs, clean

    return sample


@pytest.mark.parametrize(("n_q", "is_causal"), [(41, False), (41, True), (29, False)])
def test_is_exact_attention_on_the_visible_keys(sample, n_q, is_causal):
    inputs, clean = sample(n_q, is_causal=is_causal)
    wanted = exact_on_visible(clean, MASK, is_causal)
    arguments = {"key_padding_mask": MASK, "is_causal": is_causal}
    for found, x in zip(gradients_of(*inputs, **arguments, config=NO_INT8), wanted, strict=True):
        torch.testing.assert_close(found.double(), x, rtol=0, atol=1e-5)
        is_hidden = ~MASK if found.shape[2] == 41 and (is_causal or found.shape[1] == 2) else ~MASK.any(1)
        assert not found.transpose(1, 2)[is_hidden].any()
    for config in (SageConfig(), SageConfig(smooth_v=True), SageConfig.strictly_causal()):
        for found, x in zip(gradients_of(*inputs, **arguments, config=config), wanted, strict=True):
            assert relative_l2(found, x) < 0.03


def additive(value, dtype=torch.float32):
    return torch.zeros(3, 1, 1, 41, dtype=dtype).masked_fill(~MASK[:, None, None], value)


@pytest.mark.parametrize(
    ("attn_mask", "visible"),
    [
        (MASK[:, None, None], MASK),
        (MASK[:, None, None].expand(3, 4, 29, 41), MASK),
        (MASK[:1], MASK[:1].expand(3, 41)),
        (MASK[0].expand(29, 41), MASK[:1].expand(3, 41)),
        (MASK.any(1)[:, None, None, None], MASK.any(1, keepdim=True).expand(3, 41)),
        (additive(-torch.inf), MASK),
        (additive(LOWEST).expand(3, 1, 29, 41), MASK),
        (additive(-10000.0, torch.bfloat16), MASK),
    ],
)
def test_attn_mask_where_it_only_hides_keys(sample, attn_mask, visible):
    inputs, _ = sample(29)
    inputs = [x.nan_to_num(0.5, 0.5) for x in inputs]
    wanted = gradients_of(*inputs, key_padding_mask=visible)
    assert_same(gradients_of(*inputs, attn_mask=attn_mask), wanted)
    odd = torch.arange(41)[None] % 2 == 1
    both = gradients_of(*inputs, key_padding_mask=odd.expand(3, 41), attn_mask=attn_mask)
    assert_same(both, gradients_of(*inputs, key_padding_mask=visible & odd))
    leaves = [x.double() for x in inputs[:3]]
    seen = visible[:, None, None].expand(3, 1, 29, 41)
    torchs = scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    some = visible.any(1)
    assert relative_l2(wanted[0][some], torchs[some]) < 0.03


def test_a_bias_is_never_taken_for_a_mask(sample, compiled):
    """Where its values cannot be read, the sequence gets NaN, and its gradients, too."""
    inputs, _ = sample()
    inputs = [x.nan_to_num(0.5, 0.5) for x in inputs]
    bias = torch.zeros(3, 1, 1, 41)
    bias[1, ..., 7] = -2.5
    with pytest.raises(ValueError, match="values other than 0 and -9000 or less, which are a bias; SageBwd"):
        sage_attention(*inputs[:3], bias, enable_gqa=True)
    attend = compiled(sage_attention)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = attend(*leaves, bias, enable_gqa=True)
    for x in (out, *torch.autograd.grad(out, leaves, inputs[3])):
        assert x[1].isnan().all()
        assert x[[0, 2]].isfinite().all()


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented the batch"
)
def test_vmap(draw):
    q, k, v, _ = (x.unsqueeze(1) for x in draw(20, head_dim=16))
    mask = torch.rand(2, 1, 20, generator=torch.Generator().manual_seed(0)) > 0.4
    attend = lambda q, k, v, mask: sage_attention(q, k, v, key_padding_mask=mask)  # noqa: E731
    wanted = attend(*(x.flatten(0, 1) for x in (q, k, v, mask)))
    assert torch.equal(torch.vmap(attend)(q, k, v, mask).flatten(0, 1), wanted)


@pytest.mark.parametrize("window_size", [(5, 2), (60, 60)])
def test_a_window_of_padded_sequences(draw, window_size):
    """Padding on either side; each sequence gets the bits of its visible tokens alone, logsumexp included."""
    inputs = draw(41, head_dim=16, batch=3)
    mask = torch.zeros(3, 41, dtype=torch.bool)
    mask[0, :30] = mask[1, 11:] = mask[2] = True
    arguments = {"window_size": window_size, "return_lse": True}
    out, lse = sage_attention(*inputs[:3], key_padding_mask=mask, **arguments)
    for row, keys in enumerate(mask):
        alone = sage_attention(*(x[row : row + 1, :, keys] for x in inputs[:3]), **arguments)
        assert torch.equal(out[row : row + 1, :, keys], alone[0])
        assert torch.equal(lse[row : row + 1, :, keys], alone[1])
        assert not out[row, :, ~keys].any()
        assert (lse[row, :, ~keys] == -torch.inf).all()


def test_a_window_over_holes_is_refused(sample, compiled):
    inputs, _ = sample()
    inputs = [x.nan_to_num(0.5, 0.5) for x in inputs]
    mask = torch.ones_like(MASK)
    mask[0, 20] = mask[1, :5] = False
    additive = torch.where(mask, 0.0, -torch.inf)[:, None, None]
    attend = compiled(sage_attention)
    for of_kind, window in (({"key_padding_mask": mask}, (5, 2)), ({"attn_mask": additive}, (-1, 3))):
        arguments = {**of_kind, "window_size": window, "enable_gqa": True}
        with pytest.raises(ValueError, match="holes"):
            sage_attention(*inputs[:3], **arguments)
        out = attend(*inputs[:3], **arguments)
        assert out[0].isnan().all()
        assert out[1:].isfinite().all()


def test_a_hole_matters_where_the_window_is_narrower_than_all_that_is_shown(draw):
    """By one token: packed side by side, the first would be seen by the last. Else nothing is hidden."""
    q, k, v, _ = draw(41, head_dim=16, batch=3)
    masks = []
    for tokens in ([10, 11, 13], [10, 12]):
        masks.append(torch.zeros(3, 41, dtype=torch.bool))
        masks[-1][:, tokens] = True
    with pytest.raises(ValueError, match="holes"):
        sage_attention(q, k, v, key_padding_mask=masks[0], window_size=(5, 2))
    found = sage_attention(q, k, v, key_padding_mask=masks[1], window_size=(5, 2), config=NO_INT8)
    wanted = sage_attention(q, k, v, key_padding_mask=masks[1], config=NO_INT8)
    torch.testing.assert_close(found[:, :, [10, 12]], wanted[:, :, [10, 12]])
    assert not found[:, :, 11].any()


@pytest.mark.parametrize(("n_q", "n_kv"), [(9, 9), (4, 11), (11, 4), (1, 6), (6, 1)])
def test_a_window_loses_the_limits_that_hide_nothing_and_no_other(n_q, n_kv):
    for window in map(Window._make, product(range(-1, 12), repeat=2)):
        mask, narrowed = mask_of(n_q, n_kv, *window), window.narrowed(n_q, n_kv)
        assert torch.equal(mask_of(n_q, n_kv, *narrowed), mask)
        assert not mask.all() or not narrowed.is_sliding or min(n_q, n_kv) == 1
    assert CAUSAL.narrowed(1, 1) == CAUSAL
    assert not CAUSAL.is_sliding
