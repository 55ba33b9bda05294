import functools
import logging
import re
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml

import sagebwd
from common.errors import TrainingError
from model import backends
from model.backends import fpa
from model.backends.sagebwd import PRESETS
from sagebwd import SageConfig
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from tests.trainer.conftest import train_here

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CALL = {"is_causal": True, "enable_gqa": False}
DOCUMENTS = {"d_head": 64, "longest_document": 8}


def build(attention: dict, device: torch.device = CPU, **shape: int) -> backends.Backend:
    shape = {"device": device, "dtype": torch.float32, "d_head": 16, "is_gqa": False} | shape
    return backends.build(attention, **shape)


@pytest.fixture
def fake_gpu(monkeypatch):
    def fake(capability: tuple[int, int], usable: set[str]) -> None:
        """A GPU of this compute capability on which only these kernels run."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(fpa, "usable_kernels", lambda *kind: usable)

    return fake


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        ({"backend": "sagebwd", "smooth_k": "maybe"}, "smooth_k is 'maybe'"),
        ({"backend": "sagebwd", "block_q": "wide"}, "block_q is 'wide'"),
        ({"backend": "sagebwd", "int8_matmuls": "o"}, "int8_matmuls is 'o'; give a list"),
        ({"backend": "sagebwd", "int8_matmuls": 3}, "attention=sagebwd"),
        ({"backend": "sagebwd", "int8_matmuls": ["qk"]}, "qk"),
        ({"backend": "sagebwd", "preset": "papers"}, "preset=papers is unknown; choose one of default"),
        ({"backend": "sagebwd", "kernels": "cuda"}, "kernels=cuda is unknown; choose one of auto, hopper"),
        ({"backend": "sagebwd", "smoth_k": None}, r"no attention has .*attention\.smooth_k\?"),
        ({"backend": "fpa", "sdpa": "fast"}, "sdpa=fast is unknown; choose one of cudnn"),
        ({"backend": "fpa", "sdpa": ["math"]}, "sdpa"),
        ({"backend": "fpa", "warp": 9}, "attention.warp=9: no attention has this setting"),
        ({"backend": "fp"}, "choose one of fpa, sagebwd"),
        ({"backend": "../fpa"}, "choose one of fpa, sagebwd"),
    ],
)
def test_settings_are_typed_and_known(attention, match):
    with pytest.raises(ValueError, match=match):
        backends.read(attention)


def test_null_is_the_default_and_settings_of_other_attentions_are_left_out():
    """A sweep over attentions sets a switch for all of them."""
    with_nulls = {"backend": "sagebwd", "preset": None, "kernels": None, "smooth_k": None, "sdpa": "flash"}
    assert backends.read(with_nulls) == backends.read({"backend": "sagebwd"})
    record = backends.read({"backend": "fpa", "smooth_k": False, "preset": "paper"}).recorded()
    assert record == {"backend": "fpa", "sdpa": None}


@pytest.mark.parametrize(
    ("capability", "usable", "shape", "chosen"),
    [
        ((9, 0), "cudnn flash efficient math", {}, "scaled_dot_product_attention, cuDNN"),
        ((12, 0), "cudnn flash efficient math", {}, "scaled_dot_product_attention, cuDNN"),
        ((9, 0), "flash efficient math", {}, "scaled_dot_product_attention, FlashAttention-2"),
        ((8, 9), "cudnn flash efficient math", {}, "scaled_dot_product_attention, FlashAttention-2"),
        ((8, 0), "cudnn efficient math", {}, "scaled_dot_product_attention, memory-efficient"),
        ((8, 0), "cudnn math", {}, "scaled_dot_product_attention, cuDNN"),
        ((7, 5), "math", {}, "scaled_dot_product_attention, math"),
        ((9, 0), "cudnn flash efficient math", DOCUMENTS, "FlashAttention-2, packed documents"),
        (
            (9, 0),
            "cudnn flash efficient",
            DOCUMENTS | {"d_head": 20},
            "memory-efficient, documents by a mask",
        ),
        ((9, 0), "cudnn math fa4", DOCUMENTS, "math, documents by a mask"),
    ],
)
def test_fpa_takes_the_fastest_usable_kernel(fake_gpu, capability, usable, shape, chosen):
    fake_gpu(capability, {*usable.split()})
    assert build({"backend": "fpa"}, CUDA, **shape).description == chosen


def test_fpa_takes_the_requested_kernel_or_refuses(fake_gpu):
    fake_gpu((9, 0), {"cudnn", "flash", "math"})
    assert build({"backend": "fpa", "sdpa": "flash"}, CUDA).description.endswith("FlashAttention-2")
    with pytest.raises(ValueError, match=r"sdpa=efficient cannot run .*sdpa=cudnn or flash or math, or null"):
        build({"backend": "fpa", "sdpa": "efficient"}, CUDA)
    with pytest.raises(ValueError, match=r"attention\.sdpa=cudnn cannot run on cpu"):
        build({"backend": "fpa", "sdpa": "cudnn"}, CPU)


@pytest.mark.parametrize("is_gqa", [False, True])
def test_fpa_asks_pytorch_about_causal_training(monkeypatch, is_gqa):
    asked = []
    monkeypatch.setattr(fpa, "can_use_cudnn_attention", lambda params: asked.append(params) or True)
    monkeypatch.setattr(fpa, "can_use_flash_attention", lambda params: False)
    monkeypatch.setattr(fpa, "can_use_efficient_attention", lambda params: True)
    assert fpa.usable_kernels(CPU, torch.bfloat16, 48, is_gqa) == {"cudnn", "efficient", "math"}
    (params,) = asked
    assert (params.is_causal, params.enable_gqa) == (True, is_gqa)
    assert (params.dropout, params.attn_mask) == (0, None)
    assert (params.query.dtype, params.query.requires_grad) == (torch.bfloat16, True)
    assert params.query.shape[-1] == 48
    assert (params.key.shape[1] < params.query.shape[1]) == is_gqa


def test_fpa_does_without_cudnn_where_runs_must_repeat(fake_gpu, monkeypatch):
    for ask in ("can_use_cudnn_attention", "can_use_flash_attention", "can_use_efficient_attention"):
        monkeypatch.setattr(fpa, ask, lambda params: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fpa.usable_kernels(CPU, torch.bfloat16, 64, False) == {"flash", "efficient", "math"}
    fake_gpu((9, 0), {"flash", "math"})
    with pytest.raises(ValueError, match=r"not deterministic, as hardware.deterministic.*sdpa=flash"):
        build({"backend": "fpa", "sdpa": "cudnn"}, CUDA)


def test_pinned_kernel_is_the_one_that_runs(monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(build({"backend": "fpa", "sdpa": "math"}).attend(q, k, v, **CALL), expected)

    monkeypatch.setattr(fpa, "usable_kernels", lambda *kind: {"cudnn"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    only_cudnn = build({"backend": "fpa"}, CUDA).attend
    with pytest.raises(RuntimeError, match="No viable backend"):  # no silent fall-back on these CPU tensors
        only_cudnn(q, k, v, **CALL)
    # One key is beyond cuDNN, and its softmax is 1.
    torch.testing.assert_close(only_cudnn(q[:, :, :1], k[:, :, :1], v[:, :, :1], **CALL), v[:, :, :1])
    assert torch.backends.cuda.flash_sdp_enabled()  # PyTorch's global switches are as they were


@pytest.mark.parametrize("sdpa", ["cudnn", "fa4"])
def test_a_kernel_without_documents_is_named_with_those_that_have_them(sdpa):
    settings = backends.read({"backend": "fpa", "sdpa": sdpa})
    assert re.match(rf"attention\.sdpa={sdpa} .*sdpa=flash or", settings.why_no_documents())
    assert backends.read({"backend": "fpa", "sdpa": "math"}).why_no_documents() is None
    assert "takes no packed documents" in backends.Attention().why_no_documents()


def test_flash_attention_of_documents_is_that_by_a_mask(fake_gpu, monkeypatch):
    """A stand-in for the operator on a GPU: (T, H, D), int32 boundaries, the last document empty."""

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, returns_mask):
        assert cu_q is cu_k
        assert cu_q.dtype == torch.int32
        assert (max_q, max_k, dropout, is_causal, returns_mask) == (6, 6, 0.0, True, False)
        parts = [x.transpose(0, 1).split(cu_q.diff().tolist(), 1) for x in (q, k, v)]
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        outs = [attend(*one) for one in zip(*parts, strict=True)]
        return torch.cat(outs, 1).transpose(0, 1), None, None, None, None

    cu_seqlens = torch.tensor([0, 1, 6, 8, 11, 12, 12], dtype=torch.int32)
    q, (k, v) = torch.randn(1, 12, 4, 16).transpose(1, 2), torch.randn(2, 1, 2, 12, 16)
    documents = {"is_causal": True, "enable_gqa": True, "cu_seqlens": cu_seqlens}
    expected = build({"backend": "fpa"}, longest_document=6).attend(q, k, v, **documents)
    fake_gpu((8, 0), {"flash"})
    monkeypatch.setattr(fpa, "_ATEN", SimpleNamespace(_flash_attention_forward=flash))
    found = build({"backend": "fpa"}, CUDA, longest_document=6).attend(q, k, v, **documents)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sdpa", ["flash", "efficient", "math"])
def test_documents_on_a_gpu_are_those_of_float64(sdpa):
    shape = {"device": CUDA, "dtype": torch.bfloat16}
    attend = build({"backend": "fpa", "sdpa": sdpa}, **shape, d_head=64, longest_document=300).attend
    cu_seqlens = torch.tensor([0, 1, 170, 300, 600, 600], dtype=torch.int32, device=CUDA)
    q, k, v, grad = (torch.randn(1, 600, 4, 64, **shape).transpose(1, 2) for _ in range(4))
    exact = exact_attention(q, k, v, grad, is_causal=True, cu_seqlens=cu_seqlens)
    for run in (attend, torch.compile(attend, fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = run(*leaves, **CALL, cu_seqlens=cu_seqlens)
        gradients = torch.autograd.grad(out, leaves, grad)
        for found, wanted in zip((out, *gradients), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
            assert relative_l2(found, wanted) < 0.01


def test_every_setting_of_the_library_can_be_set():
    for field in fields(SageConfig):
        changed = {"smooth_k": False, "block_q": 32, "block_kv": 32}
        changed |= {"operand_scales": "token", "granularity": "block", "int8_matmuls": []}
        value = changed.get(field.name, True)
        needed = {"int8_matmuls": ["s_fwd"]} if field.name == "compensate_o" else {}
        config = backends.read({"backend": "sagebwd", **needed, field.name: value}).config
        assert getattr(config, field.name) in (value, ()), field.name


@pytest.mark.parametrize("name", PRESETS)
def test_a_recorded_preset_is_the_same_attention_without_its_name(name):
    record = backends.read({"backend": "sagebwd", "preset": name, "kernels": "reference"}).recorded()
    assert "preset" not in record
    assert record["kernels"] == "reference"
    again = backends.read(record)
    assert (again.config, again.recorded()) == (PRESETS[name], record)


def test_sagebwd_runs_the_library_with_the_config():
    q, k, v = torch.randn(3, 1, 4, 21, 16)
    backend = build({"backend": "sagebwd", "kernels": "reference", "int8_matmuls": ["s_fwd"], "block_q": 16})
    config = SageConfig(int8_matmuls=("s_fwd",), block_q=16)
    expected = sagebwd.sage_attention(q, k, v, is_causal=True, config=config)
    assert torch.equal(backend.attend(q, k, v, **CALL), expected)
    assert not torch.equal(expected, sagebwd.sage_attention(q, k, v, is_causal=True))
    assert re.search("kernels reference.*block_q=16|block_q=16.*kernels reference", backend.description)


__all__ = ["train_here"]

MODULE = '''
"""Causal attention to the last `window` tokens."""
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from model.backends import Attention, Backend

@dataclass
class Settings(Attention):
    window: int = 4

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"attention.window={self.window} must be at least 1")

    def build(self, *, device, dtype, d_head, is_gqa):
        def attend(q, k, v, *, is_causal, enable_gqa):
            n = q.shape[-2]
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

        return Backend(attend, f"a window of {self.window} tokens", title="windowed attention")
'''


def test_a_new_attention_trains_and_is_resumed_with_a_setting_of_its_own(
    train_here, tmp_path, monkeypatch, caplog
):
    """And its setting is checked, and known where a name is misspelt."""
    caplog.set_level(logging.INFO, logger="trainer")
    run = tmp_path / "run"
    (tmp_path / "attention").mkdir()
    (tmp_path / "window.py").write_text(MODULE)
    (tmp_path / "attention" / "window.yaml").write_text("backend: window\nwindow: 8\n")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    own = (run, f"hydra.searchpath=[file://{tmp_path}]", "attention=window", "steps=3", "probe.every=1")
    train_here(*own)
    assert "a window of 8 tokens" in caplog.text
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["attention"] == {"backend": "window", "window": 8}
    assert "probe/layer_0/dq_l2" in (run / "metrics.jsonl").read_text()  # its own error
    with pytest.raises(TrainingError, match=r"attention\.window was 8, is now 64"):
        train_here(*own, "attention.window=64")
    train_here(*own)
    assert "continuing" in caplog.text

    told = {("window", 0): "window=0 must be at least 1", ("window", "wide"): "window=wide: "}
    for (name, wrong), words in {**told, ("windw", 3): r"did you mean attention\.window"}.items():
        with pytest.raises(ValueError, match=words):
            backends.read({"backend": "window", name: wrong})
    assert backends.read({"backend": "fpa", "window": 3}) == backends.read({"backend": "fpa"})
    del sys.modules["model.backends.window"]  # of this test alone
