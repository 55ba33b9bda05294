"""Batches with padding or packed documents, as :func:`sagebwd.sage_attention` takes them.

That operator takes documents end to end in one row (``cu_seqlens``). This module converts a batch of any
layout to that form and back. A batch without padding or packing is passed on as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sagebwd.attention import sage_attention
from sagebwd.window import FULL, Window

#: Results that are remembered: layers may alternate between windows and full attention, and between models.
REMEMBERED = 8


@dataclass(frozen=True)
class Layout:
    """Which tokens of a batch attend to which.

    Attributes:
        window: how far a query sees within its document. With a limit, fewer queries than keys are the last
            of them.
        documents: (B, N_kv) int64, from 1 on, 0 for hidden tokens; None: each row is one document, all shown.
        cu_seqlens, cu_seqlens_kv: (documents + 1,) int32, as of :func:`sagebwd.sage_attention`. Without the
            first each row of the batch is one document, without the second q is cut as k is.
        q_tokens, kv_tokens: (tokens,) int64, where in the flattened batch (B·N,) the tokens of the documents
            are. None: the documents hold every token.
        has_holes: whether tokens are hidden within a document: laid end to end, its tokens are nearer to
            each other than in the text.
    """

    window: Window
    documents: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    q_tokens: Tensor | None = None
    kv_tokens: Tensor | None = None
    has_holes: bool = False

    @property
    def is_causal(self) -> bool:
        """Whether a query sees only keys up to its own."""
        return self.window[1] == 0


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **settings: Any) -> Tensor:
    """Attention within the documents of ``layout``, zero for queries of no document.

    Args:
        q: (B, H, N_q, D).
        k: (B, H_kv, N_kv, D).
        v: (B, H_kv, N_kv, D_v).
        layout: of this batch; with a window it must not have holes.
        settings: ``scale``, ``sinks`` and ``config`` of :func:`sagebwd.sage_attention`.

    Returns:
        (B, N_q, H, D_v), contiguous.
    """
    n_q = q.shape[2]
    settings |= {"is_causal": layout.is_causal, "window_size": layout.window, "enable_gqa": True}
    if layout.window != FULL and n_q < k.shape[2]:
        # Queries are counted from the first key, so pad with queries before the given ones. Nothing reads
        # their results, so their gradients are zero and add nothing to those of k and v.
        q = F.pad(q, (0, 0, k.shape[2] - n_q, 0))
    if layout.cu_seqlens is None:
        out = sage_attention(q, k, v, **settings).transpose(1, 2)
    else:
        k, v = (_lay_end_to_end(x, layout.kv_tokens) for x in (k, v))
        cuts = {"cu_seqlens": layout.cu_seqlens, "cu_seqlens_kv": layout.cu_seqlens_kv}
        packed = sage_attention(_lay_end_to_end(q, layout.q_tokens), k, v, **cuts, **settings)
        out = _put_back(packed, layout.q_tokens, q.shape[0], q.shape[2])
    return out[:, -n_q:].contiguous()


def dense_mask(layout: Layout, batch: int, n_q: int, n_kv: int, device: torch.device) -> Tensor | None:
    """``layout`` as the mask of ``scaled_dot_product_attention``, for layers in full precision.

    Returns:
        (B or 1, 1, N_q or 1, N_kv) bool, true where a query sees a key; None if every query sees every key.
    """
    shown = None
    if layout.documents is not None:
        shown = layout.documents[:, None, None] != 0
        if layout.cu_seqlens_kv is None:  # the queries are tokens of these documents
            shown = shown & (layout.documents[:, None, -n_q:, None] == layout.documents[:, None, None])
    if layout.window != FULL:
        near = layout.window.visible(slice(n_kv - n_q, n_kv), slice(0, n_kv), device)
        shown = near[None, None] if shown is None else shown & near
    return shown


def find_layout(
    documents: Tensor, *, n_q: int, window: Window, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> Layout:
    """The layout in which no two tokens attend to each other that any of the arguments keeps apart.

    Args:
        documents: (B, N_kv) integers; neighbours with the same value share a document, 0 hides a key.
        n_q: number of queries, N_q. With a window they are the last of N_kv; others need not be any of the
            keys.
        window: how far a query sees.
        position_ids: (B or 1, N_q); a document starts where they fall, or return to the lowest of the row.
        cu_seqlens: (documents + 1,) boundaries within the only row.
    """
    batch, n_kv = documents.shape
    labels = [documents.flatten()]
    if cu_seqlens is not None:
        labels.append(_index_documents(cu_seqlens.to(documents.device), n_kv))
    positions = position_ids if window != FULL or n_q == n_kv else None
    tokens = torch.arange(batch * n_kv, device=documents.device)
    is_start = _find_starts(tokens, labels, positions, batch)
    # Most batches have no padding and a document a row: without boundaries they wait for the GPU here alone.
    if bool((documents != 0).all() & (is_start.sum() == batch)):
        return Layout(window)
    kv_tokens = None
    tokens = documents.flatten().nonzero().squeeze(1)
    if len(tokens) == 0:
        raise ValueError("the attention mask hides every token; leave out batches that are padding alone")
    if len(tokens) < batch * n_kv:
        kv_tokens, is_start = tokens, _find_starts(tokens, labels, positions, batch)
    is_one_a_row = int(is_start.sum()) == len((tokens // n_kv).unique())
    flat = tokens.new_zeros(batch * n_kv).index_copy(0, tokens, is_start.cumsum(0))
    documents = flat.unflatten(0, (batch, n_kv))
    if window != FULL or not is_one_a_row:
        follows = F.pad(tokens.diff() == 1, (1, 0)) | is_start
        cuts = _boundaries(is_start)
        return Layout(window, documents, cuts, None, kv_tokens, kv_tokens, has_holes=not bool(follows.all()))
    # Every query of a row sees all of its keys. The queries need not be the keys' own tokens, not even where
    # they are as many (cross-attention), so a hidden key says nothing about the query in its place.
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=documents.device) * n_q
    cu_seqlens_kv = F.pad((documents != 0).sum(1).cumsum(0), (1, 0)).int()
    return Layout(window, documents, cu_seqlens, cu_seqlens_kv, kv_tokens=kv_tokens)


def _find_starts(tokens: Tensor, labels: list[Tensor], position_ids: Tensor | None, batch: int) -> Tensor:
    """(T,) bool: which ``tokens`` (T,) start a document, by ``labels`` (B·N,), their rows and positions."""
    n = len(labels[0]) // batch
    marks = torch.stack([tokens // n, *(label[tokens] for label in labels)])
    is_start = _differs_from_previous(marks).any(0)
    return is_start if position_ids is None else is_start | _restarts(position_ids, batch, n, tokens)


def remember_recent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recent result again to a call with the same, unmodified arguments.

    All layers of a model pass the same few tensors, and reading them waits for the GPU. The version of a
    tensor tells whether it was modified. Nothing is remembered where that is not reliable: tensors of
    inference mode have no version, and those on the CPU, where nothing waits, may share memory with numpy.
    """
    recent: deque[tuple[list[Any], Any]] = deque(maxlen=REMEMBERED)  # arguments and results

    @functools.wraps(function)
    def remembering(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if torch.is_inference_mode_enabled() or any(x.is_inference() or x.is_cpu for x in tensors):
            return function(*args)
        for known, result in tuple(recent):
            if all(map(_is_same, known, args)):
                return result
        result = function(*args)
        recent.append(
            ([_Known(weakref.ref(x), x._version) if isinstance(x, Tensor) else x for x in args], result)
        )
        return result

    return torch.compiler.disable(remembering, reason="it compares tensors by identity")


class _Known(NamedTuple):
    """A tensor that a function was called with."""

    tensor: weakref.ref[Tensor]
    version: int


def _is_same(known: Any, x: Any) -> bool:
    if isinstance(x, Tensor):
        return isinstance(known, _Known) and known.tensor() is x and known.version == x._version
    return not isinstance(known, _Known) and known == x


def _lay_end_to_end(x: Tensor, tokens: Tensor | None) -> Tensor:
    """(B, H, N, D) to (1, H, T, D)."""
    x = x.transpose(1, 2).flatten(0, 1)
    x = x if tokens is None else x.index_select(0, tokens)
    return x.transpose(0, 1)[None]


def _put_back(x: Tensor, tokens: Tensor | None, batch: int, n: int) -> Tensor:
    """(1, H, T, D) to (B, N, H, D), zero where no token was."""
    x = x[0].transpose(0, 1)
    if tokens is not None:
        x = x.new_zeros(batch * n, *x.shape[1:]).index_copy(0, tokens, x)
    return x.unflatten(0, (batch, n))


def _index_documents(cu_seqlens: Tensor, n: int) -> Tensor:
    """(N,) index of each token's document."""
    boundaries = cu_seqlens.tolist()
    if boundaries[0] != 0 or boundaries[-1] != n or boundaries != sorted(boundaries):
        raise ValueError(
            f"the documents' boundaries are {boundaries}; they must start at 0, never fall, and end at {n}, "
            "the number of tokens"
        )
    tokens = torch.arange(n, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens.to(tokens.dtype), right=True)


def _restarts(position_ids: Tensor, batch: int, n: int, tokens: Tensor) -> Tensor:
    """(T,) bool: which ``tokens`` start a document by ``position_ids`` (B or 1, N_q), of the last N_q of N.

    Packed documents start at the same position, whichever it is. That positions rise by more than 1, or stay,
    means nothing: some models give all tokens of an image the same.
    """
    first = torch.arange(position_ids.shape[1] - n, 0, device=position_ids.device) + position_ids[:, :1]
    positions = torch.cat([first, position_ids], 1).expand(batch, -1).flatten()[tokens]
    lowest = positions.new_full((batch,), torch.iinfo(positions.dtype).max)
    lowest = lowest.scatter_reduce(0, tokens // n, positions, "amin")[tokens // n]
    return (positions == lowest) | F.pad(positions.diff() < 0, (1, 0))


def _differs_from_previous(x: Tensor) -> Tensor:
    """(…, T) bool, true for the first of all."""
    return F.pad(x.diff() != 0, (1, 0), value=True)


def _boundaries(is_start: Tensor) -> Tensor:
    """(documents + 1,) int32 of a flag per token (T,)."""
    return F.pad(is_start.nonzero().squeeze(1), (0, 1), value=len(is_start)).int()
