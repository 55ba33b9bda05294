"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) with mma.sync: packing, forward.cu, one of backward*.cu.

The same arithmetic as the Hopper kernels, for the same head sizes and settings, and with INT8 O and dV also
``operand_scales="token"`` (TOKEN_SCALES in the sources). The backward is one kernel: S and dP are computed
once, and dQ is added up in fp32 in a fixed order.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from sagebwd.config import SageConfig
from sagebwd.kernels.ampere.shapes import backward_source, cta_shape
from sagebwd.kernels.cuda import forward as cuda_forward
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.arguments import CTokenTensor, CWindow
from sagebwd.kernels.cuda.compile import SHARED, Sources
from sagebwd.kernels.cuda.forward import CForward
from sagebwd.kernels.cuda.packing import Packer, packed_head_dim, with_whole_pieces
from sagebwd.kernels.cuda.result import Result
from sagebwd.kernels.cuda.scheduler import CAxes
from sagebwd.kernels.layout import Axis, ForwardResult, padded_head_dim
from sagebwd.window import CAUSAL, Window

# --- Arguments: struct Arguments of backward.cuh ------------------------------------------------------------


class CBackward(ctypes.Structure):
    """``Arguments`` of backward.cuh."""

    _fields_ = [
        ("packed_q", ctypes.c_void_p),
        ("packed_grad", ctypes.c_void_p),
        ("packed_q_columns", ctypes.c_void_p),
        ("packed_k", ctypes.c_void_p),
        ("packed_k_columns", ctypes.c_void_p),
        ("v", CTokenTensor),
        ("grad", CTokenTensor),
        ("dq", CTokenTensor),
        ("dk", CTokenTensor),
        ("dv", CTokenTensor),
        ("dq_sums", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
    ]


# --- Launching ---------------------------------------------------------------------------------------------


@functools.cache
def sources_for(architecture: str) -> Sources:
    """The sources, to be compiled for an architecture such as "sm_89"."""
    return Sources(architecture, (Path(__file__).parent, SHARED))


@functools.cache
def _packer_for(architecture: str, token_scales: bool, tile: tuple[int, int], s_16bit: bool) -> Packer:
    return Packer(sources_for(architecture), token_scales, tile, s_16bit, packs_16bit=False)


def _packer_of(x: Tensor, config: SageConfig) -> Packer:
    """Packs for these settings on the GPU of ``x``, for its head size."""
    token_scales, s_16bit = config.operand_scales == "token", not config.is_int8("s_fwd")
    return _packer_for(_architecture(x.device), token_scales, config.tile(x.shape[3]), s_16bit)


@functools.cache
def _architecture(device: torch.device) -> str:
    """As NVRTC takes it; without a GPU the oldest, for tests that compile nothing."""
    if device.type != "cuda":
        return "sm_80"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _launch(
    name: str,
    like: Tensor,
    window: Window,
    arguments: CForward | CBackward,
    *,
    tile: tuple[int, int],
    p_16bit: bool,
    token_scales: bool,
    s_16bit: bool,
    **macros: bool,
) -> None:
    """Launch kernel ``name`` with a CTA for each work tile.

    Args:
        tile: (queries, keys) of packed blocks.
        p_16bit, token_scales, s_16bit, macros: macros that only this kernel knows.
    """
    head_dim = packed_head_dim(like.shape[-1])
    shape = {"p_16bit": p_16bit, "token_scales": token_scales, "s_16bit": s_16bit}
    cta = cta_shape(name, head_dim, tile, **shape)
    kernel = launch.load_kernel(
        sources_for(_architecture(like.device)),
        name,
        f"{name}_kernel",
        cta.shared_bytes,
        HEAD_DIM=head_dim,
        IS_CAUSAL=int(window == CAUSAL),
        IS_WINDOWED=window.is_sliding,
        IS_BF16=like.dtype == torch.bfloat16,
        LAUNCH_THREADS=cta.threads,
        LAUNCH_BYTES=cta.shared_bytes,
        P_16BIT=p_16bit,
        TOKEN_SCALES=token_scales,
        S_16BIT=s_16bit,
        TILE_Q=tile[0],
        TILE_KV=tile[1],
        UNPACKED_16BIT=True,
        **macros,
    )
    kernel.launch(arguments.axes.work_tiles, cta.threads, arguments, CWindow.of(window))


# --- Attention --------------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
    pack_for_backward: bool,
) -> ForwardResult:
    """As :func:`sagebwd.kernels.cuda.forward.forward`."""
    tile, s_16bit = config.tile(q.shape[3]), not config.is_int8("s_fwd")
    token_scales = config.operand_scales == "token"
    packer = _packer_of(q, config)
    # Without an INT8 product there are no scales.
    settings = {"tile": tile, "token_scales": token_scales and not s_16bit, "s_16bit": s_16bit}
    launch_forward = functools.partial(_launch, **settings)
    if not config.is_int8("o"):
        v = with_whole_pieces(v)
    result = cuda_forward.forward(
        q, k, v, q_axis, kv_axis, packer=packer, launch=launch_forward, work_tokens=128, window=window,
        scale=scale, config=config, pack_for_backward=pack_for_backward,
    )  # fmt: skip
    return result._replace(k_mean=_unpadded(result.k_mean, k))


def token_mean(k: Tensor, kv_axis: Axis, config: SageConfig) -> Tensor:
    """As :func:`sagebwd.kernels.triton.attention.token_mean`."""
    return _unpadded(_packer_of(k, config).token_mean(k, kv_axis), k)


def _unpadded(mean: Tensor, k: Tensor) -> Tensor:
    """The mean of K as operators return it: their channels are padded to 32, those of packed blocks to 64."""
    return mean[:, : padded_head_dim(k.shape[3])].contiguous()


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    out_residual: Tensor,
    packed_q: Tensor,
    packed_kv: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    window: Window,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`sagebwd.kernels.hopper.attention.backward`, but V is not packed, so v is no stand-in."""
    dk, dv = Result(k, kv_axis), Result(v, kv_axis)  # not laid out as a copy of v is
    grad_out, v = with_whole_pieces(grad_out), with_whole_pieces(v)
    packer = _packer_of(q, config)
    if not packed_kv.numel():
        k_mean = pad(k_mean, (0, packed_head_dim(k.shape[3]) - padded_head_dim(k.shape[3])))
        packed_kv = packer.pack_kv(k, v, kv_axis, k_mean if config.smooths_k else None)
    if not packed_q.numel():
        packed_q = packer.pack_q(q, q_axis)
    # Of K in INT8 each CTA makes its own columns.
    packed_k_columns = None if config.is_int8("s_bwd") else packer.pack_k_columns(packed_kv, k, kv_axis)
    # How many blocks of keys were added to dQ of each packed block of queries; the counter of work tiles.
    q_blocks = q.shape[0] * q.shape[1] * q_axis.blocks
    turns = q.new_empty(q_blocks + 1, dtype=torch.int32)
    packed_grad, packed_q_columns = packer.pack_grad(
        q, packed_q, grad_out, out, lse, q_axis,
        out_residual=out_residual if config.compensate_o else None,
        p_16bit=not config.is_int8("dv"), counters=turns,
    )  # fmt: skip
    # No CTA visits queries that see no key.
    dq = Result(q, q_axis, is_zeroed=window.left >= 0)
    # dQ of each packed block of queries, added up block of keys by block of keys.
    block_q, block_kv = config.tile(q.shape[3])
    dq_sums = q.new_empty((q_blocks, block_q * packed_head_dim(q.shape[3])), dtype=torch.float32)
    axes = CAxes.of(
        k, q_axis, kv_axis, work_axis=kv_axis.with_block(block_kv), group=q.shape[1] // k.shape[1],
        tile_counter=turns.data_ptr() + 4 * q_blocks,
    )  # fmt: skip
    arguments = CBackward(
        packed_q.data_ptr(), packed_grad.data_ptr(), packed_q_columns.data_ptr(), packed_kv.data_ptr(),
        None if packed_k_columns is None else packed_k_columns.data_ptr(), CTokenTensor.of(v),
        CTokenTensor.of(grad_out), dq.target, dk.target, dv.target, dq_sums.data_ptr(), turns.data_ptr(),
        axes, scale,
    )  # fmt: skip
    _launch_backward(q, window, arguments, config)
    return dq.finish(), dk.finish(), dv.finish()


def _launch_backward(q: Tensor, window: Window, arguments: CBackward, config: SageConfig) -> None:
    """Launch the source for these settings and this head size."""
    tile, s_16bit = config.tile(q.shape[3]), not config.is_int8("s_bwd")
    _launch(
        backward_source(tile, packed_head_dim(q.shape[3]), s_16bit=s_16bit), q, window, arguments,
        tile=tile,
        p_16bit=not config.is_int8("dv"),
        token_scales=config.operand_scales == "token",
        s_16bit=s_16bit,
        UNSIGNED_P=config.is_unsigned("dv"),
        SCALES_OF_TILES=config.granularity == "block",
    )  # fmt: skip
