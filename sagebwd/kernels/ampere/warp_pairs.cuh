// What a warp that shares 16 keys with another one does with a block of queries: the backward kernels with tiles of 64 keys.
//
// Of P and dS each of the two computes one half of the queries, of dK and dV one half of the channels. In between, all warps
// exchange the maxima of P and dS, then the two exchange P and dS.
#pragma once

#include "backward.cuh"
#include "epilogue.cuh"
#include "int8.cuh"
#include "products.cuh"
#include "scores.cuh"

constexpr int HALF_BLOCKS = 2;  // one packed block of keys
constexpr int QUERIES = BLOCK_Q / 2, CHANNELS = D / 2;  // of a warp
static_assert(BLOCK_KV == 64 && !P_IS_16BIT);

// What warps exchange, in bytes from its begin: dS for dQ, (queries, keys) INT8, keys as in tiles by columns; then dS and P as
// left operands of dK and dV, see store_left.
constexpr int TILE_BYTES = BLOCK_Q * BLOCK_KV, LEFT_DS = TILE_BYTES, LEFT_P = 2 * TILE_BYTES, EXCHANGED_BYTES = 3 * TILE_BYTES;
constexpr int HALF_STAGING_BYTES = staging_bytes(CHANNELS);

// This warp's first query and channel of a tile.
__device__ __forceinline__ int query_of_warp() { return threadIdx.x / 128 * QUERIES; }
__device__ __forceinline__ int channel_of_warp() { return threadIdx.x / 128 * CHANNELS; }

// Maxima over a tile, as bits: non-negative floats are ordered as their bits, NaN at the top. Of the tile: the first of `ds` and
// `p` alone.
struct Maxima {
    int ds_of_queries[BLOCK_Q], ds[BLOCK_KV], p[BLOCK_KV];
};

template <int CLEARING>  // so many threads call it
__device__ __forceinline__ void clear(Maxima& x) {
    for (int i = threadIdx.x; i < int(sizeof(Maxima) / 4); i += CLEARING) reinterpret_cast<int*>(&x)[i] = 0;
}

// The maxima of dS as dQ takes it, from this query on or of the tile.
__device__ __forceinline__ const int* largest_of_queries(const Maxima& largest, int query) {
    return HAS_TILE_SCALES ? largest.ds : largest.ds_of_queries + query;
}

// --- P and dS ----------------------------------------------------------------------------------------------

// The scales of this thread's keys, in global memory. Not read for each block: waiting for a turn empties the L1 cache.
struct KeyScales {
    float of_row[2];
};
__device__ __forceinline__ const float* k_scales_of(const u8* keys) { return reinterpret_cast<const float*>(keys + K_TILE); }
__device__ __forceinline__ KeyScales load_key_scales(const float* k_scales) {
    const int key = key_of_thread();
    return {{k_scales[HAS_TOKEN_SCALES ? key : 0], k_scales[HAS_TOKEN_SCALES ? key + 8 : 0]}};
}

// This warp's part of a tile, whose queries lie at `rows`.
__device__ __forceinline__ Tile describe_tile(const u8* rows, const KeyScales& k_scale, float v_scale, int first_query, float scale,
                                              const KeyTile& work, const Window& window) {
    const int query = query_of_warp();
    Tile tile;
    tile.scales = {1.0f, 1.0f};
    tile.k_scale[0] = k_scale.of_row[0], tile.k_scale[1] = k_scale.of_row[1];
    if (!HAS_TOKEN_SCALES) tile.scales = *reinterpret_cast<const float2*>(rows + SCALES);
    tile.factor = logit_factor(tile.scales.x, tile.k_scale[0], scale);
    tile.q_scales = reinterpret_cast<const float2*>(rows + SCALES) + query / 2 + threadIdx.x % 4;
    tile.grad_scales = tile.q_scales + BLOCK_Q / 2;
    tile.q_factor = logit_factor(1.0f, 1.0f, scale);
    tile.dp_scale = fp16_grad_scale(tile.scales.y) * v_scale;
    tile.statistics = rows + STATISTICS + query * 4;
    tile.first_key = work.first - first_query - query;
    tile.keys = work.kv.tokens - work.first;
    if constexpr (HAS_WINDOW) tile.window = window;
    tile.is_cut = tile.keys < BLOCK_KV || (IS_CAUSAL && tile.first_key + BLOCK_KV > 1) ||
                  (HAS_WINDOW && window.cuts(tile.first_key, work.q.tokens, work.kv.tokens));
    return tile;
}

// P and dS of 16 keys and one half of the queries; dS also as dQ takes it.
struct Scores {
    float p[QUERIES / 2], ds[QUERIES / 2], ds_of_queries[QUERIES / 2];
};

// Raises maxima by what this warp has. `key`: this thread's first; `query`: this warp's. `ds_of_queries` is dS as dQ takes it.
template <int N>
__device__ __forceinline__ void raise_maxima(Maxima& maxima, const float (&p)[N], const float (&ds)[N],
                                             const float (&ds_of_queries)[N], int key, int query) {
    int of_p[2] = {0, 0}, of_ds[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        of_p[i / 2 % 2] = max(of_p[i / 2 % 2], __float_as_int(p[i]));
        of_ds[i / 2 % 2] = max(of_ds[i / 2 % 2], __float_as_int(ds[i]) & 0x7fffffff);
    }
    const int lane = threadIdx.x % 32;
    if constexpr (HAS_TILE_SCALES) {
        const int tile_p = __reduce_max_sync(0xffffffff, max(of_p[0], of_p[1]));
        const int tile_ds = __reduce_max_sync(0xffffffff, max(of_ds[0], of_ds[1]));
        if (lane != 0) return;
        atomicMax(maxima.p, tile_p);
        atomicMax(maxima.ds, tile_ds);
    } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row_p = row_max(of_p[r]), row_ds = row_max(of_ds[r]);
            if (lane % 4 != 0) continue;
            atomicMax(maxima.p + key + 8 * r, row_p);
            atomicMax(maxima.ds + key + 8 * r, row_ds);
        }
        raise_largest(maxima.ds_of_queries + query, ds_of_queries);
    }
}

// Rounds P or dS with the scale of each key or of the tile. `largest`: from this thread's first key on, or of the tile.
template <int N>
__device__ __forceinline__ void round_scores(u32 (&rounded)[N / 4], const float (&x)[N], const int* largest, float steps) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        inverse[r] = reciprocal(scale_of(__int_as_float(largest[HAS_TILE_SCALES ? 0 : 8 * r]), steps));
    round_tile<2 * N>(rounded, x, inverse);
}

// The factors of the rows of dK or dV: these scales times that of Q or dO.
__device__ __forceinline__ void find_factors(float (&factor)[2], const int* largest, float steps, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        factor[r] = scale_of(__int_as_float(largest[HAS_TILE_SCALES ? 0 : 8 * r]), steps) * scale;
}

// Left operands of products over all queries of a tile: of each 16 keys, 32 queries after the other, four words of each lane.
__device__ __forceinline__ uint4* left_words(u8* tile) {
    return reinterpret_cast<uint4*>(tile) + threadIdx.x / 32 % 4 * BLOCK_Q + threadIdx.x % 32;
}
template <int WORDS>
__device__ __forceinline__ void store_left(u8* tile, const u32 (&words)[WORDS], int query) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i)
        left_words(tile)[query + 32 * i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
}
__device__ __forceinline__ void load_left_words(u32 (&words)[BLOCK_Q / 8], u8* tile) {
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 32; ++i) {
        const uint4 four = left_words(tile)[32 * i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
}

// Scores, and what they raise the maxima to. k: K in registers.
__device__ __forceinline__ void compute_scores(Scores& x, Maxima& largest, const Tile& tile, const u32 (&k)[D / 8],
                                               u32 values, u32 rows) {
    const int query = query_of_warp(), key = key_of_thread();
    find_dp(x.ds, values, rows + GRAD_ROWS + query * 128, key_of_warp());
    int s[QUERIES / 2];
    contract_channels<QUERIES>(s, k, rows + query * D);
    if (!HAS_TOKEN_SCALES && is_fusible(tile.factor) && !tile.is_cut)
        find_scores<true>(x.p, x.ds, s, tile, key);
    else
        find_scores<false>(x.p, x.ds, s, tile, key);
#pragma unroll
    for (int i = 0; i < QUERIES / 2; ++i) x.ds_of_queries[i] = x.ds[i];
    if constexpr (HAS_TOKEN_SCALES) {
        multiply_ds(x.ds_of_queries, x.ds, [&](int i) { return tile.k_scale[i / 2 % 2]; });
        multiply_ds(x.ds, x.ds, [&](int i) { return pick(tile.q_scales[i / 4 * 4], i % 2); });
    }
    raise_maxima(largest, x.p, x.ds, x.ds_of_queries, key, query);
}

// The factors of the rows of dV and dK: scales of P and dS times those of dO and Q.
struct Factors {
    float dv[2], dk[2];
};

// Rounds and stores them for the products of all warps.
__device__ __forceinline__ Factors store_scores(u8* exchanged, const Scores& x, const Maxima& largest, const Tile& tile) {
    const int query = query_of_warp(), row = HAS_TILE_SCALES ? 0 : key_of_thread();
    u32 rounded[QUERIES / 8];
    round_scores(rounded, x.p, largest.p + row, P_MAX);
    store_left(exchanged + LEFT_P, rounded, query);
    round_scores(rounded, x.ds, largest.ds + row, INT8_MAX);
    store_left(exchanged + LEFT_DS, rounded, query);
    store_ds<HAS_TILE_SCALES>(exchanged + query * BLOCK_KV, x.ds_of_queries, largest_of_queries(largest, query), key_of_warp());
    Factors factor;
    find_factors(factor.dv, largest.p + row, P_MAX, tile.scales.y);
    find_factors(factor.dk, largest.ds + row, INT8_MAX, tile.scales.x);
    return factor;
}

// --- dK and dV ---------------------------------------------------------------------------------------------

// The gradients of 16 keys, half of the channels.
struct Sums {
    float dk[CHANNELS / 2], dv[CHANNELS / 2];
};

// Adds a tile's share.
__device__ __forceinline__ void multiply_scores(Sums& sums, u8* exchanged, u32 columns, const Factors& factor) {
    const int channel = channel_of_warp();
    u32 left[BLOCK_Q / 8];
    load_left_words(left, exchanged + LEFT_P);
    contract_tokens<BLOCK_Q, CHANNELS, P_IS_UNSIGNED>(sums.dv, left, columns + GRAD_COLUMNS + channel * BLOCK_Q, factor.dv);
    load_left_words(left, exchanged + LEFT_DS);
    contract_tokens<BLOCK_Q, CHANNELS>(sums.dk, left, columns + channel * BLOCK_Q, factor.dk);
}

// Stores dV and dK, a half of the channels each warp. `staging`: twice HALF_STAGING_BYTES, which nobody else uses.
__device__ __forceinline__ void store_sums(const Arguments& a, const Sums& sums, const KeyTile& work, u8* staging) {
    const int half = threadIdx.x / 128, channel = channel_of_warp();
    u8* rows = staging + half * HALF_STAGING_BYTES;
    const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
    store_channels<CHANNELS>(a.dv, sums.dv, ones, rows, half, work.kv_head, a.axes.heads, work.first, work.kv, a.axes.d, channel);
    store_channels<CHANNELS>(a.dk, sums.dk, scales, rows, half, work.kv_head, a.axes.heads, work.first, work.kv, a.axes.d, channel);
}

// The blocks of queries that a work tile visits. One that is not full may not see all keys that a full one would.
__device__ __forceinline__ QueryBlocks query_blocks(const Arguments& a, const KeyTile& work) {
    const bool has_queries = !IS_CAUSAL || work.first < work.q.tokens;
    return {0, work.q_tiles - 1, has_queries ? a.axes.group * work.q_tiles : 0};
}
