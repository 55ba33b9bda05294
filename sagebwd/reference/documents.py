"""Packed documents: sequences laid end to end along the token axis, none of which attends to another.

:mod:`sagebwd.reference.algorithm` runs on each document alone, so that its mask, mean of K and quantization
blocks start at its own first token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.interface import ForwardResult
from sagebwd.kernels.layout import padded_head_dim
from sagebwd.reference.algorithm import Output


class Document(NamedTuple):
    """Where one document lies: its queries in q and its keys in k and v; ``index`` among all of them."""

    queries: slice
    keys: slice
    index: int = 0

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of this document in q, k and v (B, heads, N, D)."""
        return cut(q, self.queries), cut(k, self.keys), cut(v, self.keys)

    def take_for_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: ForwardResult
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Output]:
        """The same of all that the backward takes."""
        rows, first = self.queries, self.index * padded_head_dim(k.shape[-1])
        residual = cut(saved.out_residual, rows) if saved.out_residual.numel() else None
        k_mean = saved.k_mean[:, :, None, first : first + k.shape[-1]] if saved.k_mean.numel() else None
        own = Output(cut(saved.out, rows), saved.lse[..., rows], residual, k_mean)
        return cut(grad_out, rows), *self.take(q, k, v), own


def cut(x: Tensor, tokens: slice) -> Tensor:
    """These tokens of x (B, heads, N, D), contiguous: sums run in one order wherever they lie in memory."""
    return x[..., tokens, :].contiguous()


def locate(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None) -> list[Document]:
    """The documents that have queries and keys; one that spans everything without ``cu_seqlens``.

    Reads the tensors, which waits for the device they are on. They must have passed
    :func:`~sagebwd.validation.check_documents`.

    Raises:
        ValueError: the boundaries leave the sequence, or go back.
    """
    if cu_seqlens is None:
        return [Document(slice(0, q.shape[-2]), slice(0, k.shape[-2]))]
    queries = slices("cu_seqlens", cu_seqlens, q.shape[-2])
    keys = queries if cu_seqlens_kv is None else slices("cu_seqlens_kv", cu_seqlens_kv, k.shape[-2])
    return [
        Document(*pair, index)
        for index, pair in enumerate(zip(queries, keys, strict=True))
        if all(tokens.start < tokens.stop for tokens in pair)
    ]


def token_means(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean of k (B, H_kv, N_kv, D) over each document, (B, H_kv, documents, D) fp32; 0 without tokens."""
    whole = [slice(0, k.shape[-2])]
    parts = whole if cu_seqlens is None else slices("cu_seqlens", cu_seqlens, k.shape[-2])
    return torch.stack([cut(k, part).float().sum(-2) / max(part.stop - part.start, 1) for part in parts], -2)


def slices(name: str, cu_seqlens: Tensor, n_tokens: int) -> list[slice]:
    """The tokens of each document, after the boundaries are found to lie in order within the sequence."""
    boundaries = cu_seqlens.tolist()
    for start, stop in pairwise([0, *boundaries, n_tokens]):
        if start > stop:
            raise ValueError(
                f"{name} goes from {start} to {stop}; boundaries must start at 0 or later, never decrease "
                f"and end at {n_tokens}, the number of tokens, or earlier"
            )
    return [slice(start, stop) for start, stop in pairwise(boundaries)]
