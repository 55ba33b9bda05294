"""The INT8 quantizer and the matrix product of quantized operands, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.config import SageConfig

#: Largest magnitude of a signed INT8 value, and largest unsigned value.
INT8_MAX, UINT8_MAX = 127, 255

#: Longest contraction whose INT8 product fp32 sums without rounding, even if its left operand is unsigned:
#: every partial sum stays within 2²⁴.
LONGEST_EXACT_CONTRACTION = 2**24 // (UINT8_MAX * INT8_MAX)  # 518

#: Products that a tensor core adds before it rounds a sum in fp16.
FP16_STEP = 16

#: Axes that share one scale, counted from the end because tiles carry batch and head axes in front.
PER_BLOCK = (-2, -1)
PER_ROW = (-1,)
PER_COLUMN = (-2,)

#: What ``SageConfig.operand_scales`` means for a block of tokens, one a row.
OPERAND_AXES = {"block": PER_BLOCK, "token": PER_ROW}


class Operand(NamedTuple):
    """An operand of a matrix product; ``values * scale`` stands for the tensor that it was made of.

    values: (..., rows, columns) fp32. Integers in [-127, 127] for INT8, in [0, 255] for unsigned INT8, else
        the rounded values themselves.
    scale: fp32, two axes or more, broadcasts against ``values``.
    """

    values: Tensor
    scale: Tensor

    @property
    def mT(self) -> Operand:
        """The transposed operand."""
        return Operand(self.values.mT, self.scale.mT)


def quantize(x: Tensor, shared: tuple[int, ...] = PER_BLOCK, *, unsigned: bool = False) -> Operand:
    """Round x / s to the nearest integer (ties to even), with s = max|x| / 127 over the axes ``shared``.

    With ``unsigned``, s = max|x| / 255: for x that is never negative; steps are half as wide.

    Where max|x| is zero, or so small that s would be subnormal in fp32, values and scale are zero. Where it
    is NaN or Inf the scale is NaN, so that every product with the operand is NaN, never a plausible result.

    Args:
        x: (..., rows, columns) fp32.
        shared: the axes along which one scale is shared: PER_BLOCK, PER_ROW or PER_COLUMN.
        unsigned: integers 0 … 255 in place of −127 … 127. No x may be negative, which is not checked.
    """
    scale = x.abs().amax(shared, keepdim=True) / (UINT8_MAX if unsigned else INT8_MAX)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    scale = infinite_to_nan(scale)
    quotient = x / torch.where(scale > 0, scale, torch.inf)
    return Operand(quotient.round_().nan_to_num_(0.0), scale)


def round_to(x: Tensor, dtype: torch.dtype) -> Operand:
    """The operand of a product that is not INT8: ``x`` rounded to ``dtype``, Inf to NaN, with scale 1.

    An Inf would be lost where a later step makes it plausible, such as exp(−Inf) = 0.
    """
    return Operand(infinite_to_nan(x.to(dtype).float()), x.new_ones(1, 1))


def to_fp16(x: Tensor, largest: Tensor) -> Operand:
    """Round x / s to fp16, with s the largest power of two up to ``largest``.

    Where ``largest`` is zero or subnormal, values and scale are zero; where it is NaN or Inf, the scale is
    NaN.

    Args:
        x: (..., rows, columns) fp32.
        largest: fp32, not negative, broadcasts against ``x``.
    """
    exponent = largest.view(torch.int32) & 0x7F800000
    scale = infinite_to_nan(exponent.view(torch.float32))
    quotient = x / torch.where(scale > 0, scale, torch.inf)
    return Operand(quotient.nan_to_num_(0.0).half().float(), scale)


def infinite_to_nan(x: Tensor) -> Tensor:
    """``x`` with NaN in place of ±Inf."""
    return torch.where(x.isinf(), torch.nan, x)


def product(a: Operand, b: Operand) -> Tensor:
    """a @ b accumulated in fp32, which holds sums of INT8 products exactly; then the scales multiply it.

    Args:
        a: (..., M, K), its scale of size 1 along K.
        b: (..., K, N), its scale of size 1 along K.

    Raises:
        ValueError: a scale runs along the contracted axis, which no INT8 product can do.
    """
    if a.scale.shape[-1] != 1 or b.scale.shape[-2] != 1:
        raise ValueError(
            f"scales {tuple(a.scale.shape)} and {tuple(b.scale.shape)} vary along the contracted axis; "
            "share one along it"
        )
    if a.values.shape[-1] <= LONGEST_EXACT_CONTRACTION:
        total = a.values @ b.values
    else:
        total = (a.values.double() @ b.values.double()).float()
    return total * (a.scale * b.scale)


def product_in_fp16(a: Operand, b: Operand) -> Tensor:
    """As :func:`product`, of operands by :func:`to_fp16`, accumulated in fp16, as mma.sync does on a GPU.

    It adds :data:`FP16_STEP` products at once to a sum, and rounds to nearest.
    """
    total = a.values.new_zeros(1, 1)
    for left, right in zip(a.values.split(FP16_STEP, -1), b.values.split(FP16_STEP, -2), strict=True):
        total = (total + left @ right).half().float()
    return total * (a.scale * b.scale)


class Products:
    """How the matrix products of one attention take their operands: INT8, or rounded to ``dtype``."""

    def __init__(self, dtype: torch.dtype, config: SageConfig) -> None:
        self.dtype, self.config = dtype, config

    def operand(self, x: Tensor, matmul: str, shared: tuple[int, ...], *, unsigned: bool = False) -> Operand:
        """``x`` as ``matmul`` takes it; in INT8, ``unsigned`` or not, with scales shared along ``shared``."""
        if not self.config.is_int8(matmul):
            return round_to(x, self.dtype)
        return quantize(x, shared, unsigned=unsigned)

    def tokens(self, block: Tensor, matmul: str) -> Operand:
        """A block (..., tokens, D) of Q, K, V or dO as ``matmul`` takes it."""
        return self.operand(block, matmul, OPERAND_AXES[self.config.operand_scales])

    def token_blocks(self, x: Tensor, matmul: str, size: int) -> list[Operand]:
        """:meth:`tokens` of each block of ``size`` tokens of x (..., N, D)."""
        return [self.tokens(block, matmul) for block in x.float().split(size, -2)]

    def contract_tokens(
        self, weights: Tensor, tokens: Operand, matmul: str, shared: tuple[int, ...], mask: Tensor
    ) -> Tensor:
        """``weights @ tokens``, (..., M, D): one of O = PV, dV = PᵀdO, dQ = dS·K and dK = dSᵀQ.

        A scale per token runs along the contracted axis, which no INT8 product can do; so the weights take
        it, before they are quantized.

        Args:
            weights: (..., M, tokens) fp32.
            tokens: (..., tokens, D), of :meth:`tokens`.
            matmul: which of the products it is.
            shared: the axes of ``weights`` along which one INT8 scale is shared.
            mask: False where a weight is hidden. It stays zero, whatever the scale of its token.
        """
        if self.config.operand_scales == "token" and self.config.is_int8(matmul):
            weights = torch.where(mask, weights * tokens.scale.mT, 0.0)
            tokens = Operand(tokens.values, torch.ones_like(tokens.scale[..., :1, :]))
        unsigned = self.config.is_unsigned(matmul)
        return product(self.operand(weights, matmul, shared, unsigned=unsigned), tokens)
