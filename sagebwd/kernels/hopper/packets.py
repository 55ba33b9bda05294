"""Q, K, V and dO as the kernels of this folder read them: packets, each one contiguous copy to shared memory.

A packet holds all that one block of tokens of one head brings to a kernel: tiles, then numbers per token,
then a tail of four fp32, scales and zeros. Blocks are numbered as :class:`sagebwd.kernels.layout.Operand`
says; tokens past the end of a document and channels past the head size are zero. Tiles:

    rows      (tokens, D) INT8, for products that contract channels
    columns   (D, tokens) INT8, for products that contract tokens; see packets.cu, Tile, for their order
    halves    (D / 64, tokens, 64) 16 bit, for products that contract channels and are not INT8

All are swizzled: 16-byte pieces are permuted within 8 rows as tensor cores expect it of shared memory.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sagebwd.kernels.hopper import runtime
from sagebwd.kernels.hopper.runtime import Segments, TokenTensor
from sagebwd.kernels.layout import Axis, padded_head_dim

#: Tokens of a packet.
QUERIES, KEYS = 64, 128
#: Bytes of the four fp32 at the end of a packet.
TAIL = 16


class _Source(ctypes.Structure):
    _fields_ = [("tensor", TokenTensor), ("is_contiguous", ctypes.c_int)]

    @classmethod
    def of(cls, x: Tensor) -> _Source:
        """x; its channels can be read 8 at a time if they are neighbours and tokens begin at 16 bytes."""
        strides = x.stride()
        aligned = x.data_ptr() % 16 == 0 and strides[0] % 8 == strides[1] % 8 == strides[2] % 8 == 0
        return cls(TokenTensor.of(x), aligned and strides[3] == 1)


class _Axis(ctypes.Structure):
    _fields_ = [
        ("segments", Segments),
        *((name, ctypes.c_int) for name in ("tokens", "d", "heads", "blocks", "documents")),
    ]

    @classmethod
    def of(cls, x: Tensor, axis: Axis) -> _Axis:
        """The tokens of x (B, H, N, D)."""
        return cls(Segments.of(axis.segments), axis.n, x.shape[3], x.shape[1], axis.blocks, axis.documents)


def token_mean(x: Tensor, axis: Axis) -> Tensor:
    """Mean of K or V over the tokens of each document, (B · H · documents, D_PAD) fp32.

    Zero past the head size, and for a document without tokens.
    """
    sums = _allocate(x, axis, padded_head_dim(x.shape[3]), torch.float32)
    mean = sums.new_empty((x.shape[0] * x.shape[1] * axis.documents, sums.shape[1]))
    arguments = _Axis.of(x, axis)
    _launch("sum", x, KEYS, len(sums), _Source.of(x), sums, arguments)
    _launch("mean", x, KEYS, len(mean), sums, mean, arguments)
    return mean


def query_packets(q: Tensor, axis: Axis) -> Tensor:
    """Q for the forward: (tiles, bytes) of rows of Q; tail: its scale."""
    packets = _allocate(q, axis, QUERIES * padded_head_dim(q.shape[3]) + TAIL)
    _launch("query", q, QUERIES, len(packets), _Source.of(q), packets, _Axis.of(q, axis))
    return packets


def key_value_packets(
    k: Tensor, v: Tensor, axis: Axis, k_mean: Tensor | None, v_mean: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """K and V for the forward: (tiles, bytes) of rows of K, columns of V; tail: their scales.

    With ``keep`` also the packets of :func:`key_packets`, from the same read of K and V.

    Args:
        k_mean, v_mean: what is subtracted from K and from V, of :func:`token_mean`; None: nothing.
    """
    packets = _allocate(k, axis, KEYS * 2 * padded_head_dim(k.shape[3]) + TAIL)
    kept = k.new_empty(key_packets_shape(k, axis.blocks), dtype=torch.uint8) if keep else None
    _launch(
        "key_value",
        k,
        KEYS,
        2 * len(packets),
        _Source.of(k),
        _Source.of(v),
        k_mean,
        v_mean,
        packets,
        kept,
        _Axis.of(k, axis),
    )
    return packets, kept


def key_packets(k: Tensor, v: Tensor, axis: Axis, k_mean: Tensor | None) -> Tensor:
    """K and V for the backward, and for a forward with P in 16 bit: (tiles, bytes) of rows of K, halves of V.

    Tail: the scale of K.

    Args:
        k_mean: as of :func:`key_value_packets`.
    """
    packets = k.new_empty(key_packets_shape(k, axis.blocks), dtype=torch.uint8)
    _launch(
        "key", k, KEYS, 2 * len(packets), _Source.of(k), _Source.of(v), k_mean, packets, _Axis.of(k, axis)
    )
    return packets


def key_packets_shape(k: Tensor, blocks: int) -> tuple[int, int]:
    """Of the result of :func:`key_packets`; blocks: those of a head."""
    return k.shape[0] * k.shape[1] * blocks, KEYS * 3 * padded_head_dim(k.shape[3]) + TAIL


def key_columns(packets: Tensor, k: Tensor, axis: Axis) -> Tensor:
    """K by columns (tiles, bytes), from the rows in the packets of :func:`key_packets`."""
    columns = _allocate(k, axis, KEYS * padded_head_dim(k.shape[3]))
    _launch("key_columns", k, KEYS, len(packets), packets, columns, _Axis.of(k, axis))
    return columns


def query_gradient_packets(
    q: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    axis: Axis,
    *,
    rest: Tensor | None = None,
    p_half: bool = False,
) -> tuple[Tensor, Tensor]:
    """Q and dO for the backward, as two packets (tiles, bytes) a block.

    The first: rows of Q, halves of dO, −lse of all tokens and −δ of all tokens (fp32; −∞ and 0 past the end);
    tail: the scales of Q and dO. The second: columns of Q, columns of dO.

    Args:
        lse: (B · H, N_q) or (B, H, N_q) fp32, contiguous.
        rest: what rounding took from ``out``, which δ takes too.
        p_half: dV takes P in 16 bit, and dO as it is: no columns of dO, no scale.
    """
    d_pad = padded_head_dim(q.shape[3])
    rows = _allocate(q, axis, QUERIES * (3 * d_pad + 8) + TAIL)
    columns = _allocate(q, axis, QUERIES * (1 if p_half else 2) * d_pad)
    sources = (_Source.of(x) for x in (q, grad_out, out, out if rest is None else rest))
    arguments = (*sources, lse, rows, columns, _Axis.of(q, axis))
    defines = {"P_HALF": p_half, "COMPENSATE_O": rest is not None}
    _launch("query_gradient", q, QUERIES, 2 * len(rows), *arguments, **defines)
    return rows, columns


def _allocate(x: Tensor, axis: Axis, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return x.new_empty((x.shape[0] * x.shape[1] * axis.blocks, size), dtype=dtype)


def _launch(
    name: str,
    like: Tensor,
    tokens: int,
    programs: int,
    *arguments: Tensor | ctypes.Structure | None,
    **defines: bool,
) -> None:
    """Run a kernel of packets.cu whose programs take ``tokens`` each; a thread takes 32 numbers."""
    head_dim = padded_head_dim(like.shape[3])
    kernel = runtime.kernel(
        "packets",
        f"{name}_kernel",
        0,
        HEAD_DIM=head_dim,
        IS_CAUSAL=0,
        IS_BF16=like.dtype == torch.bfloat16,
        **defines,
    )
    kernel.launch(programs, tokens * head_dim // 32, *arguments)
