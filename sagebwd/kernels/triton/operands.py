"""What Triton kernels take: tensors with strides, and quantized operands."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: Sizes that vary from batch to batch: kernels are not specialized for their divisibility.
SIZES = ("n", "n_q", "n_kv", "blocks", "q_blocks", "kv_blocks", "documents", "left", "right")


class TokenTensor(NamedTuple):
    """A tensor (B, H, N, D) with any strides, in elements."""

    data: Tensor
    stride_b: int
    stride_h: int
    stride_n: int
    stride_d: int

    @classmethod
    def of(cls, x: Tensor) -> TokenTensor:
        """The tensor and its strides as kernels take them."""
        return cls(x, *x.stride())


class PackedOperand(NamedTuple):
    """A tensor as matrix products take it, block by block; what no product asks for is None.

    Blocks are numbered as in :class:`sagebwd.kernels.layout.Axis`. Rows past the end of a sequence and
    channels past the head size are zero.

    rows: (heads · blocks, BLOCK, D_PAD) INT8, for products that contract channels.
    columns: (heads · blocks, D_PAD, BLOCK) INT8, the same values, for products that contract tokens, in
        the order of :func:`sagebwd.kernels.triton.device.position`.
    rounded: (heads · blocks, BLOCK, D_PAD) 16 bit, for products that are not INT8.
    scale: (heads · blocks,) fp32; (heads · blocks · BLOCK,) with scales per token.
    mean: fp32, what was subtracted: (heads · documents, D_PAD) for K and V, (heads · blocks, D_PAD) for Q.
    sums: (heads · blocks, D_PAD) int32, of ``columns`` over the tokens of each block, for products whose
        other operand is unsigned; see :func:`sagebwd.kernels.triton.device.dot_columns`.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    rounded: Tensor | None = None
    scale: Tensor | None = None
    mean: Tensor | None = None
    sums: Tensor | None = None
