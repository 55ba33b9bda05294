// dQ, dK and dV. A CTA owns 128 keys of one key head, 16 each warp; it loops over all queries that see them.
//
// Tiles of S and dP are transposed, (keys, queries): a scale of P or dS for each key is one for each row. For dQ, dS has a
// scale for each query, and the warps exchange it through shared memory. dQ of a block of queries is added up in fp32, one
// CTA after the other in the order of their keys (turns), so the result does not depend on timing.

#include "backward.cuh"
#include "copies.cuh"
#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "products.cuh"
#include "scheduler.cuh"
#include "scores.cuh"
#include "turns.cuh"
#include "window.cuh"

namespace {

static_assert(WARPS == 8);
constexpr int HALF_BLOCKS = 16 * WARPS / ROWS;  // of keys; four warps share one

// Shared memory: what stays for the whole work tile, then one block of queries, then what the warps exchange.
constexpr int VALUES = 0;
constexpr int K_COLUMNS = VALUES + 2 * K_TILE;
constexpr int Q_ROWS = K_COLUMNS + K_TILE;  // a packed block
constexpr int GRAD_ROWS = Q_ROWS + Q_TILE;
constexpr int STATISTICS = GRAD_ROWS + 2 * Q_TILE;
constexpr int SCALES = STATISTICS + ROW_STATS;
constexpr int Q_COLUMNS = Q_ROWS + align_up(PACKED_Q_ROWS_BYTES, 128);  // a packed block
constexpr int GRAD_COLUMNS = Q_COLUMNS + Q_TILE;                        // absent if P is in 16 bits
constexpr int DS = Q_COLUMNS + PACKED_Q_COLUMNS_BYTES;                  // (queries, keys) INT8, keys as in tiles by columns
constexpr int LARGEST = DS + BLOCK_Q * BLOCK_KV;                        // of each query, of two tiles in turn
constexpr int SHARED_BYTES = LARGEST + 2 * BLOCK_Q * 4;
static_assert(!(HAS_TOKEN_SCALES && P_IS_16BIT) && !DK_IS_16BIT);
static_assert(K_TILE <= PACKED_Q_ROWS_BYTES && HALF_BLOCKS * STAGING_BYTES <= LARGEST);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

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

// The gradients of a warp's 16 keys.
struct Sums {
    float dk[D / 2], dv[D / 2];
};

template <int WORDS>
__device__ __forceinline__ void multiply_scores(Sums& sums, const Scores& scores, const u32 (&p)[WORDS], u32 base) {
    if constexpr (P_IS_16BIT) {
        contract_tokens_16bit<BLOCK_Q>(sums.dv, p, base + GRAD_ROWS);
    } else {
        contract_tokens<BLOCK_Q, D, P_IS_UNSIGNED>(sums.dv, p, base + GRAD_COLUMNS, scores.dv_factor);
    }
    contract_tokens<BLOCK_Q, D>(sums.dk, scores.ds, base + Q_COLUMNS, scores.dk_factor);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const int lane = threadIdx.x % 32, warp_key = threadIdx.x / 32 * 16;
    const u8* kv = a.packed_kv + i64(work.kv_block) * PACKED_KV_BYTES;
    const float* k_scales = reinterpret_cast<const float*>(kv + 3 * K_TILE);
    int* largest = reinterpret_cast<int*>(shared + LARGEST);

    copy_block<THREADS>(base + VALUES, kv + K_TILE, 2 * K_TILE);
    copy_block<THREADS>(base + K_COLUMNS, a.packed_k_columns + i64(work.kv_block) * PACKED_K_COLUMNS_BYTES,
                        PACKED_K_COLUMNS_BYTES);
    copy_block<THREADS>(base + Q_ROWS, kv, K_TILE);  // K by rows is needed in registers only
    cp_async_commit();
    if (threadIdx.x < 2 * BLOCK_Q) largest[threadIdx.x] = 0;
    cp_async_wait<0>();
    __syncthreads();
    u32 k[D / 8];
#pragma unroll
    for (int step = 0; step < D / STEP; ++step)
        load_left<D>(k + 4 * step, left_address<D>(base + Q_ROWS), warp_key, step * STEP);
    __syncthreads();

    const auto packed_block = [&](const QueryBlocks& at) {
        return (i64(work.kv_head) * a.axes.group + at.head) * a.axes.q_blocks + work.q_block + at.block;
    };
    const auto copy_rows = [&](const QueryBlocks& at) {
        copy_block<THREADS>(base + Q_ROWS, a.packed_q_rows + packed_block(at) * PACKED_Q_ROWS_BYTES, PACKED_Q_ROWS_BYTES);
    };
    const auto copy_columns = [&](const QueryBlocks& at) {
        copy_block<THREADS>(base + Q_COLUMNS, a.packed_q_columns + packed_block(at) * PACKED_Q_COLUMNS_BYTES,
                            PACKED_Q_COLUMNS_BYTES);
    };
    QueryBlocks at = {0, work.q_tiles - 1, a.axes.group * work.q_tiles};
    if (at.left > 0) copy_rows(at);
    cp_async_commit();
    if (at.left > 0) copy_columns(at);
    cp_async_commit();

    Sums sums = {};
    int* finished = nullptr;  // the turn that this CTA has taken but not yet passed on
    const int turn = work.first / BLOCK_KV;
    while (at.left > 0) {
        QueryBlocks next = at;
        next.advance(work.q_tiles);
        cp_async_wait<1>();
        __syncthreads();  // this block's rows are there; dQ of the last block is written
        pass_turn(finished, turn);

        const int first_query = work.first_query + at.block * BLOCK_Q;
        Tile tile;
        tile.scales = {1.0f, 1.0f};
#pragma unroll
        for (int r = 0; r < 2; ++r) tile.k_scale[r] = k_scales[HAS_TOKEN_SCALES ? warp_key + lane / 4 + 8 * r : 0];
        if (!HAS_TOKEN_SCALES) tile.scales = *reinterpret_cast<const float2*>(shared + SCALES);
        tile.factor = logit_factor(tile.scales.x, tile.k_scale[0], a.scale);
        tile.q_scales = reinterpret_cast<const float2*>(shared + SCALES) + lane % 4;
        tile.grad_scales = tile.q_scales + BLOCK_Q / 2;
        tile.q_factor = logit_factor(1.0f, 1.0f, a.scale);
        tile.statistics = shared + STATISTICS;
        tile.largest = largest + at.left % 2 * BLOCK_Q;
        tile.first_key = work.first - first_query;
        tile.keys = work.kv.tokens - work.first;
        if constexpr (HAS_WINDOW) tile.window = window;
        tile.is_cut = tile.keys < BLOCK_KV || (IS_CAUSAL && tile.first_key + BLOCK_KV > 1) ||
                      (HAS_WINDOW && window.cuts(tile.first_key, work.q.tokens, work.kv.tokens));
        if (threadIdx.x < BLOCK_Q) largest[(at.left + 1) % 2 * BLOCK_Q + threadIdx.x] = 0;

        int s[32];
        float p[32], ds[32];
        contract_channels<BLOCK_Q>(s, k, base + Q_ROWS);
        contract_values(ds, base + VALUES, base + GRAD_ROWS, warp_key);
        if (!HAS_TOKEN_SCALES && is_fusible(tile.factor) && !tile.is_cut)
            find_scores<true>(p, ds, s, tile, warp_key + lane / 4);
        else
            find_scores<false>(p, ds, s, tile, warp_key + lane / 4);
        Scores scores;
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

        cp_async_wait<0>();
        __syncthreads();  // the maxima and this block's columns are there; nobody needs its rows but for 16-bit dV
        if (!P_IS_16BIT && next.left > 0) copy_rows(next);
        if (!P_IS_16BIT) cp_async_commit();
        store_ds(shared + DS, ds, tile.largest, warp_key);
        multiply_scores(sums, scores, scores.p, base);
        const i64 block = packed_block(at);
        const bool is_first = HAS_WINDOW && turn == first_key_block(window, first_query);
        if (threadIdx.x == 0) wait_for_value(a.turns + block, is_first ? 0 : turn);

        __syncthreads();  // dS is there, it is this CTA's turn, and nobody needs the columns
        if (P_IS_16BIT && next.left > 0) copy_rows(next);
        if (P_IS_16BIT) cp_async_commit();
        if (next.left > 0) copy_columns(next);
        cp_async_commit();
        add_dq(a, work, work.kv_head * a.axes.group + at.head, block, first_query, turn, window, base + DS,
               base + K_COLUMNS, tile.largest, HAS_TOKEN_SCALES ? 1.0f : tile.k_scale[0]);
        finished = a.turns + block;
        at = next;
    }
    __syncthreads();
    pass_turn(finished, turn);

    const int half = threadIdx.x / 128, first = work.first + half * ROWS;
    u8* staging = shared + half * STAGING_BYTES;
    const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
    store_rows(a.dv, sums.dv, ones, staging, half, work.kv_head, a.axes.heads, first, work.kv, a.axes.d);
    store_rows(a.dk, sums.dk, scales, staging, half, work.kv_head, a.axes.heads, first, work.kv, a.axes.d);
}
