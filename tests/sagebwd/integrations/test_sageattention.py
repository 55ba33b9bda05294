"""SageAttention's functions: layouts, scale, GQA and packed sequences against float64; what is refused."""

import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import sys
import types

import pytest
import torch

from sagebwd import SageConfig, report, sage_attention
from sagebwd.integrations import sageattention
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from tests.inputs import gradients

EXACT = SageConfig(int8_matmuls=())


@pytest.fixture
def not_installed():
    yield
    sageattention.uninstall()


def assert_same(found, truth, bound=1e-5):
    for name, x, expected in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        assert x.shape == expected.shape, name
        assert relative_l2(x, expected) < bound, name


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_scale_and_shared_heads(layout, draw):
    inputs = draw(13, 13, heads=4, kv_heads=2, head_dim=8)
    truth = exact_attention(*inputs, is_causal=True, scale=0.3)
    turn = (lambda x: x.transpose(1, 2)) if layout == "NHD" else (lambda x: x)
    settings = {"tensor_layout": layout, "is_causal": True, "sm_scale": 0.3, "config": EXACT}
    _, lse = sageattention.sageattn(*map(turn, inputs[:3]), return_lse=True, **settings)
    torch.testing.assert_close(lse, truth.lse.float())
    found = gradients(lambda q, k, v: sageattention.sageattn(q, k, v, **settings), *map(turn, inputs))
    assert_same(map(turn, found), [truth.out, truth.dq, truth.dk, truth.dv])


@pytest.mark.filterwarnings("ignore:sage_attention runs the triton kernels")  # as the config asks
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_causal_mask_over_sequences_that_differ_in_length(draw, device):
    """As many tokens in all. The mask counts from the bottom right where lengths are not read."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = [x[0].transpose(0, 1).to(device, dtype) for x in draw(30, batch=1, head_dim=8)]
    boundaries, boundaries_kv = (torch.tensor(x, device=device) for x in ([0, 10, 30], [0, 20, 30]))

    def attend(q, k, v):
        lengths = (boundaries, boundaries_kv, 20, 20)
        return sageattention.sageattn_varlen(q, k, v, *lengths, is_causal=True, config=EXACT)

    if device == "cpu":
        with pytest.raises(ValueError, match=r"lengths \[10, 20\] of queries and \[20, 10\] of keys"):
            attend(*inputs[:3])
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, *inputs)
    seen = [torch.ones(n, m, device=device).tril(m - n) for n, m in ((10, 20), (20, 10))]
    seen = torch.block_diag(*seen).bool()

    def exact(*leaves):
        q, k, v = (x.transpose(0, 1) for x in leaves)
        p = (q @ k.mT * 8**-0.5).masked_fill(~seen, -1e9).softmax(-1) * seen
        return (p @ v).transpose(0, 1)

    assert_same(found, gradients(exact, *(x.double() for x in inputs)), 1e-5 if device == "cpu" else 5e-3)


def test_the_functions_of_single_kernels_are_the_same_whatever_they_are_asked_for(draw):
    q, k, v, _ = draw(7, head_dim=8)
    kernels = {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32+fp32", "quantization_backend": "cuda"}
    for name in ("fp16_triton", "fp16_cuda", "fp8_cuda", "fp8_cuda_sm90"):
        function = getattr(sageattention, f"sageattn_qk_int8_pv_{name}")
        found = function(q, k, v, "HND", is_causal=True, smooth_k=False, **kernels)
        assert torch.equal(found, sageattention.sageattn(q, k, v, is_causal=True, smooth_k=False))


def test_masks_that_hide_keys(draw):
    """SageAttention drops ``attn_mask`` in silence. One that differs between queries is refused."""
    q, k, v, grad_out = draw(7, 9, batch=1, head_dim=8)
    shown = torch.arange(9) % 3 != 1
    truth = exact_attention(q, k[:, :, shown], v[:, :, shown], grad_out)
    settings = {"attn_mask": shown[None, None, None], "config": EXACT}
    attend = functools.partial(sageattention.sageattn, **settings)
    out, dq, dk, dv = gradients(attend, q, k, v, grad_out)
    assert not dk[:, :, ~shown].any()
    assert_same([out, dq, dk[:, :, shown], dv[:, :, shown]], [truth.out, truth.dq, truth.dk, truth.dv])
    with pytest.raises(ValueError, match="attn_mask has shape"):
        sageattention.sageattn(q, k, v, attn_mask=torch.ones(7, 9, dtype=torch.bool).tril())


def test_smoothing_is_what_the_call_says_and_else_what_the_config_says(draw):
    q, k, v, _ = draw(40, head_dim=8)
    q, k, v = q + 1, k + 1, v + 1
    of_config = {
        (k_too, v_too): sage_attention(q, k, v, config=SageConfig(smooth_k=k_too, smooth_v=v_too))
        for k_too, v_too in itertools.product((False, True), repeat=2)
    }
    for one, other in itertools.combinations(of_config.values(), 2):
        assert not torch.equal(one, other)
    plain = {"config": SageConfig(smooth_k=False)}
    for settings, (k_too, v_too) in (
        ({}, (True, False)), (plain, (False, False)), ({"smooth_k": False}, (False, False)),
        ({"smooth_k": True} | plain, (True, False)), ({"smooth_v": True}, (True, True)),
    ):  # fmt: skip
        assert torch.equal(sageattention.sageattn(q, k, v, **settings), of_config[k_too, v_too])


def test_programs_that_import_sageattention_get_gradients(not_installed, draw, caplog):
    sageattention.install(EXACT)
    program = {}
    exec("import sageattention; from sageattention import sageattn, sageattn_varlen", program)
    exec("from sageattention.core import sageattn_qk_int8_pv_fp16_cuda", program)
    assert importlib.util.find_spec("sageattention") is not None
    assert importlib.metadata.version("sageattention") == "2.2.0"
    assert torch.__version__.startswith(importlib.metadata.version("torch"))
    q, k, v, grad_out = draw(9, head_dim=8)
    truth = exact_attention(q, k, v, grad_out)
    found = gradients(program["sageattn"], q, k, v, grad_out)
    assert_same(found, [truth.out, truth.dq, truth.dk, truth.dv])
    assert [(row.name, row.kernels, row.calls) for row in report().rows] == [("sageattn", "reference", 1)]
    sageattention.install()  # sets another config
    assert [x.message for x in caplog.records] == ["`import sageattention` now gives SageBwd, which trains"]
    assert relative_l2(program["sageattn"](q, k, v), truth.out) > 1e-4
    sageattention.uninstall()
    assert importlib.util.find_spec("sageattention") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("sageattention")


def test_a_real_sageattention_is_not_displaced(monkeypatch):
    real = types.ModuleType("sageattention")
    real.__file__ = "/site-packages/sageattention/__init__.py"
    monkeypatch.setitem(sys.modules, "sageattention", real)
    with pytest.raises(RuntimeError, match="already imported from /site-packages/sageattention"):
        sageattention.install()
    sageattention.uninstall()
    assert sys.modules["sageattention"] is real


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"tensor_layout": None}, "tensor_layout is None.*sagebwd.sage_attention"),
        ({"sm_scale": 0.1, "scale": 0.1}, "pass one of the two"),
        ({"enable_gqa": False}, "enable_gqa=True"),
        ({"is_causal": True}, "3 queries and 5 keys.*flash_attn_func"),
        ({"smooth_v": True, "config": EXACT}, "smooth_v=True needs an INT8 O"),
    ],
)
def test_refused_by_name(settings, message, draw):
    q, k, v, _ = draw(3, 5, heads=2, kv_heads=1, head_dim=8)
    for tensors in ((q, k, v), (q[0], k[0], v[0])):
        with pytest.raises(ValueError, match=message):
            sageattention.sageattn(*tensors, **settings)
    cuts, (q, k, v) = torch.tensor([0, 3]), (x[0, :, :3].transpose(0, 1) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"2 queries and 3 keys.*flash_attn_varlen_func"):
        sageattention.sageattn_varlen(q[:2], k, v, cuts, cuts, 3, 3, is_causal=True)


def test_no_function_swallows_arguments():
    for name in sageattention.__all__:
        kinds = {p.kind for p in inspect.signature(getattr(sageattention, name)).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name
