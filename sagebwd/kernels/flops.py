"""How FlopCounterMode counts attention: as it counts torch's own, nothing deducted for masks and windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Size, Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from sagebwd._ops import ops
from sagebwd.interface import PARAMETERS, AttentionParams, ForwardResult

Shape = tuple[int, ...]


def register() -> None:
    """Register the formulas. Call once."""
    register_flop_formula(ops.forward, get_raw=True)(forward_flops)
    register_flop_formula(ops.backward, get_raw=True)(backward_flops)


def forward_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: Any) -> int:
    """FLOPs of ``sagebwd::forward``. Reads ``cu_seqlens``, which waits for the GPU."""
    shapes = _document_shapes(q.shape, k.shape, AttentionParams.unflatten(*arguments))
    return sum(sdpa_flop_count(of_q, of_k, of_k) for of_q, of_k in shapes)


def backward_flops(
    grad_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    kv_heads: int,
    kv_tokens: int,
    *arguments: Any,
    out_val: Any,
) -> int:
    """FLOPs of ``sagebwd::backward``. Reads ``cu_seqlens``, which waits for the GPU."""
    out, params = arguments[0], arguments[len(ForwardResult._fields) :]
    k_shape = (out.shape[0], kv_heads, kv_tokens, out.shape[3])
    shapes = _document_shapes(out.shape, k_shape, AttentionParams.unflatten(*params[:PARAMETERS]))
    return sum(sdpa_backward_flop_count(of_q, of_q, of_k, of_k) for of_q, of_k in shapes)


def _document_shapes(q: Size, k: Size | Shape, params: AttentionParams) -> Iterator[tuple[Shape, Shape]]:
    """Shapes of q and k of each document."""
    if params.cu_seqlens is None:
        yield tuple(q), tuple(k)
        return
    lengths = (_lengths(params.cu_seqlens, q[2]), _lengths(params.kv_boundaries, k[2]))
    for n_q, n_kv in zip(*lengths, strict=True):
        yield (q[0], q[1], n_q, q[3]), (k[0], k[1], n_kv, k[3])


def _lengths(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Tokens of each document; all the same where a meta or fake tensor does not tell."""
    documents = cu_seqlens.shape[0] - 1
    if cu_seqlens.is_meta or type(cu_seqlens) is not Tensor:
        return [tokens // documents] * documents
    return cu_seqlens.diff().clamp(min=0).tolist()
