"""Q, K, V and dO as the Hopper kernels read them: packets, each one contiguous copy to shared memory.

A packet holds all that one block of tokens of one head brings to a kernel: tiles, then numbers per token,
then a tail of four fp32, scales and zeros. Blocks are numbered as :class:`operands.Operand` says; tokens past
the end of a document and channels past the head size are zero. Tiles:

    rows      (tokens, D) INT8, for products that contract channels
    columns   (D, tokens) INT8, for products that contract tokens, which come in the order of _columns
    halves    (D / 64, tokens, 64) 16 bit, for products that contract channels and are not INT8

All are swizzled: 16-byte pieces are permuted within 8 rows as tensor cores expect it of shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels import device
from sagebwd.kernels.operands import SIZES, Axis, TokenTensor, padded_head_dim

#: Tokens of a packet.
QUERIES, KEYS = 64, 128
_QUERIES, _KEYS = tl.constexpr(QUERIES), tl.constexpr(KEYS)

#: Bytes of the four fp32 at the end of a packet.
TAIL = 16


@triton.jit
def _swizzled(row, byte, ROW_BYTES: tl.constexpr):
    """Where byte ``byte`` of row ``row`` lies in a tile whose rows have 64 or 128 bytes.

    That is o ^ (o >> 3 & ROW_BYTES - 16) with o = row * ROW_BYTES + byte. Written as a sum: of that the
    compiler believes that 16 bytes stay together, of an exclusive or it does not, and stores byte by byte.
    """
    piece = byte // 16 ^ (row * ROW_BYTES // 128) % (ROW_BYTES // 16)
    return row * ROW_BYTES + piece * 16 + byte % 16


@triton.jit
def _byte_offsets(ROWS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Offsets (ROWS, ROW_BYTES) of the numbers of an INT8 tile."""
    offsets = _swizzled(tl.arange(0, ROWS)[:, None], tl.arange(0, ROW_BYTES)[None, :], ROW_BYTES)
    return tl.max_contiguous(tl.multiple_of(offsets, [1, 16]), [1, 16])


@triton.jit
def _half_offsets(TOKENS: tl.constexpr, D: tl.constexpr):
    """Offsets (TOKENS, D) of the numbers of a 16-bit tile, in numbers."""
    token, channel = tl.arange(0, TOKENS)[:, None], tl.arange(0, D)[None, :]
    offsets = channel // 64 * (TOKENS * 64) + _swizzled(token, channel % 64 * 2, 128) // 2
    return tl.max_contiguous(tl.multiple_of(offsets, [1, 8]), [1, 8])


@triton.jit
def _columns(x, TOKENS: tl.constexpr, D: tl.constexpr):
    """x (TOKENS, D) as (D, TOKENS); of each 16 tokens position 4 q + 2 h + e takes token 8 h + 2 q + e.

    That is the order in which thread q of four holds a row of P or dS, the other operand of these products.
    """
    x = tl.reshape(x, (TOKENS // 16, 2, 4, 2, D))
    return tl.reshape(tl.permute(x, (4, 0, 2, 1, 3)), (D, TOKENS))


@triton.jit
def _store_rows(pointer, values, TOKENS: tl.constexpr, D: tl.constexpr):
    tl.store(pointer + _byte_offsets(TOKENS, D), values)


@triton.jit
def _store_columns(pointer, values, TOKENS: tl.constexpr, D: tl.constexpr):
    tl.store(pointer + _byte_offsets(D, TOKENS), _columns(values, TOKENS, D))


@triton.jit
def _store_halves(pointer, x, TOKENS: tl.constexpr, D: tl.constexpr):
    pointer = pointer.to(tl.pointer_type(x.dtype))
    tl.store(pointer + _half_offsets(TOKENS, D), x)


@triton.jit
def _store_tail(pointer, first, second):
    pointer, i = pointer.to(tl.pointer_type(tl.float32)), tl.arange(0, 4)
    tl.store(pointer + i, tl.where(i == 0, first, tl.where(i == 1, second, 0.0)))


@triton.jit
def _quantize(x):
    """INT8 values of the block x (fp32), as bytes, and their scale: those of ``quantize._store_operand``."""
    scale = device.scale_of(device.nan_max(device.nan_max(tl.abs(x), 1), 0))
    return device.quantize(x, scale).to(tl.uint8, bitcast=True), scale


@triton.jit
def _find_block(segments, n, blocks, BLOCK: tl.constexpr):
    """A program's block: (head, document, its first token, its tokens, first token of the block in it)."""
    program = tl.program_id(0)
    document, start, n, _, block = device.find_document(segments, n, program % blocks)
    return program // blocks, document, start, n, block * BLOCK


@triton.jit
def _load(x, head, heads, start, first, n, d, TOKENS: tl.constexpr, D: tl.constexpr):
    """The block (TOKENS, D) of x, zero where nothing is."""
    return device.load_tokens(x, device.head_pointer(x, head, heads, start), first, n, d, TOKENS, D)


@triton.jit
def _packet(packets, BYTES: tl.constexpr):
    """Pointer to the packet of the program."""
    return packets + tl.program_id(0).to(tl.int64) * BYTES


@triton.jit(do_not_specialize=SIZES)
def _query_kernel(q, packets, segments, n, d, heads, blocks, BYTES: tl.constexpr, D: tl.constexpr):
    """:func:`query_packets` of one block of one head."""
    head, _, start, n, first = _find_block(segments, n, blocks, _QUERIES)
    if first >= n:
        return
    values, scale = _quantize(_load(q, head, heads, start, first, n, d, _QUERIES, D).to(tl.float32))
    packet = _packet(packets, BYTES)
    _store_rows(packet, values, _QUERIES, D)
    _store_tail(packet + _QUERIES * D, scale, 0.0)


@triton.jit(do_not_specialize=SIZES)
def _query_gradient_kernel(
    q, grad_out, out, lse, rows, columns, segments, n, d, heads, blocks,
    ROWS_BYTES: tl.constexpr, COLUMNS_BYTES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """:func:`query_gradient_packets` of one block of one head."""
    total = n
    head, _, start, n, first = _find_block(segments, n, blocks, _QUERIES)
    if first >= n:
        return
    TILE: tl.constexpr = _QUERIES * D
    rows, columns = _packet(rows, ROWS_BYTES), _packet(columns, COLUMNS_BYTES)
    # All loads come before all stores, so that they wait together.
    q_tile = _load(q, head, heads, start, first, n, d, _QUERIES, D)
    grad_tile = _load(grad_out, head, heads, start, first, n, d, _QUERIES, D)
    out_tile = _load(out, head, heads, start, first, n, d, _QUERIES, D)
    token = tl.arange(0, _QUERIES)
    lse += head.to(tl.int64) * total + start + first
    # Where there is no query, P = exp2(S - lse) must be zero.
    lse_tile = tl.load(lse + token, mask=first + token < n, other=float("inf"))

    delta = device.inf_to_nan(tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1))
    statistics = (rows + 3 * TILE).to(tl.pointer_type(tl.float32))
    tl.store(statistics + token, -lse_tile)
    tl.store(statistics + _QUERIES + token, -delta)

    _store_halves(rows + TILE, grad_tile, _QUERIES, D)
    values, grad_scale = _quantize(grad_tile.to(tl.float32))
    _store_columns(columns + TILE, values, _QUERIES, D)

    values, q_scale = _quantize(q_tile.to(tl.float32))
    _store_rows(rows, values, _QUERIES, D)
    _store_columns(columns, values, _QUERIES, D)
    _store_tail(rows + 3 * TILE + 8 * _QUERIES, q_scale, grad_scale)


@triton.jit(do_not_specialize=SIZES)
def _key_kernel(
    k, v, k_mean, packets, segments, n, d, heads, blocks, documents,
    V_IS_INT8: tl.constexpr, BYTES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """:func:`key_value_packets` of one block of one head, or without V_IS_INT8 :func:`key_packets`."""
    head, document, start, n, first = _find_block(segments, n, blocks, _KEYS)
    if first >= n:
        return
    TILE: tl.constexpr = _KEYS * D
    packet = _packet(packets, BYTES)
    k_tile = _load(k, head, heads, start, first, n, d, _KEYS, D).to(tl.float32)
    v_tile = _load(v, head, heads, start, first, n, d, _KEYS, D)
    if k_mean is not None:
        mean = tl.load(k_mean + (head * documents + document).to(tl.int64) * D + tl.arange(0, D))
        k_tile = tl.where(device.token_mask(first, n, d, _KEYS, D), k_tile - mean[None, :], 0.0)
    values, k_scale = _quantize(k_tile)
    _store_rows(packet, values, _KEYS, D)
    if V_IS_INT8:
        values, v_scale = _quantize(v_tile.to(tl.float32))
        _store_columns(packet + TILE, values, _KEYS, D)
        _store_tail(packet + 2 * TILE, k_scale, v_scale)
    else:
        _store_halves(packet + TILE, v_tile, _KEYS, D)
        _store_tail(packet + 3 * TILE, k_scale, 0.0)


@triton.jit(do_not_specialize=SIZES)
def _key_columns_kernel(packets, columns, segments, n, blocks, BYTES: tl.constexpr, D: tl.constexpr):
    """:func:`key_columns` of one block of one head."""
    _, _, _, n, first = _find_block(segments, n, blocks, _KEYS)
    if first >= n:
        return
    values = tl.load(_packet(packets, BYTES) + _byte_offsets(_KEYS, D))
    _store_columns(_packet(columns, _KEYS * D), values, _KEYS, D)


def query_packets(q: Tensor, axis: Axis) -> Tensor:
    """Q for the forward: (tiles, bytes) of rows of Q; tail: its scale."""
    d_pad = _check(q, axis, QUERIES)
    packets = _allocate(q, axis, QUERIES * d_pad + TAIL)
    _query_kernel[(len(packets),)](
        TokenTensor.of(q), packets, axis.segments, axis.n, q.shape[3], q.shape[1], axis.blocks,
        BYTES=packets.shape[1], D=d_pad, num_warps=_warps(QUERIES, d_pad),
    )  # fmt: skip
    return packets


def key_value_packets(k: Tensor, v: Tensor, axis: Axis, k_mean: Tensor | None) -> Tensor:
    """K and V for the forward: (tiles, bytes) of rows of K, columns of V; tail: their scales.

    Args:
        k_mean: what is subtracted from K, of :func:`quantize.token_mean`; None: nothing.
    """
    return _key_packets(k, v, axis, k_mean, v_is_int8=True)


def key_packets(k: Tensor, v: Tensor, axis: Axis, k_mean: Tensor | None) -> Tensor:
    """K and V for the backward: (tiles, bytes) of rows of K, halves of V; tail: the scale of K.

    Args:
        k_mean: as of :func:`key_value_packets`.
    """
    return _key_packets(k, v, axis, k_mean, v_is_int8=False)


def key_columns(packets: Tensor, axis: Axis, d_pad: int) -> Tensor:
    """K by columns (tiles, bytes), from the rows in the packets of :func:`key_packets`."""
    columns = packets.new_empty((len(packets), KEYS * d_pad))
    _key_columns_kernel[(len(packets),)](
        packets, columns, axis.segments, axis.n, axis.blocks, BYTES=packets.shape[1], D=d_pad,
        num_warps=_warps(KEYS, d_pad),
    )  # fmt: skip
    return columns


def query_gradient_packets(
    q: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, axis: Axis
) -> tuple[Tensor, Tensor]:
    """Q and dO for the backward, as two packets (tiles, bytes) a block.

    The first: rows of Q, halves of dO, −lse of all tokens and −δ of all tokens (fp32; −∞ and 0 past the end);
    tail: the scales of Q and dO. The second: columns of Q, columns of dO.

    Args:
        lse: (B · H, N_q) fp32.
    """
    d_pad = _check(q, axis, QUERIES)
    rows = _allocate(q, axis, QUERIES * (3 * d_pad + 8) + TAIL)
    columns = _allocate(q, axis, QUERIES * 2 * d_pad)
    _query_gradient_kernel[(len(rows),)](
        TokenTensor.of(q), TokenTensor.of(grad_out), TokenTensor.of(out), lse, rows, columns,
        axis.segments, axis.n, q.shape[3], q.shape[1], axis.blocks,
        ROWS_BYTES=rows.shape[1], COLUMNS_BYTES=columns.shape[1], D=d_pad, num_warps=_warps(QUERIES, d_pad),
    )  # fmt: skip
    return rows, columns


def _key_packets(k: Tensor, v: Tensor, axis: Axis, k_mean: Tensor | None, v_is_int8: bool) -> Tensor:
    d_pad = _check(k, axis, KEYS)
    packets = _allocate(k, axis, KEYS * (2 if v_is_int8 else 3) * d_pad + TAIL)
    _key_kernel[(len(packets),)](
        TokenTensor.of(k), TokenTensor.of(v), k_mean, packets, axis.segments, axis.n, k.shape[3],
        k.shape[1], axis.blocks, axis.documents,
        V_IS_INT8=v_is_int8, BYTES=packets.shape[1], D=d_pad, num_warps=_warps(KEYS, d_pad),
    )  # fmt: skip
    return packets


def _check(x: Tensor, axis: Axis, tokens: int) -> int:
    """The padded head size."""
    d_pad = padded_head_dim(x.shape[3])
    assert axis.block == tokens, f"packets hold {tokens} tokens, not {axis.block}"
    assert d_pad in (64, 128), f"packets have 64 or 128 channels, not {d_pad}"
    return d_pad


def _allocate(x: Tensor, axis: Axis, size: int) -> Tensor:
    return x.new_empty((x.shape[0] * x.shape[1] * axis.blocks, size), dtype=torch.uint8)


def _warps(tokens: int, d_pad: int) -> int:
    """Warps for one packet: 32 numbers of each tensor a thread, 64 in the largest packets; nothing spills."""
    return 4 if tokens * d_pad <= 64 * 64 else 8
