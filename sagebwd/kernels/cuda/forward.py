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
from sagebwd.kernels.layout import Axis
from sagebwd.window import Window


class CForward(ctypes.Structure):
    """``Arguments`` of forward.cu, of every kernel set."""

    _fields_ = [
        ("packed_q", ctypes.c_void_p),
        ("packed_kv", ctypes.c_void_p),
        ("out", CTokenTensor),
        ("out_residual", CTokenTensor),
        ("lse", ctypes.c_void_p),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("documents", ctypes.c_int),
        ("v_mean", ctypes.c_void_p),
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
    pack_kv_for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`sagebwd.kernels.triton.forward.forward`, and ``packed_kv``.

    Args:
        packer: of the kernel set.
        launch: launches its forward.cu: (name, q, window, arguments, p_16bit=..., **macros) -> None.
        work_tokens: queries of a work tile.

    Returns:
        out, lse, k_mean, out_residual, packed_kv. The last is K and V packed for the backward, (blocks,
        bytes) uint8. It is empty without ``pack_kv_for_backward``; the backward then packs them itself.
    """
    if config.smooth_k:
        k_mean = packer.token_mean(k, kv_axis)
    else:
        k_mean = k.new_empty((k.shape[0] * k.shape[1] * kv_axis.documents, 0), dtype=torch.float32)
    v_mean = packer.token_mean(v, kv_axis) if config.smooth_v else None
    counter = q.new_empty(1, dtype=torch.int32)  # of work tiles
    packed_q = packer.pack_q(q, q_axis, counter)
    p_16bit, k_16bit = not config.is_int8("o"), not config.is_int8("dq")
    subtracted = k_mean if config.smooth_k else None
    if p_16bit:
        k_16bit = k_16bit and pack_kv_for_backward
        operands = packed_kv = packer.pack_kv(k, v, kv_axis, subtracted, k_16bit=k_16bit)
    else:
        operands, packed_kv = packer.pack_kv_int8(
            k, v, kv_axis, subtracted, v_mean, pack_kv_for_backward=pack_kv_for_backward, k_16bit=k_16bit
        )
    out = Result(q, q_axis)
    residual = Result(q, q_axis) if config.compensate_o else None
    lse = q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    if q_axis.segments is not None:
        lse.fill_(float("-inf"))
    group = q.shape[1] // k.shape[1]
    work_axis = q_axis.with_block(work_tokens)
    axes = CAxes.of(q, q_axis, kv_axis, work_axis=work_axis, group=group, tile_counter=counter.data_ptr())
    arguments = CForward(
        packed_q.data_ptr(), operands.data_ptr(), out.target, (residual or out).target, lse.data_ptr(), axes,
        scale, kv_axis.documents, None if v_mean is None else v_mean.data_ptr(),
    )  # fmt: skip
    macros = {
        "SMOOTH_V": config.smooth_v,
        "UNSIGNED_P": config.is_unsigned("o"),
        "COMPENSATE_O": config.compensate_o,
    }
    launch("forward", q, window, arguments, p_16bit=p_16bit, **macros)
    out_residual = q.new_empty(0) if residual is None else residual.finish()
    if not pack_kv_for_backward:
        packed_kv = k.new_empty(0, dtype=torch.uint8)
    return out.finish(), lse, k_mean, out_residual, packed_kv
