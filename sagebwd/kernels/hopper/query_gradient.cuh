// dQ. A warpgroup multiplies dS, which others store in shared memory, with the K of its CTA. CTAs that own other keys add to the
// same sums in fp32. They take turns, in the order of work tiles, so that the sum is always the same. A CTA waits only for CTAs
// that took an earlier work tile: those run already, so there is no deadlock.
#pragma once

#include "pipeline.cuh"
#include "products.cuh"
#include "scheduler.cuh"
#include "scores.cuh"

constexpr int DQ_CHANNELS = D == 64 ? 64 : 32;  // that are computed and added at a time
constexpr int DQ_CHUNK = BLOCK_Q * DQ_CHANNELS, DQ_CHUNKS = D / DQ_CHANNELS;

// --- The order of work -------------------------------------------------------------------------------------

// Whether the last keys come first, and every CTA begins with the first queries that see its keys. Under the causal mask CTAs
// then follow each other through the queries and hardly wait; but the CTA of the first keys has all the last turns, which
// write dQ. With several chunks this order was slower (docs/log.md). Otherwise the first keys come first, and all CTAs of a head
// begin with its last queries.
constexpr bool LAST_KEYS_FIRST = DQ_CHUNKS == 1;

// The block of queries with which a work tile begins, and the one that follows in turn, counted from the first one that sees
// its keys.
__device__ __forceinline__ int first_block(const KeyTile& tile) { return LAST_KEYS_FIRST ? 0 : tile.q_tiles - 1; }
__device__ __forceinline__ int next_block(const KeyTile& tile, int block) {
    if (LAST_KEYS_FIRST) return block + 1 < tile.q_tiles ? block + 1 : 0;
    return block > 0 ? block - 1 : tile.q_tiles - 1;
}

struct Turn {
    int number;    // from 0
    bool is_last;  // of its block
};

// The turn of a work tile at the block of queries from `first_query` on.
__device__ __forceinline__ Turn turn_of(const KeyTile& tile, const Window& window, int first_query) {
    const int keys = IS_CAUSAL ? min(tile.kv.tokens, first_query + BLOCK_Q) : tile.kv.tokens;
    int turns = (keys + KEYS - 1) / KEYS, before = tile.first / KEYS;
    if constexpr (HAS_WINDOW) {
        const int begin = first_key_block(window, first_query);
        turns = end_of_key_blocks(window, min(first_query + BLOCK_Q, tile.q.tokens), tile.kv.tokens) - begin;
        before -= begin;
    }
    const int number = LAST_KEYS_FIRST ? turns - 1 - before : before;
    return {number, number + 1 == turns};
}

// --- The product -------------------------------------------------------------------------------------------

// The share of all keys in dQ of a block of queries, DQ_CHANNELS of it from `channel` on. `ds` and `k`: see descriptor_base.
__device__ __forceinline__ void multiply_ds(float (&dq)[DQ_CHANNELS / 2], u32 ds, u32 k, int channel) {
    const u64 a = descriptor_mn_major<DS_BYTES>(ds);
    const u64 b = descriptor_mn_major<KEYS * 128>(k + channel / 64 * (KEYS * 128 / 16) + channel % 64 * 2 / 16);
    wgmma_fence();
    wgmma_16bit<0>(dq, a, b);
#pragma unroll
    for (int i = 1; i < KEYS / 16; ++i) wgmma_16bit<1>(dq, a + 128 * i, b + 128 * i);
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
}

// --- Sums over CTAs ----------------------------------------------------------------------------------------

// What the warpgroup hands to a thread that adds it to the sums: a product in shared memory.
struct DqChunk {
    float* sums;  // null: there is no other
    int* turns;   // how many CTAs have added to these channels of the block
    int turn;     // of this CTA
};

// One thread for each buffer in shared memory: adds what comes there. The first CTA of a block has no sum of others to add to.
__device__ __forceinline__ void add_chunks(u32 full, u32 empty, u32 shared, const DqChunk& next) {
    for (int parity = 0;; parity ^= 1) {
        barrier_wait(full, parity);
        const DqChunk chunk = next;
        if (chunk.sums == nullptr) return;
        if (chunk.turn > 0) {
            wait_for_value(chunk.turns, chunk.turn);
            fence_proxy_async_global();
            bulk_add(chunk.sums, shared, DQ_CHUNK * 4);
        } else {
            bulk_store(chunk.sums, shared, DQ_CHUNK * 4);
        }
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(empty);
        bulk_wait();
        fence_proxy_async_global();
        release_value(chunk.turns, chunk.turn + 1);
    }
}

// Stores a chunk so that add_to_own finds it, and hands it over.
template <int BUFFERS>
__device__ __forceinline__ void hand_over(const Ring<BUFFERS>& chunks, u8* buffers, DqChunk* next, const DqChunk& chunk,
                                          const float (&dq)[DQ_CHANNELS / 2], int thread) {
    chunks.wait_empty();
    float4* own = reinterpret_cast<float4*>(buffers) + chunks.index * (DQ_CHUNK / 4) + thread;
#pragma unroll
    for (int j = 0; j < DQ_CHANNELS / 8; ++j) own[128 * j] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
    if (thread == 0) next[chunks.index] = chunk;
    chunks.fill();
}

// Adds the sums of all other CTAs. The last CTA does this.
__device__ __forceinline__ void add_to_own(float (&dq)[DQ_CHANNELS / 2], const float* sums, int thread) {
    const float4* own = reinterpret_cast<const float4*>(sums) + thread;
#pragma unroll
    for (int j = 0; j < DQ_CHANNELS / 8; ++j) {
        const float4 sum = load_from_l2(own + 128 * j);
        dq[4 * j] += sum.x, dq[4 * j + 1] += sum.y, dq[4 * j + 2] += sum.z, dq[4 * j + 3] += sum.w;
    }
}
