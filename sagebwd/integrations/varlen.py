"""Batches with padding, windows or packed documents, as :func:`sagebwd.sage_attention` takes them.

A batch is described by a window, by the keys that take part and by signs of new documents. In a compiled
graph none of their values are read: packed documents then get room for a number that their shapes tell, and
a batch that does not fit gives NaN. Elsewhere they are read once, and a batch without padding is passed on as
it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdRef

from sagebwd import masks
from sagebwd.integrations.alignment import align
from sagebwd.usage import counted_attention
from sagebwd.window import CAUSAL, FULL, Window

#: Results that are remembered: layers may alternate between windows and full attention, and between models.
REMEMBERED = 8

#: A compiled graph has room for documents of this mean length, and for ROOM more.
MEAN_LENGTH, ROOM = 64, 32


@dataclass(frozen=True)
class Layout:
    """Which query of a batch sees which key.

    Attributes:
        window: how far a query sees within its document, counted from the last query and key.
        shown: (B, N_kv) bool, keys that take part; None: all.
        starts: (B, N_kv) bool, the first shown token of each document; None: each row is one.
        tokens: how the batch is packed; None if each row is one document without hidden tokens.
        is_wrong: () bool, whether the batch is another than its shapes promised.
        has_holes: whether a window counts hidden tokens within a document, which SageBwd does not.
    """

    window: Window
    shown: Tensor | None = None
    starts: Tensor | None = None
    tokens: masks.PackedTokens | None = None
    is_wrong: Tensor | None = None
    has_holes: bool = False


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **settings: Any) -> Tensor:
    """Attention as ``layout`` has it; zero for queries that see no key.

    Args:
        name: what the call is counted as.
        q: (B, H, N_q, D).
        k: (B, H_kv, N_kv, D).
        v: (B, H_kv, N_kv, D_v).
        layout: of this batch.
        settings: ``layer``, ``scale``, ``sinks`` and ``config`` of :func:`sagebwd.usage.counted_attention`.

    Returns:
        (B, H, N_q, D_v).
    """
    n_q, tokens = q.shape[2], layout.tokens
    settings["enable_gqa"] = True
    if tokens is None:
        alignment = align(n_q, k.shape[2], layout.window)
        k, v = alignment.keys(k), alignment.keys(v)
        out = counted_attention(name, alignment.queries(q), k, v, window_size=alignment.window, **settings)
        out = alignment.put_back_queries(out)
    else:
        # Queries before the given ones, whose results nothing reads, add nothing to any gradient.
        q = F.pad(q, (0, 0, tokens.n_q - n_q, 0)) if tokens.n_q > n_q else q
        settings |= {"cu_seqlens": tokens.cu_seqlens, "cu_seqlens_kv": tokens.cu_seqlens_kv}
        tensors = tokens.pack(q, k, v)
        out = counted_attention(name, *tensors, window_size=tuple(layout.window), **settings)
        out = tokens.unpack(out)[:, :, -n_q:]
    return masks.nan_where(layout.is_wrong, out)


def dense_mask(layout: Layout, n_q: int, n_kv: int, device: torch.device) -> Tensor | None:
    """``layout`` as the mask of ``scaled_dot_product_attention``, for layers in full precision.

    Returns:
        (B or 1, 1, N_q or 1, N_kv) bool, true where a query sees a key; None if every query sees every key.
    """
    parts = []
    if layout.shown is not None:
        parts.append(layout.shown[:, None, None])
    if layout.starts is not None:
        documents = layout.starts.flatten().cumsum(0).view(layout.starts.shape)
        parts.append(documents[:, None, -n_q:, None] == documents[:, None, None])
    if layout.window != FULL:
        parts.append(layout.window.visible(slice(n_kv - n_q, n_kv), slice(0, n_kv), device)[None, None])
    return functools.reduce(torch.logical_and, parts) if parts else None


class Seen(NamedTuple):
    """What a mask shows, as :func:`find_layout` takes it.

    hides_queries: whether a window hides a hidden token as a query, too. Else all keys that are shown must
        lie before the hidden ones.
    """

    window: Window
    shown: Tensor | None = None
    labels: Tensor | None = None
    hides_queries: bool = True

    def __str__(self) -> str:
        names = {FULL: "", CAUSAL: "causal"}
        parts = [
            names.get(self.window, "a window of ({}, {})".format(*self.window)),
            "documents" if self.labels is not None else "",
            "hidden keys" if self.shown is not None else "",
        ]
        return ", ".join(filter(None, parts)) or "full"


# --- From signs of new documents ---------------------------------------------------------------------------


def once_while_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A cached function of constants, which a tracer calls instead of tracing it and warning of the cache."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def calling(*args: Any) -> Any:
        return cached(*args)

    # As torch.compiler.assume_constant_result has it, without its import.
    calling._dynamo_marked_constant = True
    return calling


def remember_recent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recent result again to a call with the same, unmodified arguments.

    All layers of a model pass the same few tensors, and reading them waits for the GPU. The version of a
    tensor tells whether it was modified. Nothing is remembered where that is not reliable: tensors of
    inference mode have no version, and those on the CPU, where nothing waits, may share memory with numpy.
    """

    @functools.lru_cache(REMEMBERED)
    def remembered(*known: Any) -> Any:
        return function(*(x.tensor() if isinstance(x, _Known) else x for x in known))

    @functools.wraps(function)
    def remembering(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return function(*args)
        if any(x.is_inference() or x.is_cpu for x in tensors):
            return function(*args)
        return remembered(*(_Known(WeakIdRef(x), x._version) if isinstance(x, Tensor) else x for x in args))

    return remembering


class _Known(NamedTuple):
    """A tensor that a function was called with."""

    tensor: WeakIdRef  # equal to another of the same tensor
    version: int


def find_layout(
    seen: Seen,
    batch: int,
    n_q: int,
    n: int,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> Layout:
    """The layout in which no two tokens attend to each other that any of the arguments keeps apart.

    Args:
        seen: what the mask shows.
        batch, n_q, n: B, N_q and N_kv.
        position_ids: (B or 1, N); a document starts where they fall, or return to the lowest of the row.
        cu_seqlens, cu_seqlens_kv: (documents + 1,) boundaries within the only row, of queries and of keys.

    Raises:
        ValueError: the boundaries do not cut the row, or differ; in a compiled graph that gives NaN.
    """
    shown, labels = seen.shown, seen.labels
    tensors = [x for x in (labels, position_ids, cu_seqlens, shown) if x is not None]
    if not tensors:
        return Layout(seen.window)
    is_read = masks.has_values(tensors[0])
    # All rows have the same signs, as those of positions that a model counts itself: in a graph, none.
    is_one_row = [x.shape[0] == 1 or x.stride(0) == 0 for x in (labels, position_ids) if x is not None]
    is_shared = not is_read and batch > 1 and all(is_one_row)
    hidden_in = None if is_shared else shown
    filled, signs = _filled(hidden_in), []
    if labels is not None:
        signs.append(_changes(filled(labels)))
    if position_ids is not None:
        signs.append(_restarts(filled(position_ids)))
    if cu_seqlens is not None:
        places = torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        signs.append(_changes(filled(torch.searchsorted(cu_seqlens, places, right=True)[None])))
    if not signs:
        return _one_document_a_row(seen, n_q, n, is_read)
    if hidden_in is None:  # the first shown token of each row
        first = torch.arange(n, device=tensors[0].device)[None] == 0
    else:
        first = shown & (shown.cumsum(1) == 1)
    further = functools.reduce(torch.logical_or, signs, torch.zeros_like(first)) & ~first
    further = further if hidden_in is None else further & shown
    is_wrong = None if cu_seqlens is None else _are_wrong(cu_seqlens, cu_seqlens_kv, n)
    if is_read:
        if is_wrong is not None and is_wrong:
            raise ValueError(
                f"the documents' boundaries are {cu_seqlens.tolist()} and {cu_seqlens_kv.tolist()}; they "
                f"must be the same, start at 0, never fall, and end at {n}, the number of tokens"
            )
        further = further.expand(batch, -1)
        count = int(further.sum())
        if not count:
            return _one_document_a_row(seen, n_q, n, is_read)
        count, is_wrong = count + batch, None
    elif is_shared or (seen.window == FULL and shown is not None and labels is None):
        layout = _one_document_a_row(seen, n_q, n, is_read)
        return replace(layout, is_wrong=_either(layout.is_wrong, further.any()))
    else:
        count = batch + batch * n // MEAN_LENGTH + ROOM if cu_seqlens is None else cu_seqlens.shape[0] - 1
        is_wrong = _either(is_wrong, (first | further).sum() > count)
    starts = (first | further).expand(batch, -1)
    order = None if shown is None else masks.Order.of(shown.flatten())
    cuts = _boundaries(starts, shown, order, count)
    tokens = masks.PackedTokens(batch, n, cuts, cuts, order, order)
    return _find_holes(Layout(seen.window, shown, starts, tokens, is_wrong), is_read)


def _one_document_a_row(seen: Seen, n_q: int, n: int, is_read: bool) -> Layout:
    if seen.shown is None:
        return Layout(seen.window)
    is_full = seen.window == FULL and seen.labels is None
    hides_queries = seen.hides_queries and not is_full
    mask = masks.KeyMask(seen.shown)
    tokens = masks.visible_tokens(mask, n_q if is_full else n, hides_queries=hides_queries)
    return _find_holes(Layout(seen.window, seen.shown, tokens=tokens), is_read)


def _find_holes(layout: Layout, is_read: bool) -> Layout:
    """``layout`` with its ``has_holes``, or in a graph wrong if it has any."""
    if layout.shown is None or not layout.window.is_sliding:
        return layout
    holes = masks.have_holes(layout.window, layout.shown, layout.starts).any()
    if is_read:
        return replace(layout, has_holes=bool(holes))
    return replace(layout, is_wrong=_either(layout.is_wrong, holes))


def _either(is_wrong: Tensor | None, is_wrong_too: Tensor) -> Tensor:
    return is_wrong_too if is_wrong is None else is_wrong | is_wrong_too


def _are_wrong(cu_seqlens: Tensor, cu_seqlens_kv: Tensor, n: int) -> Tensor:
    """() bool, whether boundaries do not cut n tokens, or those of queries and keys differ."""
    is_wrong = (cu_seqlens.diff() < 0).any() | (cu_seqlens[0] != 0) | (cu_seqlens[-1] != n)
    if cu_seqlens is not cu_seqlens_kv:
        if cu_seqlens.shape[0] != cu_seqlens_kv.shape[0]:
            return torch.ones_like(is_wrong)
        is_wrong = is_wrong | (cu_seqlens != cu_seqlens_kv).any()
    return is_wrong


def _filled(shown: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function that gives hidden tokens the value of the last shown one before them, or of the first."""
    if shown is None:
        return lambda x: x
    last = torch.where(shown, torch.arange(shown.shape[1], device=shown.device), -1).cummax(1).values
    last = torch.where(last < 0, shown.int().argmax(1, keepdim=True), last)
    return lambda x: x.expand(last.shape[0], -1).gather(1, last)


def _changes(x: Tensor) -> Tensor:
    """(…, N) bool: where x differs from the token before."""
    return x.diff(prepend=x[..., :1]) != 0


def _restarts(position_ids: Tensor) -> Tensor:
    """(…, N) bool: where positions start a document.

    Packed documents start at the same position, whichever it is. That positions rise by more than 1, or stay,
    means nothing: some models give all tokens of an image the same.
    """
    falls = position_ids.diff(prepend=position_ids[:, :1]) < 0
    return falls | (position_ids == position_ids.amin(1, keepdim=True))


def _boundaries(starts: Tensor, shown: Tensor | None, order: masks.Order | None, count: int) -> Tensor:
    """(count + 1,) int32, of ``starts`` (B, N) in the order in which the tokens lie."""
    starts = starts.flatten()
    end = torch.full((1,), starts.shape[0], device=starts.device)
    if order is not None:
        starts, end = starts[order.forward], shown.sum()[None]
    documents = torch.arange(1, count + 1, device=starts.device)
    begins = torch.searchsorted(starts.cumsum(0), documents)
    return torch.cat([torch.minimum(begins, end), end]).int()


# --- From a mask of each pair of tokens --------------------------------------------------------------------


def read_mask(mask: Any, batch: int, n_q: int, n_kv: int) -> Seen | None:
    """What a mask for each pair of tokens shows, if SageBwd computes that; None for any other mask.

    Args:
        mask: broadcastable to (B, heads, N_q, N_kv), the same for all heads: bool, true where a query sees a
            key, or float, added to the logits.
        batch, n_q, n_kv: B, N_q and N_kv.
    """
    if not isinstance(mask, Tensor) or not 2 <= mask.dim() <= 4 or mask.requires_grad:
        return None  # a bias that is learned may start at zero
    mask = mask[(None,) * (4 - mask.dim())]
    shape = (batch, mask.shape[1], n_q, n_kv)
    if any(found not in (1, wanted) for found, wanted in zip(mask.shape, shape, strict=True)):
        return None
    mask = _without_copies(mask)
    if mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        return Seen(FULL, mask[:, 0, 0].expand(batch, -1))
    if not masks.has_values(mask):
        return None
    seen = mask
    if mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= masks.HIDES_FROM)).all()):
            return None
    if seen.dtype != torch.bool or not bool((seen == seen[:, :1]).all()):
        return None
    return recognise(seen[:, 0].expand(-1, n_q, n_kv), batch)


def _without_copies(mask: Tensor) -> Tensor:
    """(B or 1, heads or 1, N_q or 1, N_kv): one of each sequence, head and query that share their memory."""
    for axis in (0, 1, 2):
        mask = mask[(slice(None),) * axis + (slice(1),)] if mask.stride(axis) == 0 else mask
    return mask


def recognise(seen: Tensor, batch: int) -> Seen | None:
    """What ``seen`` (B or 1, N_q, N_kv) bool shows; None if it is neither a window nor documents."""
    _, n_q, n_kv = seen.shape
    shown = seen.any(1)
    hidden = None if shown.all() else shown.expand(batch, -1)
    if torch.equal(seen, shown[:, None].expand_as(seen)):
        return Seen(FULL, hidden)
    queries, keys = slice(n_kv - n_q, n_kv), slice(0, n_kv)  # counted from the last
    tokens = (torch.arange(x.start, x.stop, device=seen.device) for x in (keys, queries))
    reached = torch.sub(next(tokens), next(tokens)[:, None])[seen.any(0)]
    left, right = -int(reached.min()), int(reached.max())
    if min(left, right) < 0:
        return None
    forms = [(Seen(FULL), torch.ones_like(shown)[:, None])]
    if n_q == n_kv:
        # A document starts where a token does not see the last shown one before it.
        last = torch.where(shown, torch.arange(n_kv, device=seen.device), 0).cummax(1).values
        sees_last = seen.gather(2, F.pad(last[:, :-1], (1, 0))[..., None])[..., 0]
        labels = 1 + (shown & ~sees_last).cumsum(1)
        is_one = (labels.where(shown, n_kv).amin(1) >= (labels * shown).amax(1)).all()
        found = Seen(FULL, hidden, None if is_one else labels.expand(batch, -1))
        documents = labels * shown
        forms.append((found, shown[:, None] & (documents[:, :, None] == documents[:, None])))
        if not (shown[:, 1:] & ~shown[:, :-1]).any():
            forms.append((Seen(FULL, hidden, hides_queries=False), shown[:, None]))
    for window in (FULL, Window(-1, right), Window(left, -1), Window(left, right)):
        near = window.visible(queries, keys, seen.device)
        for found, together in forms:
            if torch.equal(seen, (near & together).expand_as(seen)):
                if window == FULL and found.labels is None:  # without a window, only documents hide queries
                    found = found._replace(labels=labels.expand(batch, -1))
                return found._replace(window=window)
    return None
