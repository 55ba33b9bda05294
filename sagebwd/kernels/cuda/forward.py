"""Algorithm 1 of SageBwd with CUDA kernels: packing, then forward.cu of a kernel set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from sagebwd.interface import AttentionParams, ForwardResult, no_mean, nothing_packed
from sagebwd.kernels.cuda.arguments import CAxes, CTokenTensor, Result, addresses, pointers
from sagebwd.kernels.cuda.packing import Packer
from sagebwd.kernels.cuda.plan import Operand
from sagebwd.kernels.layout import Axes


class CForward(ctypes.Structure):
    """``Arguments`` of forward.cu, of every kernel set."""

    _fields_ = [
        *pointers("packed_q", "packed_k", "packed_v"),
        ("k_stride", ctypes.c_int),
        ("v_stride", ctypes.c_int),
        ("out", CTokenTensor),
        ("out_residual", CTokenTensor),
        *pointers("lse"),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("documents", ctypes.c_int),
        *pointers("v_mean"),
        ("v", CTokenTensor),
    ]


def forward(
    q: Operand,
    k: Operand,
    v: Operand,
    params: AttentionParams,
    *,
    packer: Packer,
    launch: Callable[..., None],
    work_tokens: int,
) -> ForwardResult:
    """Algorithm 1, in a plan.

    Args:
        packer: of the kernel set.
        launch: launches its forward.cu: (name, q, params, arguments, p_16bit=..., **macros) -> None.
        work_tokens: queries of a work tile.
    """
    config, packs = params.config, params.pack_for_backward
    axes = Axes.of(q, k, params)
    k_mean = packer.token_mean(k, axes.kv) if config.smooths_k else None
    v_mean = packer.token_mean(v, axes.kv) if config.smooth_v else None
    counter = q.new_empty(1, dtype=torch.int32)  # of work tiles
    packed_q = packer.pack_q(q, axes.q, counter)
    p_16bit = not config.is_int8("o")
    if p_16bit:
        packed_k = packer.pack_kv(k, v, axes.kv, k_mean)
        k_stride = v_stride = packer.packed_kv_bytes(k)
        values = packed_k.data_ptr() + packer.k_rows_bytes(k)
    else:
        packed_k, packed_v = packer.pack_kv_int8(k, v, axes.kv, k_mean, v_mean, pack_for_backward=packs)
        k_stride = packer.packed_kv_bytes(k) if packs else packed_k.shape[1]
        values, v_stride = packed_v.data_ptr(), packed_v.shape[1]
    out = Result(q, axes.q)
    residual = Result(q, axes.q) if config.compensate_o else None
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if params.cu_seqlens is not None:
        lse.fill_(float("-inf"))
    work = CAxes.of(q, k, axes, tokens=work_tokens, tile_counter=counter.data_ptr())
    arguments = CForward(
        packed_q.data_ptr(), packed_k.data_ptr(), values, k_stride, v_stride, out.target,
        (residual or out).target, lse.data_ptr(), work, params.scale, params.documents,
        *addresses(v_mean), CTokenTensor.of(v),
    )  # fmt: skip
    macros = {
        "SMOOTH_V": config.smooth_v,
        "UNSIGNED_P": config.is_unsigned("o"),
        "COMPENSATE_O": config.compensate_o,
    }
    launch("forward", q, params, arguments, p_16bit=p_16bit, **macros)
    out_residual = residual.tensor if residual else q.new_empty(0)
    packed = (packed_q, packed_k) if packs else nothing_packed(q)
    k_mean = no_mean(k) if k_mean is None else k_mean
    return ForwardResult(out.tensor, lse, k_mean, out_residual, *packed)
