// dK and dV: an item is 128 keys of one key head, which meet all queries that see them.
//
// Tiles are transposed, (keys, queries), so that a scale per key of P and dS is one per row.

#include "common.cuh"

namespace {

constexpr int STAGES = D == 64 ? 4 : 3;
constexpr int CONSUMERS = 2;           // warpgroups that compute; one more copies
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CHUNKS = D / 64;  // of 64 channels, in which dV and dK are multiplied

// A stage in shared memory: both packets of 64 queries.
constexpr int Q_COLUMNS = 0;
constexpr int GRAD_COLUMNS = Q_COLUMNS + Q_TILE;
constexpr int Q_ROWS = GRAD_COLUMNS + Q_TILE;
constexpr int GRAD_ROWS = Q_ROWS + Q_TILE;
constexpr int STATISTICS = GRAD_ROWS + 2 * Q_TILE;
constexpr int SCALES = STATISTICS + STATS;
constexpr int STAGE_BYTES = align_up(SCALES + TAIL, 1024);

// The packet of keys, then the stages, then room to store results.
constexpr int V_ROWS = K_TILE;
constexpr int K_SCALE = 3 * K_TILE;
constexpr int KEY_BYTES = align_up(K_ROWS_BYTES, 1024);
constexpr int STAGING = KEY_BYTES + STAGES * STAGE_BYTES;
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * STAGING_BYTES);

struct Barriers {
    u64 full[STAGES], empty[STAGES], keys_full[1], keys_empty[1];
};

struct Arguments {
    const u8 *q_rows, *q_columns, *k_rows;
    TokenTensor dk, dv;
    Segments q_segments, kv_segments;
    int n_q, n_kv, d, kv_heads, group, q_blocks, kv_blocks, items;
    float scale;
};

struct Item {
    Document kv;
    int kv_head, first;    // first key
    int q_block, tiles;    // tiles of queries that see a key, the first of them
};

// False: there are no keys in this block.
__device__ __forceinline__ bool find_item(const Arguments& a, int index, Item& item) {
    const int block = index % a.kv_blocks;
    const int document = a.kv_segments.document == nullptr ? 0 : a.kv_segments.document[block];
    const Document q = find_extent(a.q_segments, a.n_q, document);
    item.kv = find_extent(a.kv_segments, a.n_kv, document);
    item.kv_head = index / a.kv_blocks;
    item.first = (block - item.kv.first_block) * KEYS;
    const int end = (q.tokens + ROWS - 1) / ROWS, begin = IS_CAUSAL ? min(item.first / ROWS, end) : 0;
    item.q_block = q.first_block + begin;
    item.tiles = end - begin;
    return item.first < item.kv.tokens;
}

__device__ __forceinline__ void copy_packets(const Arguments& a, Ring<STAGES> queries, Ring<1> keys, u32 shared) {
    Item work;
    for (int round = 0; item(round) < a.items; ++round) {
        if (!find_item(a, item(round), work) || work.tiles == 0) continue;
        keys.wait_empty();
        barrier_expect_bytes(keys.full, K_ROWS_BYTES);
        copy_async(shared, a.k_rows + i64(item(round)) * K_ROWS_BYTES, K_ROWS_BYTES, keys.full);
        keys.advance();
        for (int h = 0; h < a.group; ++h) {
            const i64 first = i64(work.kv_head * a.group + h) * a.q_blocks + work.q_block;
            for (i64 block = first; block < first + work.tiles; ++block) {
                queries.wait_empty();
                const u32 full = queries.full + 8 * queries.index, stage = shared + KEY_BYTES + queries.index * STAGE_BYTES;
                barrier_expect_bytes(full, Q_ROWS_BYTES + Q_COLUMNS_BYTES);
                copy_async(stage + Q_COLUMNS, a.q_columns + block * Q_COLUMNS_BYTES, Q_COLUMNS_BYTES, full);
                copy_async(stage + Q_ROWS, a.q_rows + block * Q_ROWS_BYTES, Q_ROWS_BYTES, full);
                queries.advance();
            }
        }
    }
}

// The products of a tile that wait to be added to dV and dK, and their scales.
struct Products {
    int dv[32], dk[32];
    float dv_factor[2], dk_factor[2];
};

// P and dS of one tile in INT8.
struct Scores {
    u32 p[8], ds[8];
};

// The scores of one tile from S and dP, and the scales of their rows times those of dO and Q (`scales`: Q, dO), in
// place of those of the previous tile. FAST: every logit allows a fused multiply-add, and none is masked. Else, if
// `is_diagonal`, keys after a query are masked; the first key is the first query there. All in one stretch without
// branches, products of the previous tile added up on the way, so that all units are kept busy.
template <bool FAST>
__device__ __forceinline__ void find_scores(Scores& scores, const int (&s)[32], const int (&dp)[32], float factor,
                                            const float2* minus_lse, float2 scales, bool is_diagonal,
                                            Products& products, float* dv_sum, float* dk_sum) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int key = thread / 32 * 16 + lane / 4, query = lane % 4 * 2;
    const float2* minus_delta = minus_lse + ROWS / 2;
    float p[32], ds[32], ds_largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int p_largest[2] = {0, 0};  // bits: numbers that are not negative are ordered as their bits are, NaN at the top
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 c = minus_lse[4 * j + lane % 4], d = minus_delta[4 * j + lane % 4];
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            const int r = i / 2 % 2;
            const float x = __int2float_rn(s[i]);
            p[i] = exp2_fast(FAST ? fmaf(x, factor, pick(c, i % 2)) : __fadd_rn(__fmul_rn(x, factor), pick(c, i % 2)));
            if (!FAST && is_diagonal && key + 8 * r > query + 8 * j + i % 2) p[i] = 0.0f;
            ds[i] = p[i] * (__int_as_float(dp[i]) + pick(d, i % 2));
            ds_largest[i % 4] = nan_max_abs(ds_largest[i % 4], ds[i]);
            if (CHUNKS == 1) {
                dv_sum[i] = fmaf(__int2float_rn(products.dv[i]), products.dv_factor[r], dv_sum[i]);
                dk_sum[i] = fmaf(__int2float_rn(products.dk[i]), products.dk_factor[r], dk_sum[i]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            p_largest[r] = max(max(p_largest[r], __float_as_int(p[4 * j + 2 * r])), __float_as_int(p[4 * j + 2 * r + 1]));
    }
    float p_inverse[2], ds_inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float p_scale = scale_of(__int_as_float(row_max(p_largest[r])));
        const float ds_scale = scale_of(row_max(nan_max(ds_largest[2 * r], ds_largest[2 * r + 1])));
        products.dv_factor[r] = p_scale * scales.y;
        products.dk_factor[r] = ds_scale * scales.x;
        p_inverse[r] = inverse_of(p_scale);
        ds_inverse[r] = inverse_of(ds_scale);
    }
    round_tile<64>(scores.p, p, p_inverse);
    round_tile<64>(scores.ds, ds, ds_inverse);
}

// What a warpgroup adds up for its 64 keys of an item.
struct Sums {
    float dk[D / 2], dv[D / 2];
};

__device__ __forceinline__ void meet_queries(const Arguments& a, const Item& work, int warpgroup, u8* shared,
                                             Ring<STAGES>& queries, Ring<1>& keys, Sums& sums) {
    const u32 base = descriptor_base(shared_address(shared));
    const u32 k_rows = base + warpgroup * ROWS * D / 16, v_rows = base + (V_ROWS + warpgroup * ROWS * 128) / 16;
    const u32 stages = base + KEY_BYTES / 16;
    // Under the causal mask the second warpgroup sees nothing of the first tile of each head.
    const int hidden = IS_CAUSAL ? warpgroup : 0;
    int left = a.group * (work.tiles - hidden), tile = hidden;
    const auto skip_hidden = [&](Ring<STAGES>& ring) {
        if (!hidden) return;
        ring.wait_full();
        ring.release();
        ring.advance();
    };
    keys.wait_full();
    if (left == 0) {
        for (int h = 0; h < a.group; ++h) skip_hidden(queries);
        keys.release();
        return;
    }
    const float k_factor = *reinterpret_cast<const float*>(shared + K_SCALE) * (a.scale * LOG2_E);

    int s[32], dp[32];
    Products products = {};
    skip_hidden(queries);
    queries.wait_full();
    const u32 stage = stages + queries.index * (STAGE_BYTES / 16);
    multiply_rows<64>(s, k_rows, stage + Q_ROWS / 16);
    multiply_halves<64, KEYS>(dp, v_rows, stage + GRAD_ROWS / 16);
    Ring<STAGES> before = queries;
    for (bool is_first = true;; is_first = false) {
        // While the tensor cores work: what this tile needs, and the next one's place.
        const u8* packet = shared + KEY_BYTES + queries.index * STAGE_BYTES;
        const float2* minus_lse = reinterpret_cast<const float2*>(packet + STATISTICS);
        const float2 scales = *reinterpret_cast<const float2*>(packet + SCALES);  // of Q and dO
        const float factor = k_factor * scales.x;
        const bool is_diagonal = IS_CAUSAL && tile == hidden, is_fast = is_fusible(factor) && !is_diagonal;
        Ring<STAGES> next = queries;
        if (left > 1) {
            next.advance();
            if (++tile == work.tiles) {
                tile = hidden;
                skip_hidden(next);
            }
            next.wait_full();
        }
        const u32 this_stage = stages + queries.index * (STAGE_BYTES / 16);
        const u32 next_stage = stages + next.index * (STAGE_BYTES / 16);

        Scores scores;
        products_wait<0>();
        pin(s);
        pin(dp);
        if (CHUNKS == 1) {
            pin(products.dv);
            pin(products.dk);
        }
        if (is_fast)
            find_scores<true>(scores, s, dp, factor, minus_lse, scales, is_diagonal, products, sums.dv, sums.dk);
        else
            find_scores<false>(scores, s, dp, factor, minus_lse, scales, is_diagonal, products, sums.dv, sums.dk);

        if (CHUNKS == 1) {
            multiply_columns<64>(products.dv, scores.p, this_stage + GRAD_COLUMNS / 16);
            multiply_columns<64>(products.dk, scores.ds, this_stage + Q_COLUMNS / 16);
            if (left == 1) break;
            multiply_rows<64>(s, k_rows, next_stage + Q_ROWS / 16);
            multiply_halves<64, KEYS>(dp, v_rows, next_stage + GRAD_ROWS / 16);
            if (!is_first) before.release();
            before = queries;
        } else {
            // Half of dV or dK at a time, in the registers of S and dP. After the last tile S is made once more, for
            // nothing: a branch between products makes each wait.
            multiply_columns<64>(s, scores.p, this_stage + GRAD_COLUMNS / 16);
            multiply_columns<64>(dp, scores.p, this_stage + GRAD_COLUMNS / 16 + 256);
            products_wait<1>();
            pin(s);
            accumulate(sums.dv, s, products.dv_factor);
            multiply_columns<64>(s, scores.ds, this_stage + Q_COLUMNS / 16);
            products_wait<1>();
            pin(dp);
            accumulate(sums.dv + 32, dp, products.dv_factor);
            multiply_columns<64>(dp, scores.ds, this_stage + Q_COLUMNS / 16 + 256);
            products_wait<1>();
            pin(s);
            accumulate(sums.dk, s, products.dk_factor);
            multiply_rows<64>(s, k_rows, next_stage + Q_ROWS / 16);
            products_wait<1>();
            pin(dp);
            accumulate(sums.dk + 32, dp, products.dk_factor);
            if (left == 1) break;
            multiply_halves<64, KEYS>(dp, v_rows, next_stage + GRAD_ROWS / 16);
            queries.release();
        }
        queries = next;
        --left;
    }
    products_wait<0>();
    if (CHUNKS == 1) {
        pin(products.dv);
        pin(products.dk);
        accumulate(sums.dv, products.dv, products.dv_factor);
        accumulate(sums.dk, products.dk, products.dk_factor);
    }
    if (CHUNKS == 1 && before.index != queries.index) before.release();
    queries.release();
    queries.advance();
    keys.release();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) dk_dv_kernel(const Arguments a) {
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

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the same in a warp, and known to be
    if (warpgroup == CONSUMERS) {
        give_registers_back<24>();
        if (threadIdx.x % 128 == 0) copy_packets(a, queries, keys, shared_address(shared));
        return;
    }
    take_registers<240>();
    u8* staging = shared + STAGING + warpgroup * STAGING_BYTES;
    Item work;
    for (int round = 0; item(round) < a.items; ++round) {
        if (!find_item(a, item(round), work)) continue;
        Sums sums = {};
        if (work.tiles > 0) {
            meet_queries(a, work, warpgroup, shared, queries, keys, sums);
            keys.advance();
        }
        const int first = work.first + warpgroup * ROWS;
        const float ones[2] = {1.0f, 1.0f}, scales[2] = {a.scale, a.scale};
        store_rows(a.dv, sums.dv, ones, staging, warpgroup, work.kv_head, a.kv_heads, first, work.kv, a.d);
        store_rows(a.dk, sums.dk, scales, staging, warpgroup, work.kv_head, a.kv_heads, first, work.kv, a.d);
    }
}
