// P and dS of a tile of 64 keys and 64 queries, one tile for each warpgroup: rounded for dV and dK, where they stay in
// registers, and dS for dQ, transposed through shared memory.
//
// Tiles are transposed, (keys, queries): a scale of P or dS for each key is one for each row. dQ contracts keys: its dS is in
// 16 bits, which needs no scale.
#pragma once

#include "epilogue.cuh"
#include "int8.cuh"
#include "ptx_sm90.cuh"
#include "window.cuh"

constexpr int KEYS = 2 * ROWS;  // of two warpgroups
static_assert(KEYS == BLOCK_KV);

// dS for dQ of a block of queries in 16 bits: rows are keys, and wgmma transposes.
constexpr int DS_BYTES = KEYS * BLOCK_Q * 2;

// Queries of a block that a warpgroup takes at a time: half of them where registers are scarce.
constexpr int QUERIES = D == 128 && DK_IS_16BIT ? BLOCK_Q / 2 : BLOCK_Q;
constexpr int PARTS = BLOCK_Q / QUERIES, VALUES = QUERIES / 2;  // VALUES: of S, that a thread has

struct Scores {
    u32 p[VALUES / (P_IS_16BIT ? 2 : 4)], ds[VALUES / (DK_IS_16BIT ? 2 : 4)];
    float dv_factor[2], dk_factor[2];  // scales per row, times those of dO and Q; in 16 bits there are none
};

// What P and dS of a tile need.
struct ScoreTile {
    float factor;             // from INT8 products to logits
    const float2* minus_lse;  // of all queries of the block, in pairs; then -delta
    int first_query;          // of the QUERIES that are taken now, in the block
    float2 scales;            // of Q and dO
    int keys;                 // that exist, from the first one of the tile on
    int blocks_ahead;         // of 64: the first key minus the first query. Causal: 0 on the diagonal, more: all is hidden
    Window window;            // set if there is one
};

// P and dS of a tile before they are rounded, with what their scales need: magnitudes, of P as bits.
struct ExactScores {
    float p[VALUES], ds[VALUES], ds_largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int p_largest[2] = {0, 0};
};

// P of queries 8j to 8j + 7 from S. FAST: every logit allows a fused multiply-add, and none is masked. Straight-line code, so that
// all units are busy.
template <bool FAST>
__device__ __forceinline__ void find_p_of_8(ExactScores& x, const int (&s)[VALUES], const ScoreTile& tile, int j) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int key = thread / 32 * 16 + lane / 4, query = tile.first_query + lane % 4 * 2;
    const float2* minus_lse = tile.minus_lse + tile.first_query / 2 + lane % 4;
    const float2 c = minus_lse[4 * j];
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const int r = i / 2 % 2;
        const float logit = __int2float_rn(s[i]);
        float p = exp2_fast(FAST ? fmaf(logit, tile.factor, pick(c, i % 2))
                                 : __fadd_rn(__fmul_rn(logit, tile.factor), pick(c, i % 2)));
        if (!FAST) {  // without a branch
            const int visible = query + 8 * j + i % 2 - ROWS * tile.blocks_ahead + 1;
            p = key + 8 * r < (IS_CAUSAL ? min(visible, tile.keys) : tile.keys) ? p : 0.0f;
            if (HAS_WINDOW && tile.window.hides(key + 8 * r - visible + 1)) p = 0.0f;
        }
        x.p[i] = p;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
        x.p_largest[r] = max(max(x.p_largest[r], __float_as_int(x.p[4 * j + 2 * r])), __float_as_int(x.p[4 * j + 2 * r + 1]));
}

// dS of the same from P and dP.
__device__ __forceinline__ void find_ds_of_8(ExactScores& x, const int (&dp)[VALUES], const ScoreTile& tile, int j) {
    const float2* minus_delta = tile.minus_lse + (BLOCK_Q + tile.first_query) / 2 + threadIdx.x % 4;
    const float2 d = minus_delta[4 * j];
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) {
        x.ds[i] = x.p[i] * (__int_as_float(dp[i]) + pick(d, i % 2));
        x.ds_largest[i % 4] = nan_max_abs(x.ds_largest[i % 4], x.ds[i]);
    }
}

// Rounds them for dV and dK.
__device__ __forceinline__ void round_scores(Scores& scores, const ExactScores& x, const ScoreTile& tile) {
    float p_inverse[2], ds_inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (DK_IS_16BIT) continue;
        const float ds_scale = scale_of(row_max(nan_max(x.ds_largest[2 * r], x.ds_largest[2 * r + 1])), INT8_MAX);
        scores.dk_factor[r] = ds_scale * tile.scales.x;
        ds_inverse[r] = reciprocal(ds_scale);
        if (P_IS_16BIT) continue;
        const float p_scale = scale_of(__int_as_float(row_max(x.p_largest[r])), P_MAX);
        scores.dv_factor[r] = p_scale * tile.scales.y;
        p_inverse[r] = reciprocal(p_scale);
    }
    round_operand(scores.p, x.p, p_inverse);
    round_operand(scores.ds, x.ds, ds_inverse);
}

// Stores dS for dQ, key by key, in a stage that is free. `first_query`: see ScoreTile.
__device__ __forceinline__ void store_ds(const float (&ds)[VALUES], u32 stage, int first_query, int warpgroup) {
    const int lane = threadIdx.x % 32, key = warpgroup * ROWS + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j += 2) {  // four matrices: keys 0 and 8 of 8 queries, and of the next 8
        const auto pair = [&](int i) { return pack_16bit(ds[4 * j + 2 * i], ds[4 * j + 2 * i + 1]); };
        const int byte = (first_query / 8 + j + lane / 16) * 16;
        stmatrix(stage + swizzled<2 * BLOCK_Q>(key * 2 * BLOCK_Q + byte), pair(0), pair(1), pair(2), pair(3));
    }
}
