// What kernels for dQ share. A work tile is 128 queries of one head, 64 for each consumer; it loops over all keys that they see.
#pragma once

#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "registers.cuh"
#include "scheduler.cuh"
#include "window.cuh"

constexpr int STAGES = D == 256 ? 2 : (D == 64 ? 4 : 2) * 128 / BLOCK_KV;
constexpr int CONSUMERS = 2;  // warpgroups; one more is the producer
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CHUNKS = D / 64;  // of 64 channels; dS K is computed chunk by chunk
// Whether shared memory has room for little but tiles. What else there is then lies behind all of them, without gaps, with room for
// scales of tokens, but none for those of dO, which dQ does not need; the epilogue goes through the place of the queries.
constexpr bool IS_CROWDED = D == 256;
static_assert(STEP_Q == ROWS && !P_IS_16BIT);
constexpr int VALUES = BLOCK_KV / 2;  // of S, that a thread holds
// Whether a consumer may see fewer tiles than another. It must not compute one that it does not see: a NaN there is not its own.
constexpr bool MAY_SEE_LESS = HAS_WINDOW || (IS_CAUSAL && BLOCK_KV < CONSUMERS * ROWS);

// A stage in shared memory: both packed blocks of the same keys.
constexpr int K_COLUMNS = 0;
constexpr int K_ROWS = K_COLUMNS + K_TILE;
constexpr int V_ROWS = K_ROWS + K_TILE;
constexpr int K_SCALE_BYTES = IS_CROWDED ? 4 * BLOCK_KV : scale_bytes(1, BLOCK_KV);
constexpr int STAGE_TILES = V_ROWS + 2 * K_TILE;  // bytes; the scale of K follows
constexpr int STAGE_BYTES = IS_CROWDED ? STAGE_TILES : align_up(STAGE_TILES + K_SCALE_BYTES, 1024);

// Before the stages: 64 queries for each consumer. Behind them: staging for the epilogue.
constexpr int GRAD_ROWS = STEP_TILE;
constexpr int QUERY_TILES = GRAD_ROWS + 2 * STEP_TILE;  // bytes; statistics and scales follow
constexpr int STATISTICS_BYTES = STEP_STATS + 4 * STEP_Q;  // if IS_CROWDED
constexpr int COPIED_BYTES = QUERY_TILES + STEP_STATS + scale_bytes(IS_CROWDED ? 1 : 2, STEP_Q);
constexpr int QUERY_BYTES = IS_CROWDED ? QUERY_TILES : align_up(Q_AND_GRAD_BYTES, 1024);
constexpr int RING = CONSUMERS * QUERY_BYTES;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
constexpr int K_SCALES = STAGING + CONSUMERS * STATISTICS_BYTES;  // if IS_CROWDED; the statistics precede them
CHECK_LAUNCH(THREADS, IS_CROWDED ? K_SCALES + STAGES * K_SCALE_BYTES : STAGING + CONSUMERS * STAGING_BYTES);
static_assert(!IS_CROWDED || STAGING_BYTES <= QUERY_BYTES);

// Where the statistics of a consumer's queries are, and the scale of K of a stage. `shared`: a pointer or an address.
template <class Shared>
__device__ __forceinline__ Shared statistics_of(Shared shared, int warpgroup) {
    return IS_CROWDED ? shared + STAGING + warpgroup * STATISTICS_BYTES : shared + warpgroup * QUERY_BYTES + QUERY_TILES;
}
template <class Shared>
__device__ __forceinline__ Shared k_scale_of(Shared shared, int stage) {
    return IS_CROWDED ? shared + K_SCALES + stage * K_SCALE_BYTES : shared + RING + stage * STAGE_BYTES + STAGE_TILES;
}

struct Barriers {
    u64 full[STAGES], empty[STAGES], queries_full[1], queries_empty[1];
    WorkTile work_tiles[2];  // whose queries are in shared memory, and whose come next, in turn
};

struct Arguments {
    const u8 *packed_q, *packed_grad, *packed_kv, *packed_k_columns;
    TokenTensor dq;
    Axes axes;
    float scale;
    float2* tile_scales;  // if SCALES_OF_TILES is defined: see dq_tile_scales.cu
};

__device__ __forceinline__ void producer_loop(const Arguments& a, const Window& window, const TensorMaps& maps,
                                              Ring<STAGES> keys, Ring<1> queries, u32 shared, WorkTile (&work_tiles)[2]) {
    QueryTile work;
    WorkTile work_tile;
    for (int index = blockIdx.x; (work_tile = work_tile_at(a.axes, index)).head >= 0; index = next_work_tile(a.axes)) {
        if (!find_query_tile<CONSUMERS>(a.axes, work_tile, work)) continue;
        queries.wait_empty();
        work_tiles[queries.parity] = work_tile;
        barrier_expect_bytes(queries.full, CONSUMERS * COPIED_BYTES);
        for (int w = 0; w < CONSUMERS; ++w) {
            // Past the end copy the last step again: a branch costs more. Half a packed block always has its other half.
            const int index = STEPS_OF_BLOCK == 1 ? min(w, work.q_blocks - 1) : w;
            copy_q_and_grad<!IS_CROWDED>(shared + w * QUERY_BYTES, statistics_of(shared, w), a.packed_q, a.packed_grad, maps,
                                         step_at(work.q_block + index), head_of(work.head, a.axes.heads),
                                         work.first + index * STEP_Q, queries.full);
        }
        queries.advance();
        const KeyRange seen = keys_seen(work, window);
        const Head kv_head = head_of(work.head / a.axes.group, a.axes.heads / a.axes.group);
#pragma unroll 1
        for (int tile = seen.begin; tile < seen.end; ++tile) {
            const i64 block = work.kv_block + tile;
            keys.wait_empty();
            const u32 full = keys.full + 8 * keys.index, stage = shared + RING + keys.index * STAGE_BYTES;
            barrier_expect_bytes(full, K_AND_V_BYTES + K_TILE);
            const u32 k_scale = k_scale_of(shared, keys.index);
            copy_k_and_v(stage + K_ROWS, k_scale, a.packed_kv, maps, block, kv_head, tile * BLOCK_KV, full);
            bulk_copy(stage + K_COLUMNS, a.packed_k_columns + block * K_TILE, K_TILE, full);
            keys.advance();
        }
    }
    queries.wait_empty();
    work_tiles[queries.parity] = work_tile;  // tells the consumers that there is no other
    barrier_arrive(queries.full);
}

// What a consumer needs once for its 64 queries.
struct Queries {
    u32 rows, grad_rows;  // descriptor_base of Q and of dO
    float q_scale[2], minus_lse[2], minus_delta[2];  // of the rows of this thread; the scale of a block twice

    __device__ __forceinline__ Queries(u8* shared, int warpgroup) {
        const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
        const u8* block = statistics_of(shared, warpgroup);
        const float* scales = reinterpret_cast<const float*>(block + STEP_STATS);
        const float* stats = reinterpret_cast<const float*>(block);
        rows = descriptor_base(shared_address(shared)) + warpgroup * (QUERY_BYTES / 16);
        grad_rows = rows + GRAD_ROWS / 16;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            q_scale[r] = scales[HAS_TOKEN_SCALES ? row + 8 * r : 0];
            minus_lse[r] = stats[row + 8 * r];
            minus_delta[r] = stats[ROWS + row + 8 * r];
        }
    }
};

// The kernel. `consume(work, seen, warpgroup, keys, queries, dq_sum)` adds dQ of a consumer's 64 queries, before the scale of
// logits. IS_JOINT: all consumers must see the same tiles.
template <bool IS_JOINT, class Consume>
__device__ __forceinline__ void find_dq(const Arguments& a, const Window& window, const TensorMaps& maps, u8* shared,
                                        Barriers& barriers, Consume consume) {
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
        const KeyRange seen = keys_seen(work, window);
        const KeyRange own = MAY_SEE_LESS && !IS_JOINT ? keys_seen_by(work, window, warpgroup) : seen;
        const bool sees_any = own.begin < own.end;
        if (HAS_WINDOW && sees_any) skip(keys, own.begin - seen.begin);
        if (sees_any)
            consume(work, own, warpgroup, keys, queries, dq_sum);
        else if (!IS_CROWDED)
            queries.release();
        if (HAS_WINDOW || (MAY_SEE_LESS && !IS_JOINT)) skip(keys, seen.end - (sees_any ? own.end : seen.begin));
        find_query_tile<CONSUMERS>(a.axes, work_tile, work);  // computed again: keeping it costs registers
        const float scales[2] = {a.scale, a.scale};
        u8* staging = IS_CROWDED ? shared + warpgroup * QUERY_BYTES : shared + STAGING + warpgroup * STAGING_BYTES;
        store_channels<D>(a.dq, dq_sum, scales, staging, warpgroup, work.head, a.axes.heads, work.first + warpgroup * ROWS, work.q,
                   a.axes.d);
        if constexpr (IS_CROWDED) {
            fence_proxy_async();  // the next queries come after these reads and writes
            queries.release();
        }
        queries.advance();
    }
}
