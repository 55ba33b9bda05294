"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) on Hopper: packets, then forward.cu or dk_dv.cu, dq.cu.

The same arithmetic as the portable kernels, for the default settings and head sizes above 32 up to 128.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.config import PAPER_INT8_MATMULS, SageConfig
from sagebwd.kernels import packets
from sagebwd.kernels.hopper import runtime
from sagebwd.kernels.hopper.runtime import Segments, TokenTensor
from sagebwd.kernels.operands import Axis, padded_head_dim

HEAD_DIMS = (64, 128)


def is_used(q: Tensor, config: SageConfig) -> bool:
    """Whether attention on ``q`` runs the kernels of this folder. Warns once if they should but cannot."""
    if not q.is_cuda or not _supports(config, q.shape[-1]):
        return False
    if torch.cuda.get_device_capability(q.device) != runtime.COMPUTE_CAPABILITY:
        return False
    reason = runtime.why_unavailable(q.device)
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.lru_cache
def _supports(config: SageConfig, head_dim: int) -> bool:
    return (
        padded_head_dim(head_dim) in HEAD_DIMS
        and config.tile(head_dim) == (packets.QUERIES, packets.KEYS)
        and frozenset(config.int8_matmuls) == frozenset(PAPER_INT8_MATMULS)
        and config.operand_scales == "block"
        and config.granularity == "row"
        and not config.smooth_q
        and not config.add_mean_k_term
    )


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"sage_attention runs its portable kernels, slower than those for this GPU: {reason}", stacklevel=2
    )


# --- What kernels take: struct Arguments of each source ---------------------------------------------------


class _Axes(ctypes.Structure):
    _fields_ = [
        ("own", Segments),
        ("q", Segments),
        ("kv", Segments),
        *((name, ctypes.c_int) for name in ("n_q", "n_kv", "d", "heads", "group")),
        *((name, ctypes.c_int) for name in ("own_blocks", "q_blocks", "kv_blocks", "items")),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("out", TokenTensor),
        ("lse", ctypes.c_void_p),
        ("axes", _Axes),
        ("scale", ctypes.c_float),
    ]


class _Dq(ctypes.Structure):
    _fields_ = [
        ("q_rows", ctypes.c_void_p),
        ("k_rows", ctypes.c_void_p),
        ("k_columns", ctypes.c_void_p),
        ("dq", TokenTensor),
        ("axes", _Axes),
        ("scale", ctypes.c_float),
    ]


class _DkDv(ctypes.Structure):
    _fields_ = [
        ("q_rows", ctypes.c_void_p),
        ("q_columns", ctypes.c_void_p),
        ("k_rows", ctypes.c_void_p),
        ("dk", TokenTensor),
        ("dv", TokenTensor),
        ("q_segments", Segments),
        ("kv_segments", Segments),
        *((name, ctypes.c_int) for name in ("n_q", "n_kv", "d", "kv_heads", "group")),
        *((name, ctypes.c_int) for name in ("q_blocks", "kv_blocks", "items")),
        ("scale", ctypes.c_float),
    ]


class Launch(NamedTuple):
    """own: tokens of an item, of which a program takes one at a time; shared_bytes: dynamic shared memory."""

    own: int
    threads: int
    shared_bytes: int


#: By kernel and padded head size. The sources check what concerns them.
LAUNCHES = {
    ("forward", 64): Launch(192, 512, 147_456),
    ("forward", 128): Launch(128, 384, 188_416),
    ("dk_dv", 64): Launch(128, 384, 130_048),
    ("dk_dv", 128): Launch(128, 384, 210_944),
    ("dq", 64): Launch(128, 384, 180_224),
    ("dq", 128): Launch(128, 384, 219_136),
}


def _launch(name: str, like: Tensor, is_causal: bool, items: int, arguments: _Forward | _Dq | _DkDv) -> None:
    """Run kernel ``name`` on as many programs as the GPU holds; they share the items."""
    head_dim = padded_head_dim(like.shape[-1])
    launch = LAUNCHES[name, head_dim]
    kernel = runtime.kernel(
        name,
        f"{name}_kernel",
        launch.shared_bytes,
        HEAD_DIM=head_dim,
        IS_CAUSAL=int(is_causal),
        IS_BF16=like.dtype == torch.bfloat16,
        LAUNCH_THREADS=launch.threads,
        LAUNCH_BYTES=launch.shared_bytes,
    )
    kernel.launch(min(items, _multiprocessors(like.device.index)), launch.threads, arguments)


def _axes(name: str, q: Tensor, k: Tensor, q_axis: Axis, kv_axis: Axis) -> _Axes:
    """Items of queries for kernel ``name``."""
    own_axis = q_axis.with_block(LAUNCHES[name, padded_head_dim(q.shape[3])].own)
    heads = q.shape[0] * q.shape[1]
    axes = _Axes(
        Segments.of(own_axis.segments), Segments.of(q_axis.segments), Segments.of(kv_axis.segments),
        q_axis.n, kv_axis.n, q.shape[3], q.shape[1], q.shape[1] // k.shape[1],
        own_axis.blocks, q_axis.blocks, kv_axis.blocks, heads * own_axis.blocks,
    )  # fmt: skip
    axes.own_axis = own_axis  # holds the memory that is pointed to
    return axes


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# --- Attention --------------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_mean: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    is_causal: bool,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor]:
    """As :func:`sagebwd.kernels.forward.forward`."""
    queries = packets.query_packets(q, q_axis)
    keys = packets.key_value_packets(k, v, kv_axis, k_mean if config.smooth_k else None)
    out = _result_like(q, q_axis)
    lse = q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    if q_axis.segments is not None:
        lse.fill_(float("-inf"))
    axes = _axes("forward", q, k, q_axis, kv_axis)
    arguments = _Forward(
        queries.data_ptr(), keys.data_ptr(), TokenTensor.of(out), lse.data_ptr(), axes, scale
    )
    _launch("forward", q, is_causal, axes.items, arguments)
    return _laid_out_as(out, q), lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    is_causal: bool,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`sagebwd.kernels.backward.backward`."""
    k_rows = packets.key_packets(k, v, kv_axis, k_mean if config.smooth_k else None)
    q_rows, q_columns = packets.query_gradient_packets(q, grad_out, out, lse, q_axis)
    dq, dk, dv = _result_like(q, q_axis), _result_like(k, kv_axis), _result_like(v, kv_axis)
    items = k.shape[0] * k.shape[1] * kv_axis.blocks
    arguments = _DkDv(
        q_rows.data_ptr(), q_columns.data_ptr(), k_rows.data_ptr(), TokenTensor.of(dk), TokenTensor.of(dv),
        Segments.of(q_axis.segments), Segments.of(kv_axis.segments), q_axis.n, kv_axis.n, q.shape[3],
        k.shape[1], q.shape[1] // k.shape[1], q_axis.blocks, kv_axis.blocks, items, scale,
    )  # fmt: skip
    _launch("dk_dv", q, is_causal, items, arguments)

    del q_columns  # its memory is free again before the next packets are made
    k_columns = packets.key_columns(k_rows, kv_axis, padded_head_dim(k.shape[3]))
    axes = _axes("dq", q, k, q_axis, kv_axis)
    arguments = _Dq(
        q_rows.data_ptr(), k_rows.data_ptr(), k_columns.data_ptr(), TokenTensor.of(dq), axes, scale
    )
    _launch("dq", q, is_causal, axes.items, arguments)
    return _laid_out_as(dq, q), _laid_out_as(dk, k), _laid_out_as(dv, v)


def _result_like(x: Tensor, axis: Axis) -> Tensor:
    """A tensor for the kernels to fill: as x, but with neighbouring channels next to each other.

    Tokens that belong to no document are not visited: zero.
    """
    result = torch.empty_like(x)
    if result.stride(-1) != 1:
        result = x.new_empty(x.shape)
    return result if axis.segments is None else result.zero_()


def _laid_out_as(result: Tensor, x: Tensor) -> Tensor:
    like = torch.empty_like(x)
    return result if like.stride() == result.stride() else like.copy_(result)
