"""Algorithm 1 of SageBwd (arXiv 2603.02170): out and the logsumexp, a tile of queries per CTA."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sagebwd.interface import AttentionParams, ForwardResult, nothing_packed
from sagebwd.kernels.layout import Axes, padded_head_dim
from sagebwd.kernels.triton import device
from sagebwd.kernels.triton.compiler import kernel
from sagebwd.kernels.triton.launch import launch_options, window_arguments, with_the_fix
from sagebwd.kernels.triton.operands import PackedOperand, TokenTensor
from sagebwd.kernels.triton.quantize import k_mean_of, quantize, token_mean


@kernel
def _forward_kernel(
    q, k, v, k_tokens, v_tokens, out, out_residual, lse, q_segments, kv_segments,
    n_q, n_kv, d, heads, group, q_blocks, kv_blocks, documents, scale, left, right,
    IS_CAUSAL: tl.constexpr, S_INT8: tl.constexpr, O_INT8: tl.constexpr, SMOOTH_Q: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, COMPENSATE_O: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    OWN: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """OWN queries of one head against all keys they see."""
    PARTS: tl.constexpr = BLOCK_Q // OWN
    UNSIGNED_P: tl.constexpr = v.sums is not None
    P_MAX: tl.constexpr = device.UINT8_MAX if UNSIGNED_P else device.INT8_MAX
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
    v_pointer = device.head_pointer(v_tokens, kv_head, heads // group, kv_start)
    k_pointer = device.head_pointer(k_tokens, kv_head, heads // group, kv_start)
    scale *= device.LOG2_E

    q_values = device.load_rows(q, q_tile, row, S_INT8, OWN, BLOCK_Q, D_PAD)
    if S_INT8:
        q_scale = device.load_scale(q, q_tile, row, OWN, BLOCK_Q, TOKEN_SCALES) * scale
    queries = first + tl.arange(0, OWN)
    acc = tl.zeros((OWN, D_PAD), tl.float32)
    l = tl.zeros((OWN,), tl.float32)
    m = tl.full((OWN,), float("-inf"), tl.float32)

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
                factor = scale
            s = device.logits(q_values, tl.trans(k_values), factor)
            if SMOOTH_Q:
                bias = device.mean_logits(
                    q, q_tile, k, kv_head * documents + document, k_tokens, k_pointer,
                    j * BLOCK_KV, n_kv, d, BLOCK_KV, D_PAD
                )  # fmt: skip
                s += (bias * scale)[None, :]
            if phase != device.WHOLE:
                keys = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
                exists = (keys < n_kv)[None, :]
                visible = device.visible(queries[:, None], keys[None, :], exists, left, right)
                s = tl.where(visible, s, float("-inf"))
            else:
                visible = None

            m_tile = tl.max(s, 1)
            m_new = tl.maximum(m, m_tile)
            shift = m_new
            if left is not None and phase != device.WHOLE:
                # Before a query has keys, its maximum is −inf.
                last = tl.minimum(j * BLOCK_KV + BLOCK_KV, n_kv) - 1
                shift = tl.where(queries - left > last, 0.0, m_new)
            rescale = tl.exp2(m - shift)
            if O_INT8 and not TOKEN_SCALES:
                # P̃ scaled by the maximum of its row in this tile, which the softmax needs anyway.
                share = tl.exp2(m_tile - shift)
                m_tile = tl.where(m_tile == float("-inf"), 0.0, m_tile)
                p = tl.exp2(s - m_tile[:, None])
                v_values = device.load_columns(v, kv_tile + j, True, BLOCK_KV, D_PAD)
                v_scale = device.load_scale(v, kv_tile + j, 0, BLOCK_KV, BLOCK_KV, False)
                v_sums = device.load_sums(v, kv_tile + j, D_PAD) if UNSIGNED_P else None
                l = l * rescale + tl.sum(p, 1) * share
                product = device.dot_columns(device.round_to_int8(p * P_MAX, UNSIGNED_P), v_values, v_sums)
                acc = acc * rescale[:, None] + product * (share * (v_scale / P_MAX))[:, None]
            else:
                p = tl.exp2(s - shift[:, None])
                if not COMPENSATE_O:
                    l = l * rescale + tl.sum(p, 1)
                if O_INT8:
                    v_values = device.load_columns(v, kv_tile + j, True, BLOCK_KV, D_PAD)
                    v_sums = device.load_sums(v, kv_tile + j, D_PAD) if UNSIGNED_P else None
                    v_scale = device.load_scale(v, kv_tile + j, 0, BLOCK_KV, BLOCK_KV, True)
                    product = device.contract_tokens(p, v_values, v_sums, v_scale, visible, False, True)
                else:
                    v_values = device.load_tokens(v_tokens, v_pointer, j * BLOCK_KV, n_kv, d, BLOCK_KV, D_PAD)
                    p_rounded = device.round_to(p, v_values.dtype)
                    if COMPENSATE_O:
                        l = l * rescale + tl.sum(p_rounded.to(tl.float32), 1)
                    product = device.dot(p_rounded, v_values)
                acc = acc * rescale[:, None] + product
            m = m_new

    # A document without keys: l = 0 and acc = 0 give out = 0, as the mean of no values is 0.
    result = acc / tl.where(l == 0, 1.0, l)[:, None]
    if v.mean is not None:
        v_mean = (kv_head * documents + document).to(tl.int64)
        result += tl.load(v.mean + v_mean * D_PAD + tl.arange(0, D_PAD))[None, :]
    if left is not None:  # a query without keys: not even the mean of the values is its own
        result = tl.where((queries - left < n_kv)[:, None], result, 0.0)
    rows = head.to(tl.int64) * total + q_start + queries
    tl.store(lse + rows, m + tl.log2(l), mask=queries < n_q)
    out_pointer = device.head_pointer(out, head, heads, q_start)
    device.store_tokens(out, out_pointer, first, n_q, d, result, OWN, D_PAD)
    if COMPENSATE_O:
        residual_pointer = device.head_pointer(out_residual, head, heads, q_start)
        residual = result - device.round_to(result, out.data.dtype.element_ty).to(tl.float32)
        device.store_tokens(out_residual, residual_pointer, first, n_q, d, residual, OWN, D_PAD)


@with_the_fix
def forward(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> ForwardResult:
    """Algorithm 1."""
    config, (q_axis, kv_axis) = params.config, Axes.of(q, k, params)
    token_scales = config.operand_scales == "token"
    k_mean = k_mean_of(k, kv_axis, config)
    s_int8, o_int8 = config.is_int8("s_fwd"), config.is_int8("o")
    forms = {"rows": s_int8, "rounded": not s_int8, "token_scales": token_scales}
    q_operand = quantize(q, q_axis, own_mean=config.smooth_q, **forms)
    k_operand = quantize(k, kv_axis, mean=k_mean if config.smooths_k else None, **forms)
    v_operand = PackedOperand()
    if o_int8:
        v_mean = token_mean(v, kv_axis) if config.smooth_v else None
        forms = {"columns": True, "sums": config.is_unsigned("o"), "token_scales": token_scales}
        v_operand = quantize(v, kv_axis, mean=v_mean, **forms)
    out = torch.empty_like(q)
    out_residual = torch.empty_like(q) if config.compensate_o else q.new_empty(0)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if q_axis.segments is not None:  # tokens that belong to no document are not visited
        out.zero_()
        out_residual.zero_()
        lse.fill_(float("-inf"))
    own, options = launch_options("forward", q, config)
    _forward_kernel[(q.shape[0] * q.shape[1] * q_axis.blocks * (q_axis.block // own),)](
        q_operand, k_operand, v_operand, TokenTensor.of(k), TokenTensor.of(v), TokenTensor.of(out),
        TokenTensor.of(out_residual if config.compensate_o else out), lse, q_axis.segments, kv_axis.segments,
        q_axis.n, kv_axis.n, q.shape[3], q.shape[1], q.shape[1] // k.shape[1],
        q_axis.blocks, kv_axis.blocks, q_axis.documents, params.scale, **window_arguments(params.window),
        S_INT8=s_int8, O_INT8=o_int8, SMOOTH_Q=config.smooth_q,
        TOKEN_SCALES=token_scales, COMPENSATE_O=config.compensate_o, BLOCK_Q=q_axis.block,
        BLOCK_KV=kv_axis.block, OWN=own, D_PAD=padded_head_dim(q.shape[3]), **options,
    )  # fmt: skip
    return ForwardResult(out, lse, k_mean, out_residual, *nothing_packed(q))
