"""Exact attention: softmax(scale · QKᵀ)V and its gradients in float64, for anything that measures errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.reference.documents import cut, locate
from sagebwd.reference.result import AttentionResult
from sagebwd.validation import check_documents, check_window
from sagebwd.window import FULL, Window

#: Elements of P that are computed at once (128 MiB in float64); some six such matrices are alive together.
ELEMENTS_AT_ONCE = 2**24


class ExactRows(NamedTuple):
    """Some rows of the matrices of one document.

    queries, keys: which tokens of q and of k they are; keys that none of these queries sees are left out.
    visible: (rows, columns) bool, or None where every query sees every key.
    s: (B, H, rows, columns), the logits scale · QKᵀ; zero where the mask hides a key.
    p, dp, ds: the same of P, dP and dS; dp and ds are None without ``grad_out``.
    """

    queries: slice
    keys: slice
    visible: Tensor | None
    s: Tensor
    p: Tensor
    dp: Tensor | None
    ds: Tensor | None


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
    matrices: bool = False,
    dtype: torch.dtype = torch.float64,
    elements_at_once: int = ELEMENTS_AT_ONCE,
    on_rows: Callable[[ExactRows], None] | None = None,
) -> AttentionResult:
    """Full-precision attention and, with ``grad_out``, its gradients and intermediates.

    Some rows of P at a time, so memory is linear in the sequence unless ``matrices`` are asked for. Outside
    autograd; ignores autocast.

    Args:
        q: (B, H, N_q, D), any strides and dtype.
        k, v: (B, H_kv, N_kv, D) with H_kv dividing H; consecutive query heads share keys and values.
        grad_out: the gradient of the output, as q; without it the result has only out and lse, and p with
            ``matrices``.
        is_causal: query i sees keys 0 … i, counted from the first of each.
        scale: factor of the logits; 1/√D by default.
        window_size: sliding window, as of :func:`sagebwd.sage_attention`.
        cu_seqlens, cu_seqlens_kv: packed documents, as of :func:`sagebwd.sage_attention`.
        matrices: return p, and with ``grad_out`` dp and ds, too: (B, H, N_q, N_kv) each.
        dtype: of all arithmetic and of the result. float32 where float64 is too slow, as on most GPUs.
        elements_at_once: elements of P that are computed at once, at least one row of it.
        on_rows: called with each group of rows, for statistics of matrices that do not fit.

    Returns:
        All in ``dtype``. Tokens of no document, and queries that see no key, get out 0, lse −inf and
        gradients 0.

    Raises:
        ValueError: the boundaries of the documents do not fit the tensors, or the window is not one.
    """
    check_documents(q, k, cu_seqlens, cu_seqlens_kv)
    check_window(window_size)
    window = Window.of(is_causal, window_size)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    packed = locate(q, k, cu_seqlens, cu_seqlens_kv)
    empty = {"dtype": dtype, "device": q.device}
    out = torch.zeros(q.shape, **empty)
    lse = torch.full(q.shape[:-1], -torch.inf, **empty)
    shape = (*lse.shape, k.shape[-2])
    p = torch.zeros(shape, **empty) if matrices else None
    delta = dp = ds = dq = dk = dv = None
    if grad_out is not None:
        delta = torch.zeros(lse.shape, **empty)
        dp, ds = (torch.zeros(shape, **empty) if matrices else None for _ in range(2))
        dq, dk, dv = (torch.zeros(x.shape, **empty) for x in (q, k, v))

    group = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        for document in packed:
            keys_of_document = document.keys
            n_kv = keys_of_document.stop - keys_of_document.start
            all_keys, all_values = (
                cut(x, keys_of_document).to(dtype).repeat_interleave(group, 1) for x in (k, v)
            )
            step = max(elements_at_once // (q.shape[0] * q.shape[1] * n_kv), 1)
            for start in range(document.queries.start, document.queries.stop, step):
                rows = slice(start, min(start + step, document.queries.stop))
                first, last = (x - document.queries.start for x in (rows.start, rows.stop))
                own = slice(first, last)
                seen = window.keys_of(own, n_kv)
                columns = slice(keys_of_document.start + seen.start, keys_of_document.start + seen.stop)
                visible = None if window == FULL else window.visible(own, seen, q.device)
                queries, keys, values = cut(q, rows).to(dtype), all_keys[:, :, seen], all_values[:, :, seen]

                s = queries @ keys.mT * scale
                logits = _fill_hidden(s, visible, -torch.inf)
                lse[..., rows] = logits.logsumexp(-1)
                p_rows = _fill_hidden(logits.softmax(-1), visible, 0.0)  # NaN in a row without keys
                out[..., rows, :] = p_rows @ values
                dp_rows = ds_rows = None
                if grad_out is not None:
                    grads = cut(grad_out, rows).to(dtype)
                    dp_rows = _fill_hidden(grads @ values.mT, visible, 0.0)
                    delta[..., rows] = (p_rows * dp_rows).sum(-1)
                    ds_rows = p_rows * (dp_rows - delta[..., rows, None])
                    dq[..., rows, :] = ds_rows @ keys * scale
                    dk[..., columns, :] += _sum_over_group(ds_rows.mT @ queries * scale, group)
                    dv[..., columns, :] += _sum_over_group(p_rows.mT @ grads, group)
                for whole, part in ((p, p_rows), (dp, dp_rows), (ds, ds_rows)):
                    if whole is not None:
                        whole[..., rows, columns] = part
                if on_rows is not None:
                    s = _fill_hidden(s, visible, 0.0)
                    on_rows(ExactRows(rows, columns, visible, s, p_rows, dp_rows, ds_rows))
    return AttentionResult(out, lse, p, dp, ds, delta, dq, dk, dv)


def _fill_hidden(x: Tensor, visible: Tensor | None, value: float) -> Tensor:
    return x if visible is None else x.masked_fill(~visible, value)


def _sum_over_group(grad: Tensor, group: int) -> Tensor:
    return grad.unflatten(1, (-1, group)).sum(2)
