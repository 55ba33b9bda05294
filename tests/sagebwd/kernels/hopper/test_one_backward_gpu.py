"""The one backward kernel beside the two that it may replace, on a Hopper GPU.

The same gradients, the same bits again, and never a hang. The tests of kernel sets run for it, too.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sagebwd import SageConfig, dispatch, sage_attention
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.kernels.cuda import runtime
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from tests.cli import ROOT
from tests.sagebwd.kernels.inputs import GRADIENTS
from tests.sagebwd.kernels.sets import without_int8

pytestmark = pytest.mark.gpu

ONE, TWO = "hopper_one_backward", "hopper"
CONFIGS = {
    "default": DEFAULT_CONFIG,
    "consistent": SageConfig.consistent(),
    "unsigned_p": SageConfig(unsigned_p=True),
}
#: (batch, heads, key heads, queries, keys)
SHAPES = ((2, 8, 8, 1024, 1024), (1, 8, 2, 4096, 4096), (3, 4, 2, 333, 777), (1, 2, 1, 777, 130))


@pytest.fixture(autouse=True)
def hopper_gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != dispatch.HOPPER:
        pytest.skip("this needs a Hopper GPU")
    if reason := runtime.why_unavailable(torch.device("cuda"), dispatch.HOPPER):
        pytest.skip(reason)


def draw(batch, heads, kv_heads, n_q, n_kv, head_dim, dtype=torch.bfloat16):
    """q, k, v, grad_out."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((heads, n_q), (kv_heads, n_kv), (kv_heads, n_kv), (heads, n_q))
    shapes = ((batch, *size, head_dim) for size in sizes)
    return [torch.randn(shape, generator=generator, dtype=dtype, device="cuda") for shape in shapes]


def gradients(kernels, q, k, v, grad_out, *, is_causal, config, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options |= {"is_causal": is_causal, "enable_gqa": True, "config": config}
    return torch.autograd.grad(sage_attention(*leaves, kernels=kernels, **options), leaves, grad_out)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_one_kernel_computes_what_two_do(config, head_dim, is_causal, dtype):
    """The same integers, multiplied and added in another order: what differs is the rounding of results."""
    settings = {"is_causal": is_causal, "config": config}
    bound = 1e-3 if dtype == torch.bfloat16 else 2e-4
    for shape in SHAPES:
        inputs = draw(*shape, head_dim, dtype)
        found, wanted = (gradients(kernels, *inputs, **settings) for kernels in (ONE, TWO))
        for name, x, y in zip(GRADIENTS, found, wanted, strict=True):
            assert relative_l2(x, y) < bound, (name, shape)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("preset", ["default", "consistent"])
def test_dq_in_16_bit_is_nearer_to_exact_attention_than_in_int8(head_dim, is_causal, preset):
    int8 = CONFIGS[preset]
    matmuls = tuple(name for name in int8.int8_matmuls if name != "dq")
    in_16_bit = SageConfig(int8_matmuls=matmuls, compensate_o=int8.compensate_o)
    q, k, v, grad_out = inputs = draw(1, 4, 2, 1024, 1024, head_dim)
    exact = exact_attention(q, k, v, grad_out, is_causal=is_causal)
    found = {
        name: gradients(ONE, *inputs, is_causal=is_causal, config=config)
        for name, config in (("INT8", int8), ("16 bit", in_16_bit))
    }
    errors = {name: relative_l2(dq, exact.dq) for name, (dq, _, _) in found.items()}
    assert errors["16 bit"] < errors["INT8"] < 0.06, errors
    for x, y in zip(found["INT8"][1:], found["16 bit"][1:], strict=True):
        assert torch.equal(x, y)  # dK and dV know nothing of it


@pytest.mark.parametrize("config", [DEFAULT_CONFIG, without_int8("dq")], ids=["INT8", "16 bit"])
@pytest.mark.parametrize(
    ("shape", "head_dim", "is_causal"),
    [((2, 16, 16, 2048, 2048), 64, True), ((1, 32, 8, 1024, 1024), 128, False)],
    ids=["causal", "full, groups"],
)
def test_the_same_bits_whichever_cta_computes_what(monkeypatch, config, shape, head_dim, is_causal):
    """100 times, in between with few CTAs, and while another stream takes a part of the GPU."""
    inputs = draw(*shape, head_dim)
    settings = {"is_causal": is_causal, "config": config}
    first = gradients(ONE, *inputs, **settings)
    assert all(x.isfinite().all() for x in first)
    differ = torch.zeros(3, dtype=torch.int64, device="cuda")
    matrix, other = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    for repetition in range(100):
        ctas = (132, 1, 7, 131, 1000)[repetition % 5]  # 1000: more than fit at once
        monkeypatch.setattr(hopper, "_multiprocessors", lambda device, ctas=ctas: ctas)
        with torch.cuda.stream(other):
            torch.mm(matrix, matrix)
        again = gradients(ONE, *inputs, **settings)
        differ += torch.stack([(x != y).sum() for x, y in zip(again, first, strict=True)])
    assert differ.tolist() == [0, 0, 0]


WITHOUT_A_HANG = """
import torch
from tests.sagebwd.kernels.hopper import test_one_backward_gpu as tests

boundaries = torch.tensor([0, 1, 64, 64, 700, 5000, 5129, 16384], dtype=torch.int32, device="cuda")
for head_dim in (64, 128):
    for is_causal in (True, False):
        for shape in ((1, 1, 1, 65536, 65536), (1, 8, 1, 16384, 16384), (16, 16, 16, 128, 128)):
            options = {"is_causal": is_causal, "config": tests.DEFAULT_CONFIG}
            tests.gradients(tests.ONE, *tests.draw(*shape, head_dim), **options)
        inputs = tests.draw(1, 4, 4, 16384, 16384, head_dim)
        options = {"is_causal": is_causal, "config": tests.SageConfig.consistent(), "cu_seqlens": boundaries}
        tests.gradients(tests.ONE, *inputs, **options)
torch.cuda.synchronize()
"""


def test_it_never_waits_for_ever():
    """In a process of its own, which can be ended: few long heads, groups, many short heads, documents."""
    subprocess.run([sys.executable, "-c", WITHOUT_A_HANG], cwd=ROOT, check=True, timeout=180)
