// What the backward kernels share: their arguments, the order of their work, and dQ.
#pragma once

#include "copies.cuh"
#include "int8.cuh"
#include "products.cuh"
#include "scheduler.cuh"
#include "turns.cuh"
#include "window.cuh"

struct Arguments {
    const u8 *packed_q, *packed_grad, *packed_q_columns, *packed_k;
    TokenTensor v, grad;
    TokenTensor dq, dk, dv;
    float* dq_sums;  // of each packed block of queries, as this kernel's threads hold them
    int* turns;      // of each packed block of queries: the block of keys that is to add next; zero at the start
    Axes axes;       // work tiles and `heads` are those of keys
    float scale;
};

// What a warp needs of dS of a tile for its part of dQ: its queries, all keys.
struct LeftOfDq {
    u32 ds[BLOCK_KV / 8];
    float factor[2];  // scales per row, times that of K
};

// `ds_tile`: (queries, keys), see store_ds; `largest`: of each query or of the tile.
template <bool IS_SCALE_OF_TILE = false>
__device__ __forceinline__ LeftOfDq load_left_of_dq(u32 ds_tile, const int* largest, float k_scale, int pass = 0) {
    LeftOfDq left;
    const int row = dq_row(pass), lane_row = row + threadIdx.x % 32 / 4;
    const u32 ds_address = left_address<BLOCK_KV>(ds_tile);
#pragma unroll
    for (int step = 0; step < BLOCK_KV / STEP; ++step)
        load_left<BLOCK_KV>(left.ds + 4 * step, ds_address, row, step * STEP);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        left.factor[r] = scale_of(__int_as_float(largest[IS_SCALE_OF_TILE ? 0 : lane_row + 8 * r]), INT8_MAX) * k_scale;
    return left;
}

// Waits until the CTA that owns the keys before has added to packed block `block` of queries, the first of which is `first_query`.
// One thread waits, of another warp than the one that passes turns; a barrier tells all others.
__device__ __forceinline__ void wait_for_turn(const Arguments& a, i64 block, int first_query, int turn, const Window& window) {
    const bool is_first = HAS_WINDOW && turn == first_key_block(window, first_query);
    if (threadIdx.x == THREADS - 32) wait_for_value(a.turns + block, is_first ? 0 : turn);
}

// Adds a tile's share to dQ of packed block `block` of queries of a head. Call it when it is this CTA's turn.
__device__ __forceinline__ void add_dq(const Arguments& a, const KeyTile& work, int head, i64 block, int first_query, int turn,
                                       const Window& window, const LeftOfDq& left, u32 k_columns, int pass = 0) {
    const bool is_first = turn == (HAS_WINDOW ? first_key_block(window, first_query) : 0);
    const bool is_last = turn + 1 >= visible_key_blocks(work, window, first_query);
#pragma unroll(DQ_PARTS <= 2 ? DQ_PARTS : 1)  // four would take registers from what stays
    for (int part = 0; part < DQ_PARTS; ++part) {
        float dq[DQ_VALUES] = {};
        contract_tokens<BLOCK_KV, DQ_CHANNELS>(dq, left.ds, k_columns + dq_channel(part) * BLOCK_KV, left.factor);
        float* sums = own_sums(a.dq_sums + block * (BLOCK_Q * D), pass, part);
        if (!is_last) {
            is_first ? begin_sum(sums, dq) : add_to_sum(sums, dq);
            continue;
        }
        if (!is_first) take_sum(dq, sums);
        store_dq(a.dq, dq, pass, part, a.scale, head, a.axes.heads * a.axes.group, first_query, work.q, a.axes.d);
    }
}

// The blocks of queries that a work tile visits, the last one first: under the causal mask all CTAs of a head then begin
// with the same one. One head of the group after the other.
struct QueryBlocks {
    int head, block, left;  // block: counted from the first that is visited; left: blocks to come, this one included

    __device__ __forceinline__ void advance(int blocks) {
        --left;
        if (--block < 0) block = blocks - 1, ++head;
    }
};

// The packed block of queries at `at`, counted over all heads.
__device__ __forceinline__ i64 packed_block(const Arguments& a, const KeyTile& work, const QueryBlocks& at) {
    return (i64(work.kv_head) * a.axes.group + at.head) * a.axes.q_blocks + work.q_block + at.block;
}

// dO of the first query of a work tile's document, in the first head of its group.
__device__ __forceinline__ const u16* first_grad(const Arguments& a, const KeyTile& work) {
    return token_of(a.grad, work.kv_head * a.axes.group, a.axes.heads * a.axes.group, work.q.start);
}

// Copies Q by rows, dO and its statistics of the block of queries at `at`, Q_AND_GRAD_BYTES, one behind the other. `grad`: first_grad.
template <int COPIERS>
__device__ __forceinline__ void copy_q_and_grad(u32 shared, const Arguments& a, const KeyTile& work, const QueryBlocks& at,
                                                const u16* grad, int thread = threadIdx.x) {
    const i64 block = packed_block(a, work, at);
    const int first_query = work.first_query + at.block * BLOCK_Q;
    copy_block<COPIERS, Q_TILE>(shared, a.packed_q + block * PACKED_Q_BYTES, thread);
    grad += at.head * a.grad.stride_h + first_query * a.grad.stride_n;
    if (!DP_IS_FP16)
        copy_tokens<COPIERS, BLOCK_Q>(shared + Q_TILE, grad, a.grad.stride_n, work.q.tokens - first_query, a.axes.d, thread);
    copy_block<COPIERS, PACKED_GRAD_BYTES>(shared + Q_TILE + (DP_IS_FP16 ? 0 : 2 * Q_TILE),
                                           a.packed_grad + block * PACKED_GRAD_BYTES, thread);
}

// Copies V of the keys of a work tile.
__device__ __forceinline__ void copy_values(u32 shared, const Arguments& a, const KeyTile& work) {
    const u16* v = token_of(a.v, work.kv_head, a.axes.heads, work.kv.start + work.first);
    copy_tokens<THREADS, BLOCK_KV>(shared, v, a.v.stride_n, work.kv.tokens - work.first, a.axes.d);
}

// For dP in fp16: V in shared memory becomes fp16, divided by a power of two for the whole tile, which is returned. All threads
// of the CTA call it; a barrier must come before. One comes after: warps whose keys no query sees store results there at once.
__device__ __forceinline__ float convert_values(u8* values) {
    if constexpr (!DP_IS_FP16) return 1.0f;
    __shared__ int largest_of_warps[WARPS];
    u32* pairs = reinterpret_cast<u32*>(values);
    int largest = 0;  // bits: magnitudes are ordered as their bits are, infinity and NaN at the top
    for (int i = threadIdx.x; i < K_TILE / 2; i += THREADS)
        for (int shift = 0; shift < 32; shift += 16)
            largest = max(largest, __float_as_int(to_float(pairs[i] >> shift & 0xffff)) & 0x7fffffff);
    largest = __reduce_max_sync(0xffffffff, largest);
    if (threadIdx.x % 32 == 0) largest_of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) largest = max(largest, largest_of_warps[i]);
    const float scale = power_of_two(__int_as_float(largest)), inverse = inverse_of_power(scale);
    for (int i = threadIdx.x; i < K_TILE / 2; i += THREADS)
        pairs[i] = pack_fp16(to_float(pairs[i] & 0xffff) * inverse, to_float(pairs[i] >> 16) * inverse);
    __syncthreads();
    return scale;
}

// K by columns from K by rows, both in shared memory. All threads of the CTA call it; a barrier must follow.
__device__ __forceinline__ void transpose_keys(u8* columns, const u8* rows) {
    constexpr int GROUPS = D / 8;  // of 8 channels
    for (int i = threadIdx.x; i < BLOCK_KV / 4 * GROUPS; i += THREADS) {
        const int quad = i / GROUPS, channel = i % GROUPS * 8;
        uint2 tokens[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            tokens[k] = *reinterpret_cast<const uint2*>(rows + swizzled<D>(token_at(quad, k) * D + channel));
        u32 words[8];
        transpose_tokens(words, tokens);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            *reinterpret_cast<u32*>(columns + swizzled<BLOCK_KV>((channel + e) * BLOCK_KV + 4 * quad)) = words[e];
    }
}
