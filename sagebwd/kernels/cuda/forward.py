"""Algorithm 1 of SageBwd with CUDA kernels: packing, then forward.cu of a kernel set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.kernels.cuda.arguments import CTokenTensor
from sagebwd.kernels.cuda.packing import Packer
from sagebwd.kernels.cuda.result import Result
from sagebwd.kernels.cuda.scheduler import CAxes
from sagebwd.kernels.layout import Axis, ForwardResult, nothing_packed
from sagebwd.window import Window


class CForward(ctypes.Structure):
    """``Arguments`` of forward.cu, of every kernel set."""

    _fields_ = [
        ("packed_q", ctypes.c_void_p),
        ("packed_k", ctypes.c_void_p),
        ("packed_v", ctypes.c_void_p),
        ("k_stride", ctypes.c_int),
        ("v_stride", ctypes.c_int),
        ("out", CTokenTensor),
        ("out_residual", CTokenTensor),
        ("lse", ctypes.c_void_p),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("documents", ctypes.c_int),
        ("v_mean", ctypes.c_void_p),
        ("v", CTokenTensor),
    ]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    packer: Packer,
    launch: Callable[..., None],
    work_tokens: int,
    window: Window,
    scale: float,
    config: SageConfig,
    pack_for_backward: bool,
) -> ForwardResult:
    """Algorithm 1.

    Args:
        packer: of the kernel set.
        launch: launches its forward.cu: (name, q, window, arguments, p_16bit=..., **macros) -> None.
        work_tokens: queries of a work tile.
        pack_for_backward: return Q, K and V packed; the backward otherwise packs them itself.
    """
    if config.smooths_k:
        k_mean = packer.token_mean(k, kv_axis)
    else:
        k_mean = k.new_empty((k.shape[0] * k.shape[1] * kv_axis.documents, 0), dtype=torch.float32)
    v_mean = packer.token_mean(v, kv_axis) if config.smooth_v else None
    counter = q.new_empty(1, dtype=torch.int32)  # of work tiles
    packed_q = packer.pack_q(q, q_axis, counter)
    p_16bit, k_16bit = not config.is_int8("o"), not config.is_int8("dq")
    subtracted = k_mean if config.smooths_k else None
    if p_16bit:
        k_16bit = k_16bit and pack_for_backward
        packed_k = packer.pack_kv(k, v, kv_axis, subtracted, k_16bit=k_16bit)
        k_stride = v_stride = packer.packed_kv_bytes(k)
        values = packed_k.data_ptr() + packer.k_rows_bytes(k)
    else:
        packed_k, packed_v = packer.pack_kv_int8(
            k, v, kv_axis, subtracted, v_mean, pack_for_backward=pack_for_backward, k_16bit=k_16bit
        )
        k_stride = packer.packed_kv_bytes(k) if pack_for_backward else packed_k.shape[1]
        values, v_stride = packed_v.data_ptr(), packed_v.shape[1]
    out = Result(q, q_axis)
    residual = Result(q, q_axis) if config.compensate_o else None
    lse = q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    if q_axis.segments is not None:
        lse.fill_(float("-inf"))
    group = q.shape[1] // k.shape[1]
    work_axis = q_axis.with_block(work_tokens)
    axes = CAxes.of(q, q_axis, kv_axis, work_axis=work_axis, group=group, tile_counter=counter.data_ptr())
    arguments = CForward(
        packed_q.data_ptr(), packed_k.data_ptr(), values, k_stride, v_stride, out.target,
        (residual or out).target, lse.data_ptr(), axes, scale, kv_axis.documents,
        None if v_mean is None else v_mean.data_ptr(), CTokenTensor.of(v),
    )  # fmt: skip
    macros = {
        "SMOOTH_V": config.smooth_v,
        "UNSIGNED_P": config.is_unsigned("o"),
        "COMPENSATE_O": config.compensate_o,
    }
    launch("forward", q, window, arguments, p_16bit=p_16bit, **macros)
    out_residual = q.new_empty(0) if residual is None else residual.finish()
    if not pack_for_backward:
        packed_q, packed_k = nothing_packed(q)
    return ForwardResult(out.finish(), lse, k_mean, out_residual, packed_q, packed_k)
