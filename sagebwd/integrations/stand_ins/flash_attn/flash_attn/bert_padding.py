"""Padded batches to packed ones and back."""

import torch
from torch import Tensor
from torch.nn import functional as F


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` (n,) of x (N, …)."""
    return x.index_select(0, indices)


def index_put_first_axis(x: Tensor, indices: Tensor, count: int) -> Tensor:
    """(count, …): x (n, …) in the rows ``indices`` (n,), zeros in all others."""
    return x.new_zeros(count, *x.shape[1:]).index_copy(0, indices, x)


def unpad_input(
    x: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of x that take part, end to end.

    Args:
        x: (B, N, …).
        attention_mask: (B, N) bool or int, tokens that take part.
        unused_mask: (B, N) bool or int, further tokens that are kept.

    Returns:
        The tokens (T, …); their indices (T,) in x (B·N, …); (B + 1,) int32 boundaries of the sequences; the
        length of the longest; and (B,) int32, how many tokens of each take part.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    boundaries = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(x.flatten(0, 1), indices)
    return tokens, indices, boundaries, int(lengths.max()), attention_mask.sum(1, dtype=torch.int32)


def pad_input(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, …): the inverse of :func:`unpad_input`, zeros where no token is."""
    return index_put_first_axis(x, indices, batch * seqlen).unflatten(0, (batch, seqlen))
