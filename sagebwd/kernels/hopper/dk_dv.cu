// dK and dV. A work tile is 128 or 192 keys of one key head, 64 for each consumer; it loops over all queries that see them.
// With 256 channels it is 64 keys: registers hold half of their channels, so each of two consumers computes P and dS of them, and
// half of the channels of dK and dV.
//
// Tiles are transposed, (keys, queries): a scale of P or dS for each key is one for each row.

#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "registers.cuh"
#include "scheduler.cuh"
#include "window.cuh"

namespace {

constexpr int CONSUMERS = D == 64 ? 3 : 2;  // warpgroups; one more is the producer
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int STAGES = D == 64 ? 6 : D == 256 ? 2 : P_IS_16BIT ? 4 : 3;
constexpr bool SHARE_KEYS = D == 256;  // whether both consumers have the same keys
constexpr int KEYS = SHARE_KEYS ? ROWS : CONSUMERS * ROWS;  // of a work tile
constexpr int CHANNELS = SHARE_KEYS ? D / CONSUMERS : D;  // of dV and dK, of a consumer
constexpr int CHUNKS = CHANNELS / 64;  // of 64 channels; dV and dK are computed chunk by chunk
constexpr int BLOCK_PARTS = BLOCK_KV / ROWS;  // parts of a packed block of keys, 64 each
constexpr int HALF_BLOCKS = 2 * KEYS / BLOCK_KV;
static_assert(STEP_Q == ROWS && !DK_IS_16BIT && !(P_IS_16BIT && (HAS_TOKEN_SCALES || HAS_TILE_SCALES)));

// A stage in shared memory: 64 queries.
constexpr int Q_COLUMNS = 0;
constexpr int GRAD_COLUMNS = Q_COLUMNS + STEP_TILE;  // absent if P is in 16 bits
constexpr int Q_ROWS = Q_COLUMNS + Q_COLUMNS_BYTES;
constexpr int GRAD_ROWS = Q_ROWS + STEP_TILE;
constexpr int STATISTICS = GRAD_ROWS + 2 * STEP_TILE;
constexpr int SCALES = STATISTICS + STEP_STATS;
constexpr int STAGE_BYTES = align_up(SCALES + scale_bytes(2, STEP_Q), 1024);

// Before the stages: the keys, 64 at a time, half a packed block or a whole one. Behind them: staging for the epilogue.
constexpr int KEYS_TILE = ROWS * D;
constexpr int V_ROWS = KEYS_TILE;
constexpr int K_SCALE = 3 * KEYS_TILE;
constexpr int K_SCALE_BYTES = scale_bytes(1, ROWS);
constexpr int KEY_BYTES = align_up(K_SCALE + K_SCALE_BYTES, 1024);
constexpr int RING = KEYS / ROWS * KEY_BYTES;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
constexpr int STORED_CHANNELS = D == 256 ? 32 : D;  // through staging at once
constexpr int PART_STAGING = staging_bytes(STORED_CHANNELS);
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * PART_STAGING);

struct Barriers {
    u64 full[STAGES], empty[STAGES], keys_full[1], keys_empty[1];
    WorkTile work_tiles[2];  // whose keys are in shared memory, and whose come next, in turn
};

struct Arguments {
    const u8 *packed_q, *packed_grad, *packed_q_columns, *packed_kv;
    TokenTensor dk, dv;
    Axes axes;  // work tiles and `heads` are those of keys
    float scale;
    const float2* tile_scales;  // if SCALES_OF_TILES is defined: see tile_scales_at
};

// Which 64 keys of the work tile are a consumer's, and from which channel on dV and dK are.
__device__ __forceinline__ int keys_of(int warpgroup) { return SHARE_KEYS ? 0 : warpgroup; }
__device__ __forceinline__ int first_channel_of(int warpgroup) { return SHARE_KEYS ? warpgroup * CHANNELS : 0; }

// Copies 64 keys of the work tile.
__device__ __forceinline__ void copy_keys(const Arguments& a, const TensorMaps& maps, const KeyTile& work, int keys,
                                          u32 target, u32 full) {
    constexpr int CHUNK_BYTES = ROWS * 128;  // 64 channels of V
    const int index = work.first / ROWS % BLOCK_PARTS + keys, part = index % BLOCK_PARTS;
    const u8* block = a.packed_kv + i64(work.kv_block + index / BLOCK_PARTS) * PACKED_KV_BYTES;
    bulk_copy(target, block + part * KEYS_TILE, KEYS_TILE, full);
    if constexpr (PACKS_16BIT) {
#pragma unroll
        for (int c = 0; c < D / 64; ++c)
            bulk_copy(target + V_ROWS + c * CHUNK_BYTES, block + K_TILE + (BLOCK_PARTS * c + part) * CHUNK_BYTES, CHUNK_BYTES, full);
    } else {
        copy_tokens<CHUNK_BYTES>(target + V_ROWS, maps.v, head_of(work.kv_head, a.axes.heads),
                                 work.first + keys * ROWS, full);
    }
    bulk_copy(target + K_SCALE,
              block + K_TILE + PACKED_V_16BIT_BYTES + (HAS_TOKEN_SCALES ? part * K_SCALE_BYTES : 0), K_SCALE_BYTES, full);
}

// How many times 64 keys there are, the last ones fewer.
__device__ __forceinline__ int parts_with_keys(const KeyTile& work) { return (work.half_blocks * BLOCK_PARTS + 1) / 2; }

__device__ __forceinline__ void producer_loop(const Arguments& a, const Window& window, const TensorMaps& maps,
                                              Ring<STAGES> queries, Ring<1> keys, u32 shared, WorkTile (&work_tiles)[2]) {
    KeyTile work;
    WorkTile work_tile;
    for (int index = blockIdx.x; (work_tile = work_tile_at(a.axes, index)).head >= 0; index = next_work_tile(a.axes)) {
        if (!find_key_tile<HALF_BLOCKS>(a.axes, work_tile, work)) continue;
        if constexpr (HAS_WINDOW) leave_queries_that_see<KEYS>(work, window);
        keys.wait_empty();
        work_tiles[keys.parity] = work_tile;
        const int parts = parts_with_keys(work);
        barrier_expect_bytes(keys.full, parts * (K_SCALE + K_SCALE_BYTES));
        for (int i = 0; i < parts; ++i) copy_keys(a, maps, work, i, shared + i * KEY_BYTES, keys.full);
        keys.advance();
        for (int h = 0; h < a.axes.group; ++h) {
            const int index = work.kv_head * a.axes.group + h;
            const Head head = head_of(index, a.axes.heads * a.axes.group);
            const i64 first = i64(index) * a.axes.q_blocks * STEPS_OF_BLOCK + work.q_block;
#pragma unroll 1
            for (int i = 0; i < work.q_tiles; ++i) {
                const int first_query = work.first_query + i * STEP_Q;
                const Step step = step_at(first + i);
                queries.wait_empty();
                const u32 full = queries.full + 8 * queries.index, stage = shared + RING + queries.index * STAGE_BYTES;
                barrier_expect_bytes(full, Q_AND_GRAD_BYTES + Q_COLUMNS_BYTES);
                copy_q_columns(stage + Q_COLUMNS, a.packed_q_columns, maps, step, head, first_query, full);
                copy_q_and_grad(stage + Q_ROWS, stage + STATISTICS, a.packed_q, a.packed_grad, maps, step, head, first_query, full);
                queries.advance();
            }
        }
    }
    keys.wait_empty();
    work_tiles[keys.parity] = work_tile;  // tells the consumers that there is no other
    barrier_arrive(keys.full);
}

// Scales of single tokens, if they have some.
struct TokenScales {
    const float2 *q, *grad;  // of all queries of the block
    float q_factor;          // from scales of Q and K to factors
    float k[2];              // of the keys of this thread
};

// The scales of P and dS of the next tile of a consumer, if tiles have scales: loaded a tile ahead.
struct TileScales {
    const float2* of_keys;  // those of the first query of a head with this consumer's keys
    float2 next;

    __device__ __forceinline__ TileScales(const Arguments& a, const KeyTile& work, int keys, int tile) {
        if constexpr (!HAS_TILE_SCALES) return;
        const int head = work.kv_head * a.axes.group, key_block = work.kv_block - work.kv_head * a.axes.kv_blocks + keys;
        of_keys = a.tile_scales + i64(head) * a.axes.q_blocks * a.axes.kv_blocks + key_block;
        load(a, work, tile);
    }
    __device__ __forceinline__ void advance_head(const Arguments& a) {
        if constexpr (HAS_TILE_SCALES) of_keys += i64(a.axes.q_blocks) * a.axes.kv_blocks;
    }
    __device__ __forceinline__ void load(const Arguments& a, const KeyTile& work, int tile) {
        if constexpr (HAS_TILE_SCALES) next = of_keys[i64((work.q_block + tile) / STEPS_OF_BLOCK) * a.axes.kv_blocks];
    }
};

// P and dS of one tile in INT8, and their scales per row times those of dO and Q. 16-bit P has no scale.
struct Scores {
    u32 p[P_IS_16BIT ? 16 : 8], ds[8];
    float dv_factor[2], dk_factor[2];
};

// The scores of one tile from S and dP; `scales` are those of Q and dO. FAST: every logit allows a fused multiply-add,
// and none is masked. Else, if `is_diagonal`, keys after a query are masked; the first key is the first query there. With a
// window, those that a query does not see; `first_key`: the first key minus the first query. Straight-line code, so that all
// units are busy. If tokens have scales: those of the queries run along the contraction of dV and dK, so that P and dS are
// multiplied by them; `factor` is not read. `of_tile`: if tiles have scales, those of P and dS.
template <bool FAST>
__device__ __forceinline__ void find_scores(Scores& scores, const int (&s)[32], const int (&dp)[32], float factor,
                                            const float2* minus_lse, float2 scales, const TokenScales& tokens,
                                            float2 of_tile, bool is_diagonal, const Window& window, int first_key) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int key = thread / 32 * 16 + lane / 4, query = lane % 4 * 2;
    const float2* minus_delta = minus_lse + ROWS / 2;
    float p[32], ds[32], ds_largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int p_largest[2] = {0, 0};  // bits: non-negative floats are ordered as their bits, NaN at the top
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 c = minus_lse[4 * j + lane % 4], d = minus_delta[4 * j + lane % 4];
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            const int r = i / 2 % 2;
            const float x = __int2float_rn(s[i]);
            const float q_scale = HAS_TOKEN_SCALES ? pick(tokens.q[4 * j + lane % 4], i % 2) : 1.0f;
            const float f = HAS_TOKEN_SCALES ? __fmul_rn(__fmul_rn(q_scale, tokens.q_factor), tokens.k[r]) : factor;
            p[i] = exp2_fast(FAST && !HAS_TOKEN_SCALES ? fmaf(x, f, pick(c, i % 2))
                                                       : __fadd_rn(__fmul_rn(x, f), pick(c, i % 2)));
            const bool is_hidden =
                !FAST && ((is_diagonal && key + 8 * r > query + 8 * j + i % 2) ||
                          (HAS_WINDOW && window.hides(first_key + key + 8 * r - query - 8 * j - i % 2)));
            if (is_hidden) p[i] = 0.0f;
            ds[i] = p[i] * (__int_as_float(dp[i]) + pick(d, i % 2));
            if constexpr (HAS_TOKEN_SCALES) {  // what is hidden stays zero, even next to a NaN
                p[i] = is_hidden ? 0.0f : p[i] * pick(tokens.grad[4 * j + lane % 4], i % 2);
                ds[i] = is_hidden ? 0.0f : ds[i] * q_scale;
            }
            if (!HAS_TILE_SCALES) ds_largest[i % 4] = nan_max_abs(ds_largest[i % 4], ds[i]);
        }
        if (HAS_TILE_SCALES) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            p_largest[r] = max(max(p_largest[r], __float_as_int(p[4 * j + 2 * r])), __float_as_int(p[4 * j + 2 * r + 1]));
    }
    float p_inverse[2], ds_inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float ds_scale =
            HAS_TILE_SCALES ? of_tile.y : scale_of(row_max(nan_max(ds_largest[2 * r], ds_largest[2 * r + 1])), INT8_MAX);
        scores.dk_factor[r] = ds_scale * scales.x;
        ds_inverse[r] = reciprocal(ds_scale);
        if (P_IS_16BIT) continue;
        const float p_scale = HAS_TILE_SCALES ? of_tile.x : scale_of(__int_as_float(row_max(p_largest[r])), P_MAX);
        scores.dv_factor[r] = p_scale * scales.y;
        p_inverse[r] = reciprocal(p_scale);
    }
    round_operand(scores.p, p, p_inverse);
    round_tile<64>(scores.ds, ds, ds_inverse);
}

// The gradients of a consumer's 64 keys.
struct Sums {
    float dk[CHANNELS / 2], dv[CHANNELS / 2];
};

// The tiles of queries of each head that see no key of a consumer: before and after those that do.
struct Hidden {
    int before, after;
};
__device__ __forceinline__ Hidden tiles_hidden(const KeyTile& work, const Window& window, int warpgroup) {
    if (keys_of(warpgroup) >= parts_with_keys(work)) return {work.q_tiles, 0};
    if constexpr (!HAS_WINDOW) return {IS_CAUSAL ? min(keys_of(warpgroup), work.q_tiles) : 0, 0};
    const QueryRange own = queries_that_see(work, window, (work.first + keys_of(warpgroup) * ROWS) / BLOCK_KV * BLOCK_KV);
    const int begin = work.first_query / STEP_Q;
    if (own.begin >= own.end) return {work.q_tiles, 0};
    return {own.begin - begin, begin + work.q_tiles - own.end};
}

__device__ __forceinline__ void consumer_loop(const Arguments& a, const Window& window, const KeyTile& work,
                                              const Hidden& hidden, int warpgroup, u8* shared, Ring<STAGES>& queries,
                                              Ring<1>& keys, Sums& sums) {
    const u32 base = descriptor_base(shared_address(shared));
    const int of_keys = keys_of(warpgroup);
    const u32 of_channels = first_channel_of(warpgroup) * (ROWS / 16);  // in a tile by columns
    const u32 k_rows = base + of_keys * (KEY_BYTES / 16), v_rows = k_rows + V_ROWS / 16, ring = base + RING / 16;
    const float* k_scales = reinterpret_cast<const float*>(shared + of_keys * KEY_BYTES + K_SCALE);
    const float k_scale = *k_scales;
    TokenScales tokens;
    if constexpr (HAS_TOKEN_SCALES) {
        const int key = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        tokens = {nullptr, nullptr, logit_factor(1.0f, 1.0f, a.scale), {k_scales[key], k_scales[key + 8]}};
    }

    const int end = work.q_tiles - hidden.after;
    int s[32], dp[32], tile = hidden.before;
    TileScales tile_scales(a, work, of_keys, tile);
    if constexpr (P_IS_16BIT) pin(sums.dv);  // zero dV before the first wgmma: later writes would serialize it
    skip(queries, hidden.before);
    queries.wait_full();
    contract_channels<64>(s, k_rows, ring + (queries.index * STAGE_BYTES + Q_ROWS) / 16);
    contract_channels_16bit<64, ROWS>(dp, v_rows, ring + (queries.index * STAGE_BYTES + GRAD_ROWS) / 16);
    for (int left = a.axes.group * (end - hidden.before);; --left) {
        // While the tensor cores work: load what this tile needs, and wait for the next stage.
        const u8* block = shared + RING + queries.index * STAGE_BYTES;
        const float2* minus_lse = reinterpret_cast<const float2*>(block + STATISTICS);
        tokens.q = reinterpret_cast<const float2*>(block + SCALES);
        tokens.grad = tokens.q + STEP_Q / 2;
        const float2 scales = HAS_TOKEN_SCALES ? float2{1.0f, 1.0f} : *tokens.q;  // of Q and dO
        const float factor = logit_factor(scales.x, k_scale, a.scale);
        const int first_key = HAS_WINDOW ? work.first + of_keys * ROWS - work.first_query - tile * STEP_Q : 0;
        const bool is_diagonal = IS_CAUSAL && tile == hidden.before;
        const bool is_cut = is_diagonal || (HAS_WINDOW && window.cuts<ROWS>(first_key, work.q.tokens, work.kv.tokens));
        const bool is_fast = (HAS_TOKEN_SCALES || is_fusible(factor)) && !is_cut;
        const float2 of_tile = tile_scales.next;
        Ring<STAGES> next = queries;
        if (left > 1) {
            next.advance();
            if (++tile == end) {
                tile = hidden.before;
                tile_scales.advance_head(a);
                skip(next, hidden.after + hidden.before);
            }
            tile_scales.load(a, work, tile);
            next.wait_full();
        }
        const u32 next_stage = ring + next.index * (STAGE_BYTES / 16);

        Scores scores;
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        if (left == 1) keys.release();  // early, so that the next ones arrive in time; the last S below is never used
        if (is_fast)
            find_scores<true>(scores, s, dp, factor, minus_lse, scales, tokens, of_tile, is_diagonal, window, first_key);
        else
            find_scores<false>(scores, s, dp, factor, minus_lse, scales, tokens, of_tile, is_diagonal, window, first_key);

        const u32 stage = ring + queries.index * (STAGE_BYTES / 16);
        const u32 q_columns = stage + Q_COLUMNS / 16 + of_channels, grad_columns = stage + GRAD_COLUMNS / 16 + of_channels;
        multiply_scores<CHUNKS>(sums, s, dp, scores, q_columns, grad_columns, stage + GRAD_ROWS / 16 + 2 * of_channels);
        // After the last tile S is computed once more and not used: a branch between wgmmas would serialize them.
        contract_channels<64>(s, k_rows, next_stage + Q_ROWS / 16);
        wgmma_wait<1>();
        pin(dp);
        accumulate(sums.dk + CHANNELS / 2 - 32, dp, scores.dk_factor);
        if (left == 1) break;
        contract_channels_16bit<64, ROWS>(dp, v_rows, next_stage + GRAD_ROWS / 16);
        queries.release();
        queries = next;
    }
    wgmma_wait<0>();
    if constexpr (P_IS_16BIT) pin(sums.dv);
    queries.release();
    queries.advance();
    if (HAS_WINDOW) skip(queries, hidden.after);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) dk_dv_kernel(const Arguments a, const Window window,
                                                                      const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
        ring_init(barriers.full, barriers.empty, CONSUMERS);
        ring_init(barriers.keys_full, barriers.keys_empty, CONSUMERS);
        barrier_init_fence();
    }
    __syncthreads();
    Ring<STAGES> queries = {shared_address(barriers.full), shared_address(barriers.empty)};
    Ring<1> keys = {shared_address(barriers.keys_full), shared_address(barriers.keys_empty)};

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the compiler then knows that it is warp-uniform
    if (warpgroup == CONSUMERS) {
        begin_producer<CONSUMERS>();
        if (threadIdx.x % 128 == 0) producer_loop(a, window, maps, queries, keys, shared_address(shared), barriers.work_tiles);
        return;
    }
    begin_consumer<CONSUMERS>();
    for (;;) {
        keys.wait_full();
        const WorkTile& work_tile = barriers.work_tiles[keys.parity];
        if (work_tile.head < 0) return;
        KeyTile work;
        find_key_tile<HALF_BLOCKS>(a.axes, work_tile, work);
        if constexpr (HAS_WINDOW) leave_queries_that_see<KEYS>(work, window);
        Sums sums = {};
        const Hidden hidden = tiles_hidden(work, window, warpgroup);
        if (hidden.before < work.q_tiles) {
            consumer_loop(a, window, work, hidden, warpgroup, shared, queries, keys, sums);
        } else {
            keys.release();
            skip(queries, a.axes.group * work.q_tiles);
        }
        find_key_tile<HALF_BLOCKS>(a.axes, work_tile, work);  // computed again: keeping it costs registers
        u8* staging = shared + STAGING + warpgroup * PART_STAGING;
        const int first = work.first + keys_of(warpgroup) * ROWS, channel = first_channel_of(warpgroup);
        const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
        store_in_parts<CHANNELS, STORED_CHANNELS>(a.dv, sums.dv, ones, staging, warpgroup, work.kv_head, a.axes.heads, first,
                                                  work.kv, a.axes.d, channel);
        store_in_parts<CHANNELS, STORED_CHANNELS>(a.dk, sums.dk, scales, staging, warpgroup, work.kv_head, a.axes.heads, first,
                                                  work.kv, a.axes.d, channel);
        keys.advance();
    }
}
