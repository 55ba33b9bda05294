"""``SageConfig.strictly_causal`` in kernels: what the mask hides leaves no trace, not a bit."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS, PAPER_INT8_MATMULS
from tests.sagebwd.kernels.inputs import INPUTS, LATER, POISONS, change_after
from tests.sagebwd.kernels.sets import emulated_too, only, over, reference_first

pytestmark = pytest.mark.usefixtures("poisoned_memory")

STRICT = SageConfig.strictly_causal()
strict_only = only(lambda kernel_set: kernel_set.runs(STRICT))


@pytest.fixture
def leaks(kernels):
    """Which of out and dq of tokens before ``cut`` are not the same bits after a change of ``names``."""

    def leaks(inputs, cut, laters, config, names=INPUTS):
        before = kernels(*inputs, is_causal=True, config=config)
        assert all(before[name].isfinite().all() for name in ("out", "dq"))
        found = {}
        for name in laters:
            tensors = zip(INPUTS, inputs, strict=True)
            changed = [change_after(x, cut, name) if which in names else x for which, x in tensors]
            after = kernels(*changed, is_causal=True, config=config)
            same = {x: torch.equal(before[x][..., :cut, :], after[x][..., :cut, :]) for x in ("out", "dq")}
            found[name] = [output for output in same if not same[output]]
        return found

    return leaks


SMALL_TILES = {"block_q": 64, "block_kv": 32}
CUTS = (1, 31, 32, 33, 63, 64, 65, 98)
#: tokens, cut, head size, heads, key heads, dtype
FEW_SHAPES = ((37, 20, 40, 4, 2, torch.bfloat16), (33, 30, 256, 1, 1, torch.float16))
MORE_SHAPES = (
    (65, 64, 64, 2, 1, torch.float16),  # one token in the last tile of queries
    (131, 130, 64, 6, 1, torch.float16),
    (193, 128, 40, 3, 3, torch.bfloat16),
    (129, 128, 128, 2, 2, torch.bfloat16),
    (1001, 777, 96, 4, 2, torch.float16),
)


def without(matmul):
    return {"int8_matmuls": tuple(m for m in MATMULS if m != matmul)}


def cases(kernel_set):
    """cut, laters, settings, sizes. Values that are not finite reach products outside INT8."""
    finite = ["other values", "huge"]
    few = [(1, ["NaN"], {}), (64, finite, {})]
    if not kernel_set.is_emulated:
        few += [
            (33, ["Inf", "huge"], SMALL_TILES),
            (63, ["-Inf"], {**SMALL_TILES, "unsigned_p": True}),
            *((40, finite, without(matmul)) for matmul in ("o", "dq")),
        ]
    shapes = () if kernel_set.is_emulated else FEW_SHAPES
    if kernel_set.is_gpu:
        few += product(CUTS, [list(LATER)], ({}, SMALL_TILES, {"unsigned_p": True}))
        few += ((40, finite, without(matmul)) for matmul in MATMULS if matmul not in ("o", "dq"))
        shapes += MORE_SHAPES
    all_cases = [(*case, {"n_q": 99}) for case in few]
    for n, cut, head_dim, heads, kv_heads, dtype in shapes:
        sizes = {"n_q": n, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "dtype": dtype}
        all_cases.append((cut, list(LATER) if kernel_set.is_gpu else ["NaN"], {}, sizes))
    return [x for x in all_cases if kernel_set.runs(replace(STRICT, **x[2]), x[3].get("head_dim"))]


@emulated_too
@strict_only
@over("cut, laters, settings, sizes", cases)
def test_hidden_tokens_leave_no_trace(leaks, sample, cut, laters, settings, sizes):
    """Unsigned P is −128 where the mask hides, times a hidden value that 128 times its sum must cancel."""
    found = leaks(sample(**sizes), cut, laters, replace(STRICT, **settings))
    assert found == {name: [] for name in laters}


@strict_only
@over("name", lambda kernel_set: INPUTS if kernel_set.is_gpu or kernel_set.is_reference else ("v",))
@over("later", lambda kernel_set: ["NaN", "Inf", "huge"] if kernel_set.is_gpu else ["NaN"])
def test_one_hidden_tensor_leaves_no_trace(leaks, sample, kernel_set, name, later):
    """Outside INT8 a NaN of V reaches ``out``, and one of K dq, as 0 · NaN; all others the mask keeps out."""
    products = {"k": ("o", "dq"), "v": ("o",)}.get(name, ())
    configs = (replace(STRICT, int8_matmuls=matmuls) for matmuls in (PAPER_INT8_MATMULS, products))
    for config in filter(kernel_set.runs, configs):
        assert leaks(sample(70), 40, [later], config, [name]) == {later: []}


LEAKS = {
    "smooth_k": (replace(STRICT, smooth_k=True), ["out", "dq"]),
    "smooth_q": (replace(STRICT, smooth_q=True), ["out", "dq"]),
    "operand_scales": (replace(STRICT, operand_scales="block"), ["out", "dq"]),
    "granularity": (replace(STRICT, granularity="block"), ["dq"]),
}


@reference_first
@over("name", lambda kernel_set: [name for name, (config, _) in LEAKS.items() if kernel_set.runs(config)])
def test_every_switch_of_it_is_needed(leaks, sample, name):
    """And these tests would see a leak: whatever leaves ``strictly_causal`` does."""
    config, leaking = LEAKS[name]
    assert leaks(sample(70), 40, ["other values"], config) == {"other values": leaking}


def poisoned_products(kernel_set):
    cases = [("q", PAPER_INT8_MATMULS), ("grad_out", PAPER_INT8_MATMULS), ("grad_out", ("dv",))]
    runs = kernel_set.those_it_runs({case: replace(STRICT, int8_matmuls=case[1]) for case in cases})
    return list(runs)


@strict_only
@over("name, matmuls", poisoned_products)
def test_a_nan_of_an_earlier_query_does_not_reach_keys_that_it_cannot_see(kernels, sample, name, matmuls):
    """The other direction of the same mask: dk and dv of a token come from the queries that see it."""
    inputs = dict(zip(INPUTS, sample(70), strict=True))
    inputs[name][..., 40, :] = torch.nan
    config = replace(STRICT, int8_matmuls=matmuls)
    result = kernels(*inputs.values(), is_causal=True, config=config)
    for output in ("dk", "dv"):
        assert result[output][..., :41, :].isnan().all()
        assert result[output][..., 41:, :].isfinite().all()


def poisoned_keys_and_values(kernel_set):
    if kernel_set.is_gpu:
        return list(product(("k", "v"), POISONS))
    return [("k", torch.inf), ("v", -torch.inf)]


@strict_only
@over("name, poison", poisoned_keys_and_values)
@pytest.mark.parametrize(
    ("mask", "first", "last"), [({"is_causal": True}, 40, 99), ({"window_size": (20, 5)}, 35, 60)]
)
def test_every_query_that_sees_a_poisoned_token_shows_it(kernels, sample, name, poison, mask, first, last):
    """And no other does."""
    inputs = dict(zip(INPUTS, sample(100), strict=True))
    inputs[name][..., 40, 3] = poison
    result = kernels(*inputs.values(), **mask, config=STRICT)
    for output in ("out", "dq"):
        found = result[output][0, 0]
        assert found[first : last + 1].isnan().all()
        assert found[:first].isfinite().all()
        assert found[last + 1 :].isfinite().all()
