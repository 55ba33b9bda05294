// dQ, to which CTAs that own different keys add. They take turns, in the order of their keys, so that the sum is always the
// same. A CTA waits only for CTAs that took an earlier work tile: those run already, so none waits for ever.
#pragma once

#include "layout.cuh"
#include "nonfinite.cuh"
#include "ptx_sm80.cuh"
#include "scheduler.cuh"
#include "window.cuh"

// The next work tile, in shared memory, where it costs no registers. All threads of the CTA call it. False: it has no keys.
template <int HALF_BLOCKS>
__device__ __forceinline__ bool take_work_tile(const Axes& axes, const Window& window, KeyTile& tile) {
    __shared__ bool has_keys;
    if (threadIdx.x == 0) has_keys = find_key_tile<HALF_BLOCKS>(axes, work_tile_at(axes, atomicAdd(axes.tile_counter, 1)), tile);
    if constexpr (HAS_WINDOW) {
        if (threadIdx.x == 0) leave_queries_that_see<HALF_BLOCKS * BLOCK_KV / 2>(tile, window);
    }
    __syncthreads();
    return has_keys;
}

// A block of dQ is divided among 8 warps, or, of 12, among the last four: 16 queries each and a part of the channels. Four have
// 64 queries at a time, so they pass twice through a block of 128. A warp computes DQ_CHANNELS at a time, because registers are
// scarce.
constexpr int THREADS = LAUNCH_THREADS, WARPS = THREADS / 32;
constexpr int DQ_WARPS = WARPS == 12 ? 4 : WARPS, DQ_THREADS = 32 * DQ_WARPS;
constexpr int DQ_ROW_WARPS = BLOCK_Q / 16 < DQ_WARPS ? BLOCK_Q / 16 : DQ_WARPS;
constexpr int DQ_QUERIES = 16 * DQ_ROW_WARPS, DQ_PASSES = BLOCK_Q / DQ_QUERIES, DQ_WARP_CHANNELS = D * DQ_ROW_WARPS / DQ_WARPS;
constexpr int DQ_CHANNELS = 32, DQ_PARTS = DQ_WARP_CHANNELS / DQ_CHANNELS, DQ_VALUES = 16 * DQ_CHANNELS / 32;
__device__ __forceinline__ int dq_thread() { return threadIdx.x - (THREADS - DQ_THREADS); }
__device__ __forceinline__ int dq_row(int pass) { return pass * DQ_QUERIES + threadIdx.x / 32 % DQ_ROW_WARPS * 16; }
__device__ __forceinline__ int dq_channel(int part) {
    return dq_thread() / (32 * DQ_ROW_WARPS) * DQ_WARP_CHANNELS + part * DQ_CHANNELS;
}

// One thread lets the next CTA add. Call it after a barrier that follows this CTA's addition.
__device__ __forceinline__ void pass_turn(int* turn, int value) {
    if (turn != nullptr && dq_thread() == 0) release_value(turn, value + 1);
}

// The last block of keys + 1 that a block of queries sees.
__device__ __forceinline__ int visible_key_blocks(const KeyTile& tile, const Window& window, int first_query) {
    if constexpr (HAS_WINDOW) {
        const int end = min(first_query + BLOCK_Q, tile.q.tokens);
        return end_of_key_blocks(window, end, tile.kv.tokens);
    }
    const int end = BLOCK_Q > BLOCK_KV ? min(first_query + BLOCK_Q, tile.q.tokens) : first_query + BLOCK_Q;
    const int keys = IS_CAUSAL ? min(tile.kv.tokens, end) : tile.kv.tokens;
    return (keys + BLOCK_KV - 1) / BLOCK_KV;
}

// --- The sum of all CTAs -----------------------------------------------------------------------------------

// Where a thread keeps its values of a block of queries. They are DQ_THREADS apart: those of a warp are contiguous.
__device__ __forceinline__ float* own_sums(float* block, int pass, int part) {
    return block + (pass * DQ_PARTS + part) * DQ_VALUES * DQ_THREADS + dq_thread();
}

__device__ __forceinline__ void begin_sum(float* sums, const float (&dq)[DQ_VALUES]) {
#pragma unroll
    for (int i = 0; i < DQ_VALUES; ++i) store_to_l2(sums + DQ_THREADS * i, dq[i]);
}

__device__ __forceinline__ void add_to_sum(float* sums, const float (&dq)[DQ_VALUES]) {
#pragma unroll
    for (int i = 0; i < DQ_VALUES; ++i) add_in_l2(sums + DQ_THREADS * i, dq[i]);
}

// What the last CTA does.
__device__ __forceinline__ void take_sum(float (&dq)[DQ_VALUES], const float* sums) {
#pragma unroll
    for (int i = 0; i < DQ_VALUES; ++i) dq[i] += load_from_l2(sums + DQ_THREADS * i);
}

// Stores a finished block, whose first query is `first`, to rows of a tensor.
__device__ __forceinline__ void store_dq(const TokenTensor& x, const float (&dq)[DQ_VALUES], int pass, int part, float scale,
                                         int head, int heads, int first, const Document& document, int d) {
    const int lane = threadIdx.x % 32;
    u16* base = x.data + head / heads * x.stride_b + head % heads * x.stride_h + document.start * x.stride_n;
#pragma unroll
    for (int i = 0; i < DQ_VALUES / 2; ++i) {
        const int token = first + dq_row(pass) + lane / 4 + i % 2 * 8, channel = dq_channel(part) + i / 2 * 8 + lane % 4 * 2;
        const float a = infinite_to_nan(dq[2 * i] * scale), b = infinite_to_nan(dq[2 * i + 1] * scale);
        if (token < document.tokens && channel < d)
            *reinterpret_cast<u32*>(base + token * x.stride_n + channel) = pack_16bit(a, b);
    }
}
