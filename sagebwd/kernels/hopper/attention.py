"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) on Hopper: packing, then forward.cu, or a backward.

The backward has two kernels, dk_dv.cu and dq.cu, if dQ is in INT8, and one, backward.cu, if it is in 16 bit:
docs/kernels.md says why. If tiles have scales, dq_tile_scales.cu finds them and runs before dk_dv.cu.

The same arithmetic as the Triton kernels, for head sizes above 32 and the default settings. ``smooth_k``,
``smooth_v`` and ``unsigned_p`` may have either value. O and dV may take 16-bit P (P_16BIT in the sources),
and such an O may be compensated (COMPENSATE_O). If all products are in INT8, tokens may have scales of their
own (TOKEN_SCALES). Up to head size 128, P and dS of a tile of 128 × 64 may then have one (SCALES_OF_TILES).
Up to head size 128, too, dQ may be in 16 bits, and with it dK (DK_16BIT), and S and O together (S_16BIT), in
tiles of 64 × 64.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.config import TILE, TILE_OF_LARGE_HEADS, SageConfig
from sagebwd.kernel_rules import (
    HOPPER_TILE_WITH_16_BIT_S,
    HOPPER_TILE_WITH_SCALES,
    has_16_bit_s,
    is_large,
)
from sagebwd.kernels.cuda import forward as cuda_forward
from sagebwd.kernels.cuda import launch, packing
from sagebwd.kernels.cuda.arguments import CTokenTensor, CWindow
from sagebwd.kernels.cuda.compile import SHARED, Sources
from sagebwd.kernels.cuda.forward import CForward
from sagebwd.kernels.cuda.result import Result
from sagebwd.kernels.cuda.scheduler import CAxes
from sagebwd.kernels.hopper.shapes import (
    CTA_SHAPES,
    STEP_Q,
    shape_macro,
    tile_macros,
    work_tokens,
)
from sagebwd.kernels.hopper.tensor_map import CTensorMaps, mappable, tensor_map
from sagebwd.kernels.layout import Axis, ForwardResult, padded_head_dim
from sagebwd.window import CAUSAL, Window

#: wgmma and setmaxnreg exist on this architecture only, neither before nor after.
SOURCES = Sources("sm_90a", (Path(__file__).parent, SHARED))


@functools.cache
def packer(config: SageConfig, *, has_large_heads: bool, has_documents: bool) -> packing.Packer:
    """Packs for these settings, for head sizes above 128 or up to it, with packed documents or without."""
    options = {"token_scales": config.operand_scales == "token", "packs_16bit": has_documents}
    if has_large_heads:
        options |= {"tile": TILE_OF_LARGE_HEADS, "rows_in_chunks": True}
    elif _has_tile_scales(config):
        options |= {"tile": HOPPER_TILE_WITH_SCALES, "step_q": STEP_Q}
    elif has_16_bit_s(config):
        options |= {"tile": HOPPER_TILE_WITH_16_BIT_S, "s_16bit": True}
    return packing.Packer(SOURCES, **options)


def _has_tile_scales(config: SageConfig) -> bool:
    return config.granularity == "block"


# --- Arguments: struct Arguments of each source ------------------------------------------------------------


class _CDq(ctypes.Structure):
    _fields_ = [
        ("packed_q", ctypes.c_void_p),
        ("packed_grad", ctypes.c_void_p),
        ("packed_kv", ctypes.c_void_p),
        ("packed_k_columns", ctypes.c_void_p),
        ("dq", CTokenTensor),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("tile_scales", ctypes.c_void_p),
    ]


class _CDkDv(ctypes.Structure):
    _fields_ = [
        ("packed_q", ctypes.c_void_p),
        ("packed_grad", ctypes.c_void_p),
        ("packed_q_columns", ctypes.c_void_p),
        ("packed_kv", ctypes.c_void_p),
        ("dk", CTokenTensor),
        ("dv", CTokenTensor),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("tile_scales", ctypes.c_void_p),
    ]


class _CBackward(ctypes.Structure):
    _fields_ = [
        ("packed_q", ctypes.c_void_p),
        ("packed_grad", ctypes.c_void_p),
        ("packed_q_columns", ctypes.c_void_p),
        ("packed_kv", ctypes.c_void_p),
        ("dk", CTokenTensor),
        ("dv", CTokenTensor),
        ("dq_sums", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("axes", CAxes),
        ("scale", ctypes.c_float),
        ("last_keys_first_up_to", ctypes.c_int),
    ]


class _CFinishDq(ctypes.Structure):
    _fields_ = [
        ("dq_sums", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
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
    like: Tensor,
    window: Window,
    arguments: CForward | _CDq | _CDkDv | _CBackward,
    *,
    maps: CTensorMaps | None,
    p_16bit: bool = False,
    tile_scales: bool = False,
    s_16bit: bool = False,
    **defines: int,
) -> None:
    """Launch kernel ``name`` on as many CTAs as the GPU holds; they share the work tiles.

    Args:
        maps: of the tensors that it reads where they are; None: they are packed.
        tile_scales: whether P and dS have a scale for each tile.
        s_16bit: whether S is in 16 bits.
        p_16bit, defines: macros that only this kernel knows.
    """
    head_dim = padded_head_dim(like.shape[-1])
    dk_16bit = defines.get("DK_16BIT", False)
    macro = shape_macro(p_16bit, dk_16bit, tile_scales, s_16bit)
    cta = CTA_SHAPES[name, head_dim, macro]
    kernel = launch.load_kernel(
        SOURCES,
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
        UNPACKED_16BIT=maps is not None,
        **(defines | tile_macros(head_dim, macro)),
    )
    kernel.launch(
        min(arguments.axes.work_tiles, _multiprocessors(like.device.index)),
        cta.threads,
        arguments,
        CWindow.of(window),
        CTensorMaps() if maps is None else maps,
    )


def _macros(config: SageConfig) -> dict[str, bool]:
    """What :func:`_launch` takes for all kernels of these settings."""
    return {
        "TOKEN_SCALES": config.operand_scales == "token",
        "tile_scales": _has_tile_scales(config),
        "s_16bit": has_16_bit_s(config),
    }


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# --- Attention --------------------------------------------------------------------------------------------


def token_mean(k: Tensor, kv_axis: Axis, config: SageConfig) -> Tensor:
    """As :func:`sagebwd.kernels.triton.attention.token_mean`."""
    options = {"has_large_heads": is_large(k.shape[3]), "has_documents": kv_axis.segments is not None}
    return packer(config, **options).token_mean(k, kv_axis)


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
    has_documents = kv_axis.segments is not None
    maps = None
    if not has_documents:
        maps = CTensorMaps()
        if not config.is_int8("o"):
            v = mappable(v)
            maps.v = tensor_map(v)
    macros = _macros(config)
    if has_16_bit_s(config):
        macros["TOKEN_SCALES"] = False  # no operand of the forward is in INT8
    return cuda_forward.forward(
        q, k, v, q_axis, kv_axis,
        packer=packer(config, has_large_heads=is_large(q.shape[3]), has_documents=has_documents),
        launch=functools.partial(_launch, maps=maps, **macros),
        work_tokens=work_tokens("forward", padded_head_dim(q.shape[3])), window=window, scale=scale,
        config=config, pack_for_backward=pack_for_backward,
    )  # fmt: skip


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
    """As :func:`sagebwd.kernels.triton.backward.backward`.

    Args:
        packed_q, packed_kv: of :func:`forward`. If they are not empty, q (unless dK is in 16 bit), k and, if
            documents are packed, v may be stand-ins, see :func:`sagebwd.kernels.layout.stand_in`.
    """
    has_documents = kv_axis.segments is not None
    pack = packer(config, has_large_heads=is_large(q.shape[3]), has_documents=has_documents)
    dq, dk, dv = Result(q, q_axis), Result(k, kv_axis), Result(v, kv_axis)  # not laid out as copies below
    maps = None
    if not has_documents:
        v, grad_out = mappable(v), mappable(grad_out)
        q = q if config.is_int8("dk") else mappable(q)
        maps = CTensorMaps(tensor_map(v), tensor_map(grad_out))
        if not config.is_int8("dk"):
            maps.q = tensor_map(q)
    if not packed_kv.numel():
        subtracted = k_mean if config.smooths_k else None
        packed_kv = pack.pack_kv(k, v, kv_axis, subtracted, k_16bit=not config.is_int8("dq"))
    if not packed_q.numel():
        packed_q = pack.pack_q(q, q_axis)
    residual = out_residual if config.compensate_o else None
    options = {
        "p_16bit": not config.is_int8("dv"),
        "dk_16bit": not config.is_int8("dk"),
        "out_residual": residual,
    }
    counters = q.new_empty(_counters(q, q_axis, config), dtype=torch.int32)
    packed = [*pack.pack_grad(q, packed_q, grad_out, out, lse, q_axis, counters=counters, **options)]
    call = _Backward(
        q, k, q_axis, kv_axis, pack, maps, packed_q, packed_kv, dq, dk, dv, counters, window, scale, config
    )
    if config.is_int8("dq"):
        _launch_two_kernels(call, packed)
    else:
        _launch_one_kernel(call, *packed)
    return dq.finish(), dk.finish(), dv.finish()


def _counters(q: Tensor, q_axis: Axis, config: SageConfig) -> int:
    """How many int32 the backward counts with: the work tiles that were taken, in each of two kernels.

    One kernel counts, before these, how many work tiles were added to each chunk of dQ.
    """
    return 2 if config.is_int8("dq") else _turns(q, q_axis) + 1


def _turns(q: Tensor, q_axis: Axis) -> int:
    """How many counters of turns backward.cu has: see TURNS in query_gradient.cuh."""
    of_a_block = {64: 1, 128: 4}[padded_head_dim(q.shape[3])]
    return q.shape[0] * q.shape[1] * q_axis.blocks * of_a_block


class _Backward(NamedTuple):
    """What one kernel or two compute. Of q and k only shapes, dtype and device are used.

    counters: see :func:`_counters`; zero.
    """

    q: Tensor
    k: Tensor
    q_axis: Axis
    kv_axis: Axis
    packer: packing.Packer
    maps: CTensorMaps | None
    packed_q: Tensor
    packed_kv: Tensor
    dq: Result
    dk: Result
    dv: Result
    counters: Tensor
    window: Window
    scale: float
    config: SageConfig

    def axes(self, name: str, tile_counter: int | None) -> CAxes:
        """The work tiles of a kernel, of queries for dq.cu, else of keys; keep it until the launch."""
        x, work_axis = (self.q, self.q_axis) if name == "dq" else (self.k, self.kv_axis)
        tokens = work_tokens(name, padded_head_dim(x.shape[3]))
        return CAxes.of(
            x, self.q_axis, self.kv_axis, work_axis=work_axis.with_block(tokens),
            group=self.q.shape[1] // self.k.shape[1], tile_counter=tile_counter,
        )  # fmt: skip

    def launch(self, name: str, arguments: _CDq | _CDkDv | _CBackward) -> None:
        config = self.config
        macros = _macros(config)
        if name != "dq":  # it multiplies P with dO, or finds its scale
            macros |= {"UNSIGNED_P": config.is_unsigned("dv")}
        if name in ("dk_dv", "backward"):
            macros |= {"p_16bit": not config.is_int8("dv"), "DK_16BIT": not config.is_int8("dk")}
        _launch(name, self.q, self.window, arguments, maps=self.maps, **macros)


def _launch_two_kernels(call: _Backward, packed: list[Tensor]) -> None:
    """dK and dV by dk_dv.cu, then dQ by dq.cu; if tiles have scales, dQ first, which finds them.

    Args:
        packed: of dO and of columns. The columns are taken out of the list, so that their memory is free
            before more is packed.
    """
    if not _has_tile_scales(call.config):
        _launch_dk_dv(call, packed[0], packed.pop())
        _launch_dq(call, packed[0])
        return
    tiles = (call.q.shape[0] * call.q.shape[1] * call.q_axis.blocks, call.kv_axis.blocks)
    tile_scales = call.q.new_empty((*tiles, 2), dtype=torch.float32)  # of P, of dS
    _launch_dq(call, packed[0], tile_scales)
    _launch_dk_dv(call, packed[0], packed.pop(), tile_scales)


def _launch_dk_dv(
    call: _Backward, packed_grad: Tensor, packed_q_columns: Tensor, tile_scales: Tensor | None = None
) -> None:
    axes = call.axes("dk_dv", call.counters.data_ptr())
    arguments = _CDkDv(
        call.packed_q.data_ptr(), packed_grad.data_ptr(), packed_q_columns.data_ptr(),
        call.packed_kv.data_ptr(), call.dk.target, call.dv.target, axes, call.scale, _address(tile_scales),
    )  # fmt: skip
    call.launch("dk_dv", arguments)


def _launch_dq(call: _Backward, packed_grad: Tensor, tile_scales: Tensor | None = None) -> None:
    packed_k_columns = call.packer.pack_k_columns(call.packed_kv, call.k, call.kv_axis)
    axes = call.axes("dq", call.counters.data_ptr() + 4)
    arguments = _CDq(
        call.packed_q.data_ptr(), packed_grad.data_ptr(), call.packed_kv.data_ptr(),
        packed_k_columns.data_ptr(), call.dq.target, axes, call.scale, _address(tile_scales),
    )  # fmt: skip
    call.launch("dq" if tile_scales is None else "dq_tile_scales", arguments)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _launch_one_kernel(call: _Backward, packed_grad: Tensor, packed_q_columns: Tensor) -> None:
    """All gradients by backward.cu, dQ as sums, which finish_dq.cu rounds."""
    padded = call.q.shape[0] * call.q.shape[1] * call.q_axis.blocks * TILE[0]
    dq_sums = call.q.new_empty((padded, padded_head_dim(call.q.shape[3])), dtype=torch.float32)
    turns = call.counters
    axes = call.axes("backward", turns.data_ptr() + 4 * _turns(call.q, call.q_axis))
    arguments = _CBackward(
        call.packed_q.data_ptr(), packed_grad.data_ptr(), packed_q_columns.data_ptr(),
        call.packed_kv.data_ptr(), call.dk.target, call.dv.target, dq_sums.data_ptr(), turns.data_ptr(),
        axes, call.scale, LAST_KEYS_FIRST_UP_TO[padded_head_dim(call.q.shape[3])],
    )  # fmt: skip
    call.launch("backward", arguments)
    _launch_finish_dq(call, dq_sums, turns)


def _launch_finish_dq(call: _Backward, dq_sums: Tensor, turns: Tensor) -> None:
    """dQ from its sums, by a CTA for 64 queries and 64 channels each."""
    arguments = _CFinishDq(
        dq_sums.data_ptr(), turns.data_ptr(), call.dq.target, call.axes("dq", None), call.scale
    )
    kernel = launch.load_kernel(
        SOURCES,
        "finish_dq",
        "finish_dq_kernel",
        0,
        HEAD_DIM=padded_head_dim(call.q.shape[3]),
        IS_CAUSAL=0,
        IS_BF16=call.q.dtype == torch.bfloat16,
        LAUNCH_THREADS=FINISH_DQ_THREADS,
        LAUNCH_BYTES=0,
    )
    kernel.launch(dq_sums.numel() // (TILE[0] * 64), FINISH_DQ_THREADS, arguments)
