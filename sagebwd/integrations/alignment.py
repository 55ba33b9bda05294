"""Masks counted from the last query and key, as FlashAttention counts them, for :func:`sage_attention`.

torch's operator and ours count from the first query and key: query i sees keys i − left … i + right.
FlashAttention counts from the last: query i sees keys i + d − left … i + d + right, with d = N_kv − N_q. Both
are the same for as many queries as keys. :func:`align` turns the second into the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sagebwd.config import SageConfig
from sagebwd.masks import can_read
from sagebwd.reference.documents import slices
from sagebwd.usage import counted_attention
from sagebwd.window import Window

#: What arguments stand for that FlashAttention's functions have and SageBwd does not compute.
REFUSED = {
    "dropout_p": "dropout of attention weights; set it to 0",
    "softcap": "soft-capping of the logits",
    "alibi_slopes": "a bias by distance (ALiBi)",
    **dict.fromkeys(("block_table", "page_table"), "a paged cache of keys and values"),
    "qv": "logits that are a sum of two products",
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "FP8 inputs with their scales"),
    "attention_chunk": "attention within chunks",
    "gather_kv_indices": "attention to chosen keys",
    **dict.fromkeys(("score_mod", "mask_mod", "block_sparse_tensors"), "a bias or mask of a function"),
    **dict.fromkeys(("return_debug_mask", "return_attn_probs"), "the weights of the attention"),
    "return_lse": "the logsumexp here",
    "window_size": "a window that is not in the mask",
    **dict.fromkeys(("seqused_q", "seqused_k"), "a cache that is not full"),
    "num_splits": "keys split over thread blocks",
}


def check_refused(instead: str, **arguments: object) -> None:
    """Raise NotImplementedError for an argument that asks for anything; None, False and 0 do not."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value:
            shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise NotImplementedError(
                f"{name} is {shown}: sagebwd does not compute {REFUSED[name]}; {instead}"
            )


class Alignment(NamedTuple):
    """An attention whose mask counts from the first query and key, and how to get its tensors and back.

    Tensors are (B, H, N, …), of queries or of keys; ``fill`` is for queries that are not there.

    Attributes:
        window: (left, right) from the first query and key; −1 is no limit.
        cu_seqlens, cu_seqlens_kv: (documents + 1,) boundaries as of :func:`sage_attention`.
        first_query: queries before it see no key; they are cut off.
        first_key: no query sees a key before it; they are cut off.
        slots: (T_q,) int64, where each query is put among padded ones; None: they stay as they are.
        slot_count: number of padded queries, the last of which is in no document.
    """

    window: tuple[int, int]
    cu_seqlens: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    first_query: int = 0
    first_key: int = 0
    slots: Tensor | None = None
    slot_count: int = 0

    def queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x of the queries as the attention takes it."""
        if self.slots is None:
            return x[:, :, self.first_query :]
        shape = (*x.shape[:2], self.slot_count, *x.shape[3:])
        return x.new_full(shape, fill).index_copy(2, self.slots, x)

    def keys(self, x: Tensor) -> Tensor:
        """x of the keys as the attention takes it."""
        return x[:, :, self.first_key :]

    def put_back_queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of :meth:`queries`."""
        return _pad_front(x, self.first_query, fill) if self.slots is None else x.index_select(2, self.slots)

    def put_back_keys(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`keys`."""
        return _pad_front(x, self.first_key, 0.0)


def window_of(is_causal: bool, window_size: Sequence[int | None]) -> tuple[int, int]:
    """(left, right) of both masks together. None and negative numbers are no limit, −1.

    Raises:
        ValueError: ``window_size`` is not a pair of integers or None.
    """
    if isinstance(window_size, Sequence):
        window_size = [-1 if x is None or (isinstance(x, int) and x < 0) else x for x in window_size]
    return tuple(Window.of(is_causal, window_size))


def align(n_q: int, n_kv: int, window: tuple[int, int], *cuts: Tensor | None) -> Alignment:
    """The attention of n_q queries to n_kv keys whose ``window`` counts from the last of each.

    ``cuts`` are None, or the boundaries of documents in q, and in k and v: see :func:`_align_documents`.
    """
    given = [x is not None for x in cuts]
    if any(given):
        if not all(given):
            raise NotImplementedError("boundaries of queries or keys are given without the others; pass both")
        return _align_documents(n_q, n_kv, window, *cuts)
    left, right = window
    shift = n_kv - n_q
    first_key = max(shift - left, 0) if left >= 0 else 0
    first_query = max(-shift - right, 0) if right >= 0 else 0
    shift += first_query - first_key
    window = (left if left < 0 else left - shift, right if right < 0 else right + shift)
    return Alignment(window, first_query=first_query, first_key=first_key)


def _align_documents(
    n_q: int, n_kv: int, window: tuple[int, int], cu_seqlens: Tensor, cu_seqlens_kv: Tensor
) -> Alignment:
    """:func:`align` for packed documents, whose lengths are not read: that would wait for the GPU.

    Where both boundaries are one tensor, or there is no mask, nothing changes. Else each document gets as
    many queries as keys. One with more is cut in two: the first queries, which see no key, and the last, as
    many as keys. One with fewer gets empty slots before its queries.

    Args:
        n_q, n_kv: number of tokens, T_q and T_kv.
        window: (left, right), counted from the last query and key of each document.
        cu_seqlens, cu_seqlens_kv: (documents + 1,) boundaries in the queries, and in the keys.

    Raises:
        NotImplementedError: a window that reaches past the causal mask, and two tensors of boundaries.
        ValueError: the two tensors differ in length; on a CPU, where reading them waits for nothing, also if
            they leave the tokens, or go back.
    """
    if cu_seqlens is cu_seqlens_kv:
        return Alignment(window, cu_seqlens)
    if window == (-1, -1):
        return Alignment(window, cu_seqlens, cu_seqlens_kv)
    if len(cu_seqlens) != len(cu_seqlens_kv):
        raise ValueError(
            f"the boundaries of the queries are {len(cu_seqlens)} and those of the keys "
            f"{len(cu_seqlens_kv)}; give both one for each sequence and one more"
        )
    if window[1] != 0:
        raise NotImplementedError(
            f"the window is {window} without a causal mask, and the boundaries of queries and of keys are "
            "two tensors; pass one tensor for both if they are equal, or a causal mask"
        )
    given = (("cu_seqlens_q", cu_seqlens, n_q), ("cu_seqlens_k", cu_seqlens_kv, n_kv))
    for name, boundaries, tokens in given:
        if can_read(boundaries):
            slices(name, boundaries, tokens)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    queries, keys = ends - starts, cu_seqlens_kv.diff().long()
    without_keys = (queries - keys).clamp(min=0)
    boundaries = F.pad(torch.stack([without_keys, keys], 1).flatten().cumsum(0), (1, 0))
    boundaries_kv = F.pad(torch.stack([torch.zeros_like(keys), keys], 1).flatten().cumsum(0), (1, 0))
    boundaries_kv = boundaries_kv + cu_seqlens_kv[:1].long()

    slot_count = n_q + n_kv + 1  # no document needs more than its queries and keys together
    query = torch.arange(n_q, device=cu_seqlens.device)
    document = torch.searchsorted(ends, query, right=True).clamp(max=len(ends) - 1)
    slots = query - ends[document] + boundaries[2 * document + 2]
    is_inside = (query >= starts[document]) & (query < ends[document])
    slots = torch.where(is_inside, slots, slot_count - 1).clamp(0, slot_count - 1)
    return Alignment(window, boundaries, boundaries_kv, slots=slots, slot_count=slot_count)


def aligned_attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cuts: Sequence[Tensor | None],
    window: tuple[int, int],
    scale: float | None,
    config: SageConfig,
    *,
    with_lse: bool,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output, laid out as q, and lse (B, H, N_q) or (H, T_q), or None; counted under ``name``.

    q, k and v are (B, N, H, D), or (T, H, D) with ``cuts`` as of :func:`align`.
    """
    alignment = align(q.shape[-3], k.shape[-3], window, *cuts)
    of_q, *of_kv = heads_first(q, k, v)
    result = counted_attention(
        name, alignment.queries(of_q), *map(alignment.keys, of_kv), scale=scale, enable_gqa=True,
        window_size=alignment.window, cu_seqlens=alignment.cu_seqlens, cu_seqlens_kv=alignment.cu_seqlens_kv,
        return_lse=with_lse, sinks=sinks, config=config,
    )  # fmt: skip
    out, lse = result if with_lse else (result, None)
    out = alignment.put_back_queries(out)
    if with_lse:
        lse = alignment.put_back_queries(lse, fill=float("-inf"))
        lse = lse if sinks is None else torch.where(lse.isneginf(), sinks.float().unsqueeze(-1), lse)
        lse = lse if q.dim() == 4 else lse[0]
    return *tokens_first(q, out), lse


def check_layout(layout: str, **tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has as many dimensions as ``layout`` names."""
    for name, x in tensors.items():
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{name} is {tuple(x.shape)}; pass {layout}")


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, N, H, D), or (T, H, D), to (B, H, N, D)."""
    return tuple((x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2) for x in tensors)


def tokens_first(like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of :func:`heads_first`, with as many dimensions as ``like``."""
    return tuple(x.transpose(1, 2) if like.dim() == 4 else x[0].transpose(0, 1) for x in tensors)


def _pad_front(x: Tensor, n: int, fill: float) -> Tensor:
    """n tokens more at the front of x (B, H, N, …)."""
    return F.pad(x, (*(0, 0) * (x.dim() - 3), n, 0), value=fill) if n else x
