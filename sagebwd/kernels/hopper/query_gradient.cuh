// dQ. A warpgroup multiplies dS, which others store in shared memory, with the K of its CTA. Helper threads add the products to
// fp32 sums in the L2 cache, to which CTAs that own other keys add, too. CTAs take turns, in the order of work tiles, so that the
// sum is always the same. A CTA waits only for CTAs that took an earlier work tile: those run already, so there is no deadlock.
// finish_dq.cu makes dQ of the sums.
#pragma once

#include "pipeline.cuh"
#include "products.cuh"
#include "scheduler.cuh"
#include "scores.cuh"

// A chunk: the channels and queries that are computed and added at a time. Half of the queries where registers are scarce.
constexpr int DQ_CHANNELS = 64, DQ_QUERIES = D == 128 && !DK_IS_16BIT ? 32 : BLOCK_Q;
constexpr int DQ_CHUNK = DQ_QUERIES * DQ_CHANNELS;
// Turns are counted for so many values; where a chunk has more, only its first counter is used.
constexpr int TURNS = D / 64, TURN_VALUES = BLOCK_Q * DQ_CHANNELS / TURNS;
// A chunk goes through shared memory in units, for which there are buffers. Helpers, one thread each, take chunks in turn.
constexpr int UNIT_QUERIES = D == 64 ? BLOCK_Q : 32, UNITS = DQ_QUERIES / UNIT_QUERIES, UNIT_VALUES = UNIT_QUERIES * DQ_CHANNELS;
constexpr int HELPERS = 3, BUFFERS = 3;

// --- The order of work -------------------------------------------------------------------------------------

// `last_keys_first`: the last keys of a document come first, and every CTA begins with the first queries that see its keys. Under
// the causal mask CTAs then follow each other through the queries and hardly wait, but the longest work tiles come last, and the
// CTAs of a head are spread over its queries. Otherwise the first keys come first, and all CTAs begin with the last queries, which
// then come from the L2 cache. results/log.md has both measured. It depends on the document alone: dQ has the same bits in any pack.
__device__ __forceinline__ bool takes_last_keys_first(const KeyTile& tile, int up_to_queries) {
    return tile.q.tokens <= up_to_queries;
}

// As find_key_tile, with the work tiles of a document in this order.
__device__ __forceinline__ bool find_key_tile_in_order(const Axes& axes, WorkTile work_tile, int last_keys_first_up_to,
                                                       KeyTile& tile) {
    const bool exists = find_key_tile<KEYS / ROWS>(axes, work_tile, tile);
    if (exists && takes_last_keys_first(tile, last_keys_first_up_to)) {
        work_tile.rank += (tile.kv.tokens - 1) / KEYS - 2 * (tile.first / KEYS);
        find_key_tile<KEYS / ROWS>(axes, work_tile, tile);
    }
    return exists;
}

// The block of queries with which a work tile begins, and the one that follows in turn, counted from the first one that sees
// its keys.
__device__ __forceinline__ int first_block(bool last_keys_first, int q_tiles) { return last_keys_first ? 0 : q_tiles - 1; }
__device__ __forceinline__ int next_block(bool last_keys_first, int q_tiles, int block) {
    if (last_keys_first) return block + 1 < q_tiles ? block + 1 : 0;
    return block > 0 ? block - 1 : q_tiles - 1;
}

// The turn of a work tile at the block of queries from `first_query` on, from 0.
__device__ __forceinline__ int turn_of(bool last_keys_first, const KeyTile& tile, const Window& window, int first_query) {
    const int keys = IS_CAUSAL ? min(tile.kv.tokens, first_query + BLOCK_Q) : tile.kv.tokens;
    int turns = (keys + KEYS - 1) / KEYS, before = tile.first / KEYS;
    if constexpr (HAS_WINDOW) {
        const int begin = first_key_block(window, first_query);
        turns = end_of_key_blocks(window, min(first_query + BLOCK_Q, tile.q.tokens), tile.kv.tokens) - begin;
        before -= begin;
    }
    return last_keys_first ? turns - 1 - before : before;
}

// --- The product -------------------------------------------------------------------------------------------

// K of the CTA in 16 bits, chunks of 64 channels.
constexpr int K_16BIT_BYTES = 2 * K_TILE;

// Makes of K what packing quantizes: without its mean, and zero from `keys` on, where the next document may begin. A warpgroup
// does it before any of its threads reads K. A thread has the same 8 channels of all its rows in a chunk.
__device__ __forceinline__ void smooth_k(u8* tile, const float* mean, int keys, int warpgroup) {
    if (mean == nullptr && keys >= KEYS) return;
    const int first_row = threadIdx.x % 128 / 8, channel = threadIdx.x % 8 * 8;
#pragma unroll 1
    for (int chunk = 0; chunk < D / 64; ++chunk) {
        float means[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) means[e] = mean == nullptr ? 0.0f : mean[chunk * 64 + channel + e];
        u8* column = tile + chunk * (KEYS * 128) + swizzled<128>(first_row * 128 + channel * 2);
#pragma unroll 2
        for (int row = 0; row < KEYS; row += 16) {  // further on the swizzle is the same
            uint4& piece = *reinterpret_cast<uint4*>(column + row * 128);
            uint4 smooth = piece;
            u32* pairs = &smooth.x;
#pragma unroll
            for (int e = 0; e < 8; e += 2)
                pairs[e / 2] = pack_16bit(to_float(pairs[e / 2] & 0xffff) - means[e], to_float(pairs[e / 2] >> 16) - means[e + 1]);
            piece = first_row + row < keys ? smooth : uint4{0, 0, 0, 0};
        }
    }
    fence_proxy_async();
    warpgroup_sync(warpgroup);
}

// K of the CTA as the left operand of dQ, which is computed transposed, (channels, queries). With 64 channels it stays in
// registers: K in shared memory would be read again for each block of queries, as often as dS.
constexpr bool K_IS_KEPT = D == 64;
struct LeftK {
    u32 words[K_IS_KEPT ? KEYS / 4 : 1];

    // From a tile in 16 bits; rows are keys.
    __device__ __forceinline__ void load(const u8* tile) {
        if (!K_IS_KEPT) return;
        const int lane = threadIdx.x % 32, channel = threadIdx.x % 128 / 32 * 16 + lane / 4, key = lane % 4 * 2;
        const auto value = [&](int e, int r) { return swizzled<128>((key + e) * 128 + (channel + 8 * r) * 2); };
        const u8* of_rows[2][2] = {{tile + value(0, 0), tile + value(1, 0)}, {tile + value(0, 1), tile + value(1, 1)}};
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            const int byte = (i / 4 * 16 + i / 2 % 2 * 8) * 128;  // 8 keys further on the swizzle is the same
            const auto read = [&](int e) -> u32 { return *reinterpret_cast<const u16*>(of_rows[i % 2][e] + byte); };
            words[i] = read(0) | read(1) << 16;
        }
    }
};

// The share of all keys in dQ of a block of queries, transposed, DQ_CHANNELS and DQ_QUERIES of it from `channel` and `query` on.
// `ds` and `k`: see descriptor_base. A template, because only one of the two branches compiles.
template <int N>
__device__ __forceinline__ void multiply_ds(float (&dq)[N], const LeftK& left_k, u32 k, u32 ds, int channel, int query) {
    const u64 b = descriptor_mn_major<DS_BYTES>(ds + query * 2 / 16);
    if constexpr (K_IS_KEPT) {
#pragma unroll
        for (int i = 0; i < N; ++i) dq[i] = 0.0f;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) wgmma_16bit(dq, left_k.words + 4 * i, b + 128 * i);
    } else {
        const u64 a = descriptor_mn_major<KEYS * 128>(k + channel / 64 * (KEYS * 128 / 16));
        wgmma_fence();
        wgmma_16bit<0>(dq, a, b);
#pragma unroll
        for (int i = 1; i < KEYS / 16; ++i) wgmma_16bit<1>(dq, a + 128 * i, b + 128 * i);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
}

// --- Sums over CTAs ----------------------------------------------------------------------------------------

// What the warpgroup hands to a helper: where a product in shared memory belongs.
struct DqChunk {
    float* sums;  // null: there is no other
    int* turns;   // how many CTAs have added to the chunk
    int turn;     // of this CTA
};

// Where the warpgroup is: in the ring of buffers, and with which helper. Each helper has barriers of its own, which say that its units
// are there: at a buffer's it could miss the units of others. `full`: UNITS of each helper; `empty`: of each buffer.
struct HandOver {
    u32 full, empty;
    int buffer = 0, parity = 0, helper = 0;

    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * buffer, parity ^ 1); }
    __device__ __forceinline__ void next_buffer() {
        if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
    }
    __device__ __forceinline__ void next_helper() { helper = helper + 1 == HELPERS ? 0 : helper + 1; }
    __device__ __forceinline__ void fill(int unit) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(full + 8 * (helper * UNITS + unit));
    }
};

// Stores a unit of a product in a buffer, in the order of threads.
__device__ __forceinline__ void store_unit(u8* buffer, const float (&dq)[DQ_QUERIES / 2], int unit, int thread) {
    float4* own = reinterpret_cast<float4*>(buffer) + thread;
    const float* from = dq + unit * (UNIT_QUERIES / 2);
#pragma unroll
    for (int j = 0; j < UNIT_QUERIES / 8; ++j) own[128 * j] = {from[4 * j], from[4 * j + 1], from[4 * j + 2], from[4 * j + 3]};
}

// A helper thread: adds its chunks. It sleeps while it waits: polls would take issue slots from those who compute. A buffer is free
// when it is read, and other helpers go on while this one waits for its addition. The first CTA of a chunk has no sum of others
// to add to.
__device__ __forceinline__ void add_chunks(const HandOver& all, int helper, u32 buffers, const DqChunk& next) {
    int buffer = helper * UNITS % BUFFERS;
    for (int parity = 0;; parity ^= 1) {
        barrier_wait_asleep(all.full + 8 * helper * UNITS, parity);
        const DqChunk chunk = next;
        if (chunk.sums == nullptr) return;
        if (chunk.turn > 0) {
            wait_for_value(chunk.turns, chunk.turn);
            fence_proxy_async_global();
        }
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (unit > 0) barrier_wait_asleep(all.full + 8 * (helper * UNITS + unit), parity);
            float* sums = chunk.sums + unit * UNIT_VALUES;
            const u32 from = buffers + buffer * (UNIT_VALUES * 4);
            if (chunk.turn > 0)
                bulk_add(sums, from, UNIT_VALUES * 4);
            else
                bulk_store(sums, from, UNIT_VALUES * 4);
            bulk_commit();
            bulk_wait_read();
            barrier_arrive(all.empty + 8 * buffer);
            buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
        }
        buffer = (buffer + (HELPERS - 1) * UNITS) % BUFFERS;
        bulk_wait();
        fence_proxy_async_global();
        release_value(chunk.turns, chunk.turn + 1);
    }
}
