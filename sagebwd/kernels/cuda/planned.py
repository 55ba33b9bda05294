"""Makes of functions that write plans what :mod:`sagebwd.interface` asks of a kernel set."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.cuda import plan
from sagebwd.kernels.cuda.plan import Operand


def planned_forward(function: Callable[..., ForwardResult]) -> Callable[..., ForwardResult]:
    """``forward`` of a kernel set, of the same for operands."""

    def write(*operands: Operand | None, params: AttentionParams) -> ForwardResult:
        q, k, v, *boundaries = operands
        return function(q, k, v, params.with_documents(*boundaries))

    @functools.wraps(function)
    def forward(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> ForwardResult:
        return ForwardResult(*plan.run(write, params.without_documents(), (q, k, v, *params.boundaries)))

    return forward


def planned_backward(function: Callable[..., tuple[Operand, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``backward`` of a kernel set, of the same for operands."""
    n = len(ForwardResult._fields)

    def write(*operands: Operand | None, params: AttentionParams) -> tuple[Operand, ...]:
        inputs, saved, (grad_lse, *boundaries) = operands[:4], operands[4 : 4 + n], operands[4 + n :]
        return function(*inputs, ForwardResult(*saved), params.with_documents(*boundaries), grad_lse)

    @functools.wraps(function)
    def backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: ForwardResult,
        params: AttentionParams,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        tensors = (grad_out, q, k, v, *saved, grad_lse, *params.boundaries)
        return tuple(plan.run(write, params.without_documents(), tensors))

    return backward


def planned_mean(function: Callable[..., Operand]) -> Callable[..., Tensor]:
    """``token_mean`` of a kernel set, of the same for operands."""

    def write(k: Operand, *boundaries: Operand | None, params: AttentionParams) -> list[Operand]:
        return [function(k, params.with_documents(*boundaries))]

    @functools.wraps(function)
    def token_mean(k: Tensor, params: AttentionParams) -> Tensor:
        return plan.run(write, params.without_documents(), (k, *params.boundaries))[0]

    return token_mean
