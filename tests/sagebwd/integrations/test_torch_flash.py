"""SageBwd as torch's FlashAttention. Its operators exist for CUDA alone, and are tried on the CPU here.

:class:`~sagebwd.integrations.torch_flash.Override` is given the CPU's dispatch key: calls then go through
torch's dispatcher and torch's own autograd formulas, as on a GPU.
"""

import inspect
import itertools
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from sagebwd import SageConfig, dispatch, sage_attention
from sagebwd.integrations import flash_attn, torch_flash
from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.test_flash_attn import WINDOWS, assert_same, draw, is_seen, seen_in, truth_of

aten = torch.ops.aten
EXACT = SageConfig(int8_matmuls=())
#: K is smoothed where an INT8 product takes it, so that the logsumexp is not that of the plain logits.
SMOOTHED = SageConfig(int8_matmuls=("dv", "dk"))
#: Before torch 2.12 torch's function for packed sequences has no groups of heads.
HAS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
VARLEN_KV_HEADS, VARLEN_GROUPS = (2, {"enable_gqa": True}) if HAS_GROUPS else (4, {})
TORCH_SDPA = torch._C._nn.scaled_dot_product_attention


@pytest.fixture
def override():
    """override(config): torch's operators on the CPU are SageBwd's."""
    with ExitStack() as stack:
        yield lambda config=SMOOTHED: stack.callback(torch_flash.Override(config, "CPU").remove)


# --- torch's operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("config", "bound"), [(EXACT, 1e-5), (SMOOTHED, 0.02)], ids=["exact", "smoothed"])
def test_the_operator_behind_sdpa(override, is_causal, config, bound):
    """With shared heads, and the logsumexp of the plain logits although K has a mean and is smoothed."""
    override(config)
    q, k, v = draw((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    k = (k + 2).detach().requires_grad_()
    seen = is_seen(9, 9, (-1, 0 if is_causal else -1))
    truth, true_lse = truth_of(*(x.transpose(1, 2) for x in (q, k, v)), seen, 0.3)
    out, lse, *others = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=0.3)
    torch.testing.assert_close(lse, true_lse.float())
    assert others[:4] == [None, None, 9, 9]
    assert_same(out, truth.transpose(1, 2), [q, k, v], "dense", bound=bound)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 7), (7, 3)], ids=str)
def test_the_dense_operator_counts_from_the_bottom_right(override, lengths):
    override(EXACT)
    n_q, n_kv = lengths
    leaves = draw((2, n_q, 4, 8), (2, n_kv, 2, 8), (2, n_kv, 2, 8))
    for window, is_causal in itertools.product(WINDOWS[::2], (False, True)):
        seen = is_seen(n_q, n_kv, (window[0], 0) if is_causal else window)
        truth, true_lse = truth_of(*leaves, seen, None)
        out, lse, *_ = aten._flash_attention_forward(
            *leaves, None, None, n_q, n_kv, 0.0, is_causal, False,
            window_size_left=window[0], window_size_right=None if window[1] < 0 else window[1],
        )  # fmt: skip
        torch.testing.assert_close(lse, true_lse.float())
        assert_same(out, truth, leaves, (window, is_causal))


@pytest.mark.parametrize("is_same", [True, False], ids=["one tensor", "two tensors"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)], ids=str)
def test_packed_sequences_by_torchs_own_function(override, window, is_same):
    override()
    cuts, cuts_kv = [0, 3, 7, 12], [0, 3, 7, 12] if is_same else [0, 1, 41, 46]
    boundaries = torch.tensor(cuts, dtype=torch.int32)
    boundaries_kv = boundaries if is_same else torch.tensor(cuts_kv, dtype=torch.int32)
    value_dim = 8 if is_same else 6  # as of multi-head latent attention
    leaves = draw((12, 4, 8), *((cuts_kv[-1], VARLEN_KV_HEADS, width) for width in (8, value_dim)))
    mask = seen_in(cuts, cuts_kv, 12, cuts_kv[-1], window)
    truth, true_lse = truth_of(*(x[None] for x in leaves), mask, None)
    arguments = (*leaves, boundaries, boundaries_kv, 5, 40)
    settings = {"window_size": window, **VARLEN_GROUPS}
    out, lse = varlen.varlen_attn(*arguments, return_aux=varlen.AuxRequest(lse=True), **settings)
    torch.testing.assert_close(lse, true_lse[0].float())
    assert_same(out, truth[0], leaves, window, bound=0.01)  # no P in slots without a query
    into = torch.full_like(out, torch.nan)
    with torch.no_grad():
        varlen.varlen_attn_out(into, *arguments, **settings)
    assert torch.equal(into, out)


def test_results_are_laid_out_as_torch_expects(override):
    """As torch's meta kernels say, which the compiler relies on: shapes, strides and dtypes."""
    override(SageConfig())
    q, k, v = (x.detach().half().transpose(1, 2) for x in draw((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)))
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    boundaries = (torch.tensor([0, 2, 5]), torch.tensor([0, 2, 6]))

    def run(q, k, v, *packed):
        dense = aten._scaled_dot_product_flash_attention(q, k, v)
        flash = aten._flash_attention_forward(*packed, *boundaries, 3, 4, 0.0, False, False)
        backward = aten._scaled_dot_product_flash_attention_backward(
            dense[0], q, k, v, *dense[:6], 0.0, False, *dense[6:8]
        )
        return [x for x in (*dense, *flash, *backward) if isinstance(x, Tensor)]

    found = run(q, k, v, *packed)
    expected = run(*(x.to("meta") for x in (q, k, v, *packed)))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert [x.stride() for x in found] == [x.stride() for x in expected]


def test_merged_logsumexps_give_the_gradients_of_all_keys_where_saved_tensors_are_copied(override):
    """Ring attention: two halves of the keys, whose results are merged, and a backward for each half.

    The ring hands the state of its last forward on to each backward. Not copied: test_rings.py.
    """
    override()
    q, k, v = draw((1, 2, 6, 8), (1, 2, 10, 8), (1, 2, 10, 8))
    k = (k + 5).detach().requires_grad_()
    truth, _ = truth_of(*(x.transpose(1, 2) for x in (q, k, v)), torch.ones(6, 10, dtype=torch.bool), None)
    grad_out = torch.ones(1, 2, 6, 8)
    expected = torch.autograd.grad(truth.transpose(1, 2), [q, k, v], grad_out.double())
    halves = [(k[:, :, a:b].detach(), v[:, :, a:b].detach()) for a, b in ((0, 4), (4, 10))]
    q = q.detach()
    parts = [aten._scaled_dot_product_flash_attention(q, *half) for half in halves]
    state = parts[1][6].clone()
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(x * (y - lse).exp()[..., None] for x, y, *_ in parts)
    gradients = [
        aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, *half, out, lse, None, None, 6, half[0].shape[2], 0.0, False, state, state
        )
        for half in halves
    ]
    dq = gradients[0][0] + gradients[1][0]
    dk, dv = (torch.cat([gradients[0][i], gradients[1][i]], 2) for i in (1, 2))
    for x, y in zip((dq, dk, dv), expected, strict=True):
        assert relative_l2(x, y) < 0.02


def test_operators_refuse_by_name(override):
    override()
    x, cuts = torch.randn(5, 2, 8), torch.tensor([0, 5])
    refused = {"seqused_k": cuts, "alibi_slopes": x, "block_table": cuts, "num_splits": 3}
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"{name} is .*restore_flash_attention_impl"):
            aten._flash_attention_forward(x, x, x, cuts, cuts, 5, 5, 0.0, False, False, **{name: value})
    for arguments, words in (
        ((0.1,), r"dropout_p is 0\.1"),
        ((0.0, False, True), "return_debug_mask is True"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            aten._scaled_dot_product_flash_attention(*[x[None]] * 3, *arguments)
    with pytest.raises(NotImplementedError, match="given without the others; pass both"):
        aten._flash_attention_forward(x, x, x, cuts, None, 5, 5, 0.0, False, False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's in Triton's interpreter: the logarithm of 0
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
def test_the_backward_gets_the_mean_of_k(override, kernels, is_packed, monkeypatch):
    """Gradients are those of sage_attention, to the rounding of the logsumexp's change of base and back.

    Packed: more queries than keys, no query, and fewer, which leaves slots without a query.
    """
    if kernels == "triton":
        pytest.importorskip("triton")
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *call: choose(*call[:5], kernels))
    monkeypatch.setattr("sagebwd.attention._calls", {})
    dtype = torch.float32 if kernels == "reference" else torch.float16
    q, k, v = (x.detach().to(dtype) for x in draw(*3 * [(1, 2, 21, 32)]))
    q, k, v = (x.requires_grad_() for x in (q, k + 9, v))
    config = SageConfig(block_q=32, block_kv=32)
    override(config)
    if is_packed:
        boundaries = torch.tensor([[0, 9, 9, 21], [0, 2, 7, 21]])
        packed = (*(x[0].transpose(0, 1) for x in (q, k, v)), *boundaries, 12, 14)
        expected = flash_attn.flash_attn_varlen_func(*packed, causal=True, config=config)
        found = varlen.varlen_attn(*packed, window_size=(-1, 0))
    else:
        expected = sage_attention(q, k, v, is_causal=True, config=config)
        found, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    assert torch.equal(found, expected)
    grad_out = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, [q, k, v], grad_out) for out in (found, expected))
    for x, y in zip(*gradients, strict=True):
        # One step of INT8 here and there; slots have no P here, which would set a scale of dV.
        assert relative_l2(x, y) < (1e-2 if is_packed else 2e-3)


# --- torch's registry --------------------------------------------------------------------------------------


def test_activate_and_restore(monkeypatch):
    attention = torch.nn.attention
    torch_flash.register("sagebwd-test", EXACT)
    assert "sagebwd-test" in attention.list_flash_attention_impls()
    torch.backends.cuda.enable_cudnn_sdp(True)
    x = torch.randn(1, 1, 3, 8)
    try:
        attention.activate_flash_attention_impl("sagebwd-test")
        assert attention.current_flash_attention_impl() == "sagebwd-test"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        attention.restore_flash_attention_impl()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    override = torch_flash.Override(EXACT, "CPU")
    aten._scaled_dot_product_flash_attention(x, x, x)
    override.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        aten._scaled_dot_product_flash_attention(x, x, x)


def test_registration_refuses_what_torch_cannot_hold(monkeypatch):
    for settings, words in (
        ({"config": SageConfig.consistent()}, r"consistent\(\) and int8_scores\(\).*patch_sdpa"),
        ({"config": SageConfig.int8_scores()}, r"consistent\(\) and int8_scores\(\).*patch_sdpa"),
        ({"config": "paper"}, "config is a str"),
        ({"name": SageConfig.paper()}, "name is a SageConfig; pass a string, and settings as config="),
        ({"name": "FA4"}, "'FA4' is registered by other code"),
    ):
        with pytest.raises(ValueError, match=words):
            torch_flash.register(**settings)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with pytest.raises(RuntimeError, match=r"switched off.*enable_flash_sdp\(True\)"):
            torch_flash.Override(EXACT, "CPU")
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(ImportError, match=r"torch 2.* use sagebwd.integrations.torch_flash.patch_sdpa"):
        torch_flash.register()


# --- On a GPU ----------------------------------------------------------------------------------------------

#: What torch says when a kernel of its own is replaced.
REPLACED = "ignore:Warning only once for all operators"


@pytest.fixture
def activated():
    torch_flash.register("sagebwd-gpu")
    torch.nn.attention.activate_flash_attention_impl("sagebwd-gpu")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def draw_on_gpu(dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 300, n, 64) for n in (4, 2, 2, 4)]
    return [torch.randn(x, generator=generator, dtype=dtype, device="cuda").transpose(1, 2) for x in shapes]


def sdpa_and_gradients(q, k, v, grad_out, attn_mask=None, function=F.scaled_dot_product_attention):
    """[out, dq, dk, dv] of a causal attention, or of a masked one."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, attn_mask=attn_mask, is_causal=attn_mask is None, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.gpu
@pytest.mark.filterwarnings(REPLACED)
def test_plain_sdpa_runs_sagebwd_until_it_is_restored():
    inputs = draw_on_gpu()
    truth = sdpa_and_gradients(*(x.double() for x in inputs))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = sdpa_and_gradients(*inputs)
    torch_flash.register("sagebwd-gpu")
    torch.nn.attention.activate_flash_attention_impl("sagebwd-gpu")
    try:
        found = sdpa_and_gradients(*inputs)
        mask = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
        masked = sdpa_and_gradients(*inputs, attn_mask=mask)
        single = sdpa_and_gradients(*(x.float() for x in inputs))
        with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1"):
            F.scaled_dot_product_attention(*inputs[:3], dropout_p=0.1, enable_gqa=True)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        after = sdpa_and_gradients(*inputs)
    assert torch.equal(before[0], after[0])  # not the gradients: FlashAttention adds those of Q in any order
    for i, expected in enumerate(truth):
        assert 0.008 < relative_l2(found[i], expected) < 0.04  # INT8, as test_against_float64.py has it
        assert relative_l2(masked[i], expected) < 0.008
        assert relative_l2(single[i], expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.filterwarnings(REPLACED)
def test_compiled_sdpa_gives_the_results_of_eager(activated):
    inputs = draw_on_gpu()
    expected = sdpa_and_gradients(*inputs)
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True)
    found = sdpa_and_gradients(*inputs, function=compiled)
    for x, y in zip(found, expected, strict=True):
        assert relative_l2(x, y) < 1e-6


@pytest.mark.gpu
@pytest.mark.filterwarnings(REPLACED, "ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_packed_sequences_on_a_gpu(activated):
    """Two tensors of boundaries, without reading them: nothing waits for the GPU."""
    cuts, cuts_kv = [0, 30, 200, 300], [0, 90, 150, 400]
    boundaries = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (cuts, cuts_kv)]
    shapes = (300, 4, 64), *2 * [(400, VARLEN_KV_HEADS, 64)]
    leaves = [x.detach().cuda().bfloat16() for x in draw(*shapes)]
    leaves = [x.requires_grad_() for x in leaves]
    mask = seen_in(cuts, cuts_kv, 300, 400, (-1, 0)).cuda()
    truth, true_lse = truth_of(*(x[None] for x in leaves), mask, None)
    grad_out = torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def attend():
        out, lse = varlen.varlen_attn(
            *leaves, *boundaries, 170, 250, window_size=(-1, 0),
            return_aux=varlen.AuxRequest(lse=True), **VARLEN_GROUPS,
        )  # fmt: skip
        return lse, out, *torch.autograd.grad(out, leaves, grad_out)

    attend()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        lse, *found = attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(lse, true_lse[0].float(), atol=0.1, rtol=0.01)
    expected = [truth[0], *torch.autograd.grad(truth, leaves, grad_out[None].double())]
    for x, y in zip(found, expected, strict=True):
        assert relative_l2(x, y) < 0.04
