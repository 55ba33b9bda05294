"""The one backward kernel, for dQ in 16 bit, on a Hopper GPU: the same bits again, and never a hang."""

import subprocess
import sys

import pytest
import torch

from sagebwd.kernels.cuda import plan
from sagebwd.kernels.hopper import attention as hopper
from tests.cli import ROOT
from tests.inputs import gradients
from tests.sagebwd.kernels.operators import attention
from tests.sagebwd.kernels.sets import without_hopper, without_int8

pytestmark = pytest.mark.gpu

#: Settings with dQ in 16 bit.
CONFIGS = {"default": without_int8("dq"), "consistent": without_int8("o", "dv", "dq", compensate_o=True)}
#: One kernel, too; there are none with INT8 dQ and 16-bit dK.
S_ALONE = without_int8("o", "dv", "dq", "dk", compensate_o=True)


@pytest.fixture(autouse=True)
def hopper_gpu():
    if reason := without_hopper():
        pytest.skip(reason)


def draw(batch, heads, kv_heads, n_q, n_kv, head_dim, dtype=torch.bfloat16):
    """q, k, v, grad_out."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((heads, n_q), (kv_heads, n_kv), (kv_heads, n_kv), (heads, n_q))
    shapes = ((batch, *size, head_dim) for size in sizes)
    return [torch.randn(shape, generator=generator, dtype=dtype, device="cuda") for shape in shapes]


@pytest.mark.parametrize("last_keys_first_up_to", [0, 2**30], ids=["first keys first", "last keys first"])
@pytest.mark.parametrize("config", [without_int8("dq"), S_ALONE], ids=["default", "S alone"])
@pytest.mark.parametrize(
    ("shape", "head_dim", "is_causal"),
    [((2, 16, 16, 2048, 2048), 64, True), ((1, 32, 8, 1024, 1024), 128, False)],
    ids=["causal", "full, groups"],
)
def test_the_same_bits_whichever_cta_computes_what(
    monkeypatch, request, shape, head_dim, is_causal, config, last_keys_first_up_to
):
    """100 times, in between with few CTAs, and while another stream takes a part of the GPU."""
    monkeypatch.setattr(hopper, "LAST_KEYS_FIRST_UP_TO", {head_dim: last_keys_first_up_to})
    request.addfinalizer(plan.plan_of.cache_clear)
    inputs = draw(*shape, head_dim)
    attend = attention("hopper", is_causal=is_causal, config=config)
    first = gradients(attend, *inputs)
    assert all(x.isfinite().all() for x in first)
    differ = torch.zeros(4, dtype=torch.int64, device="cuda")
    matrix, other = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    for repetition in range(100):
        ctas = (132, 1, 7, 131, 1000)[repetition % 5]  # 1000: more than fit at once
        monkeypatch.setattr(hopper, "_multiprocessors", lambda device, ctas=ctas: ctas)
        plan.plan_of.cache_clear()
        with torch.cuda.stream(other):
            torch.mm(matrix, matrix)
        again = gradients(attend, *inputs)
        differ += torch.stack([(x != y).sum() for x, y in zip(again, first, strict=True)])
    assert differ.tolist() == [0, 0, 0, 0]


WITHOUT_A_HANG = """
import itertools
import torch
from sagebwd.kernels.cuda import plan
from sagebwd.kernels.hopper import attention as hopper
from tests.inputs import gradients
from tests.sagebwd.kernels.hopper import test_one_backward_gpu as tests
from tests.sagebwd.kernels.operators import attention

boundaries = torch.tensor([0, 1, 64, 64, 700, 5000, 5129, 16384], dtype=torch.int32, device="cuda")
for head_dim, is_causal, up_to in itertools.product((64, 128), (True, False), (0, 2**30)):
    hopper.LAST_KEYS_FIRST_UP_TO[head_dim] = up_to
    plan.plan_of.cache_clear()
    for shape in ((1, 1, 1, 65536, 65536), (1, 8, 1, 16384, 16384), (16, 16, 16, 128, 128)):
        attend = attention("hopper", is_causal=is_causal, config=tests.CONFIGS["default"])
        gradients(attend, *tests.draw(*shape, head_dim))
    inputs = tests.draw(1, 4, 4, 16384, 16384, head_dim)
    for config in (tests.CONFIGS["consistent"], tests.S_ALONE):
        attend = attention("hopper", is_causal=is_causal, config=config, cu_seqlens=boundaries)
        gradients(attend, *inputs)
torch.cuda.synchronize()
"""


def test_it_never_waits_for_ever():
    """In a process of its own, which can be ended: few long heads, groups, many short ones, documents."""
    subprocess.run([sys.executable, "-c", WITHOUT_A_HANG], cwd=ROOT, check=True, timeout=180)
