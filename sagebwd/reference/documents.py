"""Packed documents: sequences laid end to end along the token axis, none of which attends to another.

Forward and backward run :mod:`sagebwd.reference.algorithm` on each document alone, so that its mask, mean of
K and quantization blocks start at its own first token, and put the results where the document lies.
``documents`` below lists those that have queries and keys; tokens of no such document get out 0, lse −inf and
gradients 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.reference import algorithm


class Document(NamedTuple):
    """Where one document lies: its queries in q and its keys in k and v."""

    queries: slice
    keys: slice

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of this document in q, k and v (B, heads, N, D)."""
        return cut(q, self.queries), cut(k, self.keys), cut(v, self.keys)


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
        Document(*pair)
        for pair in zip(queries, keys, strict=True)
        if all(tokens.start < tokens.stop for tokens in pair)
    ]


def token_means(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean of k (B, H_kv, N_kv, D) over each document, (B, H_kv, documents, D) fp32; 0 without tokens."""
    whole = [slice(0, k.shape[-2])]
    parts = whole if cu_seqlens is None else slices("cu_seqlens", cu_seqlens, k.shape[-2])
    return torch.stack([cut(k, part).float().sum(-2) / max(part.stop - part.start, 1) for part in parts], -2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: list[Document], **settings: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, laid out as q, lse (B, H, N_q) and the residual of out.

    ``settings`` are those of :func:`sagebwd.reference.algorithm.forward`.
    """
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    out_residual = torch.zeros_like(q) if settings["config"].compensate_o else None
    for document in documents:
        rows = document.queries
        out[..., rows, :], lse[..., rows], residual = algorithm.forward(*document.take(q, k, v), **settings)
        if out_residual is not None:
            out_residual[..., rows, :] = residual
    return out, lse, out_residual


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_residual: Tensor | None,
    documents: list[Document],
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k, v; ``settings`` as of :func:`sagebwd.reference.algorithm.backward`."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for document in documents:
        rows, columns = document
        dq[..., rows, :], dk[..., columns, :], dv[..., columns, :] = algorithm.backward(
            cut(grad_out, rows),
            *document.take(q, k, v),
            cut(out, rows),
            lse[..., rows],
            None if out_residual is None else cut(out_residual, rows),
            **settings,
        )
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
