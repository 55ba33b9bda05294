"""Which kernels are chosen on which GPU, what is said of it, and that a tracer asks no driver."""

import re
import warnings
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode

import sagebwd
from sagebwd import SageConfig, dispatch
from sagebwd.config import DEFAULT_CONFIG, PAPER_INT8_MATMULS, PRESETS, encode
from sagebwd.dispatch import GPU, Call, explain_call
from sagebwd.kernels.cuda import compile as compiler
from sagebwd.kernels.cuda import launch
from tests.sagebwd.kernels.sets import without_int8

H200 = GPU("NVIDIA H200", (9, 0))
A100 = GPU("NVIDIA A100", (8, 0))
RTX_4090 = GPU("NVIDIA GeForce RTX 4090", (8, 9))


def call(gpu=H200, config=DEFAULT_CONFIG, head_dim=64, dtype=torch.bfloat16):
    device = "cpu" if gpu is None else "cuda"
    return Call(device, gpu, dtype, head_dim, config)


HALF = torch.ones(1, 2, 8, 64).half()
#: Row scales in tiles that the Ampere kernels have and the Hopper kernels do not.
OTHER_TILES = SageConfig(block_q=128, block_kv=64)
# --- The rules ---------------------------------------------------------------------------------------------

#: Products that may be in 16 bits there, and that may not.
ON_HOPPER, IN_TRITON = ("o", "dv", "dq", "o dv", "o dv dq", "o dv dq dk"), ("s_fwd", "s_bwd", "dk", "dq dk")
#: For every setting other values than the default, and the kernels that run it on a Hopper GPU.
OTHER_SETTINGS = {
    "smooth_k": [(False, "hopper")],
    "smooth_q": [(True, "triton")],
    "smooth_v": [(True, "hopper")],
    "unsigned_p": [(True, "hopper")],
    "operand_scales": [("token", "hopper")],
    "granularity": [("block", "triton")],
    "int8_matmuls": [
        (PAPER_INT8_MATMULS[::-1], "hopper"),  # the order says nothing
        ((*PAPER_INT8_MATMULS, "dp"), "triton"),
        ((), "triton"),
        *((without_int8(*names.split()).int8_matmuls, "hopper") for names in ON_HOPPER),
        *(
            (without_int8(*names.split()).int8_matmuls, "triton")
            for names in ("s_fwd", "s_bwd", "dk", "dq dk")
        ),
    ],
    "dp_fp16_accumulation": [(True, "ampere")],
    "compensate_o": [],  # needs an O in 16 bit, see below
    "block_q": [(64, "hopper"), (32, "triton"), (128, "triton"), (16, "none")],
    "block_kv": [(128, "hopper"), (64, "ampere"), (32, "triton"), (256, "none")],
}


def test_every_setting_has_its_kernels():
    """A setting that is added to SageConfig must be added here, and looked at in the rules."""
    assert {*OTHER_SETTINGS} == {field.name for field in fields(SageConfig)}
    for name, cases in OTHER_SETTINGS.items():
        for value, kernels in cases:
            for head_dim in (64, 128):
                config = replace(DEFAULT_CONFIG, **{name: value})
                assert explain_call(call(config=config, head_dim=head_dim)).kernels == kernels, (name, value)
    for config in (without_int8("dv", smooth_v=True), without_int8("o", compensate_o=True)):
        assert explain_call(call(config=config)).kernels == "hopper"


@pytest.mark.parametrize("capability", dispatch.ARCHITECTURES)
def test_what_is_explained_is_what_runs_on_every_architecture(capability, choose):
    """Every preset; what is chosen can be asked for. What it is, is a table of docs/, which is tested."""
    gpu = dispatch.ARCHITECTURES[capability]
    assert capability == "{}.{}".format(*gpu.capability)
    for config, head_dim in product(PRESETS.values(), (32, 64, 256)):
        found = explain_call(call(gpu, config, head_dim))
        told = found.kernels
        assert (*found.reasons,) == dispatch.KERNEL_SETS[: [*dispatch.KERNEL_SETS, "none"].index(told)]
        assert all(found.reasons.values())
        if told == "none":
            with pytest.raises(NotImplementedError, match="a Turing GPU has no kernels"):
                choose(gpu, config, head_dim=head_dim)
            continue
        if capability != "9.0":
            assert f"has compute capability {capability}, not 9.0 (Hopper)" in found.reasons["hopper"]
        with warnings.catch_warnings(action="ignore"):  # of settings that cost the fastest kernels, see below
            assert choose(gpu, config, head_dim=head_dim) == told
        assert choose(gpu, config, kernels=told, head_dim=head_dim) == told


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_without_cuda_kernels_is_told_one_that_has_them(choose, name):
    for gpu, head_dim in product((H200, RTX_4090), (32, 64, 256)):
        found = explain_call(call(gpu, PRESETS[name], head_dim))
        assert (found.faster_preset is None) == (found.kernels != "triton" or head_dim == 32)
        if found.faster_preset is None:
            continue
        faster = PRESETS[found.faster_preset]
        assert explain_call(call(gpu, faster, head_dim)).kernels in ("hopper", "ampere")
        shown = "SageConfig()" if faster == DEFAULT_CONFIG else f"SageConfig.{found.faster_preset}()"
        assert str(found).endswith(f"\nfaster here: {shown}")
        with pytest.warns(UserWarning, match=re.escape(f"; {shown} runs CUDA kernels")):
            choose(gpu, PRESETS[name], head_dim=head_dim)
    assert explain_call(call(config=SageConfig(smooth_q=True))).faster_preset is None  # reasons say enough


PAPER, STRICT = SageConfig.paper(), SageConfig.strictly_causal()
DP_IN_FP16 = SageConfig(dp_fp16_accumulation=True)
#: (kernels, GPU, settings, head size): a part of what is in the way.
IN_THE_WAY = (
    ("hopper", H200, without_int8("o", operand_scales="token"), 64, "operand_scales is 'token'"),
    ("hopper", H200, replace(PAPER, block_q=None, block_kv=None), 64, "granularity is 'block'"),
    ("hopper", H200, replace(PAPER, block_q=64), 64, "set block_q=128 and block_kv=64"),
    ("hopper", H200, replace(PAPER, int8_matmuls=without_int8("dv").int8_matmuls), 64, "dv not in INT8"),
    ("hopper", H200, without_int8("s_fwd", "s_bwd"), 64, "s_fwd, s_bwd not in INT8 (add them to"),
    ("hopper", H200, without_int8("dk"), 64, "dk is not in INT8, and dv or dq is"),
    ("hopper", H200, PAPER, 256, "granularity is 'block' (set granularity='row')"),
    ("hopper", H200, SageConfig.int8_scores(), 256, "dq, dk not in INT8"),
    ("hopper", H200, SageConfig(block_kv=128), 256, "block_q is None and block_kv 128 (set both to None)"),
    ("hopper", H200, SageConfig(smooth_q=True), 64, "smooth_q is True (set smooth_q=False)"),
    ("hopper", H200, DP_IN_FP16, 64, "(set dp_fp16_accumulation=False)"),
    ("hopper", H200, DEFAULT_CONFIG, 32, "the head size is 32"),
    ("hopper", H200._replace(no_cuda_kernels="no NVRTC"), DEFAULT_CONFIG, 64, "no NVRTC"),
    ("hopper", A100, DEFAULT_CONFIG, 64, "has compute capability 8.0, not 9.0"),
    ("ampere", A100, SageConfig.int8_scores(), 64, "dq, dk not in INT8"),
    ("ampere", A100, without_int8("dv", operand_scales="token"), 64, "operand_scales is 'token'"),
    ("ampere", A100, SageConfig(smooth_q=True), 64, "smooth_q is True"),
    ("ampere", A100, without_int8("dv", block_kv=64), 64, "dv is not in INT8, and tiles have 64 keys"),
    ("ampere", A100, PAPER, 256, "block_q is 128 and block_kv 64"),
    ("ampere", A100, without_int8("s_fwd", "s_bwd"), 64, "s_fwd, s_bwd not in INT8 (add them to"),
    ("ampere", A100, SageConfig(granularity="block"), 64, "granularity is 'block'"),
    ("ampere", A100, replace(STRICT, dp_fp16_accumulation=True), 64, "and set operand_scales='block'"),
    ("ampere", A100, without_int8("dv", dp_fp16_accumulation=True), 64, "or add 'dv' to int8_matmuls"),
    ("triton", A100, replace(STRICT, dp_fp16_accumulation=True), 64, "which only the Ampere kernels have"),
    ("triton", A100, SageConfig(block_q=16), 64, "block_q is 16"),
    ("triton", A100, SageConfig(block_kv=256), 64, "block_kv is 256"),
    *(("triton", A100, DEFAULT_CONFIG, n, f"the head size is {n}") for n in (4, 20, 257, 264)),
)


@pytest.mark.parametrize(("kernels", "gpu", "config", "head_dim", "words"), IN_THE_WAY)
def test_what_is_in_the_way_is_named(choose, kernels, gpu, config, head_dim, words):
    """Where the kernels were asked for, and where it is explained why they were not chosen."""
    with pytest.raises((NotImplementedError, ValueError), match=re.escape(words)):
        choose(gpu, config, kernels=kernels, head_dim=head_dim)
    reasons = explain_call(call(gpu, config, head_dim)).reasons
    assert words in reasons[kernels]


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        ("NVIDIA H100", (9, 0)), ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA GeForce RTX 4090", (8, 9)), ("RTX 5090", (12, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA RTX 5000 Ada Generation", (8, 9)), ("Quadro RTX 5000", (7, 5)), ("Tesla T4", (7, 5)),
        ("NVIDIA RTX A6000", (8, 6)), ("NVIDIA A10G", (8, 6)), ("NVIDIA L40S", (8, 9)), ("b200", (10, 0)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0)), ("NVIDIA GB10", (12, 1)),
        ("GeForce RTX 3060 Laptop GPU", (8, 6)), ((8, 7), (8, 7)),
    ],
)  # fmt: skip
def test_explain_knows_gpus_that_are_not_here(device, capability):
    """As the driver names them."""
    fastest = {(9, 0): "hopper", (7, 5): "none"}.get(capability, "ampere")
    of_any = "triton" if capability >= (8, 0) else "none"
    assert sagebwd.explain(HALF, device=device).kernels == fastest
    assert sagebwd.explain(HALF, config=SageConfig(smooth_q=True), device=device).kernels == of_any
    assert dispatch.hypothetical_gpu(device).capability == capability


def test_explain_looks_at_the_dtype_of_autocast_and_at_the_name(monkeypatch):
    q, calls = torch.ones(1, 2, 8, 64), []
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(dispatch, "explain_call", calls.append)
        sagebwd.explain(q)
    assert calls[0].dtype == torch.bfloat16
    assert "float32" in sagebwd.explain(q, device="H200").reasons["hopper"]
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.bfloat16}.get)
    assert sagebwd.explain(q, device="H200").kernels == "hopper"
    with pytest.raises(ValueError, match=r"device is 'MI300X'.* pass that, such as \(9, 0\)"):
        sagebwd.explain(q, device="MI300X")


# --- The choice --------------------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch):
    """choose(gpu, config, kernels=, …) -> the kernel set on such a GPU."""

    def choose(gpu=H200, config=DEFAULT_CONFIG, kernels=None, scale=1.0, head_dim=64, dtype=torch.bfloat16):
        dispatch._choose_once.cache_clear()
        monkeypatch.setattr(dispatch, "gpu_of", lambda index: gpu)
        return dispatch.choose(torch.device("cuda", 0), dtype, head_dim, scale, encode(config), kernels)

    dispatch._warn_once.cache_clear()
    yield choose
    dispatch._choose_once.cache_clear()
    dispatch._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [("B200", (10, 0), "several times below its peak"), ("GB300", (10, 3), "has no fast INT8")],
)
def test_where_int8_is_slow_a_call_runs_and_says_once_what_to_use(choose, name, capability, why):
    message = rf"{name} .*{why}.*: use cuDNN's attention or FlashAttention-4, in full precision"
    for config in (DEFAULT_CONFIG, SageConfig.low_bias()):
        assert re.search(message, str(sagebwd.explain(HALF, config=config, device=name)))
    with pytest.warns(UserWarning, match=message):
        assert choose(GPU(name, capability)) == "ampere"
    assert choose(GPU(name, capability), SageConfig.low_bias()) == "ampere"  # a second warning is an error


def test_what_costs_the_fastest_kernels_is_warned_of_once(choose):
    tokens, blocks = without_int8("dv", operand_scales="token"), SageConfig(granularity="block")
    assert choose(config=blocks, kernels="triton") == "triton"  # as was asked for
    costs = [
        (
            H200,
            tokens,
            "triton",
            r"than the hopper kernels .*operand_scales is 'token' \(set operand_scales=",
        ),
        (H200, blocks, "triton", "granularity"),
        (H200, OTHER_TILES, "ampere", "the ampere kernels, slower than the hopper .* block_q is 128"),
    ]
    for gpu in (H200, RTX_4090):
        gpu = gpu._replace(no_cuda_kernels=f"{gpu.name} has no NVRTC; install it")
        costs.append((gpu, DEFAULT_CONFIG, "triton", r"on this GPU: .* has no NVRTC \(install it\)"))
    for gpu, config, kernels, message in costs:
        with pytest.warns(UserWarning, match=message):
            assert choose(gpu, config) == kernels
        assert choose(gpu, config) == kernels  # a second warning would be an error
    assert choose(config=replace(tokens, smooth_v=True)) == "triton"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_a_gpu_is_asked_whether_cuda_kernels_can_be_made_for_it(monkeypatch, capability):
    known = {"is_available": True, "get_device_capability": capability, "get_device_name": "some GPU"}
    for name, answer in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *index, answer=answer: answer)
    monkeypatch.setattr(compiler, "why_no_compiler", lambda: None)
    monkeypatch.setattr(launch, "why_no_driver", lambda: "old driver")
    assert dispatch.gpu_of.__wrapped__(1) == GPU("some GPU", capability, no_cuda_kernels="old driver")
    monkeypatch.setattr(compiler, "why_no_compiler", lambda: "no NVRTC")
    assert dispatch.gpu_of.__wrapped__(1) == GPU("some GPU", capability, no_cuda_kernels="no NVRTC")


def test_without_a_gpu_a_program_gets_kernels_that_run_on_any(choose):
    gpu = dispatch.ABSENT_GPU
    for kernels, chosen in ((None, "triton"), ("ampere", "ampere"), ("hopper", "hopper")):
        assert choose(gpu, kernels=kernels) == chosen
    reasons = explain_call(call(gpu)).reasons
    assert list(reasons) == ["hopper", "ampere"]
    assert all("not known which GPU will run this" in reason for reason in reasons.values())


def test_a_kernel_set_that_is_asked_for_runs(choose):
    for name, head_dim in ((name, n) for name in {*PRESETS} - {"int8_scores"} for n in (8, 64)):
        assert choose(H200, PRESETS[name], head_dim=head_dim, kernels="ampere") == "ampere"
    for wrong in ("cuda", ["triton"]):
        with pytest.raises(ValueError, match="use one of 'hopper', 'ampere', 'triton', 'ref"):
            choose(kernels=wrong)


def test_what_no_kernels_run_names_the_fix(choose):
    """In a call, and where it is explained."""
    with pytest.raises(ValueError, match="q, k, v are float32; cast them to bfloat16 or float16, or pass"):
        choose(dtype=torch.float32)
    found = explain_call(call(dtype=torch.float32))
    assert found.kernels == "none"
    assert found.reasons["triton"] == "q, k, v are float32 (cast them to bfloat16 or float16)"
    with pytest.raises(ValueError, match=r"scale is -1\.0; pass one that is not negative"):
        choose(scale=-1.0)
    for gpu in (GPU("Some GPU", (7, 5)), GPU("Some GPU", (9, 4), is_amd=True)):
        with pytest.raises(NotImplementedError, match=r"Some GPU has no kernels: .* Ampere .*; pass"):
            choose(gpu)
        assert explain_call(call(gpu)).kernels == "none"


def test_triton_is_needed_only_where_it_is_chosen(choose, monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert (choose(), choose(A100)) == ("hopper", "ampere")
    with pytest.raises(NotImplementedError, match=r'triton, or pass kernels="ampere" .* kernels="reference"'):
        choose(dispatch.ABSENT_GPU)
    with pytest.raises(NotImplementedError, match='install triton, or pass kernels="reference"'):
        choose(A100, SageConfig(block_q=32, block_kv=32))


# --- Tracing -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_driver(monkeypatch):
    """Whoever asks the driver fails."""

    def asked(*arguments, **settings):
        raise AssertionError("the driver was asked")

    for name in ("get_device_capability", "get_device_properties", "get_device_name", "current_device"):
        monkeypatch.setattr(torch.cuda, name, asked)


@pytest.mark.parametrize("kernels", dispatch.KERNEL_SETS)
@pytest.mark.parametrize("pack", [False, True])
def test_fakes_ask_no_driver(no_driver, kernels, pack):
    with FakeTensorMode():
        q = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 2, 130, 64, dtype=torch.bfloat16, device="cuda")
        options = (None, None, -1, 0, 0.125, encode(SageConfig.consistent()), kernels)
        saved = torch.ops.sagebwd.forward(q, k, k, *options, pack)
        out, lse, k_mean, out_residual, packed_q, packed_kv = saved
        assert out.shape == out_residual.shape == q.shape
        assert lse.shape == q.shape[:-1]
        assert k_mean.shape == (2, 2, 64)
        packs = pack and kernels not in ("triton", "reference")
        assert packed_q.shape == ((2 * 4 * 2, 64 * 64 + 16) if packs else (0,))
        assert packed_kv.shape == ((2 * 2 * 2, 128 * 64 + 16) if packs else (0,))  # V is read where it is
        dq, dk, dv = torch.ops.sagebwd.backward(q, q, k, k, 2, 130, *saved, *options)
        assert dq.shape == q.shape
        assert dk.shape == dv.shape == k.shape
