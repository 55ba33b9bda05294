"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) on Hopper: packing, then forward.cu, or a backward.

The backward has two kernels, dk_dv.cu and dq.cu, if dQ is in INT8, and one, backward.cu, if it is in 16 bit:
docs/kernels.md says why. If tiles have scales, dq_tile_scales.cu finds them and runs before dk_dv.cu.

The same arithmetic as the Triton kernels, for head sizes above 32 and the default settings. ``smooth_k``,
``smooth_v`` and ``unsigned_p`` may have either value. O and dV may take 16-bit P (P_16BIT in the sources),
and such an O may be compensated (COMPENSATE_O). If all products are in INT8, tokens may have scales of their
own (TOKEN_SCALES). Up to head size 128, P and dS of a tile of 128 × 64 may then have one (SCALES_OF_TILES).
Up to head size 128, too, dQ may be in 16 bits, and with it dK (DK_16BIT).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from sagebwd.config import TILE, SageConfig
from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernel_rules import is_large
from sagebwd.kernels.cuda import forward as cuda_forward
from sagebwd.kernels.cuda import launch, packing
from sagebwd.kernels.cuda.arguments import CAxes, CTokenTensor, CWindow, addresses, pointers
from sagebwd.kernels.cuda.backward import Backward, Gradients, prepare
from sagebwd.kernels.cuda.compile import SHARED, Sources
from sagebwd.kernels.cuda.forward import CForward
from sagebwd.kernels.cuda.plan import Operand, planned_backward, planned_forward, planned_mean
from sagebwd.kernels.hopper.shapes import CTA_SHAPES, STEP_Q, shape_macro, tile_macros, work_tokens
from sagebwd.kernels.hopper.tensor_map import CTensorMaps, mappable, tensor_map
from sagebwd.kernels.layout import Axes, Axis, padded_head_dim

#: wgmma and setmaxnreg exist on this architecture only, neither before nor after.
SOURCES = Sources("sm_90a", (Path(__file__).parent, SHARED))


def _packer_for(x: Operand, params: AttentionParams) -> packing.Packer:
    """Packs for these settings and this head size, with packed documents or without."""
    head_dim = padded_head_dim(x.shape[3])
    layout = packing.PackedLayout.of(params.config, head_dim, packs_16bit=params.cu_seqlens is not None)
    step_q = STEP_Q if _has_tile_scales(params.config) else None
    return packing.Packer(SOURCES, layout, step_q=step_q, rows_in_chunks=is_large(head_dim))


def _has_tile_scales(config: SageConfig) -> bool:
    return config.granularity == "block"


# --- Arguments: struct Arguments of each source ------------------------------------------------------------


class _CDq(ctypes.Structure):
    _fields_ = [
        *pointers("packed_q", "packed_grad", "packed_kv", "packed_k_columns"),
        ("dq", CTokenTensor),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        *pointers("tile_scales"),
    ]


class _CDkDv(ctypes.Structure):
    _fields_ = [
        *pointers("packed_q", "packed_grad", "packed_q_columns", "packed_kv"),
        ("dk", CTokenTensor),
        ("dv", CTokenTensor),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        *pointers("tile_scales"),
    ]


class _CBackward(ctypes.Structure):
    _fields_ = [
        *pointers("packed_q", "packed_grad", "packed_q_columns", "packed_kv", "k_mean"),
        ("dk", CTokenTensor),
        ("dv", CTokenTensor),
        *pointers("dq_sums", "turns"),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("documents", ctypes.c_int),
        ("last_keys_first_up_to", ctypes.c_int),
    ]


class _CFinishDq(ctypes.Structure):
    _fields_ = [
        *pointers("dq_sums", "turns"),
        ("dq", CTokenTensor),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
    ]


# --- Launching ---------------------------------------------------------------------------------------------


#: Of a CTA of finish_dq.cu.
FINISH_DQ_THREADS = 128
#: Up to how many queries a document has where backward.cu begins with its last keys, by padded head size.
#: The CTAs are then spread over the queries of several heads; if these do not fit the L2 cache, they come
#: from memory again and again. dQ is added up in the order of keys, so its bits depend on this number.
LAST_KEYS_FIRST_UP_TO = {64: 8192, 128: 2048}


def _launch(
    name: str,
    q: Operand,
    params: AttentionParams,
    arguments: CForward | _CDq | _CDkDv | _CBackward,
    *,
    maps: CTensorMaps,
    p_16bit: bool = False,
    **defines: int,
) -> None:
    """Launch kernel ``name`` on as many CTAs as the GPU holds; they share the work tiles.

    Args:
        maps: of the tensors that it reads where they are.
        p_16bit, defines: macros that only this kernel knows.
    """
    config, head_dim = params.config, padded_head_dim(q.shape[-1])
    dk_16bit = defines.get("DK_16BIT", False)
    macro = shape_macro(p_16bit, dk_16bit, _has_tile_scales(config))
    cta = CTA_SHAPES[name, head_dim, macro]
    kernel = launch.start_loading_attention(
        SOURCES, name, q, params,
        head_dim=head_dim, threads=cta.threads, shared_bytes=cta.shared_bytes,
        TOKEN_SCALES=config.operand_scales == "token", P_16BIT=p_16bit,
        UNPACKED_16BIT=params.cu_seqlens is None, **(defines | tile_macros(head_dim, macro)),
    )  # fmt: skip
    grid = min(arguments.axes.work_tiles, _multiprocessors(q.device.index))
    q.plan.launch(kernel, grid, cta.threads, arguments, CWindow.of(params.window), maps)


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# --- Attention --------------------------------------------------------------------------------------------


@planned_mean
def token_mean(k: Operand, params: AttentionParams) -> Operand:
    """See :mod:`sagebwd.interface`."""
    return packing.mean_alone(k, _packer_for(k, params), params)


@planned_forward
def forward(q: Operand, k: Operand, v: Operand, params: AttentionParams) -> ForwardResult:
    """See :mod:`sagebwd.interface`."""
    maps = CTensorMaps()
    if params.cu_seqlens is None and not params.config.is_int8("o"):
        v = mappable(v)
        maps.v = tensor_map(v)
    return cuda_forward.forward(
        q, k, v, params, packer=_packer_for(q, params), launch=functools.partial(_launch, maps=maps),
        work_tokens=work_tokens("forward", padded_head_dim(q.shape[3])),
    )  # fmt: skip


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
    """See :mod:`sagebwd.interface`."""
    config, axes = params.config, Axes.of(q, k, params)
    gradients = Gradients.like(q, k, v, axes)  # not laid out as copies below
    maps = CTensorMaps()
    if params.cu_seqlens is None:
        v, grad_out = mappable(v), mappable(grad_out)
        maps = CTensorMaps(tensor_map(v), tensor_map(grad_out))
        if not config.is_int8("dk"):
            q = mappable(q)
            maps.q = tensor_map(q)
    if not config.is_int8("dq"):
        k = mappable(k)
        maps.k = tensor_map(k)
    # Two kernels count the work tiles that were taken. One counts, before these, how many were added to each
    # chunk of dQ.
    counters = 2 if config.is_int8("dq") else _turns(q, axes.q) + 1
    call = prepare(
        grad_out, q, k, v, saved, params, grad_lse,
        axes=axes, packer=_packer_for(q, params), gradients=gradients, counters=counters,
    )  # fmt: skip
    if not config.is_int8("dq"):
        _launch_one_kernel(call, saved.k_mean if config.smooths_k else None, maps)
    elif _has_tile_scales(config):  # dQ finds them
        tiles = (q.shape[0] * q.shape[1] * axes.q.blocks, axes.kv.blocks)
        tile_scales = q.new_empty((*tiles, 2), dtype=torch.float32)  # of P, of dS
        _launch_dq(call, maps, tile_scales)
        _launch_dk_dv(call, maps, tile_scales)
    else:
        _launch_dk_dv(call, maps)
        _launch_dq(call, maps)
    return tuple(x.tensor for x in gradients)


def _turns(q: Operand, q_axis: Axis) -> int:
    """How many counters of turns backward.cu has: see TURNS in query_gradient.cuh."""
    of_a_block = {64: 1, 128: 4}[padded_head_dim(q.shape[3])]
    return q.shape[0] * q.shape[1] * q_axis.blocks * of_a_block


def _axes_of(call: Backward, name: str, tile_counter: int | None) -> CAxes:
    """The work tiles of a kernel, of queries for dq.cu, else of keys."""
    tokens = work_tokens(name, padded_head_dim(call.q.shape[3]))
    return CAxes.of(call.q, call.k, call.axes, of_keys=name != "dq", tokens=tokens, tile_counter=tile_counter)


def _launch_dk_dv(call: Backward, maps: CTensorMaps, tile_scales: Operand | None = None) -> None:
    axes = _axes_of(call, "dk_dv", call.counters.data_ptr())
    arguments = _CDkDv(
        *addresses(call.packed_q, call.packed_grad, call.columns, call.packed_kv),
        call.gradients.dk.target, call.gradients.dv.target, axes, call.params.scale, *addresses(tile_scales),
    )  # fmt: skip
    _launch("dk_dv", call.q, call.params, arguments, maps=maps, **call.macros)


def _launch_dq(call: Backward, maps: CTensorMaps, tile_scales: Operand | None = None) -> None:
    packed_k_columns = call.packer.pack_k_columns(call.packed_kv, call.k, call.axes.kv)
    axes = _axes_of(call, "dq", call.counters.data_ptr() + 4)
    arguments = _CDq(
        *addresses(call.packed_q, call.packed_grad, call.packed_kv, packed_k_columns),
        call.gradients.dq.target, axes, call.params.scale, *addresses(tile_scales),
    )  # fmt: skip
    if tile_scales is None:
        _launch("dq", call.q, call.params, arguments, maps=maps)
    else:
        unsigned_p = call.params.config.is_unsigned("dv")
        _launch("dq_tile_scales", call.q, call.params, arguments, maps=maps, UNSIGNED_P=unsigned_p)


def _launch_one_kernel(call: Backward, k_mean: Operand | None, maps: CTensorMaps) -> None:
    """All gradients by backward.cu, dQ as sums, which finish_dq.cu rounds."""
    q, params, turns = call.q, call.params, call.counters
    head_dim = padded_head_dim(q.shape[3])
    padded = q.shape[0] * q.shape[1] * call.axes.q.blocks * TILE[0]
    dq_sums = q.new_empty((padded, head_dim), dtype=torch.float32)
    axes = _axes_of(call, "backward", turns.data_ptr() + 4 * _turns(q, call.axes.q))
    arguments = _CBackward(
        *addresses(call.packed_q, call.packed_grad, call.columns, call.packed_kv, k_mean),
        call.gradients.dk.target, call.gradients.dv.target, *addresses(dq_sums, turns), axes, params.scale,
        params.documents, LAST_KEYS_FIRST_UP_TO[head_dim],
    )  # fmt: skip
    dk_16bit = not params.config.is_int8("dk")
    _launch("backward", q, params, arguments, maps=maps, DK_16BIT=dk_16bit, **call.macros)
    # A CTA for 64 queries and 64 channels each.
    kernel = launch.start_loading(
        SOURCES, "finish_dq", "finish_dq_kernel", 0,
        HEAD_DIM=head_dim, IS_CAUSAL=0, IS_BF16=q.dtype == torch.bfloat16,
        LAUNCH_THREADS=FINISH_DQ_THREADS, LAUNCH_BYTES=0,
    )  # fmt: skip
    axes = _axes_of(call, "dq", None)
    dq = call.gradients.dq.target
    arguments = _CFinishDq(*addresses(dq_sums, turns), dq, axes, params.scale)
    q.plan.launch(kernel, dq_sums.numel() // (TILE[0] * 64), FINISH_DQ_THREADS, arguments)
