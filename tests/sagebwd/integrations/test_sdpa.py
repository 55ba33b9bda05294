"""SageBwd in the place of torch's function: what it computes, and what it leaves to torch."""

import functools
import itertools
import pickle
import sys
import threading
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from sagebwd import SageConfig, dispatch, report
from sagebwd.integrations import torch_flash
from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.test_flash_attn import assert_same, draw

EXACT = SageConfig(int8_matmuls=())
#: Torch's function, where the patch does not find it.
TORCH_SDPA = functools.partial(torch._C._nn.scaled_dot_product_attention)


def test_keywords_threads_and_modules_of_torch():
    """nn.MultiheadAttention calls torch's function by its name in torch.nn.functional."""
    q, k, v = (x.detach() for x in draw((1, 4, 6, 8), (1, 2, 9, 8), (1, 2, 9, 8)))
    settings = {"query": q, "key": k, "value": v, "scale": 0.3, "enable_gqa": True, "is_causal": True}
    module, x = nn.MultiheadAttention(16, 2), torch.randn(7, 2, 16)
    truth = F.scaled_dot_product_attention(**settings), module(x, x, x, need_weights=False)[0]
    found = []
    with torch_flash.patch_sdpa():
        thread = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(**settings)))
        thread.start()
        thread.join()
        found.append(module(x, x, x, need_weights=False)[0])
    for out, expected in zip(found, truth, strict=True):
        assert 1e-4 < relative_l2(out, expected) < 0.05


def test_what_stays_in_full_precision():
    """To the bit, gradients included, because torch's function runs; with a warning, and in the report."""
    q, k, v = draw((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    shown = torch.arange(5) != 2
    calls = {
        "not a window": (q, k, v, torch.eye(5).bool().index_fill(1, torch.tensor(0), True)),
        "a window over hidden keys between": (q, k, v, near(2, 0, 5, 5) & shown & shown[:, None]),
        "a mask together with is_causal": (q, k, v, mask[:1], 0.0, True),
        r"not \(batch, heads": (q[0], k[0], v[0], mask),
        "q is float64": (q.double(), k.double(), v.double()),
        "other shapes": (torch.cat([q, q]), k, v),
        "heads that torch broadcasts": (q, k[:, :1], v[:, :1]),
        "empty": (q[:0], k[:0], v[:0]),
        "dropout": (q, k, v, None, 1.0),  # of all weights, so that both calls give the same
    }
    for reason, arguments in calls.items():
        truth = F.scaled_dot_product_attention(*arguments)
        with torch_flash.patch_sdpa(), pytest.warns(UserWarning, match=f"in full precision.*{reason}"):
            found = F.scaled_dot_product_attention(*arguments)
        assert torch.equal(found, truth), reason
        gradients = [torch.autograd.grad(x.sum(), arguments[0])[0] for x in (found, truth)]
        assert torch.equal(*gradients), reason
    gradient = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).square().sum())
    truth = gradient(q.detach())  # of which SageBwd has none
    with torch_flash.patch_sdpa():
        F.scaled_dot_product_attention(q, k, v)
        with pytest.warns(UserWarning, match=r"a transform of torch\.func"):
            assert torch.equal(gradient(q.detach()), truth)
    rows = report().rows
    assert {row.name for row in rows} == {"scaled_dot_product_attention"}
    assert sorted((row.kernels, row.calls) for row in rows) == [*[("", 1)] * 10, ("reference", 1)]


def test_what_no_kernels_take_stays_in_full_precision(monkeypatch):
    """As all calls on a GPU before Ampere, and a head size of 264."""
    (x,) = draw((1, 2, 5, 8))
    old = dispatch.Call("cuda", dispatch.GPU("a Turing GPU", (7, 5)), torch.float16, 264, SageConfig())
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: dispatch._fastest(old))
    monkeypatch.setattr(dispatch, "explain", lambda *_, config: dispatch.explain_call(old))
    reason = r"a Turing GPU has no kernels.*; the head size is 264 \(use a multiple of 8 up to 256\)"
    with torch_flash.patch_sdpa(), pytest.warns(UserWarning, match=reason):
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), TORCH_SDPA(x, x, x))
    with pytest.raises(NotImplementedError, match='kernels="reference"'):
        dispatch._fastest(old)
    assert "kernels=" not in report().rows[0].reason  # an argument that the caller does not have


@pytest.mark.parametrize(
    ("leading", "heads", "value_dim", "is_masked"),
    [((), 2, 8, False), ((2, 3), 2, 8, False), ((2,), 2, 4, False), ((2,), 1, 24, True)],
    ids=["3 dimensions", "5 dimensions", "narrower values", "wider values, a mask"],
)
def test_other_shapes_than_those_of_flash_attention(leading, heads, value_dim, is_masked):
    """As timm's Hiera attends within windows, and DeepSeek's code of its own with narrower values."""
    q, k = draw((*leading, 2, 5, 8), (*leading, heads, 5, 8))
    (v,) = draw((*leading, heads, 5, value_dim))
    settings = {"attn_mask": near(2, 0, 5, 5) if is_masked else None, "enable_gqa": heads == 1}
    settings["is_causal"] = not is_masked
    truth = F.scaled_dot_product_attention(q, k, v, **settings)
    with torch_flash.patch_sdpa(EXACT):
        found = F.scaled_dot_product_attention(q, k, v, **settings)
    assert_same(found, truth, [q, k, v], "")
    assert [(row.kernels, row.calls) for row in report().rows] == [("reference", 1)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:.* runs in full precision, not in INT8:UserWarning")
def test_a_compiled_graph_computes_and_counts_what_it_leaves_to_torch_once(backend):
    """Graphs call torch's function by its name, which the patch may not replace a second time."""
    (x,) = draw((1, 2, 9, 8))

    def attend(x):
        mask = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    truth = attend(x)
    with torch_flash.patch_sdpa():
        found = torch.compile(attend, fullgraph=True, backend=backend)(x)
    assert torch.equal(found, truth)
    assert [(row.kernels, row.calls) for row in report().rows] == [("", 1)]


def test_without_a_with_the_patch_lasts_until_it_is_removed(monkeypatch):
    """Also in a module that imported the function by its name."""
    module = types.ModuleType("module_of_a_user")
    module.attend = TORCH_SDPA.func
    monkeypatch.setitem(sys.modules, module.__name__, module)
    q, k, v = draw((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    patch = torch_flash.patch_sdpa(EXACT)
    try:
        F.scaled_dot_product_attention(q, k, v)
        with torch_flash.patch_sdpa():
            assert F.scaled_dot_product_attention.original is TORCH_SDPA.func
            pickled = pickle.dumps(F.scaled_dot_product_attention)  # as torch.save does with what models hold
            assert pickle.loads(pickled) is F.scaled_dot_product_attention
        module.attend(q, k, v)
    finally:
        patch.remove()
    assert module.attend is TORCH_SDPA.func
    with pytest.raises(ValueError, match="config is a str"), torch_flash.patch_sdpa("paper"):
        pass
    F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is TORCH_SDPA.func
    assert [(row.kernels, row.calls) for row in report().rows] == [("reference", 2)]


# --- Masks -------------------------------------------------------------------------------------------------


def additive(seen: torch.Tensor, hidden: float = -torch.inf) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, hidden)


def near(left: int, right: int, n_q: int = 9, n_kv: int = 9) -> torch.Tensor:
    """Query i, counted from the last, sees keys i − left … i + right."""
    distance = torch.arange(n_kv) - torch.arange(n_kv - n_q, n_kv)[:, None]
    return (-left <= distance) & (distance <= right)


DOCUMENTS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
SAME = DOCUMENTS[:, None] == DOCUMENTS
KEYS = torch.arange(9) < torch.tensor([9, 5])[:, None, None, None]
TRIANGLE = near(9, 0)

#: By name: a mask of two sequences of 9 keys and 4 heads, and how the report calls it.
MASKS = {
    "triangle": (TRIANGLE, "causal"),
    "additive triangle": (additive(TRIANGLE), "causal"),
    "triangle of the last queries": (near(9, 0, n_q=4), "causal"),
    "more queries than keys": (near(9, 3, n_q=9, n_kv=6), "a window of (-1, 3)"),
    "window, as Gemma 3 of litgpt": (additive(near(2, 0), torch.finfo(torch.float32).min), "(2, 0)"),
    "window of the last queries": (near(2, 0, n_q=4), "a window of (2, 0)"),
    "window to both sides": (near(2, 3)[None, None].expand(2, 4, 9, 9), "a window of (2, 3)"),
    "documents": (SAME, "documents"),
    "causal documents": (SAME & TRIANGLE, "causal, documents"),
    "documents of each sequence": (torch.stack([SAME, TRIANGLE.new_ones(9, 9)])[:, None], "documents"),
    "keys": (KEYS, "hidden keys"),
    "additive keys": (additive(KEYS), "hidden keys"),
    "keys, repeated for heads and queries": (additive(KEYS).repeat(1, 4, 9, 1), "hidden keys"),
    "triangle, padding right": (KEYS & TRIANGLE, "causal, hidden keys"),
    "triangle, padding left": (KEYS.flip(3) & KEYS.flip(3).mT & TRIANGLE, "causal, hidden keys"),
    "window, padding right": (KEYS & near(2, 0), "a window of (2, 0), hidden keys"),
    "triangle, padding, as of torch's encoder": (
        (additive(KEYS) + additive(TRIANGLE)).expand(2, 4, 9, 9), "causal, hidden keys",
    ),
    "everything": (torch.zeros(9, 9), "full"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_what_sagebwd_computes_runs_in_int8_and_is_named(name):
    mask, shown = MASKS[name]
    n_q, n_kv = mask.shape[-2:] if mask.shape[-2] > 1 else (9, 9)
    q, k, v = draw((2, 4, n_q, 8), (2, 2, n_kv, 8), (2, 2, n_kv, 8))
    truth = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    with torch_flash.patch_sdpa(EXACT):
        found = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert_same(found, truth, [q, k, v], name)
    (row,) = report().rows
    assert (row.kernels, row.calls) == ("reference", 1)
    assert shown in row.name


@pytest.mark.parametrize(("n_q", "n_kv"), [(3, 3), (2, 4), (4, 2)])
def test_every_mask_gives_what_torch_gives(n_q, n_kv):
    """Recognised or not; a query that sees no key gives zeros."""
    q, k, v = (x.detach() for x in draw((1, 1, n_q, 8), (1, 1, n_kv, 8), (1, 1, n_kv, 8)))
    with torch_flash.patch_sdpa(EXACT), warnings.catch_warnings(action="ignore"):
        for bits in itertools.product([True, False], repeat=n_q * n_kv):
            mask = torch.tensor(bits).view(n_q, n_kv)
            truth = TORCH_SDPA(q, k, v, mask).nan_to_num()
            found = F.scaled_dot_product_attention(q, k, v, mask).nan_to_num()
            torch.testing.assert_close(found, truth, msg=str(mask))
    assert sum(row.calls for row in report().rows if row.kernels) > 10


def test_heads_that_differ_and_biases_stay_in_full_precision():
    q, k, v = (x.detach() for x in draw((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)))
    heads, bias = torch.stack([TRIANGLE, SAME])[None], torch.ones(1, 2, 1, 9)
    masks = (heads, bias, additive(TRIANGLE, -1.0), torch.zeros(1, 1, 9, 9, requires_grad=True))
    with torch_flash.patch_sdpa(), warnings.catch_warnings(action="ignore"):
        for mask in masks:
            found = F.scaled_dot_product_attention(q, k, v, mask)
            assert torch.equal(found, TORCH_SDPA(q, k, v, mask))
    assert {row.kernels for row in report().rows} == {""}


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7)])
@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_the_causal_masks_of_torch_are_counted_once(make, lengths):
    n_q, n_kv = lengths
    q, k, v = draw((1, 2, n_q, 8), (1, 2, n_kv, 8), (1, 2, n_kv, 8))
    truth = F.scaled_dot_product_attention(q, k, v, make(n_q, n_kv))
    with torch_flash.patch_sdpa(EXACT):
        found = F.scaled_dot_product_attention(q, k, v, make(n_q, n_kv))
    assert_same(found, truth, [q, k, v], "")
    assert [(row.kernels, row.calls) for row in report().rows] == [("reference", 1)]
