// dQ. A work tile is 128 queries of one head; it loops over all keys that they see.

#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "registers.cuh"
#include "scheduler.cuh"
#include "window.cuh"

namespace {

constexpr int STAGES = D == 64 ? 4 : 2;
constexpr int CONSUMERS = 2;           // warpgroups; one more is the producer
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CHUNKS = D / 64;  // of 64 channels; dS K is computed chunk by chunk

// A stage in shared memory: both packed blocks of 128 keys.
constexpr int K_COLUMNS = 0;
constexpr int K_ROWS = K_COLUMNS + K_TILE;
constexpr int V_ROWS = K_ROWS + K_TILE;
constexpr int K_SCALE = V_ROWS + 2 * K_TILE;
constexpr int STAGE_BYTES = align_up(K_SCALE + scale_bytes(1, BLOCK_KV), 1024);

// Before the stages: packed blocks of 64 queries for each consumer. Behind them: staging for the epilogue.
constexpr int GRAD_ROWS = Q_TILE;
constexpr int STATISTICS = 3 * Q_TILE;
constexpr int SCALES = STATISTICS + ROW_STATS;
constexpr int QUERY_BYTES = align_up(Q_AND_GRAD_BYTES, 1024);
constexpr int RING = CONSUMERS * QUERY_BYTES;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * STAGING_BYTES);

struct Barriers {
    u64 full[STAGES], empty[STAGES], queries_full[1], queries_empty[1];
    WorkTile work_tiles[2];  // whose queries are in shared memory, and whose come next, in turn
};

struct Arguments {
    const u8 *packed_q, *packed_grad, *packed_kv, *packed_k_columns;
    TokenTensor dq;
    Axes axes;
    float scale;
};

__device__ __forceinline__ void producer_loop(const Arguments& a, const Window& window, const TensorMaps& maps,
                                              Ring<STAGES> keys, Ring<1> queries, u32 shared, WorkTile (&work_tiles)[2]) {
    QueryTile work;
    WorkTile work_tile;
    for (int index = blockIdx.x; (work_tile = work_tile_at(a.axes, index)).head >= 0; index = next_work_tile(a.axes)) {
        if (!find_query_tile<CONSUMERS>(a.axes, work_tile, work)) continue;
        queries.wait_empty();
        work_tiles[queries.parity] = work_tile;
        barrier_expect_bytes(queries.full, CONSUMERS * Q_AND_GRAD_BYTES);
        for (int w = 0; w < CONSUMERS; ++w) {  // past the end copy the last block again: a branch costs more
            const int index = min(w, work.q_blocks - 1);
            copy_q_and_grad(shared + w * QUERY_BYTES, a.packed_q, a.packed_grad, maps, work.q_block + index,
                            head_of(work.head, a.axes.heads), work.first + index * BLOCK_Q, queries.full);
        }
        queries.advance();
        const KeyRange seen = keys_seen(work, window);
        const Head kv_head = head_of(work.head / a.axes.group, a.axes.heads / a.axes.group);
#pragma unroll 1
        for (int tile = seen.begin; tile < seen.end; ++tile) {
            const i64 block = work.kv_block + tile;
            keys.wait_empty();
            const u32 full = keys.full + 8 * keys.index, stage = shared + RING + keys.index * STAGE_BYTES;
            barrier_expect_bytes(full, K_AND_V_BYTES + PACKED_K_COLUMNS_BYTES);
            copy_k_and_v(stage + K_ROWS, a.packed_kv, maps, block, kv_head, tile * BLOCK_KV, full);
            bulk_copy(stage + K_COLUMNS, a.packed_k_columns + block * PACKED_K_COLUMNS_BYTES, PACKED_K_COLUMNS_BYTES, full);
            keys.advance();
        }
    }
    queries.wait_empty();
    work_tiles[queries.parity] = work_tile;  // tells the consumers that there is no other
    barrier_arrive(queries.full);
}

// Products of dS with K that are not yet added to dQ, and the scale of each row.
struct Products {
    int chunk[CHUNKS][32];
    float factor[2];
};

// dS of one tile from S and dP, in INT8, and its scale per row. FAST: every logit allows a fused multiply-add, and none
// is masked. Else columns from `keys` on are masked, and those that `query` + 8 r does not see. Straight-line
// code, with the previous tile's products accumulated in between, so that all units are busy. If tokens have scales: those of
// the keys are at `k_scales` and run along the contraction of dQ, so that dS is multiplied by them; `factor` is without them.
template <bool FAST>
__device__ __forceinline__ void score_gradients(u32 (&ds_int8)[16], float (&ds_scale)[2], const int (&s)[64],
                                                const int (&dp)[64], const float (&factor)[2], const float2* k_scales,
                                                const float (&minus_lse)[2], const float (&minus_delta)[2],
                                                const Window& window, int keys, int query, const Products& products,
                                                float* dq_sum) {
    float ds[64], found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
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
        if (CHUNKS == 1 && i % 2 == 0) {
            const int k = i / 2;
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

__device__ __forceinline__ void consumer_loop(const Arguments& a, const Window& window, const QueryTile& work,
                                              const KeyRange& own, int warpgroup, u8* shared, Ring<STAGES>& keys,
                                              Ring<1>& queries, float (&dq_sum)[D / 2]) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    const u32 base = descriptor_base(shared_address(shared));
    const u32 q_rows = base + warpgroup * (QUERY_BYTES / 16), grad_rows = q_rows + GRAD_ROWS / 16, ring = base + RING / 16;
    const u8* block = shared + warpgroup * QUERY_BYTES;

    const float* q_scales = reinterpret_cast<const float*>(block + SCALES);
    const float q_scale[2] = {q_scales[HAS_TOKEN_SCALES ? row : 0], q_scales[HAS_TOKEN_SCALES ? row + 8 : 0]};
    const float* stats = reinterpret_cast<const float*>(block + STATISTICS);
    const float minus_lse[2] = {stats[row], stats[row + 8]}, minus_delta[2] = {stats[ROWS + row], stats[ROWS + row + 8]};

    int s[64], dp[64];
    Products products = {};
    keys.wait_full();
    const u32 stage = ring + keys.index * (STAGE_BYTES / 16);
    contract_channels<BLOCK_KV>(s, q_rows, stage + K_ROWS / 16);
    contract_channels_16bit<BLOCK_KV, ROWS>(dp, grad_rows, stage + V_ROWS / 16);
    Ring<STAGES> before = keys;
    for (int tile = own.begin;; ++tile) {
        // While the tensor cores work: load what this tile needs, and wait for the next stage.
        const float2* k_scales = reinterpret_cast<const float2*>(shared + RING + keys.index * STAGE_BYTES + K_SCALE);
        const float k_scale = HAS_TOKEN_SCALES ? 1.0f : k_scales->x;
        const float factor[2] = {logit_factor(q_scale[0], k_scale, a.scale), logit_factor(q_scale[1], k_scale, a.scale)};
        const int first_key = tile * BLOCK_KV, query = work.first + warpgroup * ROWS;
        const bool is_cut = first_key + BLOCK_KV > work.keys || (IS_CAUSAL && first_key + BLOCK_KV > query) ||
                            (HAS_WINDOW && window.cuts(first_key - query, work.q.tokens, work.keys));
        const bool is_last = tile == own.end - 1, is_fast = (HAS_TOKEN_SCALES || is_fusible(factor[0])) && !is_cut;
        Ring<STAGES> next = keys;
        if (!is_last) next.advance();
        if (STAGES > 2 && !is_last) next.wait_full();
        const u32 this_stage = ring + keys.index * (STAGE_BYTES / 16), next_stage = ring + next.index * (STAGE_BYTES / 16);

        float ds_scale[2];
        u32 ds_int8[16];
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        if (CHUNKS == 1) pin(products.chunk[0]);
        if (is_last) queries.release();  // early, so that the next ones arrive in time; the last S below is never used
        if (is_fast)
            score_gradients<true>(ds_int8, ds_scale, s, dp, factor, k_scales, minus_lse, minus_delta, window, 0, 0, products,
                                  dq_sum);
        else
            score_gradients<false>(ds_int8, ds_scale, s, dp, factor, k_scales, minus_lse, minus_delta, window,
                                   work.keys - first_key, query + row - first_key, products, dq_sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) products.factor[r] = ds_scale[r] * k_scale;

        if (STAGES == 2 && !is_last) next.wait_full();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            contract_tokens<BLOCK_KV>(products.chunk[c], ds_int8, this_stage + (K_COLUMNS + c * 64 * BLOCK_KV) / 16);
        if (CHUNKS == 1) {
            if (is_last) break;
            contract_channels<BLOCK_KV>(s, q_rows, next_stage + K_ROWS / 16);
            contract_channels_16bit<BLOCK_KV, ROWS>(dp, grad_rows, next_stage + V_ROWS / 16);
            if (tile > own.begin) before.release();
            before = keys;
        } else {
            // There are too few registers for these products next to S and dP. After the last tile S is computed once
            // more and not used: a branch between wgmmas would serialize them.
            contract_channels<BLOCK_KV>(s, q_rows, next_stage + K_ROWS / 16);
            wgmma_wait<1>();
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                pin(products.chunk[c]);
                accumulate(dq_sum + 32 * c, products.chunk[c], products.factor);
            }
            if (is_last) break;
            contract_channels_16bit<BLOCK_KV, ROWS>(dp, grad_rows, next_stage + V_ROWS / 16);
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
    if (threadIdx.x == 0) {
        ring_init(barriers.full, barriers.empty, CONSUMERS);
        ring_init(barriers.queries_full, barriers.queries_empty, CONSUMERS);
        barrier_init_fence();
    }
    __syncthreads();
    Ring<STAGES> keys = {shared_address(barriers.full), shared_address(barriers.empty)};
    Ring<1> queries = {shared_address(barriers.queries_full), shared_address(barriers.queries_empty)};

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the compiler then knows that it is warp-uniform
    if (warpgroup == CONSUMERS) {
        begin_producer<CONSUMERS>();
        if (threadIdx.x % 128 == 0) producer_loop(a, window, maps, keys, queries, shared_address(shared), barriers.work_tiles);
        return;
    }
    begin_consumer<CONSUMERS>();
    for (;;) {
        queries.wait_full();
        const WorkTile& work_tile = barriers.work_tiles[queries.parity];
        if (work_tile.head < 0) return;
        QueryTile work;
        find_query_tile<CONSUMERS>(a.axes, work_tile, work);
        float dq_sum[D / 2] = {};
        const KeyRange seen = keys_seen(work, window), own = HAS_WINDOW ? keys_seen_by(work, window, warpgroup) : seen;
        const bool sees_any = own.begin < own.end;
        if (HAS_WINDOW && sees_any) skip(keys, own.begin - seen.begin);
        if (sees_any)
            consumer_loop(a, window, work, own, warpgroup, shared, keys, queries, dq_sum);
        else
            queries.release();
        if (HAS_WINDOW) skip(keys, seen.end - (sees_any ? own.end : seen.begin));
        find_query_tile<CONSUMERS>(a.axes, work_tile, work);  // computed again: keeping it costs registers
        const float scales[2] = {a.scale, a.scale};
        store_rows(a.dq, dq_sum, scales, shared + STAGING + warpgroup * STAGING_BYTES, warpgroup, work.head, a.axes.heads,
                   work.first + warpgroup * ROWS, work.q, a.axes.d);
        queries.advance();
    }
}
