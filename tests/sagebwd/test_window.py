"""Windows: what they hide. Attention under them: reference/test_crossed.py, kernels/test_windows.py."""

from itertools import product

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.window import Window

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
