"""Exact attention: softmax(scale · QKᵀ)V and its gradients in float64, for anything that measures errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.reference.documents import cut, locate
from sagebwd.validation import check_documents
from sagebwd.window import FULL, Window

#: Elements of P that are computed at once (128 MiB in float64); some six such matrices are alive together.
ELEMENTS_AT_ONCE = 2**24


@dataclass(frozen=True)
class AttentionResult:
    """Out, gradients and intermediates of one attention; what was not computed is None.

    Attributes:
        out: (B, H, N_q, D_v).
        lse: (B, H, N_q), the logsumexp of the logits. −inf for a query that sees no key. Of
            :func:`sagebwd.reference.attention`, with the smoothed K: that of the plain logits is
            lse + scale · q·μ_K.
        p, dp, ds: (B, H, N_q, N_kv), P, dP and dS; zero where the mask hides a key, and between
            documents.
        delta: (B, H, N_q), δ.
        dq, dk, dv, dsinks: shaped as q, k, v and the sinks.
    """

    out: Tensor
    lse: Tensor
    p: Tensor | None = None
    dp: Tensor | None = None
    ds: Tensor | None = None
    delta: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None


class ExactRows(NamedTuple):
    """Some rows of the matrices of one document.

    queries, keys: which tokens of q and of k they are; keys that none of these queries sees are left out.
    visible: (rows, columns) bool, or None where every query sees every key.
    s: (B, H, rows, columns), the logits scale · QKᵀ; zero where the mask hides a key.
    p, dp, ds: the same of P, dP and dS; dp and ds are None without ``grad_out``, p while it is not computed.
    """

    queries: slice
    keys: slice
    visible: Tensor | None
    s: Tensor
    p: Tensor | None = None
    dp: Tensor | None = None
    ds: Tensor | None = None


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 products in float32, where the process allows TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@torch.no_grad()
def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    matrices: bool = False,
    dtype: torch.dtype = torch.float64,
    elements_at_once: int = ELEMENTS_AT_ONCE,
    on_rows: Callable[[ExactRows], None] | None = None,
) -> AttentionResult:
    """Full-precision attention and, with ``grad_out``, its gradients and intermediates.

    Some rows of P at a time, so memory is linear in the sequence unless ``matrices`` are asked for. Outside
    autograd; ignores autocast and TF32.

    Args:
        q: (B, H, N_q, D), any strides and dtype.
        k: (B, H_kv, N_kv, D) with H_kv dividing H; consecutive query heads share keys and values.
        v: (B, H_kv, N_kv, D_v).
        grad_out: the gradient of the output; without it the result has only out and lse, and p with
            ``matrices``.
        is_causal: query i sees keys 0 … i, counted from the first of each.
        scale: factor of the logits; 1/√D by default.
        window_size: sliding window, as of :func:`sagebwd.sage_attention`.
        cu_seqlens, cu_seqlens_kv: packed documents, as of :func:`sagebwd.sage_attention`.
        sinks: (H,) attention sinks, as of :func:`sagebwd.sage_attention`. Rows of P then sum to less than 1.
        matrices: return p, and with ``grad_out`` dp and ds, too: (B, H, N_q, N_kv) each.
        dtype: of all arithmetic and of the result. float32 where float64 is too slow, as on most GPUs.
        elements_at_once: elements of P that are computed at once, at least one row of it.
        on_rows: called with each group of rows, for statistics of matrices that do not fit.

    Returns:
        All in ``dtype``. Tokens of no document, and queries that see no key, get out 0, lse −inf (or the
        sink) and gradients 0.

    Raises:
        ValueError: the boundaries of the documents do not fit the tensors, or the window is not one.
    """
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    window = Window.of(is_causal, window_size)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    has_gradients = grad_out is not None
    result = _zero_result(q, k, v, sinks, dtype, has_gradients=has_gradients, has_matrices=matrices)
    group = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False), without_tf32():
        for document in locate(q, k, cu_seqlens, cu_seqlens_kv):
            keys, values = (cut(x, document.keys).to(dtype).repeat_interleave(group, 1) for x in (k, v))
            rows_at_once = max(elements_at_once // (q.shape[0] * q.shape[1] * keys.shape[2]), 1)
            for first in range(document.queries.start, document.queries.stop, rows_at_once):
                rows = slice(first, min(first + rows_at_once, document.queries.stop))
                own = slice(rows.start - document.queries.start, rows.stop - document.queries.start)
                seen = window.keys_of(own, keys.shape[2])
                columns = slice(document.keys.start + seen.start, document.keys.start + seen.stop)
                visible = None if window == FULL else window.visible(own, seen, q.device)
                own_keys, own_values = keys[:, :, seen], values[:, :, seen]
                found = ExactRows(rows, columns, visible, cut(q, rows).to(dtype) @ own_keys.mT * scale)
                found = _attend(found, own_values, sinks, result)
                if has_gradients:
                    found = _differentiate(found, q, own_keys, own_values, grad_out, scale, result)
                _keep_matrices(found, result)
                if on_rows is not None:
                    on_rows(found._replace(s=_fill_hidden(found.s, visible, 0.0)))
    return result


def _zero_result(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    dtype: torch.dtype,
    *,
    has_gradients: bool,
    has_matrices: bool,
) -> AttentionResult:
    """Of attention without documents: zeros, and an lse of sinks or −inf; None for what is not asked for."""
    rows, matrix = q.shape[:-1], (*q.shape[:-1], k.shape[-2])
    shapes = {"out": (*rows, v.shape[-1]), "lse": rows}
    if has_gradients:
        shapes |= {"delta": rows, "dq": q.shape, "dk": k.shape, "dv": v.shape}
        shapes |= {} if sinks is None else {"dsinks": sinks.shape}
    if has_matrices:
        shapes |= dict.fromkeys(("p", "dp", "ds") if has_gradients else ("p",), matrix)
    result = {name: torch.zeros(shape, dtype=dtype, device=q.device) for name, shape in shapes.items()}
    result["lse"] += -torch.inf if sinks is None else sinks.unsqueeze(-1)
    return AttentionResult(**result)


def _attend(found: ExactRows, values: Tensor, sinks: Tensor | None, result: AttentionResult) -> ExactRows:
    """P of the logits, with which out and lse of these rows are written to ``result``."""
    logits = _fill_hidden(found.s, found.visible, -torch.inf)
    p, lse = logits.softmax(-1), logits.logsumexp(-1)
    if sinks is not None:
        p = p * (lse - sinks.to(lse.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)
        lse = torch.logaddexp(lse, result.lse[..., found.queries])
    p = _fill_hidden(p, found.visible, 0.0)  # NaN in a row without keys
    result.lse[..., found.queries] = lse
    result.out[..., found.queries, :] = p @ values
    return found._replace(p=p)


def _differentiate(
    found: ExactRows, q: Tensor, keys: Tensor, values: Tensor, grad_out: Tensor, scale: float,
    result: AttentionResult,
) -> ExactRows:  # fmt: skip
    """dP and dS of these rows; delta and dq are written to ``result``, the other gradients added to it."""
    rows, columns, group = found.queries, found.keys, q.shape[1] // result.dk.shape[1]
    queries, grads = cut(q, rows).to(found.p.dtype), cut(grad_out, rows).to(found.p.dtype)
    dp = _fill_hidden(grads @ values.mT, found.visible, 0.0)
    delta = (found.p * dp).sum(-1)
    ds = found.p * (dp - delta[..., None])
    result.delta[..., rows] = delta
    result.dq[..., rows, :] = ds @ keys * scale
    result.dk[..., columns, :] += _sum_over_group(ds.mT @ queries * scale, group)
    result.dv[..., columns, :] += _sum_over_group(found.p.mT @ grads, group)
    if result.dsinks is not None:  # its P is what is left, its dP is zero
        result.dsinks.sub_(((1 - found.p.sum(-1)) * delta).sum((0, 2)))
    return found._replace(dp=dp, ds=ds)


def _keep_matrices(found: ExactRows, result: AttentionResult) -> None:
    for name in ("p", "dp", "ds"):
        whole = getattr(result, name)
        if whole is not None:
            whole[..., found.queries, found.keys] = getattr(found, name)


def _fill_hidden(x: Tensor, visible: Tensor | None, value: float) -> Tensor:
    return x if visible is None else x.masked_fill(~visible, value)


def _sum_over_group(grad: Tensor, group: int) -> Tensor:
    return grad.unflatten(1, (-1, group)).sum(2)
