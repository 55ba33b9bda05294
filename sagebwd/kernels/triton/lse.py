"""The formulas of :mod:`sagebwd.kernels.lse` as kernels: one pass over each tensor of q's size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.layout import padded_head_dim
from sagebwd.kernels.triton import device
from sagebwd.kernels.triton.compiler import kernel
from sagebwd.kernels.triton.operands import TokenTensor

#: Tokens of a CTA.
BLOCK = 64
LEAST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _load_means(k_mean, document, head, documents, width, tokens, n, D_PAD: tl.constexpr):
    """The mean of K (tokens or 1, D_PAD) of each token, 0 where it is not finite. ``head`` is one of K."""
    channels = tl.arange(0, D_PAD)[None, :]
    first = head.to(tl.int64) * documents
    if document is None:
        means = tl.load(k_mean + first * width + channels)
    else:
        row = first + tl.load(document + tokens, mask=tokens < n, other=0)
        means = tl.load(k_mean + row[:, None] * width + channels)
    return tl.where(tl.abs(means) < float("inf"), means, 0.0)


@triton.jit
def _load_sink(sinks, head, heads):
    sink = tl.load(sinks + head % heads).to(tl.float32)
    return tl.where(sink < LEAST, LEAST, sink)


@kernel
def _shift_kernel(
    q, lse, k_mean, document, result, lse_factor, shift_factor, n, d, heads, group, documents, width, blocks,
    BLOCK: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """lse · lse_factor + q·μ · shift_factor of one block of queries."""
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    row = head.to(tl.int64) * n + tokens
    queries = device.load_tokens(q, device.head_pointer(q, head, heads, 0), first, n, d, BLOCK, D_PAD)
    means = _load_means(k_mean, document, head // group, documents, width, tokens, n, D_PAD)
    old = tl.load(lse + row, mask=tokens < n, other=0.0)
    new = old * lse_factor + tl.sum(queries.to(tl.float32) * means, 1) * shift_factor
    tl.store(result + row, tl.where(old == float("-inf"), old, new), mask=tokens < n)


@kernel
def _sinks_kernel(
    out, residual, lse, saved_lse, sinks, new_out, new_residual, new_lse, new_saved_lse, n, d, heads, blocks,
    BLOCK: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """O with its residual, and both lse, of one block of queries, with one more key."""
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    row = head.to(tl.int64) * n + tokens
    sink, own = _load_sink(sinks, head, heads), tl.load(lse + row, mask=tokens < n, other=0.0)
    distance = sink - own
    least = tl.log(1.0 + tl.exp(-tl.abs(distance)))
    saved = tl.load(saved_lse + row, mask=tokens < n, other=0.0)
    growth = (tl.maximum(distance, 0.0) + least) * device.LOG2_E
    tl.store(new_lse + row, tl.maximum(sink, own) + least, mask=tokens < n)
    tl.store(new_saved_lse + row, tl.where(saved == float("-inf"), saved, saved + growth), mask=tokens < n)

    tile = device.load_tile(out, head, heads, 0, first, n, d, BLOCK, D_PAD)
    if residual is not None:
        tile += device.load_tile(residual, head, heads, 0, first, n, d, BLOCK, D_PAD)
    tile /= (1.0 + tl.exp(distance))[:, None]
    pointer = device.head_pointer(new_out, head, heads, 0)
    device.store_tokens(new_out, pointer, first, n, d, tile, BLOCK, D_PAD)
    if residual is not None:
        tile -= device.round_to(tile, new_out.data.dtype.element_ty).to(tl.float32)
        pointer = device.head_pointer(new_residual, head, heads, 0)
        device.store_tokens(new_residual, pointer, first, n, d, tile, BLOCK, D_PAD)


@kernel
def _gradients_kernel(
    dq, k_mean, document, grad_lse, saved_lse, grad_out, out, residual, lse, sinks, lost, scale,
    n, d, heads, group, documents, width, blocks, BLOCK: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Add the term of μ to dQ of one block of queries, and store minus its part of the gradient of a sink."""
    cta = tl.program_id(0)
    head, first = cta // blocks, cta % blocks * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    row = head.to(tl.int64) * n + tokens
    total = tl.zeros((BLOCK,), tl.float32)
    if grad_lse is not None:
        total += tl.load(grad_lse + row, mask=tokens < n, other=0.0)
    if sinks is not None:
        tile = device.load_tile(out, head, heads, 0, first, n, d, BLOCK, D_PAD)
        if residual is not None:
            tile += device.load_tile(residual, head, heads, 0, first, n, d, BLOCK, D_PAD)
        tile *= device.load_tile(grad_out, head, heads, 0, first, n, d, BLOCK, D_PAD)
        own = tl.load(lse + row, mask=tokens < n, other=float("inf"))
        to_sink = tl.exp(_load_sink(sinks, head, heads) - own) * (tl.sum(tile, 1) - total)
        tl.store(lost + cta, tl.sum(to_sink, 0))
        total += to_sink
    if dq is not None:
        saved = tl.load(saved_lse + row, mask=tokens < n, other=0.0)
        total = tl.where(saved == float("-inf"), 0.0, total) * scale
        means = _load_means(k_mean, document, head // group, documents, width, tokens, n, D_PAD)
        pointer = device.head_pointer(dq, head, heads, 0)
        tile = device.load_tile(dq, head, heads, 0, first, n, d, BLOCK, D_PAD)
        device.store_tokens(dq, pointer, first, n, d, tile + total[:, None] * means, BLOCK, D_PAD)


def shifted(
    q: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    document: Tensor | None,
    lse_factor: float,
    shift_factor: float,
    documents: int,
) -> Tensor:
    """lse · lse_factor + q·μ · shift_factor; ``document`` (N_q,) of each query, None without packing."""
    result = torch.empty_like(lse)
    grid, sizes = _sizes(q)
    _shift_kernel[grid](
        TokenTensor.of(q), lse, k_mean, document, result, lse_factor, shift_factor, *sizes[:3],
        *_means(q, k_mean, documents), *sizes[3:],
    )  # fmt: skip
    return result


def add_sinks(
    result: ForwardResult, lse: Tensor, sinks: Tensor, params: AttentionParams
) -> tuple[ForwardResult, Tensor]:
    """As :func:`sagebwd.kernels.lse.add_sinks`."""
    has_residual = params.config.compensate_o
    new = [torch.empty_like(x) for x in (result.out, result.out_residual, lse, lse)]
    tensors = [TokenTensor.of(x) if has_residual else None for x in (result.out_residual, new[1])]
    grid, sizes = _sizes(result.out)
    _sinks_kernel[grid](
        TokenTensor.of(result.out), tensors[0], lse, result.lse, sinks, TokenTensor.of(new[0]), tensors[1],
        *new[2:], *sizes,
    )  # fmt: skip
    return result._replace(out=new[0], out_residual=new[1], lse=new[3]), new[2]


def finish_gradients(
    dq: Tensor | None,
    grad_out: Tensor,
    saved: ForwardResult,
    lse: Tensor | None,
    grad_lse: Tensor | None,
    sinks: Tensor | None,
    document: Tensor | None,
    params: AttentionParams,
) -> Tensor | None:
    """Add the term of μ to dq, if there is one, and return the gradient of the sinks."""
    grid, sizes = _sizes(saved.out)
    lost = None if sinks is None else saved.lse.new_empty(grid)
    residual = TokenTensor.of(saved.out_residual) if params.config.compensate_o else None
    _gradients_kernel[grid](
        None if dq is None else TokenTensor.of(dq), saved.k_mean, document, grad_lse, saved.lse,
        TokenTensor.of(grad_out), TokenTensor.of(saved.out), residual, lse, sinks, lost, params.scale,
        *sizes[:3], *_means(saved.out, saved.k_mean, params.documents), *sizes[3:],
    )  # fmt: skip
    return None if sinks is None else -lost.view(*saved.out.shape[:2], -1).sum((0, 2)).to(sinks.dtype)


def _sizes(x: Tensor) -> tuple[tuple[int], tuple[int, ...]]:
    """The grid for x (B, H, N, D), and n, d, heads, blocks, BLOCK, D_PAD."""
    batch, heads, n, d = x.shape
    blocks = triton.cdiv(n, BLOCK)
    return (batch * heads * blocks,), (n, d, heads, blocks, BLOCK, padded_head_dim(d))


def _means(q: Tensor, k_mean: Tensor, documents: int) -> tuple[int, int, int]:
    """Query heads per head of K, documents, and columns of k_mean for each."""
    return q.shape[1] // k_mean.shape[1], documents, k_mean.shape[2] // documents
