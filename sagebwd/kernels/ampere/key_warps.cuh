// What a warp that has 16 keys for itself does with a block of queries: the backward kernels with tiles of 128 keys.
//
// Tiles of S and dP are transposed, (keys, queries): a scale of P or dS for each key is one for each row.
#pragma once

#include "backward.cuh"
#include "epilogue.cuh"
#include "int8.cuh"
#include "products.cuh"
#include "scores.cuh"

static_assert(!(HAS_TOKEN_SCALES && P_IS_16BIT) && !DK_IS_16BIT);

constexpr int K_SCALE_BYTES = scale_bytes(1, BLOCK_KV);  // behind K and V of a packed block

// P and dS of 16 keys and 64 queries. P and dS are rounded with a scale for each key, and in 16 bits P has none.
struct Scores {
    u32 p[P_IS_16BIT ? 16 : 8], ds[8];
    float dv_factor[2], dk_factor[2];  // scales per row, times those of dO and Q
};

// Rounds P, and dS, with scales for each key.
template <int WORDS>
__device__ __forceinline__ void round_p(u32 (&rounded)[WORDS], float (&dv_factor)[2], const float (&p)[32], float grad_scale) {
    int largest[2] = {0, 0};  // bits: non-negative floats are ordered as their bits, NaN at the top
    float inverse[2];
    if constexpr (P_IS_16BIT) {
#pragma unroll
        for (int k = 0; k < WORDS; ++k) rounded[k] = pack_16bit(p[2 * k], p[2 * k + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) largest[i / 2 % 2] = max(largest[i / 2 % 2], __float_as_int(p[i]));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float scale = scale_of(__int_as_float(row_max(largest[r])), P_MAX);
            dv_factor[r] = scale * grad_scale;
            inverse[r] = reciprocal(scale);
        }
        round_tile<BLOCK_Q>(rounded, p, inverse);
    }
}

__device__ __forceinline__ void round_ds(u32 (&rounded)[8], float (&dk_factor)[2], const float (&ds)[32], float q_scale) {
    float largest[2] = {0.0f, 0.0f}, inverse[2];
#pragma unroll
    for (int i = 0; i < 32; ++i) largest[i / 2 % 2] = nan_max_abs(largest[i / 2 % 2], ds[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float scale = scale_of(row_max(largest[r]), INT8_MAX);
        dk_factor[r] = scale * q_scale;
        inverse[r] = reciprocal(scale);
    }
    round_tile<BLOCK_Q>(rounded, ds, inverse);
}

// A tile, whose queries lie at `rows`.
__device__ __forceinline__ Tile describe_tile(const u8* rows, const float* k_scales, float v_scale, int* largest, int first_query,
                                              float scale, const KeyTile& work, const Window& window) {
    const int lane = threadIdx.x % 32;
    Tile tile;
    tile.scales = {1.0f, 1.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) tile.k_scale[r] = k_scales[HAS_TOKEN_SCALES ? key_of_warp() + lane / 4 + 8 * r : 0];
    if (!HAS_TOKEN_SCALES) tile.scales = *reinterpret_cast<const float2*>(rows + SCALES);
    tile.factor = logit_factor(tile.scales.x, tile.k_scale[0], scale);
    tile.q_scales = reinterpret_cast<const float2*>(rows + SCALES) + lane % 4;
    tile.grad_scales = tile.q_scales + BLOCK_Q / 2;
    tile.q_factor = logit_factor(1.0f, 1.0f, scale);
    tile.dp_scale = fp16_grad_scale(tile.scales.y) * v_scale;
    tile.statistics = rows + STATISTICS;
    tile.largest = largest;
    tile.first_key = work.first - first_query;
    tile.keys = work.kv.tokens - work.first;
    if constexpr (HAS_WINDOW) tile.window = window;
    tile.is_cut = tile.keys < BLOCK_KV || (IS_CAUSAL && tile.first_key + BLOCK_KV > 1) ||
                  (HAS_WINDOW && window.cuts(tile.first_key, work.q.tokens, work.kv.tokens));
    return tile;
}

// P and dS, rounded for dV and dK, and `ds` as dQ takes it, of which it raises the maxima of the tile. k: K in registers.
__device__ __forceinline__ void compute_scores(Scores& scores, float (&ds)[32], const Tile& tile, const u32 (&k)[D / 8],
                                               u32 values, u32 rows) {
    int s[32];
    float p[32];
    contract_channels<BLOCK_Q>(s, k, rows);
    find_dp(ds, values, rows + GRAD_ROWS, key_of_warp());
    const int key = key_of_thread();
    if (!HAS_TOKEN_SCALES && is_fusible(tile.factor) && !tile.is_cut)
        find_scores<true>(p, ds, s, tile, key);
    else
        find_scores<false>(p, ds, s, tile, key);
    round_p(scores.p, scores.dv_factor, p, tile.scales.y);
    if constexpr (HAS_TOKEN_SCALES) {
        float scaled[32];
        multiply_ds(scaled, ds, [&](int i) { return pick(tile.q_scales[i / 4 * 4], i % 2); });
        round_ds(scores.ds, scores.dk_factor, scaled, 1.0f);
        multiply_ds(ds, ds, [&](int i) { return tile.k_scale[i / 2 % 2]; });
        raise_largest(tile.largest, ds);
    } else {
        raise_largest(tile.largest, ds);
        round_ds(scores.ds, scores.dk_factor, ds, tile.scales.x);
    }
}

// The gradients of a warp's 16 keys.
struct Sums {
    float dk[D / 2], dv[D / 2];
};

// Adds a tile's share. (A template, because only one of the two branches compiles.)
template <class AnyScores>
__device__ __forceinline__ void multiply_scores(Sums& sums, const AnyScores& scores, u32 rows, u32 columns) {
    if constexpr (P_IS_16BIT)
        contract_tokens_16bit<BLOCK_Q>(sums.dv, scores.p, rows + GRAD_ROWS);
    else
        contract_tokens<BLOCK_Q, D, P_IS_UNSIGNED>(sums.dv, scores.p, columns + GRAD_COLUMNS, scores.dv_factor);
    contract_tokens<BLOCK_Q, D>(sums.dk, scores.ds, columns, scores.dk_factor);
}

// Stores dV and dK of all keys. `staging`: of 128 keys, which nobody else uses.
__device__ __forceinline__ void store_sums(const Arguments& a, const Sums& sums, const KeyTile& work, u8* staging) {
    const int half = threadIdx.x / 128, first = work.first + half * ROWS;
    u8* rows = staging + half * STAGING_BYTES;
    const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
    store_channels<D>(a.dv, sums.dv, ones, rows, half, work.kv_head, a.axes.heads, first, work.kv, a.axes.d);
    store_channels<D>(a.dk, sums.dk, scales, rows, half, work.kv_head, a.axes.heads, first, work.kv, a.axes.d);
}
