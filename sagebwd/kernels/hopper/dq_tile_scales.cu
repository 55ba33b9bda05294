// dQ, with one scale of dS for each tile of 128 queries and 64 keys, half of which each consumer computes.
//
// Stores the scales of all tiles, of P and of dS: dk_dv.cu then rounds both without a search for maxima, for which it has no
// registers. So this kernel runs first.

#include "dq.cuh"

namespace {

static_assert(HAS_TILE_SCALES && BLOCK_Q == CONSUMERS * ROWS && BLOCK_KV == ROWS && !HAS_TOKEN_SCALES);
constexpr int WARPS = 4 * CONSUMERS;

// The largest P and dS of each warp, as bits: non-negative floats are ordered as their bits, NaN at the top. Of two tiles in turn:
// who writes those of a tile has read those of the tile before, and so has everybody read those before these.
struct Maxima {
    int2 of_warps[2][WARPS];
    u64 written[1];  // an mbarrier
};

struct MaximaExchange {
    Maxima& maxima;
    u32 written;
    int parity = 0;

    // This warp's part.
    __device__ __forceinline__ void write(int p, float ds) const {
        p = __reduce_max_sync(0xffffffff, p);
        const int ds_bits = __reduce_max_sync(0xffffffff, __float_as_int(ds));
        __syncwarp();  // all lanes have read these places two tiles ago: only lane 0 arrives
        if (threadIdx.x % 32 != 0) return;
        maxima.of_warps[parity][threadIdx.x / 32] = {p, ds_bits};
        barrier_arrive(written);
    }
    // The scales of P and dS of the tile; waits for all warps.
    __device__ __forceinline__ float2 scales() {
        barrier_wait(written, parity);
        int p = 0, ds = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const int2 largest = maxima.of_warps[parity][w];
            p = max(p, largest.x);
            ds = max(ds, largest.y);
        }
        parity ^= 1;
        return {scale_of(__int_as_float(p), P_MAX), scale_of(__int_as_float(ds), INT8_MAX)};
    }
};

// dS of this consumer's half of a tile from S and dP, and the largest P and dS of this thread. FAST: every logit allows a fused
// multiply-add, and none is masked. Else columns from `keys` on are masked, and those that `query` + 8 r does not see.
template <bool FAST>
__device__ __forceinline__ void score_gradients(float (&ds)[VALUES], int& p_largest, float& ds_largest, const int (&s)[VALUES],
                                                const int (&dp)[VALUES], float factor, const Queries& q, const Window& window,
                                                int keys, int query) {
    float found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    p_largest = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int r = i / 2 % 2, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const float x = __int2float_rn(s[i]);
        float p = exp2_fast(FAST ? fmaf(x, factor, q.minus_lse[r]) : __fadd_rn(__fmul_rn(x, factor), q.minus_lse[r]));
        if (!FAST && (column >= keys || (IS_CAUSAL && column > query + 8 * r))) p = 0.0f;
        if (!FAST && HAS_WINDOW && window.hides(column - query - 8 * r)) p = 0.0f;
        p_largest = max(p_largest, __float_as_int(p));
        ds[i] = p * (__int_as_float(dp[i]) + q.minus_delta[r]);
        found[i % 4] = nan_max_abs(found[i % 4], ds[i]);
    }
    ds_largest = nan_max(nan_max(found[0], found[1]), nan_max(found[2], found[3]));
}

// While a consumer waits for the maxima of the other one, tensor cores compute S and dP of the next tile.
__device__ __forceinline__ void consumer_loop(const Arguments& a, const Window& window, const QueryTile& work,
                                              const KeyRange& seen, int warpgroup, u8* shared, Ring<STAGES>& keys,
                                              Ring<1>& queries, MaximaExchange& exchange, float (&dq_sum)[D / 2]) {
    const Queries q(shared, warpgroup);
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const u32 ring = descriptor_base(shared_address(shared)) + RING / 16;
    const int first_key_block = work.kv_block - work.head / a.axes.group * a.axes.kv_blocks;
    float2* tile_scales = a.tile_scales + i64(work.q_block / STEPS_OF_BLOCK) * a.axes.kv_blocks + first_key_block;

    int s[VALUES], dp[VALUES], product[CHUNKS][32];
    float ds[VALUES], factors[2] = {0.0f, 0.0f};  // of the product
    keys.wait_full();
    const u32 stage = ring + keys.index * (STAGE_BYTES / 16);
    contract_channels<BLOCK_KV>(s, q.rows, stage + K_ROWS / 16);
    contract_channels_16bit<BLOCK_KV, ROWS>(dp, q.grad_rows, stage + V_ROWS / 16);
    Ring<STAGES> before = keys;
    for (int tile = seen.begin;; ++tile) {
        const float k_scale = *reinterpret_cast<const float*>(k_scale_of(shared, keys.index));
        const float factor = logit_factor(q.q_scale[0], k_scale, a.scale);
        const int first_key = tile * BLOCK_KV, query = work.first + warpgroup * ROWS;
        const bool is_cut = first_key + BLOCK_KV > work.keys || (IS_CAUSAL && first_key + BLOCK_KV > query) ||
                            (HAS_WINDOW && window.cuts(first_key - query, work.q.tokens, work.keys));
        const bool is_last = tile == seen.end - 1, is_fast = is_fusible(factor) && !is_cut;
        Ring<STAGES> next = keys;
        if (!is_last) {
            next.advance();
            next.wait_full();
        }
        const u32 this_stage = ring + keys.index * (STAGE_BYTES / 16), next_stage = ring + next.index * (STAGE_BYTES / 16);

        int p_largest;
        float ds_largest;
        wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) pin(product[c]);

        pin(s);
        pin(dp);
        if (is_last) queries.release();  // early, so that the next ones arrive in time; the last S and dP below are never used
        if (is_fast)
            score_gradients<true>(ds, p_largest, ds_largest, s, dp, factor, q, window, 0, 0);
        else
            score_gradients<false>(ds, p_largest, ds_largest, s, dp, factor, q, window, work.keys - first_key,
                                   query + row - first_key);
        exchange.write(p_largest, ds_largest);
        contract_channels<BLOCK_KV>(s, q.rows, next_stage + K_ROWS / 16);
        contract_channels_16bit<BLOCK_KV, ROWS>(dp, q.grad_rows, next_stage + V_ROWS / 16);
        if (tile > seen.begin) {
            before.release();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) accumulate(dq_sum + 32 * c, product[c], factors);
        }

        const float2 scales = exchange.scales();
        if (threadIdx.x == 0) tile_scales[tile] = scales;
        const float inverse[2] = {reciprocal(scales.y), reciprocal(scales.y)};
        factors[0] = factors[1] = scales.y * k_scale;
        u32 ds_int8[VALUES / 4];
        round_tile<BLOCK_KV>(ds_int8, ds, inverse);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            contract_tokens<BLOCK_KV>(product[c], ds_int8, this_stage + (K_COLUMNS + c * 64 * BLOCK_KV) / 16);
        before = keys;
        if (is_last) break;
        keys = next;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        pin(product[c]);
        accumulate(dq_sum + 32 * c, product[c], factors);
    }
    keys.release();
    keys.advance();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dq_tile_scales_kernel(const Arguments a, const Window window, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    __shared__ __align__(16) Maxima maxima;
    MaximaExchange exchange = {maxima, shared_address(maxima.written)};
    if (threadIdx.x == 0) barrier_init(exchange.written, WARPS);  // find_dq waits until everybody can see it
    find_dq<true>(a, window, maps, shared, barriers,
                  [&](const QueryTile& work, const KeyRange& seen, int warpgroup, Ring<STAGES>& keys, Ring<1>& queries,
                      float (&dq_sum)[D / 2]) {
                      consumer_loop(a, window, work, seen, warpgroup, shared, keys, queries, exchange, dq_sum);
                  });
}
