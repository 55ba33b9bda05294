"""FlashAttention-4 against PyTorch's attention: with a stand-in for the package, and on a GPU."""

import functools
import sys
import types
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.backends import fpa
from model.kernels import flash_attention_4 as fa4

HOPPER, B200 = (9, 0), (10, 0)
CUDA = torch.device("cuda")


def exact(q, k, v, is_causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def logits(q, k, is_causal):
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return s.masked_fill(hidden, -torch.inf) if is_causal else s


class StandIn(types.ModuleType):
    """flash_attn.cute.interface of 4.0.0b36, on a CPU: (B, N, H, D), and results into the tensors given."""

    def __init__(self):
        super().__init__(fa4.MODULE)
        self.forwards, self.deterministic = 0, []

    def _flash_attn_fwd(self, q, k, v, *, causal, return_lse, out):
        assert return_lse
        assert q.shape == out.shape
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert q.shape[2] % k.shape[2] == 0
        assert out.is_contiguous()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out.copy_(exact(q, k, v, causal).transpose(1, 2))
        self.forwards += 1
        return out, logits(q, k, causal).float().logsumexp(-1), None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, causal, deterministic, dq, dk, dv):
        self.deterministic.append(deterministic)
        assert all(x.is_contiguous() for x in (dq, dk, dv))
        q, k, v, out, dout = (x.transpose(1, 2) for x in (q, k, v, out, dout))
        group = q.shape[1] // k.shape[1]
        p = (logits(q, k, causal) - lse.to(q.dtype).unsqueeze(-1)).exp()
        dp = dout @ v.repeat_interleave(group, 1).mT
        ds = p * (dp - (dout * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        per_head = ds.mT @ q, p.mT @ dout
        grads = (ds @ k.repeat_interleave(group, 1), *(x.unflatten(1, (-1, group)).sum(2) for x in per_head))
        for result, grad in zip((dq, dk, dv), grads, strict=True):
            result.copy_(grad.transpose(1, 2))


@pytest.fixture
def package(monkeypatch):
    package = StandIn()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fa4.MODULE, package)
    return package


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability that PyTorch's own kernels can run on, too."""

    def fake(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for ask in ("can_use_cudnn_attention", "can_use_flash_attention", "can_use_efficient_attention"):
            monkeypatch.setattr(fpa, ask, lambda params: True)
        monkeypatch.setattr(fpa, "SDPAParams", lambda *_: None)
        monkeypatch.setattr(torch, "empty", Mock())

    return fake


def build(sdpa=None, dtype=torch.bfloat16, d_head=64, device=CUDA):
    return fpa.Settings(sdpa).build(device=device, dtype=dtype, d_head=d_head, is_gqa=False)


def inputs(kv_heads=2, tokens=13, **options):
    """q, k, v as the model has them, (B, H, N, D) from (B, N, H, D), and a gradient."""
    torch.manual_seed(0)
    heads = (4, kv_heads, kv_heads, 4)
    drawn = [torch.randn(2, tokens, h, 8, dtype=torch.float64, **options).transpose(1, 2) for h in heads]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_are_those_of_pytorch(package, is_causal, kv_heads):
    qkv, grad = inputs(kv_heads)
    out = fa4.attend(*qkv, is_causal=is_causal, enable_gqa=kv_heads < 4)
    expected = exact(*qkv, is_causal)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(x, qkv, grad) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # lse is float32
    assert package.deterministic == [False]


def test_operators_keep_their_promises(package):
    """Schema, fakes (with strides) and autograd, as torch.compile relies on them."""
    qkv, grad = inputs()
    torch.library.opcheck(fa4.flash_attention_4, (*qkv, True))
    tensors = [x.detach() for x in qkv]
    saved = [x.detach() for x in fa4.flash_attention_4(*tensors, True)]
    torch.library.opcheck(fa4._gradients, (grad, *tensors, *saved, True))


def test_checkpointing_saves_its_results_and_deterministic_runs_ask_for_it(package, monkeypatch):
    qkv, grad = inputs()
    operator = torch.ops.llama.flash_attention_4.default
    assert operator in fpa.SAVED_OPERATORS
    attend = functools.partial(fa4.attend, is_causal=True, enable_gqa=True)
    context = functools.partial(create_selective_checkpoint_contexts, [operator])
    out = checkpoint(attend, *qkv, use_reentrant=False, context_fn=context)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    torch.autograd.grad(out, qkv, grad)
    assert (package.forwards, package.deterministic) == (1, [True])


def test_autocast_casts(package):
    qkv, grad = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = fa4.attend(*qkv, is_causal=True, enable_gqa=True)
    assert out.dtype is torch.bfloat16
    assert {x.dtype for x in torch.autograd.grad(out, qkv, grad.bfloat16())} == {torch.float64}


def test_what_it_would_compute_otherwise_is_refused(package):
    (q, k, v), _ = inputs()
    with pytest.raises(ValueError, match=r"q has 12 tokens and k 13; .* use attention\.sdpa=flash"):
        fa4.attend(q[:, :, 1:], k, v, is_causal=True, enable_gqa=True)
    with pytest.raises(ValueError, match="q has 4 heads and k 2; pass enable_gqa=True"):
        fa4.attend(q, k, v, is_causal=True, enable_gqa=False)


@pytest.mark.parametrize("capability", [HOPPER, B200])
def test_the_fastest_is_taken_where_it_is_installed(package, gpu, monkeypatch, capability):
    gpu(capability)
    monkeypatch.setattr(fa4, "version", lambda name: "4.0.0b36")
    backend = build()
    assert backend.description == "FlashAttention-4, flash-attn-4 4.0.0b36"
    assert backend.attend is fa4.attend
    assert build("cudnn").description == "scaled_dot_product_attention, cuDNN"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert build().attend is fa4.attend


def test_without_the_package_the_next_is_taken_and_the_log_says_so_once(gpu, monkeypatch, caplog):
    gpu(HOPPER)
    monkeypatch.setitem(sys.modules, fa4.MODULE, None)
    fpa._say_once.cache_clear()
    caplog.set_level("INFO", logger=fpa.__name__)
    for _ in range(2):
        assert build().description == "scaled_dot_product_attention, cuDNN"
    (line,) = caplog.messages
    assert "FlashAttention-4 is not installed" in line
    assert 'pip install "flash-attn-4' in line
    assert line.endswith("Full precision runs cuDNN")
    with pytest.raises(ValueError, match=r"sdpa=fa4 cannot run .*is not installed.*pip install .*; use att"):
        build("fa4")


@pytest.mark.parametrize(
    ("capability", "others", "reason"),
    [
        (HOPPER, {"dtype": torch.float32}, "takes float16 and bfloat16, not float32"),
        (HOPPER, {"d_head": 60}, "multiples of 8 up to 256, not 60"),
        (B200, {"d_head": 192}, "multiples of 8 up to 128, not 192"),
        ((8, 9), {}, r"needs a Hopper or Blackwell GPU, not compute capability 8\.9"),
        (HOPPER, {"device": torch.device("cpu")}, "not on cpu"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(package, gpu, capability, others, reason):
    gpu(capability)
    with pytest.raises(ValueError, match=reason):
        build("fa4", **others)


def test_a_broken_package_is_a_reason(package, gpu, monkeypatch):
    gpu(HOPPER)
    monkeypatch.setattr(fa4, "_package", Mock(side_effect=OSError("libcudart.so.13")))
    with pytest.raises(ValueError, match=r"cannot be imported \(OSError: libcudart.so.13\)"):
        build("fa4")


def test_geforce_gpus_take_it_on_request_but_not_deterministically(package, gpu, monkeypatch):
    gpu((12, 0))
    assert build().description.endswith("cuDNN")
    assert build("fa4").attend is fa4.attend
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match="no deterministic backward"):
        build("fa4")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "d_head"), [(4, 64), (2, 128)])
def test_the_package_agrees_with_float64(is_causal, kv_heads, d_head):
    reason = fa4.why_not(torch.device("cuda"), torch.bfloat16, d_head)
    if reason:
        pytest.skip(reason)
    torch.manual_seed(0)
    heads = (4, kv_heads, kv_heads, 4)
    *qkv, grad = (
        torch.randn(2, 300, h, d_head, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in heads
    )
    qkv = [x.requires_grad_() for x in qkv]
    out = fa4.attend(*qkv, is_causal=is_causal, enable_gqa=kv_heads < 4)
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    right = exact(*doubles, is_causal)
    found = (out, *torch.autograd.grad(out, qkv, grad))
    wanted = (right, *torch.autograd.grad(right, doubles, grad.double()))
    for got, expected in zip(found, wanted, strict=True):
        assert (got.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.gpu
def test_a_deterministic_backward_gives_the_same_bits(monkeypatch):
    reason = fa4.why_not(torch.device("cuda"), torch.bfloat16, 64)
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    qkv = [torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
    grad = torch.randn_like(qkv[0])
    compiled = torch.compile(fa4.attend, fullgraph=True)
    first, *others = (
        torch.autograd.grad(attend(*qkv, is_causal=True, enable_gqa=False), qkv, grad)
        for attend in (fa4.attend, fa4.attend, fa4.attend, compiled)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
