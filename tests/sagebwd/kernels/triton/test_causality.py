"""``SageConfig.strictly_causal`` in kernels: what the mask hides leaves no trace, not a bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS, PAPER_INT8_MATMULS
from sagebwd.metrics import relative_l2

pytestmark = pytest.mark.usefixtures("poisoned_memory")
gpu = pytest.mark.gpu

STRICT = SageConfig.strictly_causal()
INPUTS = ("q", "k", "v", "grad_out")
LATER = {
    "other numbers": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x),
    "huge": lambda x: 0.9 * torch.finfo(x.dtype).max * x.sign(),
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "Inf": lambda x: torch.full_like(x, torch.inf),
    "-Inf": lambda x: torch.full_like(x, -torch.inf),
}


def change_after(x, cut, later):
    """x with tokens ``cut`` and later replaced by what ``later`` makes of them."""
    return torch.cat((x[..., :cut, :], later(x[..., cut:, :])), -2)


@pytest.fixture
def leaks(kernels):
    """Return which of out and dq of the tokens before ``cut`` are not bit for bit the same after a change."""

    def leaks(inputs, cut, laters, config):
        before = kernels(*inputs, is_causal=True, config=config)
        assert all(before[name].isfinite().all() for name in ("out", "dq"))
        found = {}
        for name in laters:
            changed = [change_after(x, cut, LATER[name]) for x in inputs]
            after = kernels(*changed, is_causal=True, config=config)
            found[name] = [
                output
                for output in ("out", "dq")
                if not torch.equal(before[output][..., :cut, :], after[output][..., :cut, :])
            ]
        return found

    return leaks


SMALL_TILES = {"block_q": 64, "block_kv": 32}
CUTS = (1, 31, 32, 33, 63, 64, 65, 98)


@pytest.mark.parametrize(
    ("cut", "laters", "settings"),
    [
        (1, ["NaN"], {}),
        (64, ["other numbers", "huge"], {}),
        (98, ["NaN", "Inf"], {}),
        (33, ["NaN", "huge"], SMALL_TILES),
        (63, ["-Inf"], {**SMALL_TILES, "unsigned_p": True}),
        *(pytest.param(cut, list(LATER), {"unsigned_p": True}, marks=gpu) for cut in CUTS),
        *(pytest.param(cut, list(LATER), tiles, marks=gpu) for cut in CUTS for tiles in ({}, SMALL_TILES)),
    ],
)
def test_hidden_tokens_leave_no_trace(leaks, sample, cut, laters, settings):
    """Unsigned P is −128 where the mask hides, times a hidden value that 128 times its sum must cancel."""
    found = leaks(sample(99), cut, laters, replace(STRICT, **settings))
    assert found == {name: [] for name in laters}


@pytest.mark.parametrize("laters", [["NaN"], pytest.param(list(LATER), marks=gpu)], ids=len)
@pytest.mark.parametrize(
    ("n", "cut", "head_dim", "heads", "kv_heads", "dtype"),
    [
        (37, 20, 40, 4, 2, torch.bfloat16),
        (65, 64, 64, 2, 1, torch.float16),  # one token in the last tile of queries
        (33, 30, 256, 1, 1, torch.float16),
        *(
            pytest.param(*case, marks=gpu)
            for case in (
                (131, 130, 64, 6, 1, torch.float16),
                (193, 128, 40, 3, 3, torch.bfloat16),
                (129, 128, 128, 2, 2, torch.bfloat16),
                (1001, 777, 96, 4, 2, torch.float16),
            )
        ),
    ],
)
def test_hidden_tokens_leave_no_trace_in_any_shape(
    leaks, sample, n, cut, head_dim, heads, kv_heads, dtype, laters
):
    inputs = sample(n, head_dim=head_dim, heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert leaks(inputs, cut, laters, STRICT) == {name: [] for name in laters}


@pytest.mark.parametrize(
    ("name", "later"),
    [
        pytest.param(name, later, marks=() if later == "NaN" else gpu)
        for name, later in product(INPUTS, ("NaN", "Inf", "huge"))
    ],
)
def test_one_hidden_tensor_leaves_no_trace(kernels, sample, name, later):
    """Outside INT8 a NaN of V reaches ``out``, and one of K dq, as 0 · NaN; all others the mask keeps out."""
    products = {"k": ("o", "dq"), "v": ("o",)}.get(name, ())
    for matmuls in (PAPER_INT8_MATMULS, products):
        config = replace(STRICT, int8_matmuls=matmuls)
        inputs = dict(zip(INPUTS, sample(70), strict=True))
        before = kernels(*inputs.values(), is_causal=True, config=config)
        inputs[name] = change_after(inputs[name], 40, LATER[later])
        after = kernels(*inputs.values(), is_causal=True, config=config)
        for output in ("out", "dq"):
            assert torch.equal(before[output][..., :40, :], after[output][..., :40, :]), output


@pytest.mark.parametrize(
    "switches",
    [
        {"int8_matmuls": MATMULS},
        {"int8_matmuls": ("o", "dq")},
    ],
    ids=["all INT8", "only O and dQ INT8"],
)
def test_products_that_keep_even_nan_out(leaks, sample, switches):
    """All but O and dQ: they alone sum over tokens for a query, where a NaN outside INT8 is 0 · NaN."""
    assert leaks(sample(70), 40, ["NaN"], replace(STRICT, **switches)) == {"NaN": []}


@pytest.mark.parametrize("matmul", ["o", "dq", *(pytest.param(m, marks=gpu) for m in MATMULS)])
def test_products_outside_int8_keep_numbers_out(leaks, sample, matmul):
    config = replace(STRICT, int8_matmuls=tuple(m for m in MATMULS if m != matmul))
    laters = ["other numbers", "huge"]
    assert leaks(sample(70), 40, laters, config) == {name: [] for name in laters}


@pytest.mark.parametrize(
    ("config", "leaking"),
    [
        (replace(STRICT, smooth_k=True), ["out", "dq"]),
        (replace(STRICT, smooth_q=True), ["out", "dq"]),
        (replace(STRICT, operand_scales="block"), ["out", "dq"]),
        (replace(STRICT, granularity="block"), ["dq"]),
    ],
    ids=["smooth_k", "smooth_q", "operand_scales", "granularity"],
)
def test_every_switch_of_it_is_needed(leaks, sample, config, leaking):
    """And these tests would see a leak: whatever leaves ``strictly_causal`` does."""
    assert leaks(sample(70), 40, ["other numbers"], config) == {"other numbers": leaking}


@pytest.mark.parametrize(("n", "cut"), [(150, 75), pytest.param(1000, 700, marks=gpu)])
def test_the_default_leaks_no_more_than_its_error(kernels, exact, sample, n, cut):
    """Later tokens choose how earlier ones are rounded, so that a leak is the difference of two roundings of
    the same numbers: √2 errors, were they independent. Over twelve seeds and lengths: .8 to 1.3 errors.
    """
    inputs = sample(n, head_dim=64)
    changed = [change_after(x, cut, LATER["other numbers"]) for x in inputs]
    before, after = (kernels(*x, is_causal=True) for x in (inputs, changed))
    wanted = exact(*inputs, is_causal=True)
    for name in ("out", "dq"):
        x, y, z = (result[name][..., :cut, :] for result in (before, after, wanted))
        assert 0 < relative_l2(y, x) < 2**0.5 * relative_l2(x, z), name


@pytest.mark.parametrize(
    ("name", "matmuls"), [("q", PAPER_INT8_MATMULS), ("grad_out", PAPER_INT8_MATMULS), ("grad_out", ("dv",))]
)
def test_a_nan_of_an_earlier_query_does_not_reach_keys_that_it_cannot_see(kernels, sample, name, matmuls):
    """The other direction of the same mask: dk and dv of a token come from the queries that see it."""
    inputs = dict(zip(INPUTS, sample(70), strict=True))
    inputs[name][..., 40, :] = torch.nan
    config = replace(STRICT, int8_matmuls=matmuls)
    result = kernels(*inputs.values(), is_causal=True, config=config)
    for output in ("dk", "dv"):
        assert result[output][..., :41, :].isnan().all()
        assert result[output][..., 41:, :].isfinite().all()


@pytest.mark.parametrize(
    ("name", "poison"),
    [
        pytest.param(name, poison, marks=() if poison == mark else gpu)
        for name, mark in (("k", torch.inf), ("v", -torch.inf))
        for poison in (torch.nan, torch.inf, -torch.inf)
    ],
)
def test_every_query_that_sees_a_poisoned_token_shows_it(kernels, sample, name, poison):
    inputs = dict(zip(INPUTS, sample(70), strict=True))
    inputs[name][..., 40, 3] = poison
    result = kernels(*inputs.values(), is_causal=True, config=STRICT)
    for output in ("out", "dq"):
        assert result[output][..., :40, :].isfinite().all()
        assert result[output][..., 40:, :].isnan().all()
