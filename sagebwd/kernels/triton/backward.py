"""Algorithm 2 of SageBwd (arXiv 2603.02170) in two kernels: one owns keys (dK, dV), one owns queries (dQ).

Each gradient has one owner that sums in a fixed order: no atomics, and two runs give the same bits. The cost
is that both kernels compute S and dP. It saves the transposition of dS, which costs more.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels.layout import Axes, padded_head_dim
from sagebwd.kernels.triton import device
from sagebwd.kernels.triton.compiler import kernel
from sagebwd.kernels.triton.launch import launch_options, window_arguments, with_the_fix
from sagebwd.kernels.triton.operands import PackedOperand, TokenTensor
from sagebwd.kernels.triton.quantize import quantize, quantize_grad


@kernel
def _dk_dv_kernel(
    q, k, v, grad, k_tokens, v_tokens, grad_tokens, lse, delta, dk, dv, q_segments, kv_segments,
    n_q, n_kv, d, kv_heads, group, q_blocks, kv_blocks, documents, scale, left, right,
    IS_CAUSAL: tl.constexpr, S_INT8: tl.constexpr, DV_INT8: tl.constexpr, DP_INT8: tl.constexpr,
    DK_INT8: tl.constexpr, SMOOTH_Q: tl.constexpr, WHOLE_TILE: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, OWN: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """OWN keys of one key head against all queries that see them, for all query heads of its group.

    Tiles are transposed, (keys, queries): a scale per key is then one per row.
    """
    PARTS: tl.constexpr = BLOCK_KV // OWN
    cta = tl.program_id(0)
    kv_head = cta // (kv_blocks * PARTS)
    part = cta % (kv_blocks * PARTS)
    kv_tile, row = kv_head * kv_blocks + part // PARTS, part % PARTS * OWN
    total = n_q
    document, kv_start, n_kv, _, block = device.find_document(kv_segments, n_kv, part // PARTS)
    q_start, n_q, first_q_block = device.extent(q_segments, n_q, document)
    first = block * BLOCK_KV + row
    if first >= n_kv:
        return
    scale_log2 = scale * device.LOG2_E
    k_pointer = device.head_pointer(k_tokens, kv_head, kv_heads, kv_start)
    v_pointer = device.head_pointer(v_tokens, kv_head, kv_heads, kv_start)

    k_values = device.load_rows(k, kv_tile, row, S_INT8, OWN, BLOCK_KV, D_PAD)
    if S_INT8:
        k_scale = device.load_scale(k, kv_tile, row, OWN, BLOCK_KV, TOKEN_SCALES)
    if DP_INT8:
        v_values = device.load_rows(v, kv_tile, row, True, OWN, BLOCK_KV, D_PAD)
        v_scale = device.load_scale(v, kv_tile, row, OWN, BLOCK_KV, TOKEN_SCALES)
    else:
        v_values = device.load_tokens(v_tokens, v_pointer, first, n_kv, d, OWN, D_PAD)
    keys = first + tl.arange(0, OWN)
    dk_acc = tl.zeros((OWN, D_PAD), tl.float32)
    dv_acc = tl.zeros((OWN, D_PAD), tl.float32)

    if IS_CAUSAL:
        right = 0
    edges = device.query_tiles(first, n_q, n_kv, left, right, IS_CAUSAL, OWN, BLOCK_Q)
    for h in range(group):
        head = kv_head * group + h
        q_tile = head * q_blocks + first_q_block
        row_offset = head.to(tl.int64) * total + q_start
        grad_pointer = device.head_pointer(grad_tokens, head, kv_heads * group, q_start)
        for phase in tl.static_range(2 if left is None else 3):
            for i in range(edges[phase], edges[phase + 1]):
                queries = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
                q_values = device.load_rows(q, q_tile + i, 0, S_INT8, BLOCK_Q, BLOCK_Q, D_PAD)
                if S_INT8 or DK_INT8:
                    q_scale = device.load_scale(q, q_tile + i, 0, BLOCK_Q, BLOCK_Q, TOKEN_SCALES)
                if S_INT8:
                    factor = device.outer(k_scale, q_scale * scale_log2, TOKEN_SCALES)
                else:
                    factor = scale_log2
                s = device.logits(k_values, tl.trans(q_values), factor)
                if SMOOTH_Q:
                    bias = device.mean_logits(
                        q, q_tile + i, k, kv_head * documents + document, k_tokens, k_pointer,
                        first, n_kv, d, OWN, D_PAD
                    )  # fmt: skip
                    s += (bias * scale_log2)[:, None]
                row_lse = tl.load(lse + row_offset + queries, mask=queries < n_q, other=float("inf"))
                p = tl.exp2(s - row_lse[None, :])
                if phase != device.WHOLE:
                    exists = (keys < n_kv)[:, None]
                    visible = device.visible(queries[None, :], keys[:, None], exists, left, right)
                    p = tl.where(visible, p, 0.0)
                else:
                    visible = None

                if not (DV_INT8 and DP_INT8):
                    grad_values = device.load_tokens(
                        grad_tokens, grad_pointer, i * BLOCK_Q, n_q, d, BLOCK_Q, D_PAD
                    )
                if DV_INT8 or DP_INT8:
                    grad_scale = device.load_scale(grad, q_tile + i, 0, BLOCK_Q, BLOCK_Q, TOKEN_SCALES)
                if DV_INT8:
                    columns = device.load_columns(grad, q_tile + i, True, BLOCK_Q, D_PAD)
                    sums = device.load_sums(grad, q_tile + i, D_PAD) if grad.sums is not None else None
                    dv_acc += device.contract_tokens(
                        p, columns, sums, grad_scale, visible, WHOLE_TILE, TOKEN_SCALES
                    )
                else:
                    dv_acc += device.dot(device.round_to(p, grad_values.dtype), grad_values)

                if DP_INT8:
                    grad_rows = device.load_rows(grad, q_tile + i, 0, True, BLOCK_Q, BLOCK_Q, D_PAD)
                    dp_factor = device.outer(v_scale, grad_scale, TOKEN_SCALES)
                    dp = device.logits(v_values, tl.trans(grad_rows), dp_factor)
                else:
                    dp = device.dot(v_values, tl.trans(grad_values))
                row_delta = tl.load(delta + row_offset + queries, mask=queries < n_q, other=0.0)
                ds = p * (dp - row_delta[None, :])
                if TOKEN_SCALES and visible is not None:
                    ds = tl.where(visible, ds, 0.0)

                q_columns = device.load_columns(q, q_tile + i, DK_INT8, BLOCK_Q, D_PAD)
                if DK_INT8:
                    dk_acc += device.contract_tokens(
                        ds, q_columns, None, q_scale, visible, WHOLE_TILE, TOKEN_SCALES
                    )
                else:
                    dk_acc += device.dot(device.round_to(ds, q_columns.dtype), q_columns)
                if SMOOTH_Q:
                    q_mean = tl.load(q.mean + (q_tile + i).to(tl.int64) * D_PAD + tl.arange(0, D_PAD))
                    dk_acc += tl.sum(ds, 1)[:, None] * q_mean[None, :]

    dk_pointer = device.head_pointer(dk, kv_head, kv_heads, kv_start)
    dv_pointer = device.head_pointer(dv, kv_head, kv_heads, kv_start)
    device.store_tokens(dk, dk_pointer, first, n_kv, d, dk_acc * scale, OWN, D_PAD)
    device.store_tokens(dv, dv_pointer, first, n_kv, d, dv_acc, OWN, D_PAD)


@kernel
def _dq_kernel(
    q, k, v, grad, k_tokens, v_tokens, grad_tokens, lse, delta, dq, q_segments, kv_segments,
    n_q, n_kv, d, heads, group, q_blocks, kv_blocks, documents, scale, left, right,
    IS_CAUSAL: tl.constexpr, S_INT8: tl.constexpr, DP_INT8: tl.constexpr, DQ_INT8: tl.constexpr,
    SMOOTH_Q: tl.constexpr, WHOLE_TILE: tl.constexpr, TOKEN_SCALES: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr, OWN: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """OWN queries of one head against all keys they see."""
    PARTS: tl.constexpr = BLOCK_Q // OWN
    cta = tl.program_id(0)
    head = cta // (q_blocks * PARTS)
    # Under the causal mask the last queries have the most work: begin with them.
    part = q_blocks * PARTS - 1 - cta % (q_blocks * PARTS)
    q_tile, row = head * q_blocks + part // PARTS, part % PARTS * OWN
    total = n_q
    document, q_start, n_q, _, block = device.find_document(q_segments, n_q, part // PARTS)
    kv_start, n_kv, first_kv_block = device.extent(kv_segments, n_kv, document)
    first = block * BLOCK_Q + row
    if first >= n_q:
        return
    kv_head = head // group
    kv_tile = kv_head * kv_blocks + first_kv_block
    k_mean = (kv_head * documents + document).to(tl.int64)
    scale_log2 = scale * device.LOG2_E
    k_pointer = device.head_pointer(k_tokens, kv_head, heads // group, kv_start)
    v_pointer = device.head_pointer(v_tokens, kv_head, heads // group, kv_start)

    q_values = device.load_rows(q, q_tile, row, S_INT8, OWN, BLOCK_Q, D_PAD)
    if S_INT8:
        q_scale = device.load_scale(q, q_tile, row, OWN, BLOCK_Q, TOKEN_SCALES) * scale_log2
    if DP_INT8:
        grad_values = device.load_rows(grad, q_tile, row, True, OWN, BLOCK_Q, D_PAD)
        grad_scale = device.load_scale(grad, q_tile, row, OWN, BLOCK_Q, TOKEN_SCALES)
    else:
        grad_pointer = device.head_pointer(grad_tokens, head, heads, q_start)
        grad_values = device.load_tokens(grad_tokens, grad_pointer, first, n_q, d, OWN, D_PAD)
    queries = first + tl.arange(0, OWN)
    rows = head.to(tl.int64) * total + q_start + queries
    row_lse = tl.load(lse + rows, mask=queries < n_q, other=float("inf"))
    row_delta = tl.load(delta + rows, mask=queries < n_q, other=0.0)
    acc = tl.zeros((OWN, D_PAD), tl.float32)

    if IS_CAUSAL:
        right = 0
    edges, seen = device.key_tiles(first, n_kv, left, right, OWN, BLOCK_KV)
    for phase in tl.static_range(device.WHOLE if left is None else 0, 3):
        for j in range(edges[phase], tl.cdiv(seen, BLOCK_KV) if phase == 2 else edges[phase + 1]):
            k_values = device.load_rows(k, kv_tile + j, 0, S_INT8, BLOCK_KV, BLOCK_KV, D_PAD)
            if S_INT8:
                k_scale = device.load_scale(k, kv_tile + j, 0, BLOCK_KV, BLOCK_KV, TOKEN_SCALES)
                factor = device.outer(q_scale, k_scale, TOKEN_SCALES)
            else:
                factor = scale_log2
            s = device.logits(q_values, tl.trans(k_values), factor)
            if SMOOTH_Q:
                bias = device.mean_logits(
                    q, q_tile, k, k_mean, k_tokens, k_pointer, j * BLOCK_KV, n_kv, d, BLOCK_KV, D_PAD
                )
                s += (bias * scale_log2)[None, :]
            p = tl.exp2(s - row_lse[:, None])
            if phase != device.WHOLE:
                keys = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
                exists = (keys < n_kv)[None, :]
                visible = device.visible(queries[:, None], keys[None, :], exists, left, right)
                p = tl.where(visible, p, 0.0)
            else:
                visible = None

            if DP_INT8:
                v_values = device.load_rows(v, kv_tile + j, 0, True, BLOCK_KV, BLOCK_KV, D_PAD)
                v_scale = device.load_scale(v, kv_tile + j, 0, BLOCK_KV, BLOCK_KV, TOKEN_SCALES)
                dp_factor = device.outer(grad_scale, v_scale, TOKEN_SCALES)
                dp = device.logits(grad_values, tl.trans(v_values), dp_factor)
            else:
                v_values = device.load_tokens(v_tokens, v_pointer, j * BLOCK_KV, n_kv, d, BLOCK_KV, D_PAD)
                dp = device.dot(grad_values, tl.trans(v_values))
            ds = p * (dp - row_delta[:, None])
            if TOKEN_SCALES and visible is not None:
                ds = tl.where(visible, ds, 0.0)

            k_columns = device.load_columns(k, kv_tile + j, DQ_INT8, BLOCK_KV, D_PAD)
            if DQ_INT8:
                column_scale = device.load_scale(k, kv_tile + j, 0, BLOCK_KV, BLOCK_KV, TOKEN_SCALES)
                acc += device.contract_tokens(
                    ds, k_columns, None, column_scale, visible, WHOLE_TILE, TOKEN_SCALES
                )
            else:
                acc += device.dot(device.round_to(ds, k_columns.dtype), k_columns)

    dq_pointer = device.head_pointer(dq, head, heads, q_start)
    device.store_tokens(dq, dq_pointer, first, n_q, d, acc * scale, OWN, D_PAD)


@with_the_fix
def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: ForwardResult,
    params: AttentionParams,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2."""
    config, (q_axis, kv_axis) = params.config, Axes.of(q, k, params)
    token_scales = config.operand_scales == "token"
    int8 = {name: config.is_int8(name) for name in ("s_bwd", "dv", "dp", "dq", "dk")}
    q_operand = quantize(
        q, q_axis, own_mean=config.smooth_q, token_scales=token_scales,
        rows=int8["s_bwd"], columns=int8["dk"], rounded=not (int8["s_bwd"] and int8["dk"]),
    )  # fmt: skip
    k_operand = quantize(
        k, kv_axis, mean=saved.k_mean if config.smooths_k else None, token_scales=token_scales,
        rows=int8["s_bwd"], columns=int8["dq"], rounded=not (int8["s_bwd"] and int8["dq"]),
    )  # fmt: skip
    v_operand = PackedOperand()  # none: dP takes V as it is
    if int8["dp"]:
        v_operand = quantize(v, kv_axis, rows=True, token_scales=token_scales)
    grad_operand, delta = quantize_grad(
        grad_out, saved.out, q_axis,
        out_residual=saved.out_residual if config.compensate_o else None, grad_lse=grad_lse,
        rows=int8["dp"], columns=int8["dv"], sums=config.is_unsigned("dv"), token_scales=token_scales,
    )  # fmt: skip
    # Tokens that belong to no document are not visited.
    empty = torch.empty_like if q_axis.segments is None else torch.zeros_like
    dq, dk, dv = empty(q), empty(k), empty(v)
    tensors = (
        q_operand, k_operand, v_operand, grad_operand,
        TokenTensor.of(k), TokenTensor.of(v), TokenTensor.of(grad_out), saved.lse, delta,
    )  # fmt: skip
    group = q.shape[1] // k.shape[1]
    sizes = (q_axis.n, kv_axis.n, q.shape[3])
    blocks = (q_axis.blocks, kv_axis.blocks, kv_axis.documents, params.scale)
    shared = {
        **window_arguments(params.window),
        "S_INT8": int8["s_bwd"],
        "DP_INT8": int8["dp"],
        "SMOOTH_Q": config.smooth_q,
        "WHOLE_TILE": config.granularity == "block",
        "TOKEN_SCALES": token_scales,
        "BLOCK_Q": q_axis.block,
        "BLOCK_KV": kv_axis.block,
        "D_PAD": padded_head_dim(q.shape[3]),
    }

    own, options = launch_options("dk_dv", q, config)
    _dk_dv_kernel[(k.shape[0] * k.shape[1] * kv_axis.blocks * (kv_axis.block // own),)](
        *tensors, TokenTensor.of(dk), TokenTensor.of(dv), q_axis.segments, kv_axis.segments,
        *sizes, k.shape[1], group, *blocks,
        DV_INT8=int8["dv"], DK_INT8=int8["dk"], OWN=own, **shared, **options,
    )  # fmt: skip
    own, options = launch_options("dq", q, config)
    _dq_kernel[(q.shape[0] * q.shape[1] * q_axis.blocks * (q_axis.block // own),)](
        *tensors, TokenTensor.of(dq), q_axis.segments, kv_axis.segments,
        *sizes, q.shape[1], group, *blocks,
        DQ_INT8=int8["dq"], OWN=own, **shared, **options,
    )  # fmt: skip
    return dq, dk, dv
