"""Packed operands against their specification, built here in plain PyTorch, byte for byte."""

from __future__ import annotations

import inspect
from itertools import pairwise, product

import pytest
import torch
from torch.nn.functional import pad

from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.compile import SHARED, Sources
from sagebwd.kernels.cuda.packing import PackedLayout, Packer
from sagebwd.kernels.cuda.plan import Operand, Plan
from sagebwd.kernels.layout import Axis, Segments, padded_head_dim
from sagebwd.reference.quantization import quantize
from tests.sagebwd.kernels.cuda import sources_on_cpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TINY = torch.finfo(torch.float32).tiny
FP16, BF16 = torch.float16, torch.bfloat16
SHAPES = [  # B, H, N, D, dtype
    (2, 2, 65, 40, BF16),
    (1, 2, 130, 64, BF16),
    (1, 1, 127, 128, FP16),
    *(pytest.param(shape, marks=pytest.mark.gpu) for shape in ((1, 2, 1, 64, FP16), (1, 1, 64, 80, FP16))),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
MINUS_DELTA = slice(-16 - 4 * 64, -16)  # in packed blocks of dO
PACK = [3, 3, 68, 69, 140, 140]  # boundaries of documents among 150 tokens


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A GPU, or the CPU, for which the sources are compiled as C++."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The sources with what stands in for the instructions of a GPU."""
    if not sources_on_cpu.has_compiler():
        pytest.skip("there is no g++ that knows C++20")
    return sources_on_cpu.gather(tmp_path_factory, Sources("sm_80", (SHARED,)))


class OfTensors:
    """A packer whose methods take tensors and return tensors: each call is a plan."""

    def __init__(self, packer):
        self._packer = packer

    def __getattr__(self, name):
        def call(*arguments, **options):
            options |= dict(zip(inspect.signature(method).parameters, arguments, strict=False))
            named = {key: x for key, x in options.items() if isinstance(x, torch.Tensor)}
            axis = options["axis"]
            tensors = [*named.values(), *(axis.segments or ())]
            plan = Plan(tensors[0].device)
            operands = [Operand(plan, x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors]
            segments = axis.segments and Segments(*operands[len(named) :])
            options |= dict(zip(named, operands, strict=False)) | {"axis": axis._replace(segments=segments)}
            made = method(**options)
            plan.finish(len(operands), [made] if isinstance(made, Operand) else made)
            results = plan.run(tensors)
            return results[0] if isinstance(made, Operand) else results

        method = getattr(self._packer, name)
        return call


@pytest.fixture
def packer(device, request, monkeypatch):
    """The kernels, compiled for the current GPU or the CPU."""
    if device == "cuda":
        return OfTensors(Packer(Sources(request.getfixturevalue("architecture"), (SHARED,)), PackedLayout()))
    folder = request.getfixturevalue("folder")

    def start_loading(sources, source, name, shared_bytes, **defines):
        return lambda: sources_on_cpu.load(folder, source, name, shared_bytes, defines)

    monkeypatch.setattr(launch, "start_loading", start_loading)
    return OfTensors(Packer(Sources("sm_80", (SHARED,)), PackedLayout()))


@pytest.fixture
def gaussian(device):
    """Return Gaussians (B, H, N, D) on the device, whose heads and tokens differ in size."""

    def gaussian(b, h, n, d, dtype, count=1):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((count, b, h, n, d), generator=generator)
        sizes = torch.rand((count, b, h, n, 1), generator=generator) * (1 + torch.arange(h)[:, None, None])
        return list((x * sizes).to(dtype).to(device))

    return gaussian


@pytest.fixture
def log_sums(device):
    """Return an lse (B · H, N)."""
    return lambda b, h, n: torch.randn(b * h, n, generator=torch.Generator().manual_seed(1)).to(device)


# --- The specification --------------------------------------------------------------------------------------


def swizzle(tiles, row_bytes):
    """tiles (..., rows, values) of any type, as bytes (..., size)."""
    tiles = tiles.contiguous().view(torch.uint8).flatten(-2)
    offset = torch.arange(tiles.shape[-1])
    result = torch.empty_like(tiles)
    result[..., offset ^ ((offset >> 3) & {64: 0x30, 128: 0x70}[row_bytes])] = tiles
    return result


def rows_tile(values):
    """values (blocks, tokens, D) INT8."""
    return swizzle(values, values.shape[-1])


def columns_tile(values):
    """The same by columns."""
    tokens = values.shape[-2]
    position = torch.arange(tokens)
    token = position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2
    return swizzle(values[:, token].mT, tokens)


def tile_16bit(x):
    """x (blocks, tokens, D) in 16 bits."""
    return torch.cat([swizzle(chunk, 128) for chunk in x.split(64, -1)], -1)


def tail(*scales):
    """Scales (blocks,) and zeros, as bytes."""
    zeros = [torch.zeros_like(scales[0])] * (4 - len(scales))
    return torch.stack([*scales, *zeros], -1).view(torch.uint8)


def blocks_of(x, size, boundaries=None):
    """x (B, H, N, ...) as (B · H · blocks, size, ...): blocks of each document, zero where nothing is."""
    boundaries = boundaries or [0, x.shape[2]]
    blocks = []
    for start, stop in pairwise(boundaries):
        tokens = x[:, :, start:stop]
        zeros = tokens.new_zeros(*x.shape[:2], -(stop - start) % size, *x.shape[3:])
        blocks.append(torch.cat([tokens, zeros], 2).unflatten(2, (-1, size)))
    return torch.cat(blocks, 2).flatten(0, 2)


def tiles_of(x, size, boundaries=None):
    """The same for a tensor (B, H, N, D) on any device, with channels padded."""
    return blocks_of(pad(x.cpu(), (0, padded_head_dim(x.shape[-1]) - x.shape[-1])), size, boundaries)


def without_mean(x, mean, boundaries=None):
    """x − mean in fp32, each document its own; mean (B · H · documents, D_PAD)."""
    if mean is None:
        return x.float()
    boundaries = boundaries or [0, x.shape[2]]
    lengths = torch.tensor(boundaries).diff()
    mean = mean.reshape(*x.shape[:2], len(lengths), -1)[..., : x.shape[-1]].cpu()
    result = x.cpu().float()
    result[:, :, boundaries[0] : boundaries[-1]] -= mean.repeat_interleave(lengths, 2)
    return result


def blocks_written(packed, axis):
    """Packed blocks on the CPU, without those that belong to no document."""
    used = axis.blocks if axis.segments is None else int(axis.segments.first_block[-1])
    return packed.unflatten(0, (-1, axis.blocks))[:, :used].flatten(0, 1).cpu()


def quantized(blocks, packed, index):
    """INT8 values and scales of blocks (blocks, tokens, D) fp32; ``index`` is that of the scale in the tail.

    A GPU divides by 127 to within 2 units in the last place; then every value must be rounded exactly by the
    scale that this gives.
    """
    values, scale = quantize(blocks)
    found = packed[:, -16:].contiguous().view(torch.float32)[:, index]
    if packed.is_cuda:
        torch.testing.assert_close(found, scale.flatten(), rtol=2**-22, atol=0, equal_nan=True)
        scale = found
        values = (blocks / torch.where(scale > 0, scale, torch.inf)[:, None, None]).round()
    return values.to(torch.int8), scale.flatten()


def assert_same(found, *parts):
    """Packed blocks consist of these parts, each compared by itself to tell which is wrong."""
    assert found.shape[1] == sum(part.shape[1] for part in parts)
    for i, (part, wanted) in enumerate(zip(found.split([x.shape[1] for x in parts], 1), parts, strict=True)):
        assert torch.equal(part, wanted), f"part {i}"


def assert_packed_q(packed, axis, q, boundaries=None):
    packed = blocks_written(packed, axis)
    values, scale = quantized(tiles_of(q, 64, boundaries).float(), packed, 0)
    assert_same(packed, rows_tile(values), tail(scale))


def assert_packed_kv_int8(packed_k, packed_v, axis, k, v, k_mean, v_mean, boundaries=None):
    """packed_k: K by rows alone."""
    rows, packed = blocks_written(packed_k, axis), blocks_written(packed_v, axis)
    k_values, k_scale = quantized(tiles_of(without_mean(k, k_mean, boundaries), 128, boundaries), packed, 0)
    v_values, v_scale = quantized(tiles_of(without_mean(v, v_mean, boundaries), 128, boundaries), packed, 1)
    assert_same(packed, columns_tile(v_values), tail(k_scale, v_scale))
    assert_same(rows, rows_tile(k_values))


def assert_packed_kv(packed, columns, axis, k, v, mean, boundaries=None):
    packed, columns = blocks_written(packed, axis), blocks_written(columns, axis)
    values, scale = quantized(tiles_of(without_mean(k, mean, boundaries), 128, boundaries), packed, 0)
    assert_same(packed, rows_tile(values), tile_16bit(tiles_of(v, 128, boundaries)), tail(scale))
    assert_same(columns, columns_tile(values))


def assert_packed_grad(packed, axis, q, grad, out, lse, boundaries=None, out_residual=None, p_16bit=False):
    of_grad, columns = (blocks_written(x, axis) for x in packed)
    q_values, *scales = quantized(tiles_of(q, 64, boundaries).float(), of_grad, 0)
    tiles = [columns_tile(q_values)]
    if not p_16bit:
        grad_values, grad_scale = quantized(tiles_of(grad, 64, boundaries).float(), of_grad, 1)
        tiles.append(columns_tile(grad_values))
        scales.append(grad_scale)
    assert_same(columns, *tiles)

    lse = lse.cpu().reshape(q.shape[:3])
    exists = blocks_of(torch.ones_like(lse), 64, boundaries) > 0
    minus_lse = torch.where(exists, -blocks_of(lse, 64, boundaries), -torch.inf)
    minus_delta = of_grad[:, MINUS_DELTA].contiguous().view(torch.float32)
    assert not minus_delta[~exists].any()
    out = tiles_of(out, 64, boundaries).double()
    if out_residual is not None:
        out += tiles_of(out_residual, 64, boundaries).double()
    products = tiles_of(grad, 64, boundaries).double() * out
    # At most 128 sums of fp32, each rounded to 2⁻²⁴ of the sum of magnitudes.
    error = (minus_delta + products.sum(-1)).abs()
    assert (error <= 128 * 2.0**-24 * products.abs().sum(-1)).all()
    assert_same(
        of_grad,
        tile_16bit(tiles_of(grad, 64, boundaries)),
        minus_lse.view(torch.uint8),
        minus_delta.view(torch.uint8),
        tail(*scales),
    )


def test_the_specification_by_hand():
    """A few positions as they are worked out on paper."""
    tile = (torch.arange(64)[:, None] * 64 + torch.arange(64)).to(torch.int32)
    by_rows = swizzle(tile.to(torch.int16), 128).view(torch.int16)
    assert by_rows[:3].tolist() == [0, 1, 2]
    assert by_rows[64 + 8].item() == 64  # row 1: piece 0 lies where piece 1 would
    assert by_rows[7 * 64 + 56].item() == 7 * 64
    assert by_rows[8 * 64].item() == 8 * 64
    small = swizzle(torch.arange(16).to(torch.int8)[:, None].expand(16, 64), 64).reshape(16, 4, 16)
    assert (small == torch.arange(16)[:, None, None]).all()  # pieces never leave their row
    tokens = columns_tile(torch.arange(64).to(torch.int8)[None, :, None].expand(1, 64, 1))[0]
    assert tokens[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


# --- Operands -----------------------------------------------------------------------------------------------


@shapes
def test_queries(packer, gaussian, shape):
    (q,) = gaussian(*shape)
    axis = Axis.of(q.shape[2], 64, None)
    assert_packed_q(packer.pack_q(q, axis), axis, q)


@shapes
def test_keys_and_values(packer, gaussian, shape):
    """With and without means; whatever these hold past the head size must not matter."""
    k, v = gaussian(*shape, count=2)
    axis = Axis.of(k.shape[2], 128, None)
    k_mean, v_mean = (
        torch.full((k.shape[0] * k.shape[1], padded_head_dim(k.shape[3])), size, device=k.device)
        for size in (1.0, 2.0)
    )
    k_mean[:, : k.shape[3]] += k.float().mean((0, 2)).repeat(k.shape[0], 1)
    v_mean[:, : k.shape[3]] += v.float().mean((0, 2)).repeat(k.shape[0], 1)
    for means in product((None, k_mean), (None, v_mean)):
        alone = packer.pack_kv_int8(k, v, axis, *means, pack_for_backward=False)
        assert_packed_kv_int8(*alone, axis, k, v, *means)
        packed_kv, packed_v = packer.pack_kv_int8(k, v, axis, *means, pack_for_backward=True)
        assert torch.equal(packed_v, alone[1])
        assert torch.equal(packed_kv, packer.pack_kv(k, v, axis, means[0]))
    for mean in (None, k_mean):
        packed = packer.pack_kv(k, v, axis, mean)
        columns = packer.pack_k_columns(packed, k, axis)
        assert_packed_kv(packed, columns, axis, k, v, mean)


@shapes
def test_queries_and_gradients(packer, gaussian, log_sums, shape):
    q, grad, out, residual = gaussian(*shape, count=4)
    lse, axis = log_sums(*q.shape[:3]), Axis.of(q.shape[2], 64, None)
    for options in (
        {},
        {"p_16bit": True},
        {"out_residual": residual},
        {"p_16bit": True, "out_residual": residual},
    ):
        packed = packer.pack_grad(q, packer.pack_q(q, axis), grad, out, lse, axis, **options)
        assert_packed_grad(packed, axis, q, grad, out, lse, **options)


def test_blocks_of_a_pack_are_those_of_its_documents(packer, gaussian, log_sums):
    a, b, c = gaussian(1, 2, 150, 40, BF16, count=3)
    lse, cu_seqlens = log_sums(1, 2, 150), torch.tensor(PACK, device=a.device)
    q_axis, kv_axis = (Axis.of(150, block, cu_seqlens) for block in (64, 128))
    mean, v_mean = (packer.token_mean(x, kv_axis) for x in (a, b))
    assert_packed_q(packer.pack_q(a, q_axis), q_axis, a, PACK)
    packed = packer.pack_grad(a, packer.pack_q(a, q_axis), b, c, lse, q_axis)
    assert_packed_grad(packed, q_axis, a, b, c, lse, PACK)
    packed = packer.pack_kv_int8(a, b, kv_axis, mean, v_mean, pack_for_backward=False)
    assert_packed_kv_int8(*packed, kv_axis, a, b, mean, v_mean, PACK)
    packed_kv, _ = packer.pack_kv_int8(a, b, kv_axis, mean, v_mean, pack_for_backward=True)
    for packed in (packed_kv, packer.pack_kv(a, b, kv_axis, mean)):
        assert_packed_kv(packed, packer.pack_k_columns(packed, a, kv_axis), kv_axis, a, b, mean, PACK)


# --- Values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0.0, 1e-40, 126 * TINY])
def test_a_scale_that_would_be_subnormal_is_zero(packer, device, largest):
    x = torch.full((1, 1, 3, 64), largest, dtype=BF16, device=device)
    packed = packer.pack_q(x, Axis.of(3, 64, None))
    assert not packed.any()


# --- The mean of K or V -------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundaries", [None, PACK], ids=["one document", "packed"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_token_mean(packer, gaussian, boundaries, head_dim):
    """Of each document, zero past the head size and for a document without tokens."""
    (k,) = gaussian(2, 3, 150, head_dim, BF16)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, device=k.device)
    axis = Axis.of(150, 128, cu_seqlens)
    mean = packer.token_mean(k, axis).cpu().view(-1, padded_head_dim(max(head_dim, 33)))
    documents = [k[:, :, start:stop].cpu().double() for start, stop in pairwise(boundaries or [0, 150])]
    wanted = torch.stack([x.sum(2) / max(x.shape[2], 1) for x in documents], 2).flatten(0, 2)
    torch.testing.assert_close(mean[:, :head_dim].double(), wanted, rtol=1e-5, atol=1e-6)
    assert not mean[:, head_dim:].any()
