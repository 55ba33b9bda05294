"""Q, K, V and dO from 16 bit to INT8, with smoothing, and δ = rowsum(dO ∘ O): one read of each tensor.

Only the means of K and V take a read of their own: every scale depends on them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.interface import no_mean
from sagebwd.kernels.layout import Axis, padded_head_dim
from sagebwd.kernels.triton import device
from sagebwd.kernels.triton.compiler import kernel
from sagebwd.kernels.triton.operands import PackedOperand, TokenTensor


@triton.jit
def _store_operand(operand, x, tile, TOKEN_SCALES: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr):
    """Quantize one block x (BLOCK, D_PAD) and store each form that ``operand`` has room for."""
    tile = tile.to(tl.int64)
    token, channel = tl.arange(0, BLOCK)[:, None], tl.arange(0, D_PAD)[None, :]
    offset = tile * (BLOCK * D_PAD)
    if operand.rounded is not None:
        rounded = device.round_to(device.inf_to_nan(x), operand.rounded.dtype.element_ty)
        tl.store(operand.rounded + offset + token * D_PAD + channel, rounded)
    if operand.scale is not None:
        largest = device.nan_max(tl.abs(x), 1)
        if TOKEN_SCALES:
            scale = device.scale_of(largest)
            tl.store(operand.scale + tile * BLOCK + tl.arange(0, BLOCK), scale)
            values = device.quantize(x, scale[:, None])
        else:
            scale = device.scale_of(device.nan_max(largest, 0))
            tl.store(operand.scale + tile, scale)
            values = device.quantize(x, scale)
        if operand.rows is not None:
            tl.store(operand.rows + offset + token * D_PAD + channel, values)
        if operand.columns is not None:
            tl.store(operand.columns + offset + channel * BLOCK + device.position(token), values)
        if operand.sums is not None:
            tl.store(operand.sums + tile * D_PAD + tl.arange(0, D_PAD), tl.sum(values.to(tl.int32), 0))


@kernel
def _quantize_kernel(
    x, operand, segments, n, d, heads, blocks, documents,
    SUBTRACT: tl.constexpr, TOKEN_SCALES: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One block of one head. SUBTRACT: "" for nothing, "given" for the mean of the document, "own" for that
    of the block, which is stored.
    """
    cta = tl.program_id(0)
    head, block = cta // blocks, cta % blocks
    document, start, n, _, block = device.find_document(segments, n, block)
    first = block * BLOCK
    if first >= n:
        return
    tile = device.load_tile(x, head, heads, start, first, n, d, BLOCK, D_PAD)
    channels = tl.arange(0, D_PAD)
    exists = device.token_mask(first, n, d, BLOCK, D_PAD)
    if SUBTRACT == "given":
        mean = tl.load(operand.mean + (head * documents + document).to(tl.int64) * D_PAD + channels)
        tile = tl.where(exists, tile - mean[None, :], 0.0)
    elif SUBTRACT == "own":
        mean = tl.sum(tile, 0) / tl.minimum(n - first, BLOCK).to(tl.float32)
        tl.store(operand.mean + cta.to(tl.int64) * D_PAD + channels, mean)
        tile = tl.where(exists, tile - mean[None, :], 0.0)
    _store_operand(operand, tile, cta, TOKEN_SCALES, BLOCK, D_PAD)


@kernel
def _quantize_grad_kernel(
    grad_out, out, out_residual, grad_lse, operand, delta, segments, n, d, heads, blocks,
    TOKEN_SCALES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One block of one head of dO, and its δ (heads, N), minus the gradient of lse if there is one."""
    cta = tl.program_id(0)
    head, block = cta // blocks, cta % blocks
    total = n
    _, start, n, _, block = device.find_document(segments, n, block)
    first = block * BLOCK
    if first >= n:
        return
    grad_tile = device.load_tile(grad_out, head, heads, start, first, n, d, BLOCK, D_PAD)
    out_tile = device.load_tile(out, head, heads, start, first, n, d, BLOCK, D_PAD)
    if HAS_RESIDUAL:
        out_tile += device.load_tile(out_residual, head, heads, start, first, n, d, BLOCK, D_PAD)
    tokens = first + tl.arange(0, BLOCK)
    row = head.to(tl.int64) * total + start
    value = tl.sum(grad_tile * out_tile, 1)
    if grad_lse is not None:
        value -= tl.load(grad_lse + row + tokens, mask=tokens < n, other=0.0)
    tl.store(delta + row + tokens, device.inf_to_nan(value), mask=tokens < n)
    _store_operand(operand, grad_tile, cta, TOKEN_SCALES, BLOCK, D_PAD)


@kernel
def _block_sum_kernel(x, sums, segments, n, d, heads, blocks, BLOCK: tl.constexpr, D_PAD: tl.constexpr):
    """Sum over the tokens of one block of one head; sums is (heads · blocks, D_PAD)."""
    cta = tl.program_id(0)
    head, block = cta // blocks, cta % blocks
    _, start, n, _, block = device.find_document(segments, n, block)
    first = block * BLOCK
    if first >= n:
        return
    tile = device.load_tile(x, head, heads, start, first, n, d, BLOCK, D_PAD)
    tl.store(sums + cta.to(tl.int64) * D_PAD + tl.arange(0, D_PAD), tl.sum(tile, 0))


@kernel
def _mean_kernel(
    sums, mean, segments, n, blocks, documents, BLOCK: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr
):
    """Token mean of one document of one head; sums in a fixed order, so that it never varies."""
    cta = tl.program_id(0)
    head, document = cta // documents, cta % documents
    _, n, first_block = device.extent(segments, n, document)
    channels = tl.arange(0, D_PAD)
    pointer = sums + (head * blocks + first_block).to(tl.int64) * D_PAD + channels[None, :]
    own_blocks = tl.cdiv(n, BLOCK)
    total = tl.zeros((CHUNK, D_PAD), tl.float32)
    for chunk in range(0, own_blocks, CHUNK):
        block = chunk + tl.arange(0, CHUNK)[:, None]
        total += tl.load(pointer + block.to(tl.int64) * D_PAD, mask=block < own_blocks, other=0.0)
    value = tl.sum(total, 0) / tl.maximum(n, 1).to(tl.float32)
    tl.store(mean + cta.to(tl.int64) * D_PAD + channels, value)


def token_mean(x: Tensor, axis: Axis) -> Tensor:
    """Mean over the tokens of each document, (B · H · documents, D_PAD) fp32, zero past the head size."""
    heads, d_pad = x.shape[0] * x.shape[1], padded_head_dim(x.shape[3])
    sums = x.new_empty((heads * axis.blocks, d_pad), dtype=torch.float32)
    mean = x.new_empty((heads * axis.documents, d_pad), dtype=torch.float32)
    _block_sum_kernel[(heads * axis.blocks,)](
        TokenTensor.of(x), sums, axis.segments, axis.n, x.shape[3], x.shape[1], axis.blocks, axis.block, d_pad
    )
    _mean_kernel[(heads * axis.documents,)](
        sums, mean, axis.segments, axis.n, axis.blocks, axis.documents, axis.block, d_pad, CHUNK=32
    )
    return mean


def k_mean_of(k: Tensor, axis: Axis, config: SageConfig) -> Tensor:
    """The ``k_mean`` of :class:`~sagebwd.interface.ForwardResult`."""
    return token_mean(k, axis).view(*k.shape[:2], -1) if config.smooths_k else no_mean(k)


def quantize(
    x: Tensor,
    axis: Axis,
    *,
    rows: bool = False,
    columns: bool = False,
    rounded: bool = False,
    sums: bool = False,
    mean: Tensor | None = None,
    own_mean: bool = False,
    token_scales: bool,
) -> PackedOperand:
    """The forms of x (B, H, N, D) that are asked for; see :class:`PackedOperand`.

    Args:
        mean: of :func:`token_mean`, what is subtracted.
        own_mean: subtract the mean of each block.
        token_scales: one scale per token in place of one per block.
    """
    operand = _allocate(x, axis, rows, columns, rounded, sums, token_scales)
    subtract = "own" if own_mean else "" if mean is None else "given"
    if own_mean:
        mean = x.new_empty((operand_tiles(x, axis), padded_head_dim(x.shape[3])), dtype=torch.float32)
    operand = operand._replace(mean=mean)
    _quantize_kernel[(operand_tiles(x, axis),)](
        TokenTensor.of(x), operand, axis.segments, axis.n, x.shape[3], x.shape[1], axis.blocks,
        axis.documents, SUBTRACT=subtract, TOKEN_SCALES=token_scales, BLOCK=axis.block,
        D_PAD=padded_head_dim(x.shape[3]), num_warps=_warps(x, axis),
    )  # fmt: skip
    return operand


def quantize_grad(
    grad_out: Tensor,
    out: Tensor,
    axis: Axis,
    *,
    out_residual: Tensor | None = None,
    grad_lse: Tensor | None = None,
    rows: bool,
    columns: bool,
    sums: bool = False,
    token_scales: bool,
) -> tuple[PackedOperand, Tensor]:
    """dO as products take it, and δ (B · H, N_q) fp32, from ``out`` and its residual, minus ``grad_lse``."""
    residual = out if out_residual is None else out_residual  # one that nothing reads
    operand = _allocate(grad_out, axis, rows, columns, False, sums, token_scales)
    delta = grad_out.new_empty((grad_out.shape[0] * grad_out.shape[1], axis.n), dtype=torch.float32)
    _quantize_grad_kernel[(operand_tiles(grad_out, axis),)](
        TokenTensor.of(grad_out), TokenTensor.of(out), TokenTensor.of(residual), grad_lse,
        operand, delta, axis.segments, axis.n, out.shape[3], out.shape[1], axis.blocks,
        TOKEN_SCALES=token_scales, HAS_RESIDUAL=out_residual is not None, BLOCK=axis.block,
        D_PAD=padded_head_dim(out.shape[3]),
        num_warps=_warps(out, axis),
    )  # fmt: skip
    return operand, delta


def operand_tiles(x: Tensor, axis: Axis) -> int:
    """Blocks of all heads of x."""
    return x.shape[0] * x.shape[1] * axis.blocks


def _allocate(
    x: Tensor, axis: Axis, rows: bool, columns: bool, rounded: bool, sums: bool, token_scales: bool
) -> PackedOperand:
    tiles, d_pad = operand_tiles(x, axis), padded_head_dim(x.shape[3])
    scales = tiles * (axis.block if token_scales else 1)
    return PackedOperand(
        rows=x.new_empty((tiles, axis.block, d_pad), dtype=torch.int8) if rows else None,
        columns=x.new_empty((tiles, d_pad, axis.block), dtype=torch.int8) if columns else None,
        rounded=x.new_empty((tiles, axis.block, d_pad)) if rounded else None,
        scale=x.new_empty(scales, dtype=torch.float32) if rows or columns else None,
        sums=x.new_empty((tiles, d_pad), dtype=torch.int32) if sums else None,
    )


def _warps(x: Tensor, axis: Axis) -> int:
    """Warps for one block: 32 elements per thread; more would spill."""
    return 8 if axis.block * padded_head_dim(x.shape[3]) >= 128 * 64 else 4
