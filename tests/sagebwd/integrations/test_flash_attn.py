"""flash_attn's functions: the truth is torch's attention in float64 with flash_attn's mask written out."""

import functools
import itertools
import sys

import pytest
import torch
from torch import Tensor

from sagebwd import SageConfig
from sagebwd.integrations import flash_attn
from sagebwd.metrics import relative_l2

EXACT = SageConfig(int8_matmuls=())
LENGTHS = [(7, 7), (3, 8), (8, 3), (1, 6), (6, 1)]
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (2, 1), (-1, 1), (1, -1), (0, 0)]


def is_seen(n_q: int, n_kv: int, window: tuple[int, int]) -> Tensor:
    """(N_q, N_kv) bool, by the formula in flash_attn's documentation."""
    left, right = (10**6 if x < 0 else x for x in window)
    distance = torch.arange(n_kv) - torch.arange(n_q)[:, None] - (n_kv - n_q)
    return (distance >= -left) & (distance <= right)


def seen_in(cuts: list[int], cuts_kv: list[int], n_q: int, n_kv: int, window: tuple[int, int]) -> Tensor:
    """The same for packed sequences, whose tokens see their own."""
    seen = torch.zeros(n_q, n_kv, dtype=torch.bool)
    for (a, b), (c, d) in zip(itertools.pairwise(cuts), itertools.pairwise(cuts_kv), strict=True):
        seen[a:b, c:d] = is_seen(b - a, d - c, window)
    return seen


def truth_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output and lse in float64; flash_attn's shapes (B, N, H, D); zeros where the mask hides all keys."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1).where(mask.any(-1, keepdim=True), 0.0)
    return (weights @ v).transpose(1, 2), logits.logsumexp(-1)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_same(found, truth, leaves, name, bound=1e-5):
    grad_out = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    assert relative_l2(found, truth) < bound, name
    gradients = torch.autograd.grad(found, leaves, grad_out)
    expected = torch.autograd.grad(truth, leaves, grad_out.double())
    for gradient, x in zip(gradients, expected, strict=True):
        assert relative_l2(gradient, x) < bound or (gradient - x).abs().max() < 1e-6, name


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_window_from_the_bottom_right(lengths):
    n_q, n_kv = lengths
    leaves = draw((2, n_q, 4, 8), (2, n_kv, 2, 8), (2, n_kv, 2, 8))
    for window, causal in itertools.product(WINDOWS, (False, True)):
        seen = is_seen(n_q, n_kv, (window[0], 0) if causal else window)
        truth, true_lse = truth_of(*leaves, seen, 0.3)
        settings = {"causal": causal, "window_size": window, "softmax_scale": 0.3, "config": EXACT}
        found, lse = flash_attn.flash_attn_func(*leaves, return_lse=True, **settings)
        torch.testing.assert_close(lse, true_lse.float())
        assert_same(found, truth, leaves, (window, causal))


@pytest.mark.parametrize("is_same", [True, False], ids=["one tensor", "two tensors"])
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (2, -1))])
def test_packed_sequences(causal, window, is_same):
    """With two tensors: more queries than keys, fewer, none, and tokens before and after all sequences."""
    cuts = [0, 3, 7, 12] if is_same else [1, 4, 8, 11, 11]
    cuts_kv, n_kv = (cuts, 12) if is_same else ([2, 6, 8, 12, 13], 14)
    boundaries = torch.tensor(cuts, dtype=torch.int32)
    boundaries_kv = boundaries if is_same else torch.tensor(cuts_kv, dtype=torch.int32)
    leaves = draw((12, 4, 8), (n_kv, 2, 8), (n_kv, 2, 8))
    mask = seen_in(cuts, cuts_kv, 12, n_kv, (window[0], 0) if causal else window)
    truth, true_lse = truth_of(*(x[None] for x in leaves), mask, 0.3)
    found, lse, weights = flash_attn.flash_attn_varlen_func(
        *leaves, boundaries, boundaries_kv, 5, 5, softmax_scale=0.3, causal=causal, window_size=window,
        return_attn_probs=True, config=EXACT,
    )  # fmt: skip
    assert weights is None
    torch.testing.assert_close(lse, true_lse[0].float())
    assert_same(found, truth[0], leaves, cuts)


@pytest.mark.parametrize("is_packed", [False, True])
def test_sinks(is_packed):
    """Of queries without keys, too, where lse is the sink."""
    leaves = draw((1, 8, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), (2,))
    cuts, cuts_kv = ([0, 3, 8], [0, 5, 6]) if is_packed else ([0, 8], [0, 6])
    seen = seen_in(cuts, cuts_kv, 8, 6, (-1, 0))
    _, lse = truth_of(*leaves[:3], seen, None)
    q, k, v, sinks = (x.double() for x in leaves)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k * 8**-0.5).masked_fill(~seen, -torch.inf)
    lse = torch.logaddexp(lse, sinks[:, None])
    truth = torch.einsum("bhqk,bkhd->bqhd", (logits - lse[..., None]).exp(), v)
    settings = {"causal": True, "return_lse": True, "config": EXACT, "s_aux": leaves[3]}
    if is_packed:
        inputs = (*(x[0] for x in leaves[:3]), torch.tensor(cuts), torch.tensor(cuts_kv))
        found, found_lse = flash_attn.flash_attn_varlen_func(*inputs, 5, 5, **settings)
        found, found_lse = found[None], found_lse[None]
    else:
        found, found_lse = flash_attn.flash_attn_func(*leaves[:3], **settings)
    torch.testing.assert_close(found_lse, lse.float())
    assert_same(found, truth, leaves, "sinks")


def test_packed_arguments_are_their_parts():
    qkv, q, kv = draw((2, 6, 3, 2, 8), (2, 6, 4, 8), (2, 9, 2, 2, 8))
    one, one_q, one_kv = qkv[0], q[0], kv[0]
    cuts, cuts_kv = torch.tensor([0, 2, 6]), torch.tensor([0, 5, 9])
    same, other = (cuts, cuts, 4, 4), (cuts, cuts_kv, 4, 5)
    for name, packed, boundaries, parts, lengths in (
        ("qkvpacked", [qkv], (), qkv.unbind(2), ()),
        ("kvpacked", [q, kv], (), (q, *kv.unbind(2)), ()),
        ("varlen_qkvpacked", [one], (cuts, 4), one.unbind(1), same),
        ("varlen_kvpacked", [one_q, one_kv], other, (one_q, *one_kv.unbind(1)), other),
    ):
        plain = flash_attn.flash_attn_varlen_func if lengths else flash_attn.flash_attn_func
        function = getattr(flash_attn, f"flash_attn_{name}_func")
        found = function(*packed, *boundaries, causal=True, config=EXACT)
        assert_same(found, plain(*parts, *lengths, causal=True, config=EXACT), packed, name)


Q = torch.ones(2, 5, 2, 8)
CUTS, OTHER_CUTS = torch.tensor([0, 5]), torch.tensor([0, 2, 5])


def dense(*inputs, **settings):
    return flash_attn.flash_attn_func(*(inputs or (Q, Q, Q)), **settings)


def varlen(cuts=CUTS, cuts_kv=CUTS, inputs=(Q[0], Q[0], Q[0]), **settings):
    return flash_attn.flash_attn_varlen_func(*inputs, cuts, cuts_kv, 5, 5, **settings)


#: Boundaries of queries and of keys.
UNORDERED = (
    ([0, 4, 3, 5], [0, 1, 2, 5]), ([0, 2, 6], [0, 2, 5]), ([-1, 2, 5], [0, 2, 5]), ([0, 2, 5], [0, 2, 7])
)  # fmt: skip
#: What is wrong -> a word of the message that names it.
BAD_CALLS = {
    "dropout": (lambda: dense(dropout_p=0.1), "dropout_p is 0.1"),
    "softcap": (lambda: dense(softcap=30.0), "softcap is 30.0"),
    "softcap, packed": (lambda: varlen(softcap=30.0), "softcap is 30.0"),
    "dropout, packed": (lambda: varlen(dropout_p=0.1), "dropout_p is 0.1"),
    "alibi": (lambda: varlen(alibi_slopes=torch.ones(2)), "alibi_slopes"),
    "sinks": (lambda: dense(s_aux=torch.zeros(3)), r"sinks has shape \(3,\)"),
    "paged cache": (lambda: varlen(block_table=CUTS), "block_table"),
    "window, two tensors": (lambda: varlen(cuts_kv=CUTS.clone(), window_size=(1, 1)), "one tensor for both"),
    "numbers of documents": (lambda: varlen(cuts_kv=OTHER_CUTS, causal=True), "queries are 2 and .* keys 3"),
    "dimensions": (lambda: dense(Q[0], Q, Q), "q is .5, 2, 8."),
    "dimensions, packed": (lambda: varlen(inputs=(Q[0], Q, Q[0])), "k is .2, 5, 2, 8."),
    "qkv": (lambda: flash_attn.flash_attn_qkvpacked_func(torch.stack([Q, Q, Q], 3)), "qkv is"),
    "kv": (lambda: flash_attn.flash_attn_varlen_kvpacked_func(Q[0], Q[0], CUTS, CUTS, 5, 5), "kv is"),
    **{
        f"window {window}": (lambda window=window: dense(window_size=window), "window_size is")
        for window in (5, None, (5.7, 0), (1, 2, 3))
    },
    # Boundaries that cannot be are found on a CPU, where reading them waits for nothing.
    **{
        f"boundaries {cuts}, {causal}": (
            functools.partial(varlen, *map(torch.tensor, cuts), causal=causal),
            "boundaries must start at 0 or later, never decrease",
        )
        for causal in (False, True)
        for cuts in UNORDERED
    },
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_named(call, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        call()


# --- In the place of flash_attn ----------------------------------------------------------------------------


@pytest.fixture
def program():
    """What a program finds that imports flash_attn."""
    found = {}
    flash_attn.install(EXACT)
    exec("from flash_attn import __version__, flash_attn_func, flash_attn_varlen_func", found)
    low_level = (f"_flash_attn{kind}_{way}" for kind in ("", "_varlen") for way in ("forward", "backward"))
    exec(f"from flash_attn.flash_attn_interface import {', '.join(low_level)}", found)
    yield found
    flash_attn.uninstall()
    assert "flash_attn" not in sys.modules


def test_a_program_that_imports_flash_attn_runs_the_installed_config(program):
    q, k, v = draw((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    exact = flash_attn.flash_attn_func(q, k, v, causal=True, config=EXACT)
    assert torch.equal(program["flash_attn_func"](q, k, v, causal=True), exact)
    assert not torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True, config=SageConfig()), exact)
    for change in (flash_attn.install, lambda: flash_attn.install(EXACT), flash_attn.uninstall):
        change()  # back to the default in the end, also for what a program holds
    assert not torch.equal(program["flash_attn_func"](q, k, v, causal=True), exact)
    assert program["__version__"].startswith("2.")


@pytest.mark.parametrize(("config", "bound"), [(EXACT, 1e-5), (SageConfig(), 0.03)], ids=["exact", "INT8"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "varlen"])
def test_two_parts_of_the_keys_joined_by_their_lse_are_the_whole(program, is_packed, config, bound):
    """As ring-flash-attn joins them: the first part without a mask, the second causal. K has a mean."""
    q, k, v = draw((1, 32, 2, 8), (1, 64, 2, 8), (1, 64, 2, 8))
    k = (k + 1).detach().requires_grad_()
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    truth, _ = truth_of(q, k, v, is_seen(32, 64, (-1, 0)), None)
    truth, *true_gradients = truth, *torch.autograd.grad(truth, [q, k, v], grad_out.double())
    flash_attn.install(config)
    kind, cuts = "_flash_attn", ()
    tensors = [x.detach() for x in (q, k, v, grad_out)]
    if is_packed:
        kind, cuts = "_flash_attn_varlen", (*[torch.tensor([0, 32])] * 2, 32, 32)
        tensors = [x[0] for x in tensors]
    q, k, v, grad_out = tensors
    parts = [(*(x.narrow(-3, i, 32) for x in (k, v)), i == 32) for i in (0, 32)]
    found = [program[f"{kind}_forward"](q, k, v, *cuts, 0.0, None, causal)[:2] for k, v, causal in parts]
    lse = torch.logaddexp(found[0][1], found[1][1])
    out = sum(out * (part_lse - lse).exp().mT[..., None] for out, part_lse in found)
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for i, (k, v, causal) in enumerate(parts):
        dq = torch.empty_like(q)
        into = (dq, *(x.narrow(-3, 32 * i, 32) for x in gradients[1:]))
        program[f"{kind}_backward"](grad_out, q, k, v, out, lse, *into, *cuts, 0.0, None, causal)
        gradients[0] += dq
    for x, true_x in zip((out, *gradients), (truth, *true_gradients), strict=True):
        assert relative_l2(x.view(true_x.shape), true_x) < bound


def test_a_config_whose_residual_has_no_place_is_refused(program):
    q, k, v = draw((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    flash_attn.install(SageConfig.consistent())
    with pytest.raises(NotImplementedError, match=r"install\(\) another config"):
        program["_flash_attn_forward"](q, k, v, 0.0, None, True)


@pytest.mark.parametrize("has_init", [True, False], ids=["2", "4 alone"])
def test_modules_of_an_installed_flash_attn_that_are_not_replaced(tmp_path, monkeypatch, has_init):
    """FlashAttention-4's has no ``__init__``: then ``flash_attn`` is a namespace package."""
    installed = tmp_path / "flash_attn"
    (installed / "cute").mkdir(parents=True)
    (installed / "layers.py").write_text("import flash_attn.bert_padding\nROTARY = 1")
    (installed / "cute" / "__init__.py").write_text("raise OSError('no such GPU')")
    if has_init:
        (installed / "__init__.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    flash_attn.install()
    try:
        found = {}
        exec("from flash_attn.layers import ROTARY\nfrom flash_attn import cute, flash_attn_func", found)
        assert found["ROTARY"] == 1
        assert found["flash_attn_func"] is flash_attn.flash_attn_func
        assert found["cute"].flash_attn_func.__module__ == "flash_attn.cute"
    finally:
        flash_attn.uninstall()
