"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) on Hopper: packets, then forward.cu or dk_dv.cu, dq.cu.

The same arithmetic as the portable kernels, for head sizes above 32 up to 128 and the default settings, of
which ``smooth_k``, ``smooth_v`` and ``unsigned_p`` may be set either way; O and dV may take P in 16 bit
(P_HALF in the sources), and such an O may be compensated (COMPENSATE_O).
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.kernels.hopper import packets, runtime
from sagebwd.kernels.hopper.runtime import Segments, TokenTensor
from sagebwd.kernels.layout import Axis, empty_result, padded_head_dim

# --- What kernels take: struct Arguments of each source ---------------------------------------------------


class _Axes(ctypes.Structure):
    _fields_ = [
        ("own", Segments),
        ("q", Segments),
        ("kv", Segments),
        ("taken", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("n_q", "n_kv", "d", "heads", "group")),
        *((name, ctypes.c_int) for name in ("own_heads", "own_blocks", "q_blocks", "kv_blocks")),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("out", TokenTensor),
        ("rest", TokenTensor),
        ("lse", ctypes.c_void_p),
        ("axes", _Axes),
        ("scale", ctypes.c_float),
        ("documents", ctypes.c_int),
        ("v_mean", ctypes.c_void_p),
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
        ("axes", _Axes),
        ("scale", ctypes.c_float),
    ]


class Launch(NamedTuple):
    """warpgroups: those that compute, 64 tokens of an item each; shared_bytes: dynamic shared memory."""

    warpgroups: int
    shared_bytes: int

    @property
    def own(self) -> int:
        """Tokens of an item."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a program: one warpgroup more copies."""
        return 128 * (self.warpgroups + 1)


#: By kernel, padded head size and whether P_HALF is defined; the sources check them.
LAUNCHES = {
    ("forward", 64, False): Launch(3, 147_456),
    ("forward", 64, True): Launch(3, 196_608),
    ("forward", 128, False): Launch(2, 188_416),
    ("forward", 128, True): Launch(2, 203_776),
    ("dk_dv", 64, False): Launch(3, 196_608),
    ("dk_dv", 64, True): Launch(3, 172_032),
    ("dk_dv", 128, False): Launch(2, 211_968),
    ("dk_dv", 128, True): Launch(2, 221_184),
    ("dq", 64, False): Launch(2, 180_224),
    ("dq", 128, False): Launch(2, 219_136),
}


def _launch(
    name: str,
    like: Tensor,
    is_causal: bool,
    arguments: _Forward | _Dq | _DkDv,
    *,
    p_half: bool = False,
    **defines: bool,
) -> None:
    """Run kernel ``name`` on as many programs as the GPU holds; they share the items.

    p_half, defines: macros that only this kernel knows.
    """
    head_dim = padded_head_dim(like.shape[-1])
    launch = LAUNCHES[name, head_dim, p_half]
    kernel = runtime.kernel(
        name,
        f"{name}_kernel",
        launch.shared_bytes,
        HEAD_DIM=head_dim,
        IS_CAUSAL=int(is_causal),
        IS_BF16=like.dtype == torch.bfloat16,
        LAUNCH_THREADS=launch.threads,
        LAUNCH_BYTES=launch.shared_bytes,
        P_HALF=p_half,
        **defines,
    )
    items = arguments.axes.own_heads * arguments.axes.own_blocks
    kernel.launch(min(items, _multiprocessors(like.device.index)), launch.threads, arguments)


def _axes(
    name: str, own: Tensor, q_axis: Axis, kv_axis: Axis, *, own_axis: Axis, group: int, taken: int
) -> _Axes:
    """The items of kernel ``name``: blocks of ``own_axis`` in each head of ``own``, which is q or k.

    taken: address of a zero, int32.
    """
    own_axis = own_axis.with_block(LAUNCHES[name, padded_head_dim(own.shape[3]), False].own)
    axes = _Axes(
        Segments.of(own_axis.segments), Segments.of(q_axis.segments), Segments.of(kv_axis.segments),
        taken, q_axis.n, kv_axis.n, own.shape[3], own.shape[1], group,
        own.shape[0] * own.shape[1], own_axis.blocks, q_axis.blocks, kv_axis.blocks,
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
    q_axis: Axis,
    kv_axis: Axis,
    *,
    is_causal: bool,
    scale: float,
    config: SageConfig,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`sagebwd.kernels.triton.forward.forward`; last, with ``keep``, the backward's packets of K, V.

    Without ``keep`` the last is empty, and the backward makes them.
    """
    if config.smooth_k:
        k_mean = packets.token_mean(k, kv_axis)
    else:
        k_mean = k.new_empty((k.shape[0] * k.shape[1] * kv_axis.documents, 0), dtype=torch.float32)
    v_mean = packets.token_mean(v, kv_axis) if config.smooth_v else None
    queries = packets.query_packets(q, q_axis)
    p_half = not config.is_int8("o")
    subtracted = k_mean if config.smooth_k else None
    if p_half:
        keys = kept = packets.key_packets(k, v, kv_axis, subtracted)
    else:
        keys, kept = packets.key_value_packets(k, v, kv_axis, subtracted, v_mean, keep=keep)
    out = _Result(q, q_axis)
    rest = _Result(q, q_axis) if config.compensate_o else None
    lse = q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    if q_axis.segments is not None:
        lse.fill_(float("-inf"))
    group, taken = q.shape[1] // k.shape[1], q.new_zeros(1, dtype=torch.int32)
    axes = _axes("forward", q, q_axis, kv_axis, own_axis=q_axis, group=group, taken=taken.data_ptr())
    arguments = _Forward(
        queries.data_ptr(), keys.data_ptr(), out.target, (rest or out).target, lse.data_ptr(), axes, scale,
        kv_axis.documents, None if v_mean is None else v_mean.data_ptr(),
    )  # fmt: skip
    defines = {
        "SMOOTH_V": config.smooth_v,
        "UNSIGNED_P": config.is_unsigned("o"),
        "COMPENSATE_O": config.compensate_o,
    }
    _launch("forward", q, is_causal, arguments, p_half=p_half, **defines)
    rest = q.new_empty(0) if rest is None else rest.finish()
    return out.finish(), lse, k_mean, rest, kept if keep else k.new_empty(0, dtype=torch.uint8)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_mean: Tensor,
    rest: Tensor,
    kept: Tensor,
    q_axis: Axis,
    kv_axis: Axis,
    *,
    is_causal: bool,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`sagebwd.kernels.triton.backward.backward`; with ``kept``, k and v may be stand-ins."""
    k_rows = kept
    if not kept.numel():
        k_rows = packets.key_packets(k, v, kv_axis, k_mean if config.smooth_k else None)
    p_half = not config.is_int8("dv")
    q_rows, q_columns = packets.query_gradient_packets(
        q, grad_out, out, lse, q_axis, rest=rest if config.compensate_o else None, p_half=p_half
    )
    dq, dk, dv = _Result(q, q_axis), _Result(k, kv_axis), _Result(v, kv_axis)
    group, taken = q.shape[1] // k.shape[1], q.new_zeros(2, dtype=torch.int32)
    axes = _axes("dk_dv", k, q_axis, kv_axis, own_axis=kv_axis, group=group, taken=taken.data_ptr())
    arguments = _DkDv(
        q_rows.data_ptr(), q_columns.data_ptr(), k_rows.data_ptr(), dk.target, dv.target,
        axes, scale,
    )  # fmt: skip
    _launch("dk_dv", q, is_causal, arguments, p_half=p_half, UNSIGNED_P=config.is_unsigned("dv"))

    del q_columns  # its memory is free again before the next packets are made
    k_columns = packets.key_columns(k_rows, k, kv_axis)
    axes = _axes("dq", q, q_axis, kv_axis, own_axis=q_axis, group=group, taken=taken.data_ptr() + 4)
    arguments = _Dq(q_rows.data_ptr(), k_rows.data_ptr(), k_columns.data_ptr(), dq.target, axes, scale)
    _launch("dq", q, is_causal, arguments)
    return dq.finish(), dk.finish(), dv.finish()


class _Result:
    """A tensor for kernels to fill, laid out as ``x``, or token by token if x is a stand-in.

    Kernels write neighbouring channels next to each other; where x has another layout they fill a buffer.
    Tokens that belong to no document are not visited: zero.
    """

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self._result = empty_result(x)
        self._buffer = self._result if self._result.stride(-1) == 1 else x.new_empty(x.shape)
        if axis.segments is not None:
            self._buffer.zero_()
        self.target = TokenTensor.of(self._buffer)

    def finish(self) -> Tensor:
        """The tensor, after the kernels that fill it were launched."""
        if self._buffer is not self._result:
            self._result.copy_(self._buffer)
        return self._result
