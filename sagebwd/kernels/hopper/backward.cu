// dK and dV, and the sums of which finish_dq.cu makes dQ. A work tile is 128 keys of one key head; it loops over all queries
// that see them.
//
// Two warpgroups compute S and dP, and dK and dV of 64 keys each. They store dS for a third one, which computes dQ. The fourth
// has one thread that copies ahead, and others that add dQ to the sums of all CTAs.

#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "query_gradient.cuh"
#include "scheduler.cuh"
#include "scores.cuh"

namespace {

constexpr int CONSUMERS = KEYS / ROWS;
constexpr int DQ_WARPGROUP = CONSUMERS, PRODUCER = CONSUMERS + 1;
constexpr int THREADS = 128 * (PRODUCER + 1);
constexpr int STAGES = D == 64 ? 4 : 2;
constexpr int DS_STAGES = 2;
constexpr int CHUNKS = D / 64;  // of 64 channels
static_assert(!HAS_TOKEN_SCALES);
static_assert(P_IS_16BIT || !DK_IS_16BIT);

// Registers of a thread. Their sum is what the CTA starts with.
constexpr int CONSUMER_REGISTERS = D == 64 ? 192 : DK_IS_16BIT ? 208 : 216;
constexpr int DQ_REGISTERS = D == 64 ? 96 : DK_IS_16BIT ? 72 : 56;
constexpr int PRODUCER_REGISTERS = D == 64 ? 32 : 24;
static_assert(CONSUMERS * CONSUMER_REGISTERS + DQ_REGISTERS + PRODUCER_REGISTERS == 65536 / 128);

// A stage in shared memory: the packed blocks of 64 queries.
constexpr int Q_COLUMNS = 0;                      // in 16 bits it is Q by rows
constexpr int GRAD_COLUMNS = Q_COLUMNS + Q_TILE;  // absent if P is in 16 bits
constexpr int Q_ROWS = Q_COLUMNS + Q_COLUMNS_BYTES;
constexpr int GRAD_ROWS = Q_ROWS + Q_TILE;
constexpr int STATISTICS = GRAD_ROWS + 2 * Q_TILE;
constexpr int SCALES = STATISTICS + ROW_STATS;
constexpr int STAGE_BYTES = align_up(SCALES + TAIL, 1024);

// Before the stages: a packed block of keys, K for dQ, dS, and chunks of dQ. Behind them: staging for the epilogue.
constexpr int V_ROWS = K_TILE;
constexpr int K_SCALE = 3 * K_TILE;
constexpr int DQ_K = align_up(K_AND_V_BYTES, 1024);
constexpr int DS = DQ_K + K_16BIT_BYTES;
constexpr int DQ = DS + DS_STAGES * DS_BYTES;
constexpr int RING = DQ + BUFFERS * UNIT_VALUES * 4;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
constexpr int STORED_CHANNELS = D == 64 ? 64 : 16;  // at a time, in the epilogue
constexpr int CHUNK_STAGING = staging_bytes(STORED_CHANNELS);
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * CHUNK_STAGING);

struct SharedState {
    u64 full[STAGES], empty[STAGES], keys_full[1], keys_empty[1], dq_k_full[1];
    u64 ds_full[DS_STAGES], ds_empty[DS_STAGES], dq_full[HELPERS * UNITS], dq_empty[BUFFERS];
    KeyTile work[2];  // whose keys are in shared memory, and whose come next, in turn; kv_head -1: there is no other
    DqChunk dq_chunks[HELPERS];
};

struct Arguments {
    const u8 *packed_q, *packed_grad, *packed_q_columns, *packed_kv;
    const float* k_mean;  // (documents of all heads of keys, D), what packed_kv lacks of K; null: nothing
    TokenTensor dk, dv;
    float* dq_sums;  // of each packed block of queries, chunk by chunk, as the threads that compute dQ hold them
    int* turns;      // of each chunk: how many work tiles are in its sum; zero at the start
    Axes axes;       // work tiles and `heads` are those of keys
    float scale;
    int documents;
    int last_keys_first_up_to;  // queries of a document; see query_gradient.cuh
};

struct Rings {
    Ring<STAGES> queries;
    Ring<1> keys;
    Ring<DS_STAGES> ds;
    HandOver dq;
    u32 dq_k_full;
};

// The first packed block of queries that a work tile visits in one head of its group, counted over all heads.
__device__ __forceinline__ i64 first_packed_block(const Axes& axes, const KeyTile& work, int head) {
    return i64(work.kv_head * axes.group + head) * axes.q_blocks + work.q_block;
}

__device__ __forceinline__ void producer_loop(const Arguments& a, const Window& window, const TensorMaps& maps, Rings& rings,
                                              u32 shared, SharedState& state) {
    Ring<STAGES>& queries = rings.queries;
    Ring<1>& keys = rings.keys;
    // All work tiles come from the counter, the first ones too: none is taken before those that it waits for.
    WorkTile work_tile;
    while ((work_tile = work_tile_at(a.axes, atomicAdd(a.axes.tile_counter, 1))).head >= 0) {
        KeyTile found;
        if (!find_key_tile_in_order(a.axes, work_tile, a.last_keys_first_up_to, found)) continue;
        if constexpr (HAS_WINDOW) leave_queries_that_see<KEYS>(found, window);
        keys.wait_empty();
        KeyTile& work = state.work[keys.parity];
        work = found;
        barrier_expect_bytes(keys.full, K_AND_V_BYTES);
        const Head kv_head = head_of(work.kv_head, a.axes.heads);
        copy_k_and_v(shared, shared + K_SCALE, a.packed_kv, maps, work.kv_block, kv_head, work.first, keys.full);
        keys.advance();
        const bool last_keys_first = takes_last_keys_first(work, a.last_keys_first_up_to);
        int next = first_block(last_keys_first, work.q_tiles);
        for (int h = 0; h < a.axes.group; ++h) {
            const i64 first = first_packed_block(a.axes, work, h);
            const Head head = head_of(work.kv_head * a.axes.group + h, a.axes.heads * a.axes.group);
#pragma unroll 1
            for (int left = work.q_tiles; left > 0; --left) {
                const i64 block = first + next;
                const int first_query = work.first_query + next * BLOCK_Q;
                next = next_block(last_keys_first, work.q_tiles, next);
                queries.wait_empty();
                const u32 full = queries.full + 8 * queries.index, stage = shared + RING + queries.index * STAGE_BYTES;
                barrier_expect_bytes(full, Q_AND_GRAD_BYTES + Q_COLUMNS_BYTES);
                copy_q_and_grad(stage + Q_ROWS, stage + STATISTICS, a.packed_q, a.packed_grad, maps, step_at(block), head,
                                first_query, full);
                copy_q_columns(stage + Q_COLUMNS, a.packed_q_columns, maps, step_at(block), head, first_query, full);
                queries.advance();
            }
        }
    }
    keys.wait_empty();
    state.work[keys.parity].kv_head = -1;
    barrier_arrive(keys.full);
}

// --- dK and dV ---------------------------------------------------------------------------------------------

// The gradients of a consumer's 64 keys.
struct Sums {
    float dk[D / 2], dv[D / 2];
};

// Keeps reads and writes of what the tensor cores accumulate where they are.
__device__ __forceinline__ void pin_sums(Sums& sums) {
    if constexpr (P_IS_16BIT) pin(sums.dv);
    if constexpr (DK_IS_16BIT) pin(sums.dk);
}

// A tile of a work tile: the stage that its block of queries lies in, the block as in first_block, and which QUERIES of it.
struct Place {
    Ring<STAGES> queries;
    int block, part;

    __device__ __forceinline__ bool is_last_part() const { return part == PARTS - 1; }
};

// The tiles of a work tile, for one warpgroup. `work` lies in shared memory; read in the loops, it would be waited for.
struct Tiles {
    const Window& window;
    const u8* shared;
    int keys, q_tiles, first_ahead, q_tokens, kv_tokens;  // keys: that exist, from the first of this warpgroup on
    u32 k_rows, v_rows, ring;
    float k_scale, scale;
    bool last_keys_first;

    __device__ __forceinline__ Tiles(const Arguments& a, const Window& window, const KeyTile& work, int warpgroup, const u8* shared)
        : window(window), shared(shared), keys(work.kv.tokens - work.first - warpgroup * ROWS), q_tiles(work.q_tiles),
          first_ahead(warpgroup + (HAS_WINDOW ? (work.first - work.first_query) / ROWS : 0)), q_tokens(work.q.tokens),
          kv_tokens(work.kv.tokens), k_scale(*reinterpret_cast<const float*>(shared + K_SCALE)), scale(a.scale),
          // The compiler then knows that it is warp-uniform.
          last_keys_first(__shfl_sync(0xffffffff, takes_last_keys_first(work, a.last_keys_first_up_to), 0)) {
        const u32 base = descriptor_base(shared_address(shared));
        k_rows = base + warpgroup * (ROWS * D / 16), v_rows = base + (V_ROWS + warpgroup * ROWS * 128) / 16;
        ring = base + RING / 16;
    }

    __device__ __forceinline__ Place first(const Ring<STAGES>& queries) const {
        return {queries, first_block(last_keys_first, q_tiles), 0};
    }
    // To the next one, when its block is there.
    __device__ __forceinline__ void advance(Place& at) const {
        at.part = at.is_last_part() ? 0 : at.part + 1;
        if (at.part > 0) return;
        at.block = next_block(last_keys_first, q_tiles, at.block);
        at.queries.advance();
        at.queries.wait_full();
    }
    __device__ __forceinline__ u32 stage(const Place& at) const { return ring + at.queries.index * (STAGE_BYTES / 16); }
    __device__ __forceinline__ void begin_s(int (&s)[VALUES], const Place& at) const {
        contract_channels<QUERIES>(s, k_rows, stage(at) + (Q_ROWS + at.part * QUERIES * D) / 16);
    }
    __device__ __forceinline__ void begin_dp(int (&dp)[VALUES], const Place& at) const {
        contract_channels_16bit<QUERIES, KEYS, BLOCK_Q>(dp, v_rows, stage(at) + (GRAD_ROWS + at.part * QUERIES * 128) / 16);
    }
    __device__ __forceinline__ ScoreTile tile(const Place& at) const {
        const u8* stage = shared + RING + at.queries.index * STAGE_BYTES;
        const float2 scales = *reinterpret_cast<const float2*>(stage + SCALES);
        return {logit_factor(scales.x, k_scale, scale), reinterpret_cast<const float2*>(stage + STATISTICS), at.part * QUERIES,
                scales, keys, first_ahead - at.block, window};
    }
    // See find_p_of_8.
    __device__ __forceinline__ bool is_fast(const ScoreTile& tile) const {
        const bool is_cut = keys < ROWS || (IS_CAUSAL && tile.blocks_ahead >= 0) ||
                            (HAS_WINDOW && window.cuts<ROWS>(ROWS * tile.blocks_ahead, q_tokens, kv_tokens));
        return is_fusible(tile.factor) && !is_cut;
    }
};

// Stores dS for dQ when there is room.
__device__ __forceinline__ void put_ds(const ExactScores& scores, const ScoreTile& tile, const Ring<DS_STAGES>& ds,
                                       const u8* shared, int warpgroup) {
    ds.wait_empty();
    store_ds(scores.ds, shared_address(shared) + DS + ds.index * DS_BYTES, tile.first_query, warpgroup);
}

// --- dK in INT8: one product after the other

// All of find_p_of_8 and find_ds_of_8, rounded; dS is stored.
template <bool FAST, int N>
__device__ __forceinline__ void find_scores(Scores& scores, const int (&s)[N], const int (&dp)[N], const ScoreTile& tile,
                                            const Ring<DS_STAGES>& ds, const u8* shared, int warpgroup) {
    ExactScores exact;
#pragma unroll
    for (int j = 0; j < VALUES / 4; ++j) {
        find_p_of_8<FAST>(exact, s, tile, j);
        find_ds_of_8(exact, dp, tile, j);
    }
    round_scores(scores, exact, tile);
    put_ds(exact, tile, ds, shared, warpgroup);
}

// All tiles. Templates, here and below, because only one of the two loops compiles.
template <int N>
__device__ __forceinline__ void loop_in_turn(const Tiles& tiles, int count, int warpgroup, Rings& rings, Sums& sums) {
    int s[N], dp[N];
    Place at = tiles.first(rings.queries);
    pin_sums(sums);  // zero them before the first wgmma: later writes would serialize it
    at.queries.wait_full();
    tiles.begin_s(s, at);
    tiles.begin_dp(dp, at);
    for (int left = count;; --left) {
        const ScoreTile tile = tiles.tile(at);  // while the tensor cores work
        const bool is_fast = tiles.is_fast(tile);
        Place next = at;
        if (left > 1) tiles.advance(next);
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        // Early, so that the next ones arrive in time; the last S below is never used.
        if (left == 1) rings.keys.release();
        Scores scores;
        if (is_fast)
            find_scores<true>(scores, s, dp, tile, rings.ds, tiles.shared, warpgroup);
        else
            find_scores<false>(scores, s, dp, tile, rings.ds, tiles.shared, warpgroup);
        const u32 stage = tiles.stage(at);
        multiply_scores<CHUNKS>(sums, s, dp, scores, stage + Q_COLUMNS / 16, stage + GRAD_COLUMNS / 16, stage + GRAD_ROWS / 16);
        fence_proxy_async();
        rings.ds.fill();
        rings.ds.advance();
        // After the last tile S is computed once more and not used: a branch between wgmmas would serialize them.
        tiles.begin_s(s, next);
        wgmma_wait<1>();
        pin(dp);
        accumulate(sums.dk + D / 2 - 32, dp, scores.dk_factor);
        if (left == 1) break;
        tiles.begin_dp(dp, next);
        at.queries.release();
        at = next;
    }
    wgmma_wait<0>();
    pin_sums(sums);
    at.queries.release();
    rings.queries = at.queries;
    rings.queries.advance();
}

// --- dK in 16 bit: products overlap with P and dS

template <bool FAST, int N>
__device__ __forceinline__ void find_p(ExactScores& exact, const int (&s)[N], const ScoreTile& tile) {
#pragma unroll
    for (int j = 0; j < VALUES / 4; ++j) find_p_of_8<FAST>(exact, s, tile, j);
}

// All tiles. The tensor cores multiply S of the next tile while dS is found, and dP of it while its P is found, which needs
// registers for P beside those of S and dP. Products whose left operands lie in registers, as those of dV and dK, hold up the warps
// that issue them.
template <int N, class AnyScores = Scores>
__device__ __forceinline__ void loop_overlapped(const Tiles& tiles, int count, int warpgroup, Rings& rings, Sums& sums) {
    int s[N], dp[N];
    ExactScores exact;  // of several tiles, so its maxima are none; in 16 bit nothing needs them
    Place at = tiles.first(rings.queries);
    pin_sums(sums);
    at.queries.wait_full();
    tiles.begin_s(s, at);
    tiles.begin_dp(dp, at);
    ScoreTile tile = tiles.tile(at);
    wgmma_wait<0>();
    pin(s);
    pin(dp);
    find_p<false>(exact, s, tile);
#pragma unroll 1
    for (int left = count; left > 0; --left) {
        // After the last tile S, dP and P are computed once more and not used: a branch between wgmmas would serialize them.
        Place next = at;
        if (left > 1) tiles.advance(next);
        tiles.begin_s(s, next);
#pragma unroll
        for (int j = 0; j < VALUES / 4; ++j) find_ds_of_8(exact, dp, tile, j);
        AnyScores scores;
        round_scores(scores, exact, tile);
        put_ds(exact, tile, rings.ds, tiles.shared, warpgroup);
        fence_proxy_async();  // here: it would also wait for the products that follow
        const u32 first_row = tiles.stage(at) + at.part * QUERIES * 128 / 16;
        contract_tokens_16bit<QUERIES, BLOCK_Q>(sums.dv, scores.p, first_row + GRAD_ROWS / 16);
        contract_tokens_16bit<QUERIES, BLOCK_Q>(sums.dk, scores.ds, first_row + Q_COLUMNS / 16);
        tiles.begin_dp(dp, next);
        if (at.is_last_part()) {
            rings.ds.fill();
            rings.ds.advance();
        }
        wgmma_wait<1>();  // leaves dP unfinished
        pin(s);
        if (at.is_last_part()) at.queries.release();
        tile = tiles.tile(next);
        if (tiles.is_fast(tile))
            find_p<true>(exact, s, tile);
        else
            find_p<false>(exact, s, tile);
        wgmma_wait<0>();
        pin(dp);
        at = next;
    }
    pin_sums(sums);
    rings.keys.release();
    rings.queries = at.queries;
    rings.queries.advance();
}

__device__ __forceinline__ void consume(const Arguments& a, const Window& window, int warpgroup, u8* shared, Rings& rings,
                                        SharedState& state) {
    for (;;) {
        rings.keys.wait_full();
        const KeyTile& work = state.work[rings.keys.parity];
        if (work.kv_head < 0) return;
        Sums sums = {};
        const Tiles tiles(a, window, work, warpgroup, shared);
        const int count = a.axes.group * tiles.q_tiles * PARTS;
        if (count == 0)
            rings.keys.release();
        else if constexpr (DK_IS_16BIT)
            loop_overlapped<VALUES>(tiles, count, warpgroup, rings, sums);
        else
            loop_in_turn<VALUES>(tiles, count, warpgroup, rings, sums);
        u8* staging = shared + STAGING + warpgroup * CHUNK_STAGING;
        const int first = work.first + warpgroup * ROWS;
        const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
        store_in_parts<D, STORED_CHANNELS>(a.dv, sums.dv, ones, staging, warpgroup, work.kv_head, a.axes.heads, first, work.kv,
                                           a.axes.d);
        store_in_parts<D, STORED_CHANNELS>(a.dk, sums.dk, scales, staging, warpgroup, work.kv_head, a.axes.heads, first, work.kv,
                                           a.axes.d);
        rings.keys.advance();
    }
}

// --- dQ ----------------------------------------------------------------------------------------------------

// All blocks of queries of a work tile, as the consumers go through them.
__device__ __forceinline__ void dq_loop(const Arguments& a, const Window& window, const KeyTile& work, u8* shared,
                                        Rings& rings, SharedState& state) {
    const int thread = threadIdx.x % 128, q_tiles = work.q_tiles, first_query = work.first_query;
    const u32 base = descriptor_base(shared_address(shared)), k = base + DQ_K / 16;
    LeftK left_k;
    left_k.load(shared + DQ_K);
    const bool last_keys_first = takes_last_keys_first(work, a.last_keys_first_up_to);
    int block = first_block(last_keys_first, q_tiles), head = 0;
#pragma unroll 1
    for (int left = a.axes.group * q_tiles; left > 0; --left) {
        i64 place = (first_packed_block(a.axes, work, head) + block) * (D / DQ_CHANNELS * TURNS);
        const int turn = turn_of(last_keys_first, work, window, first_query + block * BLOCK_Q);
        rings.ds.wait_full();
#pragma unroll 1
        for (int channel = 0; channel < D; channel += DQ_CHANNELS) {
#pragma unroll
            for (int query = 0; query < BLOCK_Q; query += DQ_QUERIES) {
                float dq[DQ_QUERIES / 2];
                multiply_ds(dq, left_k, k, base + (DS + rings.ds.index * DS_BYTES) / 16, channel, query);
                if (channel == D - DQ_CHANNELS && query == BLOCK_Q - DQ_QUERIES) rings.ds.release();
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
                    rings.dq.wait_empty();
                    store_unit(shared + DQ + rings.dq.buffer * UNIT_VALUES * 4, dq, unit, thread);
                    if (unit == 0 && thread == 0)
                        state.dq_chunks[rings.dq.helper] = {a.dq_sums + place * TURN_VALUES, a.turns + place, turn};
                    fence_proxy_async();
                    rings.dq.fill(unit);
                    rings.dq.next_buffer();
                }
                place += DQ_CHUNK / TURN_VALUES;
                rings.dq.next_helper();
            }
        }
        rings.ds.advance();
        block = next_block(last_keys_first, q_tiles, block);
        if (block == first_block(last_keys_first, q_tiles)) ++head;
    }
}

// The mean of K of a work tile; null if nothing was subtracted.
__device__ __forceinline__ const float* mean_of(const Arguments& a, const KeyTile& work) {
    if (a.k_mean == nullptr) return nullptr;
    const int* documents = a.axes.kv.document;
    const int document = documents == nullptr ? 0 : documents[work.kv_block - work.kv_head * a.axes.kv_blocks];
    return a.k_mean + (i64(work.kv_head) * a.documents + document) * D;
}

__device__ __forceinline__ void compute_dq(const Arguments& a, const Window& window, const TensorMaps& maps, u8* shared,
                                           Rings& rings, SharedState& state) {
    const int thread = threadIdx.x % 128;
    for (int parity = 0;; parity ^= 1) {
        rings.keys.wait_full();
        const KeyTile& work = state.work[rings.keys.parity];
        if (work.kv_head < 0) break;
        rings.keys.release();  // of the packed block only `work` is needed, which is not overwritten yet
        rings.keys.advance();
        warpgroup_sync(DQ_WARPGROUP);  // every warp's last product has read the K before
        if (thread == 0) {
            barrier_expect_bytes(rings.dq_k_full, K_16BIT_BYTES);
#pragma unroll
            for (int token = 0; token < KEYS; token += 64)
                copy_tokens<KEYS * 128>(shared_address(shared) + DQ_K + token * 128, maps.k, head_of(work.kv_head, a.axes.heads),
                                        work.kv.start + work.first + token, rings.dq_k_full);
        }
        barrier_wait(rings.dq_k_full, parity);
        smooth_k(shared + DQ_K, mean_of(a, work), work.kv.tokens - work.first, DQ_WARPGROUP);
        dq_loop(a, window, work, shared, rings, state);
    }
#pragma unroll 1
    for (int i = 0; i < BUFFERS; ++i, rings.dq.next_buffer()) rings.dq.wait_empty();  // then all chunks were taken
#pragma unroll 1
    for (int i = 0; i < HELPERS; ++i, rings.dq.next_helper()) {
        if (thread == 0) state.dq_chunks[rings.dq.helper].sums = nullptr;
        rings.dq.fill(0);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kernel(const Arguments a, const Window window,
                                                                         const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ SharedState state;
    if (threadIdx.x == 0) {
        ring_init(state.full, state.empty, CONSUMERS);
        ring_init(state.keys_full, state.keys_empty, CONSUMERS + 1);
        ring_init(state.ds_full, state.ds_empty, 4 * CONSUMERS, 4);
        for (u64& barrier : state.dq_full) barrier_init(shared_address(&barrier), 4);
        for (u64& barrier : state.dq_empty) barrier_init(shared_address(&barrier), 1);
        barrier_init(shared_address(state.dq_k_full), 1);
        barrier_init_fence();
    }
    __syncthreads();
    Rings rings = {{shared_address(state.full), shared_address(state.empty)},
                   {shared_address(state.keys_full), shared_address(state.keys_empty)},
                   {shared_address(state.ds_full), shared_address(state.ds_empty)},
                   {shared_address(state.dq_full), shared_address(state.dq_empty)},
                   shared_address(state.dq_k_full)};

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the compiler then knows that it is warp-uniform
    if (warpgroup == PRODUCER) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 == 0) producer_loop(a, window, maps, rings, shared_address(shared), state);
        const int helper = static_cast<int>(threadIdx.x % 128) / 32 - 1;
        if (helper >= 0 && helper < HELPERS && threadIdx.x % 32 == 0)
            add_chunks(rings.dq, helper, shared_address(shared) + DQ, state.dq_chunks[helper]);
    } else if (warpgroup == DQ_WARPGROUP) {
        setmaxnreg_dec<DQ_REGISTERS>();
        compute_dq(a, window, maps, shared, rings, state);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(a, window, warpgroup, shared, rings, state);
    }
}
