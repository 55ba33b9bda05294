"""How an operand of a matrix product is rounded, for studies: INT8, unsigned INT8, FP8, 16-bit, and mixtures.

A Rounding is a function of x that returns what a product sees of x, in float32. x has shape (rows, columns).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.reference.quantization import Operand, quantize, quantize_two_levels

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def to_dtype(dtype: torch.dtype) -> Rounding:
    """Rounded to a 16-bit dtype."""
    return lambda x: x.to(dtype).float()


def int8(rows: int | None, columns: int | None, *, levels: int = 1) -> Rounding:
    """INT8 with one scale for each group of `rows` × `columns` entries; None: all of that axis.

    levels: 2 for INT8 high and low halves, of `sagebwd.reference.quantization.quantize_two_levels`.
    """

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        parts = quantize_two_levels(grouped, (1, 3)) if levels == 2 else [quantize(grouped, (1, 3))]
        return from_groups(sum(map(value_of, parts)), x)

    return rounding


def uint8(rows: int | None, columns: int | None) -> Rounding:
    """As `int8` for values that are never negative, such as P: 255 steps instead of 127.

    Tensor cores take unsigned operands, or (integer − 128) where 128 times the other's sum is added.
    """

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        return from_groups(value_of(quantize(grouped, (1, 3), unsigned=True)), x)

    return rounding


def stochastic_int8(rows: int | None, columns: int | None) -> Rounding:
    """As `int8`, but rounded up with the probability of the fraction: right on average over draws."""

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        scale = quantize(grouped, (1, 3)).scale
        return from_groups((grouped * inverse(scale) + torch.rand_like(grouped)).floor_() * scale, x)

    return rounding


def float8(rows: int | None, columns: int | None) -> Rounding:
    """As `int8`, with 8-bit floating point (e4m3) instead of integers."""
    largest = torch.finfo(torch.float8_e4m3fn).max

    def rounding(x: Tensor) -> Tensor:
        grouped = in_groups(x, rows, columns)
        scale = grouped.abs().amax((1, 3), keepdim=True) / largest
        return from_groups((grouped * inverse(scale)).to(torch.float8_e4m3fn).float() * scale, x)

    return rounding


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and zero where the scale is zero or subnormal."""
    return torch.where(scale < torch.finfo(scale.dtype).tiny, 0.0, 1 / scale)


def value_of(operand: Operand) -> Tensor:
    return operand.values * operand.scale


def in_groups(x: Tensor, rows: int | None, columns: int | None) -> Tensor:
    """x (M, N) as (groups, rows, groups, columns), filled up with zeros to whole groups."""
    rows, columns = min(rows or x.shape[0], x.shape[0]), min(columns or x.shape[1], x.shape[1])
    padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def from_groups(grouped: Tensor, like: Tensor) -> Tensor:
    """Undo `in_groups`."""
    return grouped.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def per_channel(rounding: Rounding) -> Rounding:
    """`rounding` of x (N, D) with every channel divided by its largest entry.

    For a product that contracts tokens: the factor of a channel multiplies the finished result, once.
    """

    def rounded(x: Tensor) -> Tensor:
        largest = x.abs().amax(0, keepdim=True)
        return rounding(x * inverse(largest)) * largest

    return rounded


def rotated(rounding: Rounding, turn: Tensor | None = None) -> Rounding:
    """`rounding` of x (N, D) in the basis of `turn` (D, D), or `rotation`, where no channel stands out.

    Q and K turned alike leave QKᵀ as it is; where tokens are contracted the finished result is turned back.
    Under `torch.vmap`, which draws random signs for each head, give `turn`.
    """

    def rounded(x: Tensor) -> Tensor:
        basis = (rotation(x.shape[-1]) if turn is None else turn).to(x)
        return rounding(x @ basis) @ basis.mT

    return rounded


def rotation(d: int) -> Tensor:
    """Orthogonal (d, d): random signs, then Hadamard matrices of the largest power of 2 that divides d."""
    size = d & -d
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(2, (d, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs * torch.block_diag(*[hadamard / math.sqrt(size)] * (d // size))


def but_channels(rounding: Rounding, share: float) -> Rounding:
    """`rounding` of x (N, D), but for the `share` of channels with the largest entries, which stay exact."""

    def rounded(x: Tensor) -> Tensor:
        largest = x.abs().amax(0).topk(math.ceil(share * x.shape[-1])).indices
        outliers = torch.zeros_like(x)
        outliers[:, largest] = x[:, largest]
        return outliers + rounding(x - outliers)

    return rounded


def but_hard_tiles(rounding: Rounding, rows: int, columns: int, share: float) -> Rounding:
    """`rounding` of weights (N, N), but for the `share` of tiles of rows × columns that it hurts most.

    Those are the tiles with the largest Σ (row's maximum)². A kernel has these maxima, and the squared error
    of INT8 with a scale per row is in proportion to their squares.
    """

    def rounded(x: Tensor) -> Tensor:
        tiles = in_groups(x, rows, columns)
        hardness = tiles.abs().amax(3, keepdim=True).square().sum(1, keepdim=True)
        chosen = hard_tiles(hardness, share)
        return torch.where(from_groups(chosen.expand_as(tiles), x), x, rounding(x))

    return rounded


def hard_tiles(hardness: Tensor, share: float) -> Tensor:
    """True for the `share` of tiles with the largest hardness > 0; that of hidden tiles is 0."""
    count = round(share * int((hardness > 0).sum()))
    chosen = torch.zeros_like(hardness, dtype=torch.bool)
    chosen.view(-1)[hardness.flatten().topk(count).indices] = True
    return chosen
