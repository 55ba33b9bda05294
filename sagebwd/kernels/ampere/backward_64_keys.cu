// dQ, dK and dV with tiles of 64 keys. As backward.cu, but two warps share 16 keys: of P and dS each computes one half of the
// queries, of dK and dV one half of the channels. In between, all warps exchange the maxima of P and dS, then P and dS.

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

constexpr int HALF_BLOCKS = 2;  // one packed block of keys
constexpr int QUERIES = BLOCK_Q / 2, CHANNELS = D / 2;  // of a warp
static_assert(WARPS == 8 && BLOCK_KV == 64 && !P_IS_16BIT);

#ifdef SCALES_OF_TILES  // one scale for all P, and one for all dS, of a tile; otherwise one for each output row of a product
constexpr bool HAS_TILE_SCALES = true;
#else
constexpr bool HAS_TILE_SCALES = false;
#endif

// Maxima over a tile, as bits: non-negative floats are ordered as their bits, NaN at the top. Of the tile: the first of `ds` and
// `p` alone.
struct Maxima {
    int ds_of_queries[BLOCK_Q], ds[BLOCK_KV], p[BLOCK_KV];
};

// Shared memory: what stays for the whole work tile, then the rows and columns of a block of queries and what the warps
// exchange. Where that is too much, rows and the rest lie in one place: rows are no longer needed when P and dS are known.
constexpr int VALUES = 0;
constexpr int K_COLUMNS = VALUES + 2 * K_TILE;
constexpr int KEYS = K_COLUMNS + K_TILE;    // K by rows if it is in 16 bits; otherwise it is in registers
constexpr int MAXIMA = KEYS + (S_IS_16BIT ? K_ROWS_TILE : 0);  // of two tiles in turn
constexpr int Q_ROWS = align_up(MAXIMA + 2 * int(sizeof(Maxima)), 256);  // a packed block
constexpr int GRAD_ROWS = Q_ROWS + Q_ROWS_TILE;
constexpr int STATISTICS = GRAD_ROWS + 2 * Q_TILE;
constexpr int SCALES = STATISTICS + ROW_STATS;
constexpr int ROWS_END = Q_ROWS + align_up(PACKED_Q_ROWS_BYTES, 256);
constexpr int TILE_BYTES = BLOCK_Q * BLOCK_KV, COLUMNS_BYTES = PACKED_Q_COLUMNS_BYTES + 3 * TILE_BYTES;
constexpr int SHARED_LIMIT = 99 * 1024 - 256;  // of a GeForce, without static variables
constexpr bool IS_ALIASED = ROWS_END + COLUMNS_BYTES > SHARED_LIMIT;
constexpr int Q_COLUMNS = IS_ALIASED ? Q_ROWS : ROWS_END;  // a packed block
constexpr int GRAD_COLUMNS = Q_COLUMNS + Q_TILE;
constexpr int DS = Q_COLUMNS + PACKED_Q_COLUMNS_BYTES;  // (queries, keys) INT8, keys as in tiles by columns
constexpr int LEFT_DS = DS + TILE_BYTES, LEFT_P = LEFT_DS + TILE_BYTES;  // as left operands of dK and dV, see store_left
constexpr int COLUMNS_END = Q_COLUMNS + COLUMNS_BYTES;
constexpr int SHARED_BYTES = ROWS_END > COLUMNS_END ? ROWS_END : COLUMNS_END;
constexpr int HALF_STAGING_BYTES = staging_bytes(CHANNELS);
static_assert(K_TILE <= PACKED_Q_ROWS_BYTES && (!S_IS_16BIT || D <= 128) && 2 * HALF_STAGING_BYTES <= SHARED_BYTES);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

// --- Maxima and rounding -----------------------------------------------------------------------------------

// Raises maxima by what this warp has. `key`: this thread's first; `query`: this warp's. `ds_of_queries` is dS as dQ takes it.
template <int N>
__device__ __forceinline__ void raise_maxima(Maxima& maxima, const float (&p)[N], const float (&ds)[N],
                                             const float (&ds_of_queries)[N], int key, int query) {
    int of_p[2] = {0, 0}, of_ds[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        of_p[i / 2 % 2] = max(of_p[i / 2 % 2], __float_as_int(p[i]));
        of_ds[i / 2 % 2] = max(of_ds[i / 2 % 2], __float_as_int(ds[i]) & 0x7fffffff);
    }
    const int lane = threadIdx.x % 32;
    if constexpr (HAS_TILE_SCALES) {
        const int tile_p = __reduce_max_sync(0xffffffff, max(of_p[0], of_p[1]));
        const int tile_ds = __reduce_max_sync(0xffffffff, max(of_ds[0], of_ds[1]));
        if (lane != 0) return;
        atomicMax(maxima.p, tile_p);
        atomicMax(maxima.ds, tile_ds);
    } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row_p = row_max(of_p[r]), row_ds = row_max(of_ds[r]);
            if (lane % 4 != 0) continue;
            atomicMax(maxima.p + key + 8 * r, row_p);
            atomicMax(maxima.ds + key + 8 * r, row_ds);
        }
        raise_largest(maxima.ds_of_queries + query, ds_of_queries);
    }
}

// Rounds P or dS with the scale of each key or of the tile. `largest`: from this thread's first key on, or of the tile.
template <int N>
__device__ __forceinline__ void round_scores(u32 (&rounded)[N / 4], const float (&x)[N], const int* largest, float steps) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        inverse[r] = reciprocal(scale_of(__int_as_float(largest[HAS_TILE_SCALES ? 0 : 8 * r]), steps));
    round_tile<2 * N>(rounded, x, inverse);
}

// The factors of the rows of dK or dV: these scales times that of Q or dO.
__device__ __forceinline__ void find_factors(float (&factor)[2], const int* largest, float steps, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        factor[r] = scale_of(__int_as_float(largest[HAS_TILE_SCALES ? 0 : 8 * r]), steps) * scale;
}

// --- Exchange ----------------------------------------------------------------------------------------------

// Left operands of products over all queries of a tile: of each 16 keys, 32 queries after the other, four words of each lane.
__device__ __forceinline__ uint4* left_words(u8* tile) {
    return reinterpret_cast<uint4*>(tile) + threadIdx.x / 32 % 4 * BLOCK_Q + threadIdx.x % 32;
}
template <int WORDS>
__device__ __forceinline__ void store_left(u8* tile, const u32 (&words)[WORDS], int query) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i)
        left_words(tile)[query + 32 * i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
}
__device__ __forceinline__ void load_left_words(u32 (&words)[BLOCK_Q / 8], u8* tile) {
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 32; ++i) {
        const uint4 four = left_words(tile)[32 * i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
}

// The gradients of 16 keys, half of the channels.
struct Sums {
    float dk[CHANNELS / 2], dv[CHANNELS / 2];
};

// Adds a tile's share. `channel`: this warp's first.
__device__ __forceinline__ void multiply_scores(Sums& sums, u8* shared, u32 base, const float (&dv_factor)[2],
                                                const float (&dk_factor)[2], int channel) {
    u32 left[BLOCK_Q / 8];
    load_left_words(left, shared + LEFT_P);
    contract_tokens<BLOCK_Q, CHANNELS, P_IS_UNSIGNED>(sums.dv, left, base + GRAD_COLUMNS + channel * BLOCK_Q, dv_factor);
    load_left_words(left, shared + LEFT_DS);
    contract_tokens<BLOCK_Q, CHANNELS>(sums.dk, left, base + Q_COLUMNS + channel * BLOCK_Q, dk_factor);
}

// Stores this warp's half of the channels of dK or dV.
__device__ __forceinline__ void store_half(const TokenTensor& x, const float (&values)[CHANNELS / 2], float scale, u8* shared,
                                           const KeyTile& work, const Axes& axes) {
    const int half = threadIdx.x / 128, first = work.first;
    const float factor[2] = {scale, scale};
    store_channels<CHANNELS>(x, values, factor, shared + half * HALF_STAGING_BYTES, half, work.kv_head, axes.heads, first,
                             work.kv, axes.d, half * CHANNELS);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_64_keys_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(256) u8 shared[];  // no more, because static variables take as much
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_key = warp % 4 * 16, key = warp_key + lane / 4;
    const int query = warp / 4 * QUERIES, channel = warp / 4 * CHANNELS;
    const u8* kv = a.packed_kv + i64(work.kv_block) * PACKED_KV_BYTES;
    const u8* k_columns = a.packed_k_columns + i64(work.kv_block) * PACKED_K_COLUMNS_BYTES;
    const float* k_scales = reinterpret_cast<const float*>(S_IS_16BIT ? k_columns + K_TILE : kv + 3 * K_TILE);
    Maxima* maxima = reinterpret_cast<Maxima*>(shared + MAXIMA);
    const auto clear = [&](Maxima& x) {
        for (int i = threadIdx.x; i < int(sizeof(Maxima) / 4); i += THREADS) reinterpret_cast<int*>(&x)[i] = 0;
    };

    copy_block<THREADS>(base + VALUES, kv + K_ROWS_TILE, 2 * K_TILE);
    copy_block<THREADS>(base + K_COLUMNS, k_columns, K_TILE);
    copy_block<THREADS>(base + (S_IS_16BIT ? KEYS : Q_ROWS), kv, K_ROWS_TILE);
    cp_async_commit();
    clear(maxima[0]);
    clear(maxima[1]);
    cp_async_wait<0>();
    __syncthreads();
    u32 k[D / 8];
#pragma unroll
    for (int step = 0; step < D / STEP && !S_IS_16BIT; ++step)
        load_left<D>(k + 4 * step, left_address<D>(base + Q_ROWS), warp_key, step * STEP);
    __syncthreads();

    const auto copy_rows = [&](const QueryBlocks& at) {
        if (at.left > 0)
            copy_block<THREADS>(base + Q_ROWS, a.packed_q_rows + packed_block(a, work, at) * PACKED_Q_ROWS_BYTES, PACKED_Q_ROWS_BYTES);
        cp_async_commit();
    };
    const auto copy_columns = [&](const QueryBlocks& at) {
        copy_block<THREADS>(base + Q_COLUMNS, a.packed_q_columns + packed_block(a, work, at) * PACKED_Q_COLUMNS_BYTES,
                            PACKED_Q_COLUMNS_BYTES);
        cp_async_commit();
    };
    // A block of queries that is not full may not see all keys that a full one would.
    const bool has_queries = !IS_CAUSAL || work.first < work.q.tokens;
    QueryBlocks at = {0, work.q_tiles - 1, has_queries ? a.axes.group * work.q_tiles : 0};
    copy_rows(at);

    // Not read for each block: waiting for a turn empties the L1 cache.
    const float k_scale[2] = {k_scales[HAS_TOKEN_SCALES ? key : 0], k_scales[HAS_TOKEN_SCALES ? key + 8 : 0]};
    Sums sums = {};
    int* finished = nullptr;  // the turn that this CTA has taken but not yet passed on
    const int turn = work.first / BLOCK_KV;
    while (at.left > 0) {
        QueryBlocks next = at;
        next.advance(work.q_tiles);
        cp_async_wait<0>();
        __syncthreads();  // this block's rows are there; dQ of the last block is written, and nobody needs its columns
        if (!IS_ALIASED) copy_columns(at);

        const int first_query = work.first_query + at.block * BLOCK_Q;
        Maxima& largest = maxima[at.left % 2];
        Tile tile;
        tile.scales = {1.0f, 1.0f};
        tile.k_scale[0] = k_scale[0], tile.k_scale[1] = k_scale[1];
        if (!HAS_TOKEN_SCALES) tile.scales = *reinterpret_cast<const float2*>(shared + SCALES);
        tile.factor = S_IS_16BIT ? __fmul_rn(a.scale, LOG2_E) : logit_factor(tile.scales.x, tile.k_scale[0], a.scale);
        tile.q_scales = reinterpret_cast<const float2*>(shared + SCALES) + query / 2 + lane % 4;
        tile.grad_scales = tile.q_scales + BLOCK_Q / 2;
        tile.q_factor = logit_factor(1.0f, 1.0f, a.scale);
        tile.statistics = shared + STATISTICS + query * 4;
        tile.first_key = work.first - first_query - query;
        tile.keys = work.kv.tokens - work.first;
        if constexpr (HAS_WINDOW) tile.window = window;
        tile.is_cut = tile.keys < BLOCK_KV || (IS_CAUSAL && tile.first_key + BLOCK_KV > 1) ||
                      (HAS_WINDOW && window.cuts(tile.first_key, work.q.tokens, work.kv.tokens));
        clear(maxima[(at.left + 1) % 2]);

        float p[QUERIES / 2], ds[QUERIES / 2], ds_of_queries[QUERIES / 2];
        contract_values(ds, base + VALUES, base + GRAD_ROWS + query * 128, warp_key);
        if constexpr (S_IS_16BIT) {
            float s[QUERIES / 2];
            contract_values(s, base + KEYS, base + Q_ROWS + query * 128, warp_key);
            find_scores<false>(p, ds, s, tile, key);
        } else {
            int s[QUERIES / 2];
            contract_channels<QUERIES>(s, k, base + Q_ROWS + query * D);
            if (!HAS_TOKEN_SCALES && is_fusible(tile.factor) && !tile.is_cut)
                find_scores<true>(p, ds, s, tile, key);
            else
                find_scores<false>(p, ds, s, tile, key);
        }
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) ds_of_queries[i] = ds[i];
        if constexpr (HAS_TOKEN_SCALES) {
            multiply_ds(ds_of_queries, ds, [&](int i) { return tile.k_scale[i / 2 % 2]; });
            multiply_ds(ds, ds, [&](int i) { return pick(tile.q_scales[i / 4 * 4], i % 2); });
        }
        raise_maxima(largest, p, ds, ds_of_queries, key, query);

        cp_async_wait<0>();
        __syncthreads();  // the maxima are there, the columns too unless they lie where the rows are; nobody needs these
        if (IS_ALIASED) copy_columns(at);
        if (!IS_ALIASED) copy_rows(next);
        pass_turn(finished, turn);  // not earlier: it waits until all additions have arrived
        const int row = HAS_TILE_SCALES ? 0 : key;
        u32 rounded[QUERIES / 8];
        round_scores(rounded, p, largest.p + row, P_MAX);
        store_left(shared + LEFT_P, rounded, query);
        round_scores(rounded, ds, largest.ds + row, INT8_MAX);
        store_left(shared + LEFT_DS, rounded, query);
        const int* of_queries = HAS_TILE_SCALES ? largest.ds : largest.ds_of_queries;
        store_ds<HAS_TILE_SCALES>(shared + DS + query * BLOCK_KV, ds_of_queries, HAS_TILE_SCALES ? of_queries : of_queries + query,
                                  warp_key);
        float dv_factor[2], dk_factor[2];
        find_factors(dv_factor, largest.p + row, P_MAX, tile.scales.y);
        find_factors(dk_factor, largest.ds + row, INT8_MAX, tile.scales.x);
        const i64 block = packed_block(a, work, at);
        wait_for_turn(a, block, first_query, turn, window);
        if (IS_ALIASED) cp_async_wait<0>();

        __syncthreads();  // P, dS and the columns are there, and it is this CTA's turn
        multiply_scores(sums, shared, base, dv_factor, dk_factor, channel);
        const LeftOfDq left =
            load_left_of_dq<HAS_TILE_SCALES>(base + DS, of_queries, HAS_TOKEN_SCALES ? 1.0f : tile.k_scale[0]);
        add_dq(a, work, work.kv_head * a.axes.group + at.head, block, first_query, turn, window, left, base + K_COLUMNS);
        finished = a.turns + block;
        if (IS_ALIASED) {
            __syncthreads();  // nobody needs the columns
            copy_rows(next);
        }
        at = next;
    }
    __syncthreads();
    pass_turn(finished, turn);
    store_half(a.dv, sums.dv, 1.0f, shared, work, a.axes);
    store_half(a.dk, sums.dk, a.scale, shared, work, a.axes);
}
