"""What kernel sets share: blocks of tokens, packed documents, results that the kernels fill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.interface import AttentionParams


def stand_in(like: Tensor, heads: int, tokens: int) -> Tensor:
    """A tensor (B, heads, tokens, D) of which only the shape and the dtype can be read."""
    return like.new_empty_strided((like.shape[0], heads, tokens, like.shape[3]), (0, 0, 0, 0))


def empty_result(x: Tensor, params: AttentionParams) -> Tensor:
    """An uninitialized tensor like x (B, H, N, D), laid out as kernels do.

    Those that pack lay it out token by token for a :func:`stand_in`, and so for any x whose channels are one.
    """
    if x.stride(3) != 0 or not params.packs:
        return torch.empty_like(x)
    batch, heads, tokens, channels = x.shape
    return x.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def is_virtual(x: Tensor | None) -> bool:
    """Whether its memory does not hold it: a lazy minus, a zero without memory, a batch of gradients."""
    return x is not None and (
        x.is_neg() or x._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(x)
    )


class Segments(NamedTuple):
    """Where packed documents lie along one axis of tokens, all int32, on the device.

    document: (blocks,), the document that each block belongs to; blocks left over belong to an empty one.
    start: (documents + 2,), first token of each document.
    first_block: (documents + 2,), first block of each document.
    """

    document: Tensor
    start: Tensor
    first_block: Tensor


def block_count(n: int, block: int, documents: int) -> int:
    """Blocks that ``n`` tokens need at most, if none lies across the boundary of two documents."""
    return (n + documents * (block - 1)) // block


def document_starts(cu_seqlens: Tensor, n: int) -> Tensor:
    """The boundaries in int32, moved to the nearest that are valid.

    Boundaries out of order or out of range must not become reads out of bounds.
    """
    return cu_seqlens.clamp(0, n).cummax(0).values.int()


class Axis(NamedTuple):
    """The tokens of q, or those of k and v, cut into blocks, which are numbered over all heads:
    ``head * blocks + block``.

    n: tokens; block: tokens per block; blocks: blocks per head, an upper bound when documents are packed;
    documents: their number, 1 without packing; segments: None without packing.
    """

    n: int
    block: int
    blocks: int
    documents: int
    segments: Segments | None

    @classmethod
    def of(cls, n: int, block: int, cu_seqlens: Tensor | None) -> Axis:
        """Cut ``n`` tokens into blocks, none across a boundary of ``cu_seqlens``. Does not synchronise.

        ``cu_seqlens`` of a plan is an operand, and so are the segments.
        """
        if cu_seqlens is None:
            return cls(n, block, block_count(n, block, 1), 1, None)
        documents = len(cu_seqlens) - 1
        (start,) = _computed(lambda x: (_padded_starts(x, n),), cu_seqlens, [(documents + 2,)])
        return cls._of_documents(n, block, documents, start)

    @classmethod
    def _of_documents(cls, n: int, block: int, documents: int, start: Tensor) -> Axis:
        """``start`` is that of :class:`Segments`."""
        blocks = block_count(n, block, documents)
        find = functools.partial(_find_blocks, block=block, blocks=blocks)
        document, first_block = _computed(find, start, [(blocks,), (documents + 2,)])
        return cls(n, block, blocks, documents, Segments(document, start, first_block))

    def with_block(self, block: int) -> Axis:
        """The same tokens and documents in blocks of another size."""
        if block == self.block:
            return self
        if self.segments is None:
            return Axis.of(self.n, block, None)
        return self._of_documents(self.n, block, self.documents, self.segments.start)


def _computed(function: Callable[[Tensor], Sequence[Tensor]], x: Any, shapes: Sequence[Any]) -> Any:
    """``function(x)``; for an operand of a plan, what that will be, in these shapes."""
    return function(x) if isinstance(x, Tensor) else x.call(function, shapes)


def _padded_starts(cu_seqlens: Tensor, n: int) -> Tensor:
    start = document_starts(cu_seqlens, n)
    return torch.cat([start, start[-1:]])


def _find_blocks(start: Tensor, block: int, blocks: int) -> tuple[Tensor, Tensor]:
    """``document`` and ``first_block`` of :class:`Segments`."""
    per_document = (start.diff() + block - 1) // block
    first_block = torch.nn.functional.pad(per_document.cumsum(0), (1, 0))
    indices = torch.arange(blocks, device=start.device)
    document = torch.searchsorted(first_block[1:-1].contiguous(), indices, right=True)
    return document.int(), first_block.int()


class Axes(NamedTuple):
    """The tokens of q, and those of k and v, in the blocks that the settings ask for."""

    q: Axis
    kv: Axis

    @classmethod
    def of(cls, q: Tensor, k: Tensor, params: AttentionParams) -> Axes:
        """Does not synchronise."""
        block_q, _ = params.config.tile(q.shape[3])
        return cls(Axis.of(q.shape[2], block_q, params.cu_seqlens), kv_axis(k, params))


def kv_axis(k: Tensor, params: AttentionParams) -> Axis:
    """The tokens of k and v in the blocks that the settings ask for."""
    _, block_kv = params.config.tile(k.shape[3])
    return Axis.of(k.shape[2], block_kv, params.kv_boundaries)


def padded_head_dim(d: int) -> int:
    """Channels that a tile has room for: a power of two, and no less than INT8 tensor cores contract."""
    return max(32, 1 << (d - 1).bit_length())


def packed_head_dim(d: int) -> int:
    """Channels of packed blocks: 64, 128 or 256."""
    return max(64, padded_head_dim(d))
