"""The Hopper kernels with one backward kernel instead of two: backward.cu, which computes S and dP once.

dQ is added up in fp32 in a fixed order. Its product is INT8 or 16 bit, as ``int8_matmuls`` says. Not run on a
GPU yet: ``kernels="hopper_one_backward"`` is for tests and benchmarks.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.arguments import CTokenTensor
from sagebwd.kernels.cuda.packing import TILE
from sagebwd.kernels.cuda.result import Result
from sagebwd.kernels.cuda.scheduler import CAxes
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.layout import Axis, padded_head_dim
from sagebwd.window import Window

forward = hopper.forward

#: Keys of a work tile, and threads of a CTA: two warpgroups of consumers, one for dQ, one producer.
WORK_KEYS, THREADS = 128, 512
#: Channels of dQ that are added at a time.
DQ_CHANNELS = 32
#: Dynamic shared memory by padded head size and the macros that change it. The source checks them.
SHARED_BYTES = {
    (64, ()): 203_776,
    (64, ("P_16BIT",)): 187_392,
    (64, ("DQ_INT8",)): 179_200,
    (64, ("P_16BIT", "DQ_INT8")): 162_816,
    (128, ()): 226_304,
    (128, ("P_16BIT",)): 209_920,
    (128, ("DQ_INT8",)): 201_728,
    (128, ("P_16BIT", "DQ_INT8")): 185_344,
}


class CBackward(ctypes.Structure):
    """``Arguments`` of backward.cu."""

    _fields_ = [
        ("packed_q_rows", ctypes.c_void_p),
        ("packed_q_columns", ctypes.c_void_p),
        ("packed_kv", ctypes.c_void_p),
        ("dq", CTokenTensor),
        ("dk", CTokenTensor),
        ("dv", CTokenTensor),
        ("dq_sums", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
    ]


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    out_residual: Tensor,
    packed_kv: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`sagebwd.kernels.hopper.attention.backward`."""
    hopper._check_window(window)
    if not packed_kv.numel():
        packed_kv = hopper.PACKER.pack_kv(k, v, kv_axis, k_mean if config.smooth_k else None)
    packed_q_rows, packed_q_columns = hopper.PACKER.pack_q_and_grad(
        q, grad_out, out, lse, q_axis, out_residual=out_residual if config.compensate_o else None,
        p_16bit=not config.is_int8("dv"),
    )  # fmt: skip
    dq, dk, dv = Result(q, q_axis), Result(k, kv_axis), Result(v, kv_axis)
    # dQ of each packed block of queries, added up work tile by work tile; how many are in each chunk.
    chunks = q.shape[0] * q.shape[1] * q_axis.blocks * padded_head_dim(q.shape[3]) // DQ_CHANNELS
    dq_sums = q.new_empty((chunks, TILE[0] * DQ_CHANNELS), dtype=torch.float32)
    turns = q.new_zeros(chunks + 1, dtype=torch.int32)
    axes = CAxes.of(
        k, q_axis, kv_axis, work_axis=kv_axis.with_block(WORK_KEYS), group=q.shape[1] // k.shape[1],
        tile_counter=turns.data_ptr() + 4 * chunks,
    )  # fmt: skip
    arguments = CBackward(
        packed_q_rows.data_ptr(), packed_q_columns.data_ptr(), packed_kv.data_ptr(), dq.target, dk.target,
        dv.target, dq_sums.data_ptr(), turns.data_ptr(), axes, scale,
    )  # fmt: skip
    _launch(q, window, config, arguments)
    return dq.finish(), dk.finish(), dv.finish()


def _launch(like: Tensor, window: Window, config: SageConfig, arguments: CBackward) -> None:
    """Launch the kernel on as many CTAs as the GPU holds; they share the work tiles."""
    head_dim = padded_head_dim(like.shape[-1])
    macros = {"P_16BIT": not config.is_int8("dv"), "DQ_INT8": config.is_int8("dq")}
    shared_bytes = SHARED_BYTES[head_dim, tuple(name for name, on in macros.items() if on)]
    kernel = launch.load_kernel(
        hopper.SOURCES,
        "backward",
        "backward_kernel",
        shared_bytes,
        HEAD_DIM=head_dim,
        IS_CAUSAL=int(window.right == 0),
        IS_BF16=like.dtype == torch.bfloat16,
        LAUNCH_THREADS=THREADS,
        LAUNCH_BYTES=shared_bytes,
        UNSIGNED_P=config.is_unsigned("dv"),
        **macros,
    )
    grid = min(arguments.axes.work_tiles, hopper._multiprocessors(like.device.index))
    kernel.launch(grid, THREADS, arguments)
