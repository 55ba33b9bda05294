"""Quantized operands, block by block, against the quantizer of the reference: bit for bit where no mean is
subtracted, and within one step of INT8 where the order of its sum may round it otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from sagebwd import SageConfig
from sagebwd.kernels.layout import Axis, padded_head_dim
from sagebwd.kernels.triton.quantize import quantize, quantize_grad, quantize_q_and_k, token_mean
from sagebwd.reference.quantization import PER_BLOCK, PER_ROW, round_to
from sagebwd.reference.quantization import quantize as reference_quantize
from tests.sagebwd.kernels.inputs import VIEWS
from tests.sagebwd.kernels.sets import over, triton_only

pytestmark = [triton_only, pytest.mark.usefixtures("poisoned_memory")]

FORMS = {"rows": True, "columns": True, "rounded": True}
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
    }


def assert_quantized(operand, x, size, token_scales, forms=FORMS):
    """``operand`` holds these forms of x, bit for bit, and no others.

    A GPU divides by 127 to within 2 units in the last place; then every element must be rounded exactly by
    the scale that this gives.
    """
    stored = {name: value.cpu() for name, value in operand._asdict().items() if value is not None}
    wanted = expected(x.cpu(), size, token_scales)
    if set(forms) == {"rounded"}:
        del wanted["scale"]
    elif operand.scale.is_cuda:
        torch.testing.assert_close(stored["scale"], wanted["scale"], rtol=2**-22, atol=0)
        wanted["scale"] = stored["scale"]
        divisor = torch.where(stored["scale"] > 0, stored["scale"], torch.inf)
        divisor = divisor.reshape(-1, size if token_scales else 1, 1)
        wanted["rows"] = (blocks_of(x.cpu(), size) / divisor).round().to(torch.int8)
        wanted["columns"] = columns_of(wanted["rows"])
    assert stored.keys() == wanted.keys() & {*forms, "scale"}
    for name, found in stored.items():
        assert found.dtype == wanted[name].dtype
        assert torch.equal(found, wanted[name]), name


SHAPES = [  # B, H, N, D, block, dtype
    (2, 3, 65, 40, 32, torch.bfloat16),
    (1, 2, 129, 80, 128, torch.bfloat16),
    (1, 1, 33, 7, 32, torch.float16),
]


@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_is_that_of_the_reference(gaussian, shape, token_scales):
    *sizes, block, dtype = shape
    x = gaussian(*sizes, dtype=dtype)
    operand = quantize(x, Axis.of(x.shape[2], block, None), token_scales=token_scales, **FORMS)
    assert_quantized(operand, x, block, token_scales)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_strides_do_not_matter(gaussian, view):
    x = gaussian(2, 2, 40, 24)
    strided = view(x)
    assert torch.equal(strided, x)
    operand = quantize(strided, Axis.of(40, 32, None), token_scales=True, **FORMS)
    assert_quantized(operand, x, 32, True)


@pytest.mark.parametrize("largest", [0.0, 1e-40, 100 * TINY, 126 * TINY])
def test_a_scale_that_would_be_subnormal_is_zero(device, largest):
    x = torch.full((1, 1, 5, 8), largest, dtype=torch.bfloat16, device=device)
    operand = quantize(x, Axis.of(5, 32, None), rows=True, token_scales=False)
    assert not operand.rows.any()
    assert not operand.scale.any()


# --- Means ------------------------------------------------------------------------------------------------


def assert_within_one_step(operand, wanted):
    """The mean rounds otherwise, so that an element on the border between two steps may fall to either.

    fp32 sums of at most 256 elements differ by about 1e-6 of their size; steps lie 1/127 apart. So
    hardly any step differs, and a scale by no more than the mean does.
    """
    steps = (operand.rows.cpu().int() - wanted["rows"].int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 1e-3
    assert torch.equal(columns_of(operand.rows), operand.columns)
    torch.testing.assert_close(operand.scale.cpu(), wanted["scale"], rtol=1e-5, atol=0)
    torch.testing.assert_close(operand.rounded.cpu(), wanted["rounded"])


@pytest.mark.parametrize("n", [1, 40, 200])
@pytest.mark.parametrize("strided", [False, True])
def test_the_mean_over_all_tokens(gaussian, n, strided):
    x = gaussian(2, 2, n, 40) + 3
    if strided:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    mean = token_mean(x, Axis.of(n, 32, None)).cpu()
    assert mean.shape == (4, 64)
    assert not mean[:, 40:].any()
    torch.testing.assert_close(mean[:, :40], x.cpu().float().mean(2).flatten(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize(("smooth_q", "smooth_k"), [(True, False), (False, True), (True, True)])
def test_smoothing(gaussian, smooth_q, smooth_k, token_scales):
    """μ_K is that of all tokens, μ_Q that of each block of its own; what pads a block stays zero."""
    q, k = gaussian(1, 4, 70, 40), gaussian(1, 2, 90, 40) + 2
    config = SageConfig(
        smooth_q=smooth_q, smooth_k=smooth_k, operand_scales="token" if token_scales else "block"
    )
    axes = Axis.of(70, 32, None), Axis.of(90, 64, None)
    q_operand, k_operand = quantize_q_and_k(q, k, token_mean(k, axes[1]), *axes, config, FORMS, FORMS)

    q, k = q.cpu(), k.cpu()
    q_means = torch.stack([block.float().mean(2) for block in q.split(32, 2)], 2)
    k_mean = k.float().mean(2, keepdim=True)
    for operand, x, mean, smooth, block in (
        (q_operand, q, q_means.repeat_interleave(32, 2)[:, :, :70], smooth_q, 32),
        (k_operand, k, k_mean, smooth_k, 64),
    ):
        if not smooth:
            assert_quantized(operand, x, block, token_scales)
            continue
        wanted = expected(x.float() - mean, block, token_scales)
        assert_within_one_step(operand, wanted | {"rounded": wanted["rounded"].half()})
    if smooth_q:
        means = pad(q_means.flatten(0, 2), (0, 24))
        torch.testing.assert_close(q_operand.mean.cpu(), means, rtol=1e-6, atol=1e-6)


# --- Sums -------------------------------------------------------------------------------------------------


@over("token_scales", lambda kernel_set: [False, True] if kernel_set.is_gpu else [False])
@over("shape", lambda kernel_set: [SHAPES[2], SHAPES[1]] if kernel_set.is_gpu else [SHAPES[2]])
def test_sums_of_each_channel_of_each_block(gaussian, shape, token_scales):
    """What pads a block has no part in them, nor has the order in which columns hold the tokens."""
    *sizes, block, dtype = shape
    x, axis = gaussian(*sizes, dtype=dtype), Axis.of(sizes[2], block, None)
    forms = {"columns": True, "sums": True, "token_scales": token_scales}
    wanted = expected(x.cpu(), block, token_scales)["rows"].sum(1, dtype=torch.int32)
    for operand in (quantize(x, axis, **forms), quantize_grad(x, x, axis, rows=False, **forms)[0]):
        assert torch.equal(operand.sums.cpu(), operand.columns.cpu().sum(-1, dtype=torch.int32))
        if not x.is_cuda:  # a GPU's scales differ by 2 units in the last place, see assert_quantized
            assert torch.equal(operand.sums, wanted)


def test_sums_of_the_largest_values(device):
    """128 tokens of ± 127, that is ± 16256, which 8 bits do not hold."""
    x = torch.ones(1, 1, 128, 8, dtype=torch.float16, device=device)
    x[..., 1] *= -1
    operand = quantize(x, Axis.of(128, 128, None), columns=True, sums=True, token_scales=False)
    wanted = torch.zeros(32, dtype=torch.int32)
    wanted[:8] = 127 * 128
    wanted[1] *= -1
    assert torch.equal(operand.sums.cpu(), wanted[None])
