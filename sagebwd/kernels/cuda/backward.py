"""What the backward of every CUDA kernel set does before its own kernels run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.cuda.arguments import Result
from sagebwd.kernels.cuda.packing import Packer
from sagebwd.kernels.cuda.plan import Operand
from sagebwd.kernels.layout import Axes


class Gradients(NamedTuple):
    """dq, dk and dv, for kernels to fill."""

    dq: Result
    dk: Result
    dv: Result

    @classmethod
    def like(cls, q: Operand, k: Operand, v: Operand, axes: Axes, *, zeroes_dq: bool = False) -> Gradients:
        """Laid out as q, k, v. ``zeroes_dq``: as ``is_zeroed`` of :class:`Result`."""
        return cls(Result(q, axes.q, is_zeroed=zeroes_dq), Result(k, axes.kv), Result(v, axes.kv))


class Backward(NamedTuple):
    """What the backward kernels take. Of q and k only shapes, dtype and device are used.

    packed_q, packed_kv, packed_grad, columns: of :class:`Packer`; columns of Q and dO.
    counters: int32, zero.
    """

    q: Operand
    k: Operand
    params: AttentionParams
    axes: Axes
    packer: Packer
    packed_q: Operand
    packed_kv: Operand
    packed_grad: Operand
    columns: Operand
    gradients: Gradients
    counters: Operand

    @property
    def macros(self) -> dict[str, bool]:
        """Of the kernels that multiply P with dO."""
        config = self.params.config
        return {"p_16bit": not config.is_int8("dv"), "UNSIGNED_P": config.is_unsigned("dv")}


def prepare(
    grad_out: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    saved: ForwardResult,
    params: AttentionParams,
    grad_lse: Operand | None,
    *,
    axes: Axes,
    packer: Packer,
    gradients: Gradients,
    counters: int,
) -> Backward:
    """Pack what the forward did not, and dO.

    Args:
        q, k, v: stand-ins (see :func:`sagebwd.kernels.layout.stand_in`) where ``saved`` has them packed: q
            unless dK is in 16 bit, k unless dQ is and, if V is packed, v.
        counters: how many int32 to set to zero.
    """
    packed_q, packed_kv = saved.packed_q, saved.packed_kv
    if not packed_kv.numel():
        packed_kv = packer.pack_kv(k, v, axes.kv, saved.k_mean if params.config.smooths_k else None)
    if not packed_q.numel():
        packed_q = packer.pack_q(q, axes.q)
    counted = q.new_empty(counters, dtype=torch.int32)
    of_grad = packer.pack_grad(q, packed_q, grad_out, saved, grad_lse, axes.q, counted)
    return Backward(q, k, params, axes, packer, packed_q, packed_kv, *of_grad, gradients, counted)
