// dQ. A warpgroup multiplies dS, which others store in shared memory, with the K of its CTA. CTAs that own other keys add to the
// same sums in fp32. They take turns, in the order of their keys, so that the sum is always the same. A CTA waits only for
// CTAs that took an earlier work tile: those run already, so none waits for ever.
#pragma once

#include "pipeline.cuh"
#include "products.cuh"
#include "scheduler.cuh"
#include "scores.cuh"

constexpr int DQ_K_BYTES = K_TILE * (DQ_IS_INT8 ? 1 : 2);
constexpr int DQ_CHANNELS = 32;  // that are added at a time
constexpr int DQ_CHUNK = BLOCK_Q * DQ_CHANNELS, DQ_CHUNKS = D / DQ_CHANNELS;

// --- K as dQ takes it --------------------------------------------------------------------------------------

// K in bf16, which holds INT8 exactly, without its scale: rows as they are, in chunks of 64 channels.
__device__ __forceinline__ void convert_k_to_bf16(u8* target, const u8* k_rows, int thread) {
#pragma unroll 1
    for (int i = thread; i < K_TILE / 16; i += 128) {
        const int key = i / (D / 16), channel = i % (D / 16) * 16;
        const uint4 bytes = *reinterpret_cast<const uint4*>(k_rows + swizzled<D>(key * D + channel));
        const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
        u32 pairs[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const auto value = [&](int k) { return __int2float_rn(static_cast<signed char>(words[k / 4] >> 8 * (k % 4))); };
            pairs[e] = pack_bf16(value(2 * e), value(2 * e + 1));
        }
        u8* chunk = target + channel / 64 * (KEYS * 128);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<uint4*>(chunk + swizzled<128>(key * 128 + channel % 64 * 2 + 16 * h)) = {
                pairs[4 * h], pairs[4 * h + 1], pairs[4 * h + 2], pairs[4 * h + 3]};
    }
}

// K by columns, each 16 keys in the order of store_ds_int8: 0, 8, 1, 9, ...
__device__ __forceinline__ void transpose_k(u8* target, const u8* k_rows, int thread) {
#pragma unroll 1
    for (int i = thread; i < K_TILE / 64; i += 128) {  // four channels of 16 keys
        const int channel = i % (D / 4) * 4, first_key = i / (D / 4) * 16;
        u32 words[16], columns[4][4];  // of a key; of a channel
#pragma unroll
        for (int k = 0; k < 16; ++k)
            words[k] = *reinterpret_cast<const u32*>(k_rows + swizzled<D>((first_key + k / 2 + k % 2 * 8) * D + channel));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 of_channels[4];
            transpose_bytes(of_channels, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]);
#pragma unroll
            for (int c = 0; c < 4; ++c) columns[c][k] = of_channels[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint4*>(target + swizzled<KEYS>((channel + c) * KEYS + first_key)) = {
                columns[c][0], columns[c][1], columns[c][2], columns[c][3]};
    }
}

__device__ __forceinline__ void convert_k(u8* target, const u8* k_rows, int thread) {
    if (DQ_IS_INT8)
        transpose_k(target, k_rows, thread);
    else
        convert_k_to_bf16(target, k_rows, thread);
}

// --- The product -------------------------------------------------------------------------------------------

// 64 channels of the share of all keys in dQ of a block of queries, from `chunk` on. `ds` and `k`: see descriptor_base.
__device__ __forceinline__ void multiply_ds(float (&dq)[32], u32 ds, u32 k, int chunk, const float* ds_scales, float k_scale) {
    if constexpr (DQ_IS_INT8) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        const u32 b = k + chunk * (64 * KEYS / 16);
        int product[32];
        wgmma_fence();
        wgmma_int8<0>(product, descriptor<KEYS>(ds), descriptor<KEYS>(b));
#pragma unroll
        for (int i = 1; i < KEYS / 32; ++i)
            wgmma_int8<1>(product, descriptor<KEYS>(ds + 2 * i), descriptor<KEYS>(b + 2 * i));
        wgmma_commit();
        const float factor[2] = {ds_scales[row] * k_scale, ds_scales[row + 8] * k_scale};
        wgmma_wait<0>();
        pin(product);
#pragma unroll
        for (int i = 0; i < 32; ++i) dq[i] = __int2float_rn(product[i]) * factor[i / 2 % 2];
    } else {
        const u64 a = descriptor_mn_major<DS_BYTES>(ds), b = descriptor_mn_major<KEYS * 128>(k + chunk * (KEYS * 128 / 16));
        wgmma_fence();
        wgmma_bf16<0>(dq, a, b);
#pragma unroll
        for (int i = 1; i < KEYS / 16; ++i) wgmma_bf16<1>(dq, a + 128 * i, b + 128 * i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dq);
#pragma unroll
        for (int i = 0; i < 32; ++i) dq[i] *= k_scale;
    }
}

// --- Sums over CTAs ----------------------------------------------------------------------------------------

// What the warpgroup hands to a thread that adds it to the sums: DQ_CHANNELS of a block of queries in shared memory.
struct DqChunk {
    float* sums;  // null: there is no other
    int* turns;   // how many CTAs have added to these channels of the block
    int turn;     // of this CTA
};

// Work tiles of keys that see the block of queries from `first_query` on.
__device__ __forceinline__ int visible_key_tiles(const KeyTile& tile, int first_query) {
    const int keys = IS_CAUSAL ? min(tile.kv.tokens, first_query + BLOCK_Q) : tile.kv.tokens;
    return (keys + KEYS - 1) / KEYS;
}

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

// Stores a chunk so that add_to_own finds it, and hands it over. `dq`: its DQ_CHANNELS / 2 values of this thread.
template <int BUFFERS>
__device__ __forceinline__ void hand_over(const Ring<BUFFERS>& chunks, u8* buffers, DqChunk* next, const DqChunk& chunk,
                                          const float* dq, int thread) {
    chunks.wait_empty();
    float4* own = reinterpret_cast<float4*>(buffers) + chunks.index * (DQ_CHUNK / 4) + thread;
#pragma unroll
    for (int j = 0; j < DQ_CHANNELS / 8; ++j) own[128 * j] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
    if (thread == 0) next[chunks.index] = chunk;
    chunks.fill();
}

// Adds the sums of all other CTAs. The last CTA does this.
__device__ __forceinline__ void add_to_own(float* dq, const float* sums, int thread) {
    const float4* own = reinterpret_cast<const float4*>(sums) + thread;
#pragma unroll
    for (int j = 0; j < DQ_CHANNELS / 8; ++j) {
        const float4 sum = load_from_l2(own + 128 * j);
        dq[4 * j] += sum.x, dq[4 * j + 1] += sum.y, dq[4 * j + 2] += sum.z, dq[4 * j + 3] += sum.w;
    }
}
