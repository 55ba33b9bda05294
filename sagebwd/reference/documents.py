"""Packed documents: sequences laid end to end along the token axis, none of which attends to another.

Forward and backward run :mod:`sagebwd.reference.algorithm` on each document alone, so that its mask, mean of
K and quantization blocks start at its own first token, and put the results where the document lies.
``documents`` below lists those that have queries and keys; tokens of no such document get out 0, lse −inf and
gradients 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.interface import AttentionParams
from sagebwd.reference import algorithm
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
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Output
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Output]:
        """The same of all that the backward takes."""
        rows = self.queries
        residual = None if saved.residual is None else cut(saved.residual, rows)
        k_mean = None if saved.k_mean is None else saved.k_mean[..., self.index : self.index + 1, :]
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


def forward(q: Tensor, k: Tensor, v: Tensor, documents: list[Document], params: AttentionParams) -> Output:
    """Algorithm 1; out is laid out as q."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    residual = torch.zeros_like(q) if params.config.compensate_o else None
    for document in documents:
        rows = document.queries
        found = algorithm.forward(*document.take(q, k, v), params)
        out[..., rows, :], lse[..., rows] = found.out, found.lse
        if residual is not None:
            residual[..., rows, :] = found.residual
    return Output(out, lse, residual)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Output,
    documents: list[Document],
    params: AttentionParams,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: dq, dk, dv, laid out as q, k, v."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for document in documents:
        rows, columns, _ = document
        inputs = document.take_for_backward(grad_out, q, k, v, saved)
        own = None if grad_lse is None else grad_lse[..., rows]
        gradients = algorithm.backward(*inputs, params, own)
        dq[..., rows, :], dk[..., columns, :], dv[..., columns, :] = gradients
    return dq, dk, dv


def slices(name: str, cu_seqlens: Tensor, n_tokens: int) -> list[slice]:
    """The tokens of each document, after the boundaries are found to lie in order within the sequence."""
    boundaries = cu_seqlens.tolist()
    if boundaries[0] < 0:
        raise ValueError(f"{name} starts at {boundaries[0]}; start it at 0 or later")
    if boundaries[-1] > n_tokens:
        raise ValueError(
            f"{name} ends at {boundaries[-1]}, past the {n_tokens} tokens; end it at {n_tokens} or earlier"
        )
    for n, (start, stop) in enumerate(pairwise(boundaries)):
        if start > stop:
            raise ValueError(
                f"{name} goes back from {start} to {stop} in document {n}; boundaries may never decrease"
            )
    return [slice(start, stop) for start, stop in pairwise(boundaries)]
