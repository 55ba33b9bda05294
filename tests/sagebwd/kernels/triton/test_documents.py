"""Packed documents: kernels give each document the bits that it gets alone, and nothing to anyone else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from sagebwd.kernels.layout import Axis

pytestmark = pytest.mark.usefixtures("poisoned_memory")
gpu = pytest.mark.gpu

NAMES = ("out", "dq", "dk", "dv")
CONFIGS = {
    "default": SageConfig(),
    "paper": SageConfig(granularity="block", block_q=64, block_kv=64),
    "strictly causal": SageConfig.strictly_causal(),
    "smooth_q": SageConfig(smooth_q=True, block_q=32, block_kv=64),
    "smooth_v": SageConfig(smooth_v=True),
    "unsigned_p": SageConfig(unsigned_p=True),
    "no INT8": SageConfig(int8_matmuls=()),
    "compensate_o": SageConfig(int8_matmuls=("dq",), compensate_o=True),
    "all INT8": SageConfig(int8_matmuls=MATMULS, block_q=64, block_kv=32),
}
#: (tokens of q, cu_seqlens, tokens of k, cu_seqlens_kv)
PACKS = {
    "one": (70, [0, 70], 70, None),
    "two": (67, [0, 1, 67], 67, None),
    "several": (103, [0, 66, 67, 103], 103, None),
    "tokens of no document": (90, [3, 30, 80], 90, None),
    "empty documents": (70, [0, 0, 40, 40, 40, 70, 70], 70, None),
    "other keys": (60, [0, 25, 60], 110, [10, 20, 105]),
    "keys or queries missing": (60, [0, 20, 20, 60], 50, [0, 0, 15, 50]),
    "long": (1500, [0, 64, 128, 129, 700, 1499], 1500, None),
}
#: For the interpreter.
CASES = [
    *((config, "two") for config in CONFIGS if config not in ("default", "unsigned_p")),
    ("smooth_v", "keys or queries missing"),
    *(("default", pack) for pack in PACKS if pack not in ("one", "two", "long")),
]


def of_document(inputs, rows, columns):
    q, k, v, grad_out = inputs
    return q[..., rows, :], k[..., columns, :], v[..., columns, :], grad_out[..., rows, :]


@pytest.fixture
def alone(kernels):
    """Return {out, dq, dk, dv} of a pack, put together from one call for each document."""

    def alone(inputs, boundaries, boundaries_kv, **settings):
        wanted = {name: torch.zeros_like(inputs[n]) for name, n in zip(NAMES, (0, 0, 1, 2), strict=True)}
        for row, column in zip(pairwise(boundaries), pairwise(boundaries_kv), strict=True):
            rows, columns = slice(*row), slice(*column)
            if rows.start == rows.stop or columns.start == columns.stop:
                continue
            result = kernels(*of_document(inputs, rows, columns), **settings)
            for name in NAMES:
                tokens = rows if name in ("out", "dq") else columns
                wanted[name][..., tokens, :] = result[name]
        return wanted

    return alone


def assert_bit_equal(found, wanted):
    for name in NAMES:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        pytest.param(config, pack, marks=() if (config, pack) in CASES else gpu)
        for config in CONFIGS
        for pack in PACKS
    ],
)
@pytest.mark.parametrize(
    ("is_causal", "dtype"), [(True, torch.float16), pytest.param(False, torch.bfloat16, marks=gpu)]
)
def test_a_pack_is_each_of_its_documents_alone(kernels, alone, sample, config, pack, is_causal, dtype):
    n_q, rows, n_kv, columns = PACKS[pack]
    heads, kv_heads = {"several": (2, 1), "two": (2, 2)}.get(pack, (1, 1))
    inputs = sample(n_q, n_kv, heads=heads, kv_heads=kv_heads, dtype=dtype)
    settings = {"is_causal": is_causal, "config": CONFIGS[config], "scale": 0.3}
    boundaries = {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}
    if columns is not None:
        boundaries["cu_seqlens_kv"] = torch.tensor(columns)  # int64
    packed = kernels(*inputs, **boundaries, **settings)
    assert_bit_equal(packed, alone(inputs, rows, columns or rows, **settings))


def test_a_document_of_one_token_returns_its_value(kernels, sample):
    q, k, v, grad_out = sample(6)
    result = kernels(q, k, v, grad_out, cu_seqlens=torch.arange(7))
    for name, x in (("out", v), ("dv", grad_out)):
        step = x.float().abs().amax(-1, keepdim=True) / 127
        bound = 0.5 * step + 2**-10 * x.float().abs()  # and fp16 rounds the result
        assert ((result[name] - x).float().abs() <= bound).all(), name


@pytest.mark.parametrize("boundaries", [[7, 7, 7], [0, 0], [30, 30], [0, 30]])
def test_without_keys_everything_is_zero(kernels, sample, boundaries):
    inputs = sample(30, 20)
    result = kernels(
        *inputs, cu_seqlens=torch.tensor(boundaries), cu_seqlens_kv=torch.full((len(boundaries),), 5)
    )
    assert not any(result[name].any() for name in NAMES)


@pytest.mark.parametrize("poison", [torch.nan, pytest.param(torch.inf, marks=gpu)])
def test_nothing_comes_from_outside_a_document(kernels, sample, poison):
    inputs = sample(100, heads=2, kv_heads=1)
    cu_seqlens = torch.tensor([10, 45, 90])
    clean = kernels(*inputs, cu_seqlens=cu_seqlens)
    for x in inputs:
        x[..., :10, :] = x[..., 45:, :] = poison
    poisoned = kernels(*inputs, cu_seqlens=cu_seqlens)
    for name in NAMES:
        assert torch.equal(poisoned[name][..., :45, :], clean[name][..., :45, :]), name
        assert poisoned[name][..., 45:90, :].isnan().all(), name
        assert not poisoned[name][..., 90:, :].any(), name


# --- Invalid boundaries -----------------------------------------------------------------------------------
# Reading their values would wait for the GPU, so they are clamped to the sequence and to the boundary before.


def mended(boundaries, n):
    largest, result = 0, []
    for boundary in boundaries:
        largest = max(largest, min(max(boundary, 0), n))
        result.append(largest)
    return result


@pytest.mark.parametrize(
    "boundaries",
    [
        [-5, 20, 300],
        [0, 50, 30, 70],
        pytest.param([2**40, 3], marks=gpu),
        pytest.param([-(2**40), 2**40], marks=gpu),
        pytest.param([60, 10, 0], marks=gpu),
    ],
)
def test_boundaries_out_of_order_or_range_read_nothing_out_of_bounds(kernels, sample, device, boundaries):
    """Around the tensors lies NaN, which would show."""
    surrounded = [pad(x, (0, 0, 64, 64), value=torch.nan).to(device) for x in sample(70)]
    inputs = [x[..., 64:-64, :] for x in surrounded]
    found, wanted = (
        kernels(*inputs, cu_seqlens=torch.tensor(x), is_causal=True)
        for x in (boundaries, mended(boundaries, 70))
    )
    assert_bit_equal(found, wanted)
    assert all(found[name].isfinite().all() for name in NAMES)


@given(
    n=st.integers(1, 300),
    block=st.sampled_from([32, 64, 128]),
    boundaries=st.lists(st.integers(-10, 310) | st.integers(-(2**62), 2**62), min_size=2, max_size=9),
)
def test_an_axis_holds_every_document_whatever_the_boundaries(n, block, boundaries):
    axis = Axis.of(n, block, torch.tensor(boundaries))
    segments = axis.segments
    assert axis.documents == len(boundaries) - 1
    starts = mended(boundaries, n)
    assert segments.start.tolist() == [*starts, starts[-1]]  # and an empty document at the end
    blocks = [-(-(stop - start) // block) for start, stop in pairwise(starts)]
    assert segments.document.dtype == segments.start.dtype == segments.first_block.dtype == torch.int32
    assert segments.first_block.diff().tolist() == [*blocks, 0]
    documents = [document for document, count in enumerate(blocks) for _ in range(count)]
    left_over = axis.blocks - len(documents)
    assert left_over >= 0
    assert segments.document.tolist() == documents + [axis.documents] * left_over


def test_an_axis_without_documents():
    assert Axis.of(129, 64, None) == (129, 64, 3, 1, None)
