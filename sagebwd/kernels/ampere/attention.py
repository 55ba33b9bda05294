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

from sagebwd.config import SageConfig
from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.ampere.shapes import backward_source, cta_shape
from sagebwd.kernels.cuda import forward as cuda_forward
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.arguments import CAxes, CTokenTensor, CWindow, addresses, pointers
from sagebwd.kernels.cuda.backward import Gradients, prepare
from sagebwd.kernels.cuda.compile import SHARED, Sources
from sagebwd.kernels.cuda.forward import CForward
from sagebwd.kernels.cuda.packing import PackedLayout, Packer, mean_alone, with_whole_pieces
from sagebwd.kernels.cuda.plan import Operand, planned_backward, planned_forward, planned_mean
from sagebwd.kernels.layout import Axes, packed_head_dim

# --- Arguments: struct Arguments of backward.cuh ------------------------------------------------------------


class CBackward(ctypes.Structure):
    """``Arguments`` of backward.cuh."""

    _fields_ = [
        *pointers("packed_q", "packed_grad", "packed_q_columns", "packed_k"),
        *((name, CTokenTensor) for name in ("v", "grad", "dq", "dk", "dv")),
        *pointers("dq_sums", "turns"),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
    ]


# --- Launching ---------------------------------------------------------------------------------------------


@functools.cache
def sources_for(architecture: str) -> Sources:
    """The sources, to be compiled for an architecture such as "sm_89"."""
    return Sources(architecture, (Path(__file__).parent, SHARED))


def _packer_for(x: Operand, config: SageConfig) -> Packer:
    """Packs for these settings on the GPU of ``x``, for its head size."""
    sources = sources_for(_architecture(x.device))
    return Packer(sources, PackedLayout.of(config, x.shape[3], packs_16bit=False))


def _architecture(device: torch.device) -> str:
    """As NVRTC takes it; without a GPU the oldest, for tests that compile nothing."""
    if device.type != "cuda":
        return "sm_80"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _launch(
    name: str,
    q: Operand,
    params: AttentionParams,
    arguments: CForward | CBackward,
    *,
    p_16bit: bool,
    **defines: bool,
) -> None:
    """Launch kernel ``name`` with a CTA for each work tile.

    Args:
        p_16bit, defines: macros that only this kernel knows.
    """
    config, head_dim = params.config, packed_head_dim(q.shape[3])
    tile, token_scales = config.tile(q.shape[3]), config.operand_scales == "token"
    cta = cta_shape(name, head_dim, tile, p_16bit=p_16bit, token_scales=token_scales)
    kernel = launch.start_loading_attention(
        sources_for(_architecture(q.device)), name, q, params,
        head_dim=head_dim, threads=cta.threads, shared_bytes=cta.shared_bytes,
        TOKEN_SCALES=token_scales, P_16BIT=p_16bit, TILE_Q=tile[0], TILE_KV=tile[1],
        UNPACKED_16BIT=True, **defines,
    )  # fmt: skip
    grid = arguments.axes.work_tiles
    q.plan.launch(kernel, grid, cta.threads, arguments, CWindow.of(params.window))


# --- Attention --------------------------------------------------------------------------------------------


@planned_mean
def token_mean(k: Operand, params: AttentionParams) -> Operand:
    """See :mod:`sagebwd.interface`."""
    return mean_alone(k, _packer_for(k, params.config), params)


@planned_forward
def forward(q: Operand, k: Operand, v: Operand, params: AttentionParams) -> ForwardResult:
    """See :mod:`sagebwd.interface`."""
    v = v if params.config.is_int8("o") else with_whole_pieces(v)
    packer = _packer_for(q, params.config)
    return cuda_forward.forward(q, k, v, params, packer=packer, launch=_launch, work_tokens=128)


@planned_backward
def backward(
    grad_out: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    saved: ForwardResult,
    params: AttentionParams,
    grad_lse: Operand | None,
) -> tuple[Operand, ...]:
    """See :mod:`sagebwd.interface`. V is not packed, so v is no stand-in."""
    config, axes = params.config, Axes.of(q, k, params)
    # Not laid out as a copy of v is. No CTA visits queries that see no key.
    gradients = Gradients.like(q, k, v, axes, zeroes_dq=params.window.left >= 0)
    grad_out, v = with_whole_pieces(grad_out), with_whole_pieces(v)
    q_blocks = q.shape[0] * q.shape[1] * axes.q.blocks
    # How many blocks of keys were added to dQ of each packed block of queries; the counter of work tiles.
    call = prepare(
        grad_out, q, k, v, saved, params, grad_lse,
        axes=axes, packer=_packer_for(q, config), gradients=gradients, counters=q_blocks + 1,
    )  # fmt: skip
    # dQ of each packed block of queries, added up block of keys by block of keys.
    (block_q, block_kv), head_dim = config.tile(q.shape[3]), packed_head_dim(q.shape[3])
    dq_sums = q.new_empty((q_blocks, block_q * head_dim), dtype=torch.float32)
    turns = call.counters.data_ptr()
    tile_counter = turns + 4 * q_blocks
    work = CAxes.of(q, k, axes, of_keys=True, tokens=block_kv, tile_counter=tile_counter)
    arguments = CBackward(
        *addresses(call.packed_q, call.packed_grad, call.columns, call.packed_kv),
        CTokenTensor.of(v), CTokenTensor.of(grad_out), *(x.target for x in gradients),
        dq_sums.data_ptr(), turns, work, params.scale,
    )  # fmt: skip
    source = backward_source((block_q, block_kv), head_dim)
    scales_of_tiles = config.granularity == "block"
    macros = {"SCALES_OF_TILES": scales_of_tiles, "DP_FP16": config.dp_fp16_accumulation, **call.macros}
    _launch(source, q, params, arguments, **macros)
    return tuple(x.tensor for x in gradients)
