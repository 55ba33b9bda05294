// dQ, with a scale of dS for each query of a tile of keys.

#include "dq.cuh"

namespace {

// With 256 channels the registers of S and dP hold the products of dS with K, 64 channels at a time.
constexpr bool IN_TURN = D == 256;

// Products of dS with K that are not yet added to dQ, and the scale of each row.
struct Products {
    int chunk[IN_TURN ? 1 : CHUNKS][32];
    float factor[2];
};

// dS of one tile from S and dP, in INT8, and its scale per row. FAST: every logit allows a fused multiply-add, and none
// is masked. Else columns from `keys` on are masked, and those that `query` + 8 r does not see. Straight-line
// code, with the previous tile's products accumulated in between, so that all units are busy. If tokens have scales: those of
// the keys are at `k_scales` and run along the contraction of dQ, so that dS is multiplied by them; `factor` is without them.
template <bool FAST>
__device__ __forceinline__ void score_gradients(u32 (&ds_int8)[VALUES / 4], float (&ds_scale)[2], const int (&s)[VALUES],
                                                const int (&dp)[VALUES], const float (&factor)[2], const float2* k_scales,
                                                const float (&minus_lse)[2], const float (&minus_delta)[2],
                                                const Window& window, int keys, int query, const Products& products,
                                                float* dq_sum) {
    float ds[VALUES], found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int r = i / 2 % 2;
        const float x = __int2float_rn(s[i]);
        const float k_scale = HAS_TOKEN_SCALES ? pick(k_scales[i / 4 * 4 + threadIdx.x % 4], i % 2) : 1.0f;
        const float f = HAS_TOKEN_SCALES ? __fmul_rn(factor[r], k_scale) : factor[r];
        float p = exp2_fast(FAST && !HAS_TOKEN_SCALES ? fmaf(x, f, minus_lse[r]) : __fadd_rn(__fmul_rn(x, f), minus_lse[r]));
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const bool is_hidden = !FAST && (column >= keys || (IS_CAUSAL && column > query + 8 * r));
        const bool is_outside = HAS_WINDOW && !FAST && window.hides(column - query - 8 * r);
        if (is_hidden) p = 0.0f;
        if (is_outside) p = 0.0f;
        ds[i] = p * (__int_as_float(dp[i]) + minus_delta[r]);
        if constexpr (HAS_TOKEN_SCALES) ds[i] = is_hidden || is_outside ? 0.0f : ds[i] * k_scale;  // 0 even next to a NaN
        found[i % 4] = nan_max_abs(found[i % 4], ds[i]);
        if (CHUNKS == 1 && i % (VALUES / 32) == 0) {
            const int k = i / (VALUES / 32);
            dq_sum[k] = fmaf(__int2float_rn(products.chunk[0][k]), products.factor[k / 2 % 2], dq_sum[k]);
        }
    }
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        ds_scale[r] = scale_of(row_max(nan_max(found[2 * r], found[2 * r + 1])), INT8_MAX);
        inverse[r] = reciprocal(ds_scale[r]);
    }
    round_tile<BLOCK_KV>(ds_int8, ds, inverse);
}

// dS times the K of a tile by columns. IN_TURN: most of it is added to dQ already, what is not is in dp.
template <int N>
__device__ __forceinline__ void multiply_keys(Products& products, int (&s)[N], int (&dp)[N], const u32 (&ds_int8)[N / 4], u32 k_columns,
                                              float* dq_sum) {
    if constexpr (IN_TURN) {
        contract_tokens_in_turn<CHUNKS, BLOCK_KV>(dq_sum, s, dp, ds_int8, k_columns, products.factor);
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            contract_tokens<BLOCK_KV>(products.chunk[c], ds_int8, k_columns + c * 64 * BLOCK_KV / 16);
    }
}

// Adds what multiply_keys did not; call it after the wait for it.
template <int N>
__device__ __forceinline__ void add_products(float* dq_sum, Products& products, int (&dp)[N]) {
    if constexpr (IN_TURN) {
        pin(dp);
        accumulate(dq_sum + D / 2 - 32, dp, products.factor);
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            pin(products.chunk[c]);
            accumulate(dq_sum + 32 * c, products.chunk[c], products.factor);
        }
    }
}

__device__ __forceinline__ void consumer_loop(const Arguments& a, const Window& window, const QueryTile& work,
                                              const KeyRange& own, int warpgroup, u8* shared, Ring<STAGES>& keys,
                                              Ring<1>& queries, float (&dq_sum)[D / 2]) {
    const Queries q(shared, warpgroup);
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const u32 ring = descriptor_base(shared_address(shared)) + RING / 16;

    int s[VALUES], dp[VALUES];
    Products products = {};
    keys.wait_full();
    const u32 stage = ring + keys.index * (STAGE_BYTES / 16);
    contract_channels<BLOCK_KV>(s, q.rows, stage + K_ROWS / 16);
    contract_channels_16bit<BLOCK_KV, ROWS>(dp, q.grad_rows, stage + V_ROWS / 16);
    Ring<STAGES> before = keys;
    for (int tile = own.begin;; ++tile) {
        // While the tensor cores work: load what this tile needs, and wait for the next stage.
        const float2* k_scales = reinterpret_cast<const float2*>(k_scale_of(shared, keys.index));
        const float k_scale = HAS_TOKEN_SCALES ? 1.0f : k_scales->x;
        const float factor[2] = {logit_factor(q.q_scale[0], k_scale, a.scale), logit_factor(q.q_scale[1], k_scale, a.scale)};
        const int first_key = tile * BLOCK_KV, query = work.first + warpgroup * ROWS;
        const bool is_cut = first_key + BLOCK_KV > work.keys || (IS_CAUSAL && first_key + BLOCK_KV > query) ||
                            (HAS_WINDOW && window.cuts(first_key - query, work.q.tokens, work.keys));
        const bool is_last = tile == own.end - 1, is_fast = (HAS_TOKEN_SCALES || is_fusible(factor[0])) && !is_cut;
        Ring<STAGES> next = keys;
        if (!is_last) next.advance();
        if (STAGES > 2 && !is_last) next.wait_full();
        const u32 this_stage = ring + keys.index * (STAGE_BYTES / 16), next_stage = ring + next.index * (STAGE_BYTES / 16);

        float ds_scale[2];
        u32 ds_int8[VALUES / 4];
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        if (CHUNKS == 1) pin(products.chunk[0]);
        if (!IS_CROWDED && is_last) queries.release();  // early, so that the next ones arrive in time; the last S below is never used
        if (is_fast)
            score_gradients<true>(ds_int8, ds_scale, s, dp, factor, k_scales, q.minus_lse, q.minus_delta, window, 0, 0, products,
                                  dq_sum);
        else
            score_gradients<false>(ds_int8, ds_scale, s, dp, factor, k_scales, q.minus_lse, q.minus_delta, window,
                                   work.keys - first_key, query + row - first_key, products, dq_sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) products.factor[r] = ds_scale[r] * k_scale;

        if (STAGES == 2 && !is_last) next.wait_full();
        multiply_keys(products, s, dp, ds_int8, this_stage + K_COLUMNS / 16, dq_sum);
        if constexpr (CHUNKS == 1) {
            if (is_last) break;
            contract_channels<BLOCK_KV>(s, q.rows, next_stage + K_ROWS / 16);
            contract_channels_16bit<BLOCK_KV, ROWS>(dp, q.grad_rows, next_stage + V_ROWS / 16);
            if (tile > own.begin) before.release();
            before = keys;
        } else {
            // There are too few registers for these products next to S and dP. After the last tile S is computed once
            // more and not used: a branch between wgmmas would serialize them.
            contract_channels<BLOCK_KV>(s, q.rows, next_stage + K_ROWS / 16);
            wgmma_wait<1>();
            add_products(dq_sum, products, dp);
            if (is_last) break;
            contract_channels_16bit<BLOCK_KV, ROWS>(dp, q.grad_rows, next_stage + V_ROWS / 16);
            keys.release();
        }
        keys = next;
    }
    wgmma_wait<0>();
    if (CHUNKS == 1) {
        pin(products.chunk[0]);
        accumulate(dq_sum, products.chunk[0], products.factor);
    }
    if (CHUNKS == 1 && before.index != keys.index) before.release();
    keys.release();
    keys.advance();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq_kernel(const Arguments a, const Window window,
                                                                   const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    find_dq<false>(a, window, maps, shared, barriers,
                   [&](const QueryTile& work, const KeyRange& own, int warpgroup, Ring<STAGES>& keys, Ring<1>& queries,
                       float (&dq_sum)[D / 2]) { consumer_loop(a, window, work, own, warpgroup, shared, keys, queries, dq_sum); });
}
