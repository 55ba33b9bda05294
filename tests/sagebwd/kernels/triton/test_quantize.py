"""Quantized operands, block by block, against the quantizer of the reference: bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from sagebwd.kernels.layout import Axis, padded_head_dim
from sagebwd.kernels.triton.quantize import quantize
from sagebwd.reference.quantization import PER_BLOCK, PER_ROW, round_to
from sagebwd.reference.quantization import quantize as reference_quantize
from tests.sagebwd.kernels.sets import triton_only

pytestmark = [triton_only, pytest.mark.usefixtures("poisoned_memory")]

FORMS = {"rows": True, "columns": True, "rounded": True, "sums": True}
SHARED = {False: PER_BLOCK, True: PER_ROW}  # by token_scales
TINY = torch.finfo(torch.float32).tiny


@pytest.fixture
def gaussian(device):
    """Return a Gaussian (B, H, N, D) on the device, whose heads and tokens differ in size."""

    def gaussian(*shape, dtype=torch.float16):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator)
        sizes = torch.rand(*shape[:3], 1, generator=generator) * (1 + torch.arange(shape[1])[:, None, None])
        return (x * sizes).to(dtype).to(device)

    return gaussian


def blocks_of(x, size):
    """x (B, H, N, D) in fp32 as (B · H · blocks, size, D_PAD), zero where nothing is."""
    n, d = x.shape[-2:]
    x = pad(x.float(), (0, padded_head_dim(d) - d, 0, -n % size))
    return x.unflatten(2, (-1, size)).flatten(0, 2)


def columns_of(rows):
    """rows (blocks, size, D_PAD) transposed: of 16 tokens, position 4 q + 2 h + e is 8 h + 2 q + e."""
    position = torch.arange(rows.shape[1])
    token = position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2
    return rows[:, token].mT


def expected(x, size, token_scales):
    """What :func:`quantize` stores for x (B, H, N, D): rows, columns, rounded, scale."""
    blocks = blocks_of(x, size)
    values, scale = reference_quantize(blocks, SHARED[token_scales])
    return {
        "rows": values.to(torch.int8),
        "columns": columns_of(values).to(torch.int8),
        "rounded": round_to(blocks, x.dtype).values.to(x.dtype),
        "scale": scale.flatten(),
        "sums": values.sum(1).to(torch.int32),
    }


SHAPES = [  # B, H, N, D, block, dtype
    (2, 3, 65, 40, 32, torch.bfloat16),
    (1, 2, 129, 80, 128, torch.bfloat16),
    (1, 1, 33, 7, 32, torch.float16),
]


@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_is_that_of_the_reference(gaussian, shape, token_scales):
    """A GPU divides by 127 to within 2 units in the last place; then every element must be rounded exactly by
    the scale that this gives.
    """
    *sizes, block, dtype = shape
    x = gaussian(*sizes, dtype=dtype)
    operand = quantize(x, Axis.of(x.shape[2], block, None), token_scales=token_scales, **FORMS)
    stored = {name: value.cpu() for name, value in operand._asdict().items() if value is not None}
    wanted = expected(x.cpu(), block, token_scales)
    if x.is_cuda:
        torch.testing.assert_close(stored["scale"], wanted["scale"], rtol=2**-22, atol=0)
        wanted["scale"] = stored["scale"]
        divisor = torch.where(stored["scale"] > 0, stored["scale"], torch.inf)
        divisor = divisor.reshape(-1, block if token_scales else 1, 1)
        wanted["rows"] = (blocks_of(x.cpu(), block) / divisor).round().to(torch.int8)
        wanted["columns"] = columns_of(wanted["rows"])
        wanted["sums"] = wanted["rows"].sum(1, dtype=torch.int32)
    assert stored.keys() == wanted.keys()
    for name, found in stored.items():
        assert found.dtype == wanted[name].dtype
        assert torch.equal(found, wanted[name]), name


@pytest.mark.parametrize("largest", [0.0, 1e-40, 100 * TINY, 126 * TINY])
def test_a_scale_that_would_be_subnormal_is_zero(device, largest):
    x = torch.full((1, 1, 5, 8), largest, dtype=torch.bfloat16, device=device)
    operand = quantize(x, Axis.of(5, 32, None), rows=True, token_scales=False)
    assert not operand.rows.any()
    assert not operand.scale.any()


def test_sums_of_the_largest_values(device):
    """128 tokens of ± 127, that is ± 16256, which 8 bits do not hold."""
    x = torch.ones(1, 1, 128, 8, dtype=torch.float16, device=device)
    x[..., 1] *= -1
    operand = quantize(x, Axis.of(128, 128, None), columns=True, sums=True, token_scales=False)
    wanted = torch.zeros(32, dtype=torch.int32)
    wanted[:8] = 127 * 128
    wanted[1] *= -1
    assert torch.equal(operand.sums.cpu(), wanted[None])
