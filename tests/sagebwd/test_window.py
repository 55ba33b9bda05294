"""Windows: what they hide, that they are checked, and attention under them compared with torch's."""

from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import SageConfig, explain, sage_attention
from sagebwd.window import Window

NO_INT8 = SageConfig(int8_matmuls=())
SIZES = (-1, 0, 1, 3, 20)
LENGTHS = ((9, 9), (4, 11), (11, 4), (1, 6), (6, 1))


def mask_of(n_q, n_kv, left, right):
    """(n_q, n_kv) bool, from the definition, one query after another."""
    return torch.tensor(
        [
            [(left < 0 or i - left <= j) and (right < 0 or j <= i + right) for j in range(n_kv)]
            for i in range(n_q)
        ]
    )


# --- The arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_q", "n_kv"), LENGTHS)
def test_what_a_window_says_of_tiles_is_what_its_mask_says(n_q, n_kv):
    for window in map(Window._make, product(SIZES, SIZES)):
        mask = mask_of(n_q, n_kv, *window)
        assert torch.equal(window.visible(slice(0, n_q), slice(0, n_kv), "cpu"), mask)
        assert torch.equal(mask_of(n_q, n_kv, *window.narrowed(n_q, n_kv)), mask)
        hides = not mask.all()
        assert hides or not window.narrowed(n_q, n_kv).is_sliding or min(n_q, n_kv) == 1
        for first, size in product(range(0, n_q, 3), (1, 3)):
            rows = slice(first, min(first + size, n_q))
            keys = window.keys_of(rows, n_kv)
            seen = mask[rows].any(0)
            assert seen[keys].all()
            assert seen.sum() == keys.stop - keys.start
            for start in range(0, n_kv, 2):
                columns = slice(start, min(start + 2, n_kv))
                assert window.sees_all(rows, columns) == mask[rows, columns].all()


def test_a_causal_mask_stays_one_and_takes_the_right_limit_away():
    assert Window.of(True) == Window.of(False, (-1, 0)) == Window(-1, 0)
    assert Window.of(True, (5, 9)) == Window(5, 0)
    assert Window(-1, 0).narrowed(1, 1) == Window(-1, 0)
    assert not Window(-1, 0).is_sliding
    assert Window(3, 0).is_sliding
    assert Window(-1, 2).is_sliding


# --- Validation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "window_size", [None, 4, "44", (1,), (1, 2, 3), (1.0, 2), (None, 0), (True, 0), {1, 2}]
)
def test_what_is_no_pair_of_integers_is_refused(window_size):
    q = torch.zeros(1, 1, 4, 8)
    for call in (sage_attention, explain):
        with pytest.raises(
            ValueError, match=r"window_size is .*; pass two integers, \(left, right\); -1 is no"
        ):
            call(q, q, q, window_size=window_size)


def test_other_negative_limits_are_refused():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(
        ValueError, match=r"window_size is \(-2, 0\); pass numbers of keys, or -1 for no limit"
    ):
        sage_attention(q, q, q, window_size=(-2, 0))


def test_a_list_is_a_pair_too():
    q = torch.randn(1, 1, 9, 8)
    assert torch.equal(
        sage_attention(q, q, q, window_size=[2, 1]), sage_attention(q, q, q, window_size=(2, 1))
    )


# --- Attention ---------------------------------------------------------------------------------------------


def gradients(operator, q, k, v, grad_out, **settings):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = operator(*leaves, enable_gqa=True, **settings)
    return (out, *torch.autograd.grad(out, leaves, grad_out))


@pytest.mark.parametrize(("n_q", "n_kv"), [(50, 50), (31, 77), (150, 31)])
@pytest.mark.parametrize("window_size", [(0, 0), (7, 0), (-1, 5), (20, -1), (10, 33)])
def test_means_what_torch_means_by_the_mask(draw, n_q, n_kv, window_size):
    """A query without keys gets zeros, and gives none to any gradient, as in torch."""
    inputs = draw(n_q, n_kv, heads=4, kv_heads=2, batch=1)
    ours = gradients(sage_attention, *inputs, window_size=window_size, config=NO_INT8)
    mask = mask_of(n_q, n_kv, *window_size)
    torchs = gradients(scaled_dot_product_attention, *inputs, attn_mask=mask)
    for x, y in zip(ours, torchs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    without_keys = ~mask.any(1)
    for x in ours[:2]:
        assert not x[:, :, without_keys].any()


def test_a_window_that_hides_nothing_changes_no_bit(draw):
    inputs = draw(60, 50)
    plain = gradients(sage_attention, *inputs)
    causal = gradients(sage_attention, *inputs, is_causal=True)
    for window_size in ((59, 49), (10**9, 10**9), (-1, 10**12)):
        assert all(map(torch.equal, gradients(sage_attention, *inputs, window_size=window_size), plain))
    assert all(map(torch.equal, gradients(sage_attention, *inputs, window_size=(-1, 0)), causal))
    wide = gradients(sage_attention, *inputs, is_causal=True, window_size=(59, 7))
    assert all(map(torch.equal, wide, causal))


# --- With masks that hide keys -----------------------------------------------------------------------------

#: Padding on the right, on the left and on both sides; no key at all.
PADDED = torch.zeros(4, 40, dtype=torch.bool)
PADDED[0, :33] = PADDED[1, 9:] = PADDED[2, 5:30] = True


def test_padding_goes_with_a_window(draw):
    """The window counts tokens where they are. A hidden token is hidden as a query, too."""
    inputs = draw(40, heads=4, kv_heads=2, batch=4)
    settings = {"window_size": (6, 2), "config": NO_INT8}
    ours = gradients(sage_attention, *inputs, key_padding_mask=PADDED, **settings)
    mask = mask_of(40, 40, 6, 2) & PADDED[:, None, None] & PADDED[:, None, :, None]
    torchs = gradients(scaled_dot_product_attention, *inputs, attn_mask=mask)
    for x, y in zip(ours, torchs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    _, lse = sage_attention(
        *inputs[:3], enable_gqa=True, key_padding_mask=PADDED, return_lse=True, **settings
    )
    logits = inputs[0] @ inputs[1].repeat_interleave(2, 1).mT * inputs[0].shape[-1] ** -0.5
    torch.testing.assert_close(lse, logits.masked_fill(~mask, -torch.inf).logsumexp(-1))


# --- The logsumexp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_size", [(-1, -1), (5, 2)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_logsumexp_is_that_of_the_plain_logits(draw, window_size, is_packed):
    """K has a mean, which smoothing subtracts; it is not that of its neighbour in a pack."""
    q, k, v, _ = draw(60, 50, heads=4, kv_heads=2, batch=1)
    k = k + torch.linspace(0, 3, 50)[:, None]
    mask = mask_of(60, 50, *window_size)
    packed = {}
    if is_packed:
        packed = {"cu_seqlens": torch.tensor([2, 30, 30, 58]), "cu_seqlens_kv": torch.tensor([0, 20, 30, 45])}
        mask = torch.zeros(60, 50, dtype=torch.bool)
        mask[2:30, :20], mask[30:58, 30:45] = (mask_of(28, n, *window_size) for n in (20, 15))
    logits = 0.2 * q.double() @ k.double().repeat_interleave(2, 1).mT
    wanted = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
    settings = {"scale": 0.2, "enable_gqa": True, "window_size": window_size, **packed}
    for config, bound in ((NO_INT8, 1e-5), (SageConfig(), 0.05), (SageConfig(smooth_k=False), 0.1)):
        out, lse = sage_attention(q.requires_grad_(), k, v, return_lse=True, config=config, **settings)
        assert lse.dtype == torch.float32
        assert out.requires_grad
        assert lse.requires_grad
        torch.testing.assert_close(lse.double(), wanted, rtol=0, atol=bound)
        assert torch.equal(out, sage_attention(q, k, v, config=config, **settings))


def test_the_gradient_with_a_logsumexp_is_the_same_one(draw):
    q, k, v, grad_out = draw(40)
    plain = gradients(sage_attention, q, k, v, grad_out)
    with_lse = gradients(
        lambda *x, **settings: sage_attention(*x, return_lse=True, **settings)[0], q, k, v, grad_out
    )
    assert all(map(torch.equal, with_lse, plain))


def test_without_keys_or_queries_the_logsumexp_is_that_of_nothing():
    q, k = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 0, 8)
    out, lse = sage_attention(q, k, k, return_lse=True)
    assert not out.any()
    assert lse.shape == (2, 3, 5)
    assert (lse == -torch.inf).all()
    assert sage_attention(k, q, q, return_lse=True)[1].shape == (2, 3, 0)
