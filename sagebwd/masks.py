"""Masks that hide keys, such as padding, without a kernel of their own.

Hidden tokens are moved behind all others and left outside of every packed document. So no score, mean or
scale sees them, whatever they hold, and their gradients are zero. Nothing reads the mask's values, which
would wait for the GPU and break a compiled graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sagebwd.validation import check_tensor, show
from sagebwd.window import FULL, Window

#: Additive masks hide a key by −inf, by the least number of their dtype, or by −10,000 rounded to it.
HIDES_FROM = -9000.0

WHAT_FITS = (
    "SageBwd has is_causal, window_size, key_padding_mask=(batch, keys) and cu_seqlens; for others use "
    "torch.nn.functional.scaled_dot_product_attention or torch.nn.attention.flex_attention"
)


class KeyMask(NamedTuple):
    """Which keys take part.

    visible: (B, N_kv) bool.
    is_wrong: (B,) bool, sequences for which the mask asks for more than hiding keys; None if it cannot.
    """

    visible: Tensor
    is_wrong: Tensor | None = None


def find_key_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> KeyMask | None:
    """The keys that both masks show, or None without masks.

    Args:
        q, k: (…, H, N_q, D) and (…, H_kv, N_kv, D), or without heads.
        attn_mask: bool or additive, broadcastable to (…, H, N_q, N_kv), the same for all heads and queries.
        key_padding_mask: (…, N_kv) bool, True for keys that take part.

    Raises:
        ValueError: a mask has another dtype, device or shape, or differs between heads or queries.
    """
    if attn_mask is None and key_padding_mask is None:
        return None
    shape = (*q.shape[:-3], k.shape[-2])
    of_attn_mask = None if attn_mask is None else _of_attn_mask(attn_mask, q, k)
    if key_padding_mask is None:
        return of_attn_mask
    check_tensor("key_padding_mask", key_padding_mask, q)
    if key_padding_mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask is {show(key_padding_mask.dtype)}; pass bool, True for the keys that take part"
        )
    if key_padding_mask.shape != shape:
        raise ValueError(
            f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; pass (batch, keys), here {shape}"
        )
    key_padding_mask = _with_one_batch(key_padding_mask)
    if of_attn_mask is None:
        return KeyMask(key_padding_mask)
    return KeyMask(key_padding_mask & of_attn_mask.visible, of_attn_mask.is_wrong)


def check_combination(
    mask: KeyMask, q: Tensor, k: Tensor, asked: Window, window: Window, *, has_documents: bool
) -> KeyMask:
    """Refuse what does not go together with a mask.

    A sliding window counts tokens, and those that are hidden are not there any more. So it is right only for
    visible tokens that lie side by side.

    Args:
        asked, window: the window of the call, and the same without limits that hide nothing.
        has_documents: whether ``cu_seqlens`` is given.

    Returns:
        The mask, wrong also for sequences where it has holes and ``window`` slides.

    Raises:
        ValueError: the arguments do not go together.
    """
    if has_documents:
        raise ValueError(
            "cu_seqlens is given together with a mask; leave the hidden tokens out of the documents, "
            "and the mask away"
        )
    if asked != FULL and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"is_causal or window_size with a mask needs as many queries as keys, got {q.shape[2]} and "
            f"{k.shape[2]}; {WHAT_FITS}"
        )
    if not window.is_sliding:
        return mask
    has_holes = have_holes(window, mask.visible)
    if can_read(has_holes) and has_holes.any():
        raise ValueError(
            "with window_size, the mask must hide tokens only before and after all visible ones, and it has "
            f"holes; {WHAT_FITS}"
        )
    return KeyMask(mask.visible, has_holes if mask.is_wrong is None else has_holes | mask.is_wrong)


def have_holes(window: Window, visible: Tensor, starts: Tensor | None = None) -> Tensor:
    """(B,) bool, where a limit of ``window`` counts hidden tokens between ``visible`` (B, N) ones.

    It hides visible ones only if these lie far enough apart. A limit of 0 hides by the order of tokens alone,
    which does not change with what lies between them.

    Args:
        starts: (B, N) bool, the first visible token of each document; None: each row is one.
    """
    follow_hidden = visible & pad(visible, (1, 0)).diff()
    holes = follow_hidden.sum(1) > 1 if starts is None else (follow_hidden & ~starts).any(1)
    seen = visible.cumsum(1)
    from_first_to_last = (seen > 0) & (visible | (seen < seen[:, -1:]))
    reach = min([limit for limit in window if limit > 0] or [torch.inf])
    return holes & (from_first_to_last.sum(1) - 1 > reach)


@dataclass
class PackedTokens:
    """A batch of sequences as packed documents in a batch of 1; tokens of no document lie behind the last.

    Attributes:
        batch, n_q: sequences, and queries of each.
        cu_seqlens, cu_seqlens_kv: (documents + 1,) int32, the boundaries in the queries, and in the keys.
        queries, keys: put tokens of documents first; None: they stay as they are.
        is_wrong: of :class:`KeyMask`.
    """

    batch: int
    n_q: int
    cu_seqlens: Tensor
    cu_seqlens_kv: Tensor
    queries: Order | None
    keys: Order | None
    is_wrong: Tensor | None = None

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, heads, N, D) as (1, heads, B · N, D)."""
        orders = (self.queries, self.keys, self.keys)
        tensors = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        tensors = (x if own is None else own.sort(x) for x, own in zip(tensors, orders, strict=True))
        return tuple(x.transpose(0, 1).unsqueeze(0) for x in tensors)

    def unpack(self, out: Tensor) -> Tensor:
        """What belongs to queries, (1, H, B · N_q, …), as (B, H, N_q, …); NaN where the mask is wrong."""
        out = out.squeeze(0).transpose(0, 1)
        if self.queries is not None:
            out = self.queries.undo(out)
        return nan_where(self.is_wrong, out.unflatten(0, (self.batch, -1)).transpose(1, 2))


def visible_tokens(mask: KeyMask, n_q: int, *, hides_queries: bool) -> PackedTokens:
    """The visible tokens of a batch, one document a sequence.

    ``hides_queries``: a hidden token is hidden as a query, too; N_q must be N_kv.
    """
    visible, is_wrong = mask
    keys = Order.of(visible.flatten())
    cuts = cuts_kv = pad(visible.sum(1).cumsum(0), (1, 0)).int()
    if not hides_queries:
        cuts = n_q * (torch.ones_like(cuts).cumsum(0, dtype=torch.int32) - 1)
    queries = keys if hides_queries else None
    return PackedTokens(visible.shape[0], n_q, cuts, cuts_kv, queries, keys, is_wrong)


class Order(NamedTuple):
    """A permutation of tokens: forward[i] is the token at place i, backward[i] the place of token i."""

    forward: Tensor
    backward: Tensor

    @classmethod
    def of(cls, visible: Tensor) -> Order:
        """Visible tokens (tokens,) first, otherwise as they are."""
        forward = torch.argsort(~visible, stable=True)
        places = torch.ones_like(forward).cumsum(0) - 1
        return cls(forward, torch.empty_like(forward).scatter(0, forward, places))

    def sort(self, x: Tensor) -> Tensor:
        """x (tokens, …) in this order."""
        return _TakeTokens.apply(x, self.forward, self.backward)

    def undo(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`sort`."""
        return _TakeTokens.apply(x, self.backward, self.forward)


class _TakeTokens(torch.autograd.Function):
    """x (tokens, …) in another order. torch's own gradient would add up rows with atomics on a GPU."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _TakeTokens.apply(grad, inverse, order), None, None


def nan_where(is_wrong: Tensor | None, x: Tensor) -> Tensor:
    """x (B, …), NaN in the sequences that ``is_wrong`` (B,), or () for all, names."""
    if is_wrong is None:
        return x
    # A product, because it takes the NaN to the gradients as well.
    factor = torch.where(is_wrong, torch.nan, 1.0).to(x.dtype)
    return x * factor.view(-1, *(1,) * (x.dim() - 1))


def _of_attn_mask(mask: Tensor, q: Tensor, k: Tensor) -> KeyMask:
    if isinstance(mask, bool):
        raise ValueError(f"attn_mask is {mask}; pass a torch.Tensor, or is_causal by name: is_causal={mask}")
    check_tensor("attn_mask", mask, q)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask is {show(mask.dtype)}; pass a bool or an additive floating-point tensor")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"attn_mask wants a gradient, and SageBwd has no bias; pass attn_mask.detach() if it only hides "
            f"keys. {WHAT_FITS}"
        )
    mask = _without_heads_and_queries(mask, (*q.shape[:-1], k.shape[-2]))
    if mask.dtype == torch.bool:
        return KeyMask(mask)
    visible = ~(mask <= HIDES_FROM)
    is_wrong = (visible & (mask != 0)).any(1)
    if can_read(is_wrong) and is_wrong.any():
        raise ValueError(
            f"attn_mask has values other than 0 and {HIDES_FROM:.0f} or less, which are a bias; {WHAT_FITS}"
        )
    return KeyMask(visible, is_wrong)


def _without_heads_and_queries(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask as (B, N_kv), if it is one for the tokens of ``shape`` (…, H, N_q, N_kv)."""
    fits = 2 <= mask.dim() <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to (batch, heads, queries, "
            f"keys), here {shape}; a mask of (batch, keys) is key_padding_mask"
        )
    found = tuple(mask.shape)
    mask = mask[(None,) * (max(len(shape), 3) - mask.dim())]
    for axis in (-3, -2):
        if mask.shape[axis] > 1 and mask.stride(axis) != 0:
            raise ValueError(
                f"attn_mask has shape {found} and may differ between heads or queries; pass "
                f"(batch, 1, 1, keys), or expand it from there, if it only hides keys. {WHAT_FITS}"
            )
    return _with_one_batch(mask[..., 0, 0, :].expand(*shape[:-3], shape[-1]))


def _with_one_batch(mask: Tensor) -> Tensor:
    """(…, N_kv) or (N_kv,) as (B, N_kv)."""
    return mask.flatten(0, -2) if mask.dim() > 1 else mask[None]


def can_read(x: Tensor) -> bool:
    """Whether the values of x can be read without a wait for a GPU or a break in a traced graph."""
    return x.device.type == "cpu" and has_values(x)


def has_values(x: Tensor) -> bool:
    """Whether x is no tracer's, which has none to read. Reading them waits for a GPU."""
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return type(x) is Tensor and not x.is_meta and not is_traced
