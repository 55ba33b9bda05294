// dQ, dK and dV. A work tile is 128 keys of one key head; it loops over all queries that see them.
//
// Two warpgroups compute S and dP, and dK and dV of 64 keys each. They store dS for a third one, which computes dQ. The fourth
// has one thread that copies ahead, and three that add dQ to the sums of all CTAs.

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
constexpr int DS_STAGES = D == 64 ? 2 : 1;
constexpr int CHUNKS = D / 64;  // of 64 channels
constexpr int DQ_BUFFERS = 3;   // each with a thread of its own
static_assert(!HAS_TOKEN_SCALES);

// Registers of a thread. Their sum is what the CTA starts with.
constexpr int CONSUMER_REGISTERS = D == 64 ? 184 : 216, DQ_REGISTERS = D == 64 ? 104 : 56;
constexpr int PRODUCER_REGISTERS = D == 64 ? 40 : 24;
static_assert(CONSUMERS * CONSUMER_REGISTERS + DQ_REGISTERS + PRODUCER_REGISTERS == 65536 / 128);

// A stage in shared memory: both packed blocks of 64 queries.
constexpr int Q_COLUMNS = 0;                      // in 16 bits it is Q by rows
constexpr int GRAD_COLUMNS = Q_COLUMNS + Q_TILE;  // absent if P is in 16 bits
constexpr int Q_ROWS = Q_COLUMNS + PACKED_Q_COLUMNS_BYTES;
constexpr int GRAD_ROWS = Q_ROWS + Q_TILE;
constexpr int STATISTICS = GRAD_ROWS + 2 * Q_TILE;
constexpr int SCALES = STATISTICS + ROW_STATS;
constexpr int STAGE_BYTES = align_up(SCALES + TAIL, 1024);

// Before the stages: a packed block of keys, K for dQ, dS, and chunks of dQ. Behind them: staging for the epilogue.
constexpr int V_ROWS = K_TILE;
constexpr int K_SCALE = 3 * K_TILE;
constexpr int DQ_K = align_up(PACKED_KV_BYTES, 1024);
constexpr int DS = DQ_K + PACKED_K_16BIT_BYTES;
constexpr int DQ = DS + DS_STAGES * DS_BYTES;
constexpr int RING = DQ + DQ_BUFFERS * DQ_CHUNK * 4;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
constexpr int CHUNK_STAGING = staging_bytes(64);
static_assert(DQ_CHUNK * 4 >= staging_bytes(DQ_CHANNELS));
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * CHUNK_STAGING);

struct SharedState {
    u64 full[STAGES], empty[STAGES], keys_full[1], keys_empty[1], dq_k_full[1];
    u64 ds_full[DS_STAGES], ds_empty[DS_STAGES], chunk_full[DQ_BUFFERS], chunk_empty[DQ_BUFFERS];
    KeyTile work[2];  // whose keys are in shared memory, and whose come next, in turn; kv_head -1: there is no other
    DqChunk chunks[DQ_BUFFERS];
};

struct Arguments {
    const u8 *packed_q_rows, *packed_q_columns, *packed_kv;  // K in 16 bits is behind packed_kv
    TokenTensor dq, dk, dv;
    float* dq_sums;  // of each packed block of queries, chunk by chunk, as the threads that compute dQ hold them
    int* turns;      // of each chunk: how many work tiles are in its sum; zero at the start
    Axes axes;       // work tiles and `heads` are those of keys
    float scale;
};

struct Rings {
    Ring<STAGES> queries;
    Ring<1> keys;
    Ring<DS_STAGES> ds;
    Ring<DQ_BUFFERS> chunks;
    u32 dq_k_full;
};

// The first packed block of queries that a work tile visits in one head of its group, counted over all heads.
__device__ __forceinline__ i64 first_packed_block(const Axes& axes, const KeyTile& work, int head) {
    return i64(work.kv_head * axes.group + head) * axes.q_blocks + work.q_block;
}

__device__ __forceinline__ void producer_loop(const Arguments& a, const Window& window, Rings& rings, u32 shared,
                                              SharedState& state) {
    Ring<STAGES>& queries = rings.queries;
    Ring<1>& keys = rings.keys;
    // All work tiles come from the counter, the first ones too: none is taken before those that it waits for.
    WorkTile work_tile;
    while ((work_tile = work_tile_at(a.axes, atomicAdd(a.axes.tile_counter, 1))).head >= 0) {
        KeyTile found;
        if (LAST_KEYS_FIRST) work_tile.rank = a.axes.work_blocks - 1 - work_tile.rank;
        if (!find_key_tile<CONSUMERS>(a.axes, work_tile, found)) continue;
        if constexpr (HAS_WINDOW) leave_queries_that_see<KEYS>(found, window);
        keys.wait_empty();
        KeyTile& work = state.work[keys.parity];
        work = found;
        barrier_expect_bytes(keys.full, PACKED_KV_BYTES);
        bulk_copy(shared, a.packed_kv + i64(work.kv_block) * PACKED_KV_BYTES, PACKED_KV_BYTES, keys.full);
        keys.advance();
        int next = first_block(work);
        for (int h = 0; h < a.axes.group; ++h) {
            const i64 first = first_packed_block(a.axes, work, h);
#pragma unroll 1
            for (int left = work.q_tiles; left > 0; --left) {
                const i64 block = first + next;
                next = next_block(work, next);
                queries.wait_empty();
                const u32 full = queries.full + 8 * queries.index, stage = shared + RING + queries.index * STAGE_BYTES;
                barrier_expect_bytes(full, PACKED_Q_ROWS_BYTES + PACKED_Q_COLUMNS_BYTES);
                bulk_copy(stage + Q_ROWS, a.packed_q_rows + block * PACKED_Q_ROWS_BYTES, PACKED_Q_ROWS_BYTES, full);
                bulk_copy(stage + Q_COLUMNS, a.packed_q_columns + block * PACKED_Q_COLUMNS_BYTES, PACKED_Q_COLUMNS_BYTES,
                          full);
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

// dV and dK of the tile at `stage`, 64 channels at a time, in the registers of S and dP. The last product of dK is left
// unfinished in dp. 16-bit dV and dK are accumulated by the tensor cores, in registers of their own.
template <int N, int P_WORDS, int DS_WORDS>
__device__ __forceinline__ void multiply_scores(Sums& sums, int (&s)[N], int (&dp)[N], const Scores& scores,
                                                const u32 (&p)[P_WORDS], const u32 (&ds)[DS_WORDS], u32 stage, int first_query) {
    const u32 q_columns = stage + Q_COLUMNS / 16, grad_columns = stage + GRAD_COLUMNS / 16, row = first_query * 128 / 16;
    if constexpr (P_IS_16BIT) contract_tokens_16bit<QUERIES, BLOCK_Q>(sums.dv, p, stage + GRAD_ROWS / 16 + row);
    if constexpr (DK_IS_16BIT) {
        contract_tokens_16bit<QUERIES, BLOCK_Q>(sums.dk, ds, q_columns + row);
    } else if constexpr (P_IS_16BIT) {
        if (CHUNKS == 2) {
            contract_tokens<64>(s, ds, q_columns);
            contract_tokens<64>(dp, ds, q_columns + 256);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dk, s, scores.dk_factor);
        } else {
            contract_tokens<64>(dp, ds, q_columns);
        }
    } else {
        contract_tokens<64, P_IS_UNSIGNED>(s, p, grad_columns);
        if (CHUNKS == 1) {
            contract_tokens<64>(dp, ds, q_columns);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dv, s, scores.dv_factor);
        } else {
            contract_tokens<64, P_IS_UNSIGNED>(dp, p, grad_columns + 256);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dv, s, scores.dv_factor);
            contract_tokens<64>(s, ds, q_columns);
            wgmma_wait<1>();
            pin(dp);
            accumulate(sums.dv + 32, dp, scores.dv_factor);
            contract_tokens<64>(dp, ds, q_columns + 256);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dk, s, scores.dk_factor);
        }
    }
}

// Waits for these products, while S is still multiplied.
template <int N>
__device__ __forceinline__ void finish_scores(Sums& sums, int (&dp)[N], const Scores& scores) {
    wgmma_wait<1>();
    if constexpr (!DK_IS_16BIT) {
        pin(dp);
        accumulate(sums.dk + D / 2 - 32, dp, scores.dk_factor);
    }
}

__device__ __forceinline__ void consumer_loop(const Arguments& a, const Window& window, const KeyTile& work, int warpgroup,
                                              u8* shared, Rings& rings, SharedState& state, Sums& sums) {
    Ring<STAGES>& queries = rings.queries;
    Ring<DS_STAGES>& ds = rings.ds;
    const u32 base = descriptor_base(shared_address(shared));
    const u32 k_rows = base + warpgroup * (ROWS * D / 16), v_rows = base + (V_ROWS + warpgroup * ROWS * 128) / 16;
    const u32 ring = base + RING / 16;
    const float k_scale = *reinterpret_cast<const float*>(shared + K_SCALE);

    int s[VALUES], dp[VALUES], block = first_block(work);
    const auto begin_s = [&](u32 stage, int part) {
        contract_channels<QUERIES>(s, k_rows, stage + (Q_ROWS + part * QUERIES * D) / 16);
    };
    const auto begin_dp = [&](u32 stage, int part) {
        contract_channels_16bit<QUERIES, KEYS, BLOCK_Q>(dp, v_rows, stage + (GRAD_ROWS + part * QUERIES * 128) / 16);
    };
    pin_sums(sums);  // zero them before the first wgmma: later writes would serialize it
    queries.wait_full();
    begin_s(ring + queries.index * (STAGE_BYTES / 16), 0);
    begin_dp(ring + queries.index * (STAGE_BYTES / 16), 0);
    for (int left = a.axes.group * work.q_tiles;; --left) {
        // While the tensor cores work: load what this tile needs, and wait for the next stage.
        const u8* stage = shared + RING + queries.index * STAGE_BYTES;
        ScoreTile tile;
        tile.minus_lse = reinterpret_cast<const float2*>(stage + STATISTICS);
        tile.scales = *reinterpret_cast<const float2*>(stage + SCALES);
        tile.factor = logit_factor(tile.scales.x, k_scale, a.scale);
        tile.keys = work.kv.tokens - work.first - warpgroup * ROWS;
        tile.blocks_ahead = warpgroup - block;
        if constexpr (HAS_WINDOW) {
            tile.blocks_ahead += (work.first - work.first_query) / ROWS;
            tile.window = window;
        }
        tile.ds = shared_address(shared) + DS + ds.index * DS_BYTES;
        tile.ds_empty = ds.empty + 8 * ds.index, tile.ds_parity = ds.parity ^ 1;
        const bool is_cut = tile.keys < ROWS || (IS_CAUSAL && tile.blocks_ahead >= 0) ||
                            (HAS_WINDOW && window.cuts<ROWS>(ROWS * tile.blocks_ahead, work.q.tokens, work.kv.tokens));
        Ring<STAGES> next = queries;
        block = next_block(work, block);
        const u32 this_stage = ring + queries.index * (STAGE_BYTES / 16);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const bool is_last = part + 1 == PARTS;
            if (is_last && left > 1) {
                next.advance();
                next.wait_full();
            }
            tile.first_query = part * QUERIES;
            Scores scores;
            wgmma_wait<0>();
            pin(s);
            pin(dp);
            // Early, so that the next ones arrive in time; the last S below is never used.
            if (is_last && left == 1) rings.keys.release();
            if (is_fusible(tile.factor) && !is_cut)
                find_scores<true>(scores, s, dp, tile, warpgroup);
            else
                find_scores<false>(scores, s, dp, tile, warpgroup);
            multiply_scores(sums, s, dp, scores, scores.p, scores.ds, this_stage, tile.first_query);
            if (is_last) {
                ds.fill();
                ds.advance();
            }
            // After the last tile S is computed once more and not used: a branch between wgmmas would serialize them.
            begin_s(is_last ? ring + next.index * (STAGE_BYTES / 16) : this_stage, is_last ? 0 : part + 1);
            finish_scores(sums, dp, scores);
            if (!is_last) begin_dp(this_stage, part + 1);
        }
        if (left == 1) break;
        begin_dp(ring + next.index * (STAGE_BYTES / 16), 0);
        queries.release();
        queries = next;
    }
    wgmma_wait<0>();
    pin_sums(sums);
    queries.release();
    queries.advance();
}

__device__ __forceinline__ void consume(const Arguments& a, const Window& window, int warpgroup, u8* shared, Rings& rings,
                                        SharedState& state) {
    for (;;) {
        rings.keys.wait_full();
        const KeyTile& work = state.work[rings.keys.parity];
        if (work.kv_head < 0) return;
        Sums sums = {};
        if (work.q_tiles > 0)
            consumer_loop(a, window, work, warpgroup, shared, rings, state, sums);
        else
            rings.keys.release();
        u8* staging = shared + STAGING + warpgroup * CHUNK_STAGING;
        const int first = work.first + warpgroup * ROWS;
        const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            store_channels<64>(a.dv, sums.dv + 32 * c, ones, staging, warpgroup, work.kv_head, a.axes.heads, first, work.kv,
                               a.axes.d, 64 * c);
            store_channels<64>(a.dk, sums.dk + 32 * c, scales, staging, warpgroup, work.kv_head, a.axes.heads, first, work.kv,
                               a.axes.d, 64 * c);
        }
        rings.keys.advance();
    }
}

// --- dQ ----------------------------------------------------------------------------------------------------

// All blocks of queries of a work tile, as the consumers go through them.
__device__ __forceinline__ void dq_loop(const Arguments& a, const Window& window, const KeyTile& work, u8* shared,
                                        Rings& rings, SharedState& state) {
    const int thread = threadIdx.x % 128;
    const u32 base = descriptor_base(shared_address(shared)), k = base + DQ_K / 16;
    int block = first_block(work), head = 0;
#pragma unroll 1
    for (int left = a.axes.group * work.q_tiles; left > 0; --left) {
        const int first_query = work.first_query + block * BLOCK_Q;
        const i64 packed_block = first_packed_block(a.axes, work, head) + block;
        const Turn turn = turn_of(work, window, first_query);
        rings.ds.wait_full();
#pragma unroll 1
        for (int c = 0; c < DQ_CHUNKS; ++c) {
            float dq[DQ_CHANNELS / 2];
            multiply_ds(dq, base + (DS + rings.ds.index * DS_BYTES) / 16, k, c * DQ_CHANNELS);
            if (c == DQ_CHUNKS - 1) rings.ds.release();
            const i64 index = packed_block * DQ_CHUNKS + c;
            const DqChunk chunk = {a.dq_sums + index * DQ_CHUNK, a.turns + index, turn.number};
            if (!turn.is_last) {
                hand_over(rings.chunks, shared + DQ, state.chunks, chunk, dq, thread);
                rings.chunks.advance();
                continue;
            }
            if (turn.number > 0) {
                if (thread == 0) wait_for_value(chunk.turns, turn.number);
                warpgroup_sync(DQ_WARPGROUP);
                add_to_own(dq, chunk.sums, thread);
            }
            rings.chunks.wait_empty();  // its memory is the staging
            const float scales[2] = {a.scale, a.scale};
            u8* staging = shared + DQ + rings.chunks.index * (DQ_CHUNK * 4);
            store_channels<DQ_CHANNELS>(a.dq, dq, scales, staging, DQ_WARPGROUP, work.kv_head * a.axes.group + head,
                                        a.axes.heads * a.axes.group, first_query, work.q, a.axes.d, c * DQ_CHANNELS);
            warpgroup_sync(DQ_WARPGROUP);  // until the staging is read
        }
        rings.ds.advance();
        block = next_block(work, block);
        if (block == first_block(work)) ++head;
    }
}

__device__ __forceinline__ void compute_dq(const Arguments& a, const Window& window, u8* shared, Rings& rings,
                                           SharedState& state) {
    const int thread = threadIdx.x % 128;
    const u8* k_16bit = a.packed_kv + i64(a.axes.work_heads) * a.axes.kv_blocks * PACKED_KV_BYTES;
    for (int parity = 0;; parity ^= 1) {
        rings.keys.wait_full();
        const KeyTile& work = state.work[rings.keys.parity];
        if (work.kv_head < 0) break;
        rings.keys.release();  // of the packed block only `work` is needed, which is not overwritten yet
        rings.keys.advance();
        warpgroup_sync(DQ_WARPGROUP);  // every warp's last product has read the K before
        if (thread == 0) {
            barrier_expect_bytes(rings.dq_k_full, PACKED_K_16BIT_BYTES);
            bulk_copy(shared_address(shared) + DQ_K, k_16bit + i64(work.kv_block) * PACKED_K_16BIT_BYTES,
                      PACKED_K_16BIT_BYTES, rings.dq_k_full);
        }
        barrier_wait(rings.dq_k_full, parity);
        dq_loop(a, window, work, shared, rings, state);
    }
#pragma unroll 1
    for (int i = 0; i < DQ_BUFFERS; ++i) {
        rings.chunks.wait_empty();
        if (thread == 0) state.chunks[rings.chunks.index].sums = nullptr;
        rings.chunks.fill();
        rings.chunks.advance();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ SharedState state;
    if (threadIdx.x == 0) {
        ring_init(state.full, state.empty, CONSUMERS);
        ring_init(state.keys_full, state.keys_empty, CONSUMERS + 1);
        ring_init(state.ds_full, state.ds_empty, 4 * CONSUMERS, 4);
        ring_init(state.chunk_full, state.chunk_empty, 4, 1);
        barrier_init(shared_address(state.dq_k_full), 1);
        barrier_init_fence();
    }
    __syncthreads();
    Rings rings = {{shared_address(state.full), shared_address(state.empty)},
                   {shared_address(state.keys_full), shared_address(state.keys_empty)},
                   {shared_address(state.ds_full), shared_address(state.ds_empty)},
                   {shared_address(state.chunk_full), shared_address(state.chunk_empty)},
                   shared_address(state.dq_k_full)};

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the compiler then knows that it is warp-uniform
    if (warpgroup == PRODUCER) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 == 0) producer_loop(a, window, rings, shared_address(shared), state);
        const int buffer = static_cast<int>(threadIdx.x % 128) / 32 - 1;
        if (buffer >= 0 && threadIdx.x % 32 == 0)
            add_chunks(rings.chunks.full + 8 * buffer, rings.chunks.empty + 8 * buffer,
                       shared_address(shared) + DQ + buffer * (DQ_CHUNK * 4), state.chunks[buffer]);
    } else if (warpgroup == DQ_WARPGROUP) {
        setmaxnreg_dec<DQ_REGISTERS>();
        compute_dq(a, window, shared, rings, state);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(a, window, warpgroup, shared, rings, state);
    }
}
