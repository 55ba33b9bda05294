"""Packs Q, K, V and dO for CUDA kernels, by packing.cu: quantized, tiled and swizzled.

A packed block is contiguous, so that one copy brings it to shared memory. It holds all that one block of
tokens of one head contributes to a kernel: tiles, then values per token, then a tail of four fp32, scales and
zeros. Blocks are numbered as in :class:`sagebwd.kernels.layout.Axis`. Tokens past the end of a
document and channels past the head size are zero. Kinds of tiles:

    rows      (tokens, D) INT8, for products that contract channels
    columns   (D, tokens) INT8, for products that contract tokens; ``Tile`` in packing.cu tells their order
    16-bit    (D / 64, tokens, 64), for products that are not INT8

All tiles are swizzled: 16-byte pieces are permuted within 8 rows, as tensor cores expect it of shared memory.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from sagebwd.config import TILE, SageConfig
from sagebwd.interface import AttentionParams, ForwardResult, no_mean
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.arguments import CSegments, CTokenTensor
from sagebwd.kernels.cuda.compile import Sources
from sagebwd.kernels.cuda.plan import Operand
from sagebwd.kernels.layout import Axis, kv_axis, packed_head_dim

#: Bytes of the four fp32 at the end of a packed block.
TAIL = 16
#: Channels that a thread of packing.cu holds: four pieces of 8.
VALUES_PER_THREAD = 32


class PackedLayout(NamedTuple):
    """What packed blocks hold.

    config: the settings. If tokens have scales, tails hold those of all tokens of the first tensor, then of
        the second.
    tile: tokens of a packed block of queries, and of one of keys and values.
    packs_16bit: whether V, dO and, for dK in 16 bits, Q are packed; otherwise kernels read the tensors.
    """

    config: SageConfig
    tile: tuple[int, int]
    packs_16bit: bool

    @classmethod
    def of(cls, config: SageConfig, head_dim: int, *, packs_16bit: bool) -> PackedLayout:
        """For these settings and this head size."""
        return cls(config, config.tile(head_dim), packs_16bit)

    @property
    def token_scales(self) -> bool:
        """Whether INT8 values have a scale for each token, not for each block."""
        return self.config.operand_scales == "token"

    def q_shape(self, q: Operand, blocks: int) -> tuple[int, int]:
        """Shape of the result of :meth:`Packer.pack_q`; as :meth:`kv_shape`."""
        tail = scale_bytes(1, self.tile[0], self.token_scales)
        return q.shape[0] * q.shape[1] * blocks, self.tile[0] * packed_head_dim(q.shape[3]) + tail

    def kv_shape(self, k: Operand, blocks: int) -> tuple[int, int]:
        """Shape of the result of :meth:`Packer.pack_kv`.

        Args:
            k: (B, H_kv, N_kv, D).
            blocks: blocks of each head.
        """
        tail = scale_bytes(1, self.tile[1], self.token_scales)
        values = self.tile[1] * packed_head_dim(k.shape[3])
        tiles = 1 + 2 * self.packs_16bit
        return k.shape[0] * k.shape[1] * blocks, tiles * values + tail


def mean_alone(k: Operand, packer: Packer, params: AttentionParams) -> Operand:
    """The ``k_mean`` of ``ForwardResult`` without the rest."""
    return packer.token_mean(k, kv_axis(k, params)) if params.config.smooths_k else no_mean(k)


def scale_bytes(tensors: int, tokens: int, token_scales: bool) -> int:
    """Bytes of the scales of so many tensors in a packed block of ``tokens``."""
    return 4 * tensors * tokens if token_scales else TAIL


class Packer:
    """The kernels of packing.cu, compiled for one architecture. All results are uint8, (blocks, bytes)."""

    def __init__(
        self,
        sources: Sources,
        layout: PackedLayout,
        *,
        step_q: int | None = None,
        rows_in_chunks: bool = False,
    ) -> None:
        """Prepare packing for one kernel set.

        Args:
            sources: those of the kernel set that reads what is packed.
            step_q: tokens of a tile of Q or dO by columns; a packed block may have several. None: one.
            rows_in_chunks: whether tiles by rows of 256 channels are cut into chunks of 128, (2, tokens,
                128), as wgmma takes them.
        """
        self._sources = sources
        self._layout = layout
        self._block_q, self._block_kv = layout.tile
        self._macros: dict[str, int] = {
            "TOKEN_SCALES": layout.token_scales,
            "UNPACKED_16BIT": not layout.packs_16bit,
        }
        if layout.tile != TILE:
            self._macros |= {"TILE_Q": layout.tile[0], "TILE_KV": layout.tile[1]}
        if step_q is not None:
            self._macros["Q_STEP"] = step_q
        if rows_in_chunks:
            self._macros["ROWS_IN_CHUNKS"] = True

    def token_mean(self, x: Operand, axis: Axis) -> Operand:
        """Mean of K or V over the tokens of each document, (B, H, documents · D_PAD) fp32.

        Zero past the head size, and for a document without tokens.
        """
        (batch, heads), channels = x.shape[:2], packed_head_dim(x.shape[3])
        sums = _allocate(x, axis, channels, torch.float32)
        mean = sums.new_empty((batch, heads, axis.documents * channels))
        arguments = _CAxis.of(x, axis)
        self._launch("token_sum", x, self._block_kv, len(sums), _CSource.of(x), sums, arguments)
        grid = batch * heads * axis.documents
        self._launch("token_mean", x, self._block_kv, grid, sums, mean, arguments)
        return mean

    def pack_q(self, q: Operand, axis: Axis, counters: Operand | None = None) -> Operand:
        """Q by rows; tail: its scale.

        Args:
            counters: int32, contiguous; the same kernel sets them to zero for those that follow.
        """
        packed = q.new_empty(self._layout.q_shape(q, axis.blocks), dtype=torch.uint8)
        count = 0 if counters is None else counters.numel()
        arguments = (_CSource.of(q), packed, _CAxis.of(q, axis), counters, count)
        self._launch("pack_q", q, self._block_q, len(packed), *arguments)
        return packed

    def pack_kv_int8(
        self,
        k: Operand,
        v: Operand,
        axis: Axis,
        k_mean: Operand | None,
        v_mean: Operand | None,
        *,
        pack_for_backward: bool,
    ) -> tuple[Operand, Operand]:
        """K and V for the forward, two packed blocks for each block of tokens.

        The first: K by rows. With ``pack_for_backward`` it is the result of :meth:`pack_kv`, which begins
        with them, from the same read of K and V. The second: V by columns; tail: the scales of K and V.

        Args:
            k_mean, v_mean: what to subtract from K and from V, see :meth:`token_mean`; None: nothing.
        """
        rows = self._block_kv * packed_head_dim(k.shape[3])
        packed_v = _allocate(k, axis, rows + scale_bytes(2, self._block_kv, self._layout.token_scales))
        if pack_for_backward:
            packed_k = k.new_empty(self._layout.kv_shape(k, axis.blocks), dtype=torch.uint8)
            keys = (None, packed_v, packed_k)
        else:
            packed_k = _allocate(k, axis, rows)
            keys = (packed_k, packed_v, None)
        sources = (_CSource.of(x) for x in (k, v))
        arguments = (*sources, k_mean, v_mean, *keys, _CAxis.of(k, axis))
        self._launch("pack_kv_int8", k, self._block_kv, 2 * len(packed_v), *arguments)
        return packed_k, packed_v

    def pack_kv(self, k: Operand, v: Operand, axis: Axis, k_mean: Operand | None) -> Operand:
        """K and V for the backward, and for a forward with 16-bit P: K by rows, and V if 16 bits are packed.

        Tail: the scale of K.

        Args:
            k_mean: as in :meth:`pack_kv_int8`.
        """
        packed_kv = k.new_empty(self._layout.kv_shape(k, axis.blocks), dtype=torch.uint8)
        arguments = (_CSource.of(k), _CSource.of(v), k_mean, packed_kv, _CAxis.of(k, axis))
        parts = 1 + self._layout.packs_16bit
        self._launch("pack_kv", k, self._block_kv, parts * len(packed_kv), *arguments)
        return packed_kv

    def pack_k_columns(self, packed_kv: Operand, k: Operand, axis: Axis) -> Operand:
        """K by columns for the backward, from its rows in the result of :meth:`pack_kv`.

        Args:
            k: only its shape and dtype are used.
        """
        columns = _allocate(k, axis, self.k_rows_bytes(k))
        self._launch(
            "pack_k_columns", k, self._block_kv, len(packed_kv), packed_kv, columns, _CAxis.of(k, axis)
        )
        return columns

    def pack_grad(
        self,
        q: Operand,
        packed_q: Operand,
        grad_out: Operand,
        saved: ForwardResult,
        grad_lse: Operand | None,
        axis: Axis,
        counters: Operand,
    ) -> tuple[Operand, Operand]:
        """dO and Q for the backward, as two packed blocks for each block of tokens.

        The first: dO, if 16 bits are packed or dP has fp16 accumulators, −lse of all tokens and −δ of all
        tokens (fp32; −∞ and 0 past the end); tail: the scales of Q and dO. For fp16 accumulators dO is in
        fp16, divided by a power of two for each block that follows from its scale in INT8.

        The second: Q by columns, dO by columns. Without dO, which then has no scale, either, if dV is in 16
        bits. If dK is, too, it is Q in 16 bits, if they are packed, else nothing.

        Args:
            q: only read for dK in 16 bits, if they are packed; otherwise only its shape and dtype are used.
            packed_q: of :meth:`pack_q`.
            grad_lse: the gradient of lse to base e, as ``saved.lse``, which is subtracted from δ.
            counters: as of :meth:`pack_q`.
        """
        config, d_pad = self._layout.config, packed_head_dim(q.shape[3])
        p_16bit, dk_16bit = not config.is_int8("dv"), not config.is_int8("dk")
        has_grad = self._layout.packs_16bit or config.dp_fp16_accumulation
        grad_bytes = self._block_q * (2 * has_grad * d_pad + 8)
        grad_bytes += scale_bytes(2, self._block_q, self._layout.token_scales)
        packed_grad = _allocate(q, axis, grad_bytes)
        columns_of = 2 * self._layout.packs_16bit if dk_16bit else 1 + (not p_16bit)
        columns = _allocate(q, axis, self._block_q * columns_of * d_pad)
        tensors = (grad_out, saved.out, saved.out_residual if config.compensate_o else saved.out)
        sources = (_CSource.of(q), packed_q, *(_CSource.of(x) for x in tensors))
        counted = (counters, counters.numel())
        arguments = (*sources, saved.lse, packed_grad, columns, _CAxis.of(q, axis), *counted, grad_lse)
        self._launch(
            "pack_grad", q, self._block_q, 2 * len(packed_grad), *arguments,
            P_16BIT=p_16bit, DK_16BIT=dk_16bit, COMPENSATE_O=config.compensate_o,
            DP_FP16=config.dp_fp16_accumulation,
        )  # fmt: skip
        return packed_grad, columns

    def k_rows_bytes(self, k: Operand) -> int:
        """Bytes of K by rows of a packed block."""
        return self._block_kv * packed_head_dim(k.shape[3])

    def packed_kv_bytes(self, k: Operand) -> int:
        """Bytes from block to block in the result of :meth:`pack_kv`."""
        return self._layout.kv_shape(k, 0)[1]

    def _launch(
        self,
        name: str,
        like: Operand,
        tokens: int,
        grid: int,
        *arguments: Operand | ctypes.Structure | int | None,
        **defines: bool,
    ) -> None:
        """Launch a kernel of packing.cu on ``grid`` CTAs of ``tokens`` tokens each."""
        head_dim = packed_head_dim(like.shape[3])
        kernel = launch.start_loading(
            self._sources,
            "packing",
            f"{name}_kernel",
            0,
            HEAD_DIM=head_dim,
            IS_BF16=like.dtype == torch.bfloat16,
            **self._macros,
            **defines,
        )
        like.plan.launch(kernel, grid, tokens * head_dim // VALUES_PER_THREAD, *arguments)


def _allocate(x: Operand, axis: Axis, size: int, dtype: torch.dtype = torch.uint8) -> Operand:
    return x.new_empty((x.shape[0] * x.shape[1] * axis.blocks, size), dtype=dtype)


# --- Structures of packing.cu ------------------------------------------------------------------------------


class _CSource(ctypes.Structure):
    _fields_ = [("tensor", CTokenTensor), ("is_contiguous", ctypes.c_int)]

    @classmethod
    def of(cls, x: Operand) -> _CSource:
        return cls(CTokenTensor.of(x), has_whole_pieces(x))


def has_whole_pieces(x: Operand) -> bool:
    """Whether 8 channels of x can be read at once: contiguous, and each token aligned to 16 bytes."""
    strides = x.stride()
    aligned = x.data_ptr() % 16 == 0 and strides[0] % 8 == strides[1] % 8 == strides[2] % 8 == 0
    return aligned and strides[3] == 1


def with_whole_pieces(x: Operand) -> Operand:
    """x, or a contiguous copy if 8 of its channels cannot be read at once."""
    return x if has_whole_pieces(x) else x.clone(memory_format=torch.contiguous_format)


class _CAxis(ctypes.Structure):
    _fields_ = [
        ("segments", CSegments),
        *((name, ctypes.c_int) for name in ("tokens", "d", "heads", "blocks", "documents")),
    ]

    @classmethod
    def of(cls, x: Operand, axis: Axis) -> _CAxis:
        """The tokens of x (B, H, N, D)."""
        return cls(CSegments.of(axis.segments), axis.n, x.shape[3], x.shape[1], axis.blocks, axis.documents)
