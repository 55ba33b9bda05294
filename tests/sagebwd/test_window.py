"""Windows: what they hide, that they are checked, and attention under them compared with torch's."""

import functools
from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import SageConfig, sage_attention
from sagebwd.window import Window
from tests.inputs import gradients

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


def test_a_list_is_a_pair_too():
    q = torch.randn(1, 1, 9, 8)
    assert torch.equal(
        sage_attention(q, q, q, window_size=[2, 1]), sage_attention(q, q, q, window_size=(2, 1))
    )


# --- Attention ---------------------------------------------------------------------------------------------


gradients_of = functools.partial(gradients, enable_gqa=True)


@pytest.mark.parametrize(
    ("n_q", "n_kv", "window_size"),
    [(50, 50, (0, 0)), (50, 50, (10, 33)), (31, 77, (7, 0)), (31, 77, (-1, 5)), (150, 31, (20, -1))],
)
def test_means_what_torch_means_by_the_mask(draw, n_q, n_kv, window_size):
    """A query without keys gets zeros, and gives none to any gradient, as in torch."""
    inputs = draw(n_q, n_kv, heads=4, kv_heads=2, batch=1)
    ours = gradients_of(sage_attention, *inputs, window_size=window_size, config=NO_INT8)
    mask = mask_of(n_q, n_kv, *window_size)
    torchs = gradients_of(scaled_dot_product_attention, *inputs, attn_mask=mask)
    for x, y in zip(ours, torchs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    without_keys = ~mask.any(1)
    for x in ours[:2]:
        assert not x[:, :, without_keys].any()


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
