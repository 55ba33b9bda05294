from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

import sagebwd
from model import backends
from model.backends import AttentionSettings, fpa
from model.backends.sagebwd import sage_config
from sagebwd import SageConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CALL = {"is_causal": True, "enable_gqa": False}


def build(settings: AttentionSettings, device: torch.device = CPU) -> backends.Backend:
    return backends.load(settings).build(
        settings, device=device, dtype=torch.float32, d_head=16, is_gqa=False
    )


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU of a given compute capability on which only the given kernels run."""

    def fake(capability: tuple[int, int], usable: set[str]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(fpa, "usable_kernels", lambda *kind: usable)

    return fake


def test_backends_are_the_modules_of_the_package():
    assert {"fpa", "sagebwd"} <= set(backends.available())
    for name in backends.available():
        module = backends.load(AttentionSettings(backend=name))
        module.check(AttentionSettings(backend=name))
        assert isinstance(build(AttentionSettings(backend=name)), backends.Backend)


@pytest.mark.parametrize("name", ["fp", "", "../fpa", "fpa.check"])
def test_unknown_backend_is_refused_with_a_list(name):
    with pytest.raises(ValueError, match=r"choose one of fpa, sagebwd"):
        backends.load(AttentionSettings(backend=name))


def test_settings_are_a_structured_config():
    merged = OmegaConf.merge(AttentionSettings, {"backend": "sagebwd", "int8_matmuls": ["o"], "block_q": 32})
    settings = OmegaConf.to_object(merged)
    assert settings == AttentionSettings(backend="sagebwd", int8_matmuls=["o"], block_q=32)


# fpa


@pytest.mark.parametrize(
    "changes",
    [
        {"smooth_q": True},
        {"granularity": "row"},
        {"operand_scales": "token"},
        {"int8_matmuls": ["o"]},
        {"s_levels": 2},
        {"implementation": "auto"},
    ],
)
def test_fpa_refuses_what_only_sagebwd_reads(changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match="attention=fpa") as caught:
        fpa.check(AttentionSettings(**changes))
    assert f"attention.{name}={value}" in str(caught.value)
    assert "drop it, or use attention=sagebwd" in str(caught.value)


def test_fpa_allows_switches_that_are_off():
    fpa.check(AttentionSettings(smooth_k=False, smooth_q=False, int8_matmuls=[]))


def test_fpa_refuses_an_unknown_kernel():
    with pytest.raises(ValueError, match=r"attention\.sdpa=fast is unknown; choose one of cudnn, flash, eff"):
        fpa.check(AttentionSettings(sdpa="fast"))


@pytest.mark.parametrize(
    ("capability", "usable", "chosen"),
    [
        ((9, 0), {"cudnn", "flash", "efficient", "math"}, "cuDNN"),
        ((12, 0), {"cudnn", "flash", "efficient", "math"}, "cuDNN"),
        ((9, 0), {"flash", "efficient", "math"}, "FlashAttention-2"),
        ((8, 9), {"cudnn", "flash", "efficient", "math"}, "FlashAttention-2"),
        ((8, 0), {"cudnn", "efficient", "math"}, "memory-efficient"),
        ((8, 0), {"cudnn", "math"}, "cuDNN"),
        ((7, 5), {"math"}, "math"),
    ],
)
def test_fpa_takes_the_fastest_usable_kernel(fake_gpu, capability, usable, chosen):
    fake_gpu(capability, usable)
    assert build(AttentionSettings(), CUDA).description == f"scaled_dot_product_attention, {chosen}"


def test_fpa_takes_the_requested_kernel_or_refuses(fake_gpu):
    fake_gpu((9, 0), {"cudnn", "flash", "math"})
    assert build(AttentionSettings(sdpa="flash"), CUDA).description.endswith("FlashAttention-2")
    with pytest.raises(ValueError, match=r"sdpa=efficient cannot run .*sdpa=cudnn or flash or math, or null"):
        build(AttentionSettings(sdpa="efficient"), CUDA)
    with pytest.raises(ValueError, match=r"attention\.sdpa=cudnn cannot run on cpu"):
        build(AttentionSettings(sdpa="cudnn"), CPU)


@pytest.mark.parametrize("is_gqa", [False, True])
def test_fpa_asks_pytorch_about_causal_training(monkeypatch, is_gqa):
    asked = []
    monkeypatch.setattr(fpa, "can_use_cudnn_attention", lambda params: asked.append(params) or True)
    monkeypatch.setattr(fpa, "can_use_flash_attention", lambda params: False)
    monkeypatch.setattr(fpa, "can_use_efficient_attention", lambda params: True)
    assert fpa.usable_kernels(CPU, torch.bfloat16, 48, is_gqa) == {"cudnn", "efficient", "math"}
    (params,) = asked
    assert params.is_causal
    assert params.enable_gqa == is_gqa
    assert params.dropout == 0
    assert params.attn_mask is None
    assert params.query.dtype == torch.bfloat16
    assert params.query.requires_grad
    assert params.query.shape[-1] == 48
    assert (params.key.shape[1] < params.query.shape[1]) == is_gqa


def test_fpa_does_without_cudnn_where_runs_must_repeat(monkeypatch):
    for ask in ("can_use_cudnn_attention", "can_use_flash_attention", "can_use_efficient_attention"):
        monkeypatch.setattr(fpa, ask, lambda params: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fpa.usable_kernels(CPU, torch.bfloat16, 64, False) == {"flash", "efficient", "math"}


def test_fpa_on_a_cpu_is_pytorchs_attention():
    backend = build(AttentionSettings())
    assert backend.description == "scaled_dot_product_attention, PyTorch's own choice for cpu"
    assert backend.attend is F.scaled_dot_product_attention


def test_pinned_kernel_is_the_one_that_runs(monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(build(AttentionSettings(sdpa="math")).attend(q, k, v, **CALL), expected)

    monkeypatch.setattr(fpa, "usable_kernels", lambda *kind: {"cudnn"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    only_cudnn = build(AttentionSettings(), CUDA).attend
    with pytest.raises(RuntimeError, match="No viable backend"):  # no silent fall-back on these CPU tensors
        only_cudnn(q, k, v, **CALL)
    # One key is beyond cuDNN, and its softmax is 1.
    torch.testing.assert_close(only_cudnn(q[:, :, :1], k[:, :, :1], v[:, :, :1], **CALL), v[:, :, :1])
    assert torch.backends.cuda.flash_sdp_enabled()  # PyTorch's global switches are as they were


# sagebwd


def sagebwd_settings(**changes: object) -> AttentionSettings:
    return AttentionSettings(backend="sagebwd", **changes)


def test_every_setting_of_sagebwd_can_be_set():
    given = {field.name for field in fields(AttentionSettings)} - {"backend", "sdpa", "implementation"}
    assert given == {field.name for field in fields(SageConfig)}


def test_sagebwd_uses_what_is_set_and_its_own_defaults_for_the_rest():
    assert sage_config(sagebwd_settings()) == SageConfig()
    changes = {"smooth_k": False, "granularity": "block", "int8_matmuls": ["o", "dv"], "block_kv": 32}
    config = sage_config(sagebwd_settings(**changes))
    assert config == SageConfig(**changes | {"int8_matmuls": ("o", "dv")})
    assert config != SageConfig()
    assert sage_config(sagebwd_settings(int8_matmuls=[])).int8_matmuls == ()


def test_the_strictly_causal_setting_can_be_set():
    """The line that configs/attention/sagebwd.yaml names."""
    settings = sagebwd_settings(smooth_k=False, operand_scales="token", granularity="row")
    assert sage_config(settings) == SageConfig.strictly_causal()
    assert "operand_scales='token'" in build(settings).description


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"granularity": "token"}, "attention=sagebwd: .*token"),
        (
            {"operand_scales": "row"},
            "attention=sagebwd: operand_scales is 'row'; set it to",
        ),
        ({"int8_matmuls": ["qk"]}, "attention=sagebwd: .*qk"),
        ({"s_levels": 3}, "attention=sagebwd: .*3"),
        (
            {"implementation": "cuda"},
            "implementation=cuda is unknown; choose one of auto, reference",
        ),
        ({"sdpa": "flash"}, "sdpa=flash: without meaning for attention=sagebwd.*use attention=fpa"),
    ],
)
def test_sagebwd_refuses_wrong_settings(changes, match):
    settings = sagebwd_settings(**changes)
    with pytest.raises(ValueError, match=match):
        backends.load(settings).check(settings)


@pytest.mark.parametrize(
    ("device", "dtype", "match"),
    [
        ("meta", torch.float32, r"cannot run on meta .*implementation=reference"),
        ("cpu", torch.float64, "float64"),
    ],
)
def test_sagebwd_that_cannot_run_is_refused_when_built(device, dtype, match):
    settings = sagebwd_settings()
    with pytest.raises(ValueError, match=match):
        backends.load(settings).build(
            settings, device=torch.device(device), dtype=dtype, d_head=16, is_gqa=False
        )


def test_sagebwd_runs_the_library_with_the_config():
    q, k, v = torch.randn(3, 1, 4, 21, 16)
    settings = sagebwd_settings(implementation="reference", int8_matmuls=["s_fwd"], block_q=16)
    backend = build(settings)
    config = SageConfig(int8_matmuls=("s_fwd",), block_q=16)
    expected = sagebwd.sage_attention(q, k, v, is_causal=True, config=config)
    assert torch.equal(backend.attend(q, k, v, **CALL), expected)
    assert not torch.equal(expected, sagebwd.sage_attention(q, k, v, is_causal=True))
    assert "implementation reference" in backend.description
    assert "block_q=16" in backend.description
