"""backward.cu, the one backward kernel for Hopper, in emulation on a CPU.

On a GPU the tests of kernel sets run for it, too, and test_one_backward_gpu.py.
"""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch.nn.functional import pad

from sagebwd import reference
from sagebwd.interface import AttentionParams
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.metrics import relative_l2
from sagebwd.window import Window
from tests.sagebwd.kernels.inputs import GRADIENTS, INPUTS, assert_nan_where, poison_one
from tests.sagebwd.kernels.sets import without_int8


@pytest.fixture
def backward(emulated):
    """dq, dk and dv on CPU tensors. Out and its logsumexp are the reference's."""

    def backward(q, k, v, grad_out, *, config, is_causal=False, window_size=(-1, -1), boundaries=None):
        window = Window.of(is_causal, window_size).narrowed(q.shape[2], k.shape[2])
        params = AttentionParams(window, q.shape[3] ** -0.5, config, "hopper", boundaries)
        saved = reference.forward(q, k, v, params)
        d_pad = 128 if q.shape[3] > 64 else 64
        k_mean = pad(saved.k_mean.view(-1, q.shape[3]), (0, d_pad - q.shape[3])).view(*k.shape[:2], -1)
        saved = saved._replace(lse=saved.lse / math.log(2), k_mean=k_mean)
        return hopper.backward(grad_out, q, k, v, saved, params)

    return backward


DEFAULT, UNSIGNED_P = without_int8("dq"), without_int8("dq", unsigned_p=True)
CONSISTENT = without_int8("o", "dv", "dq", compensate_o=True)
S_ALONE = without_int8("o", "dv", "dq", "dk", compensate_o=True)
CASES = {
    "default, packed": (DEFAULT, 64, True, [1, 64, 65, 0, 127, 2, 1]),
    "default, fewer channels": (DEFAULT, 56, True, [130, 70]),
    "unsigned_p": (UNSIGNED_P, 128, False, [150]),
    "consistent": (CONSISTENT, 120, True, [190]),
    "S alone, packed": (S_ALONE, 64, True, [1, 64, 65, 0, 127, 2, 1]),
    "S alone, fewer channels": (S_ALONE, 40, False, [190]),
    "S alone, many channels": (S_ALONE, 128, True, [1, 64, 65, 0, 127, 2, 1]),
}


@pytest.mark.parametrize(("config", "head_dim", "is_causal", "documents"), CASES.values(), ids=CASES.keys())
def test_it_computes_what_the_reference_does(backward, draw, config, head_dim, is_causal, documents):
    boundaries = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    inputs = draw(sum(documents), batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    packed = boundaries if len(documents) > 1 else None
    settings = {"is_causal": is_causal, "config": config}
    found = backward(*inputs, boundaries=packed, **settings)
    wanted = reference.attention(*inputs, **settings, cu_seqlens=packed, enable_gqa=True)
    for name, x in zip(GRADIENTS, found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name


@pytest.mark.parametrize(
    ("config", "head_dim", "is_causal", "n_q"),
    [
        (DEFAULT, 64, True, 190),
        (UNSIGNED_P, 128, False, 130),
        (UNSIGNED_P, 128, False, 64),
        (S_ALONE, 64, True, 190),
        (S_ALONE, 128, False, 130),
    ],
    ids=["64", "128", "few queries", "S alone", "S alone, 128"],
)
def test_the_order_in_which_threads_run_changes_nothing(
    backward, in_all_orders, draw, config, head_dim, is_causal, n_q
):
    """Each warpgroup late: whoever waits too little for it, or gives it back too early, shows."""
    inputs = draw(n_q, 190, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    in_all_orders(lambda: backward(*inputs, is_causal=is_causal, config=config))


# --- The order of keys -------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 2**30], ids=["first keys first", "last keys first"])
def order_of_keys(request, monkeypatch):
    """Each order at each head size and length."""
    monkeypatch.setattr(hopper, "LAST_KEYS_FIRST_UP_TO", {64: request.param, 128: request.param})


#: (settings, head size, mask, queries, keys, documents)
ORDERED_CASES = {
    "causal": (S_ALONE, 64, {"is_causal": True}, 333, 333, None),
    "causal, many channels": (S_ALONE, 128, {"is_causal": True}, 270, 270, None),
    "full": (DEFAULT, 128, {}, 130, 333, None),
    "few keys": (CONSISTENT, 64, {"is_causal": True}, 400, 70, None),
    "window": (CONSISTENT, 128, {"window_size": (140, 70)}, 330, 330, None),
    "window, hidden queries": (S_ALONE, 64, {"window_size": (70, 0)}, 330, 150, None),
    "window, fewer channels": (DEFAULT, 40, {"window_size": (150, 10)}, 400, 400, None),
    "packed": (S_ALONE, 72, {"is_causal": True}, 460, 460, [1, 64, 65, 0, 327, 2, 1]),
    "packed, window": (DEFAULT, 64, {"window_size": (130, 5)}, 460, 460, [1, 64, 65, 0, 327, 2, 1]),
}


@pytest.mark.usefixtures("order_of_keys")
@pytest.mark.parametrize("case", ORDERED_CASES.values(), ids=ORDERED_CASES.keys())
def test_either_order_of_keys(backward, draw, case):
    """Twice the same bits, and those of the reference as near as ever."""
    config, head_dim, mask, n_q, n_kv, documents = case
    packed = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    inputs = draw(n_q, n_kv, batch=1, heads=4, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    found, again = (backward(*inputs, **mask, boundaries=packed, config=config) for _ in range(2))
    wanted = reference.attention(*inputs, **mask, config=config, cu_seqlens=packed, enable_gqa=True)
    for name, x, y in zip(GRADIENTS, found, again, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name
        assert torch.equal(x, y), name


@pytest.mark.parametrize("window_size", [(-1, 0), (130, 5)])
def test_each_document_has_its_own_order_of_keys(backward, draw, monkeypatch, window_size):
    """Bit for bit the same in a pack and alone, on either side of the limit."""
    monkeypatch.setattr(hopper, "LAST_KEYS_FIRST_UP_TO", {64: 300})
    inputs = draw(900, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    starts = [0, 290, 601, 601, 900]
    settings = {"window_size": window_size, "config": S_ALONE}
    packed = backward(*inputs, boundaries=torch.tensor(starts, dtype=torch.int32), **settings)
    for begin, end in ((0, 290), (290, 601), (601, 900)):
        alone = backward(*(x[:, :, begin:end] for x in inputs), **settings)
        for name, x, y in zip(GRADIENTS, packed, alone, strict=True):
            assert torch.equal(x[:, :, begin:end], y), (name, begin)


@pytest.mark.usefixtures("order_of_keys")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_in_either_order_of_keys_that_of_threads_changes_nothing(backward, in_all_orders, draw, head_dim):
    inputs = draw(270, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    in_all_orders(lambda: backward(*inputs, is_causal=True, config=S_ALONE))


# --- Lengths, NaN and Inf ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_q", "n_kv"), [(1, 1), (65, 130), (130, 65)])
def test_lengths(backward, draw, n_q, n_kv):
    inputs = draw(n_q, n_kv, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    found = backward(*inputs, is_causal=True, config=DEFAULT)
    wanted = reference.attention(*inputs, is_causal=True, config=DEFAULT, enable_gqa=True)
    for name, x in zip(GRADIENTS, found, strict=True):
        y = getattr(wanted, name)
        assert relative_l2(x, y) < 8e-3 or (x - y).abs().max() < 1e-5, name


@pytest.mark.parametrize("config", [DEFAULT, S_ALONE], ids=["default", "S alone"])
@pytest.mark.parametrize("name", INPUTS)
def test_nan_and_inf_come_out_as_nan_where_the_reference_has_them(backward, draw, name, config):
    """Token 70 is in the second block of queries, and in the tile of keys that all blocks see."""
    inputs = draw(140, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    poison_one(inputs, name, 70, torch.inf)
    found = backward(*inputs, is_causal=True, config=config)
    wanted = reference.attention(*inputs, is_causal=True, config=config)
    assert_nan_where(zip(GRADIENTS, found, strict=True), wanted)
