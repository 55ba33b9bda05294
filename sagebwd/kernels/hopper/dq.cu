// dQ: an item is 128 queries of one head, which meet all keys that they see.

#include "common.cuh"

namespace {

constexpr int STAGES = D == 64 ? 4 : 2;
constexpr int CONSUMERS = 2;           // warpgroups that compute; one more copies
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CHUNKS = D / 64;  // of 64 channels, in which dQ is multiplied

// A stage in shared memory: both packets of 128 keys.
constexpr int K_COLUMNS = 0;
constexpr int K_ROWS = K_COLUMNS + K_TILE;
constexpr int V_ROWS = K_ROWS + K_TILE;
constexpr int K_SCALE = V_ROWS + 2 * K_TILE;
constexpr int STAGE_BYTES = align_up(K_SCALE + TAIL, 1024);

// Before the stages the packets of queries, one for each warpgroup; behind them room to store results.
constexpr int GRAD_ROWS = Q_TILE;
constexpr int STATISTICS = 3 * Q_TILE;
constexpr int SCALES = STATISTICS + STATS;
constexpr int QUERY_BYTES = align_up(Q_ROWS_BYTES, 1024);
constexpr int RING = CONSUMERS * QUERY_BYTES;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * STAGING_BYTES);

struct Barriers {
    u64 full[STAGES], empty[STAGES], queries_full[1], queries_empty[1];
    Item items[2];  // whose queries are here, and whose are next, in turn
};

struct Arguments {
    const u8 *q_rows, *k_rows, *k_columns;
    TokenTensor dq;
    Axes axes;
    float scale;
};

__device__ __forceinline__ void copy_packets(const Arguments& a, Ring<STAGES> keys, Ring<1> queries, u32 shared, Item (&items)[2]) {
    Queries work;
    Item item;
    for (int index = blockIdx.x; (item = item_at(a.axes, index)).head >= 0; index = take_item(a.axes)) {
        if (!find_queries<CONSUMERS>(a.axes, item, work)) continue;
        queries.wait_empty();
        items[queries.parity] = item;
        barrier_expect_bytes(queries.full, CONSUMERS * Q_ROWS_BYTES);
        for (int w = 0; w < CONSUMERS; ++w) {  // past the end the last packet again: a branch there would cost all items
            const i64 block = work.q_block + min(w, work.q_packets - 1);
            copy_async(shared + w * QUERY_BYTES, a.q_rows + block * Q_ROWS_BYTES, Q_ROWS_BYTES, queries.full);
        }
        queries.advance();
#pragma unroll 1
        for (i64 block = work.kv_block; block < work.kv_block + work.tiles; ++block) {
            keys.wait_empty();
            const u32 full = keys.full + 8 * keys.index, stage = shared + RING + keys.index * STAGE_BYTES;
            barrier_expect_bytes(full, K_ROWS_BYTES + K_COLUMNS_BYTES);
            copy_async(stage + K_ROWS, a.k_rows + block * K_ROWS_BYTES, K_ROWS_BYTES, full);
            copy_async(stage + K_COLUMNS, a.k_columns + block * K_COLUMNS_BYTES, K_COLUMNS_BYTES, full);
            keys.advance();
        }
    }
    queries.wait_empty();
    items[queries.parity] = item;  // none
    barrier_arrive(queries.full);
}

// Products of dS with K that wait to be added to dQ, and the scale of each row.
struct Products {
    int chunk[CHUNKS][32];
    float factor[2];
};

// dS of one tile from S and dP, in INT8, and its scale per row. FAST: every logit allows a fused multiply-add, and none
// is masked. Else columns from `keys` on are masked, and those after `query` + 8 r if IS_CAUSAL. All in one stretch
// without branches, products of the previous tile added up on the way, so that all units are kept busy.
template <bool FAST>
__device__ __forceinline__ void score_gradients(u32 (&ds_int8)[16], float (&ds_scale)[2], const int (&s)[64],
                                                const int (&dp)[64], float factor, const float (&minus_lse)[2],
                                                const float (&minus_delta)[2], int keys, int query,
                                                const Products& products, float* dq_sum) {
    float ds[64], found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int r = i / 2 % 2;
        const float x = __int2float_rn(s[i]);
        float p = exp2_fast(FAST ? fmaf(x, factor, minus_lse[r]) : __fadd_rn(__fmul_rn(x, factor), minus_lse[r]));
        if (!FAST) {
            const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            if (column >= keys || (IS_CAUSAL && column > query + 8 * r)) p = 0.0f;
        }
        ds[i] = p * (__int_as_float(dp[i]) + minus_delta[r]);
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
    round_tile<KEYS>(ds_int8, ds, inverse);
}

__device__ __forceinline__ void meet_keys(const Arguments& a, const Queries& work, int warpgroup, u8* shared,
                                          Ring<STAGES>& keys, Ring<1>& queries, float (&dq_sum)[D / 2]) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    const u32 base = descriptor_base(shared_address(shared));
    const u32 q_rows = base + warpgroup * (QUERY_BYTES / 16), grad_rows = q_rows + GRAD_ROWS / 16, ring = base + RING / 16;
    const u8* packet = shared + warpgroup * QUERY_BYTES;

    const float q_scale = *reinterpret_cast<const float*>(packet + SCALES);
    const float* stats = reinterpret_cast<const float*>(packet + STATISTICS);
    const float minus_lse[2] = {stats[row], stats[row + 8]}, minus_delta[2] = {stats[ROWS + row], stats[ROWS + row + 8]};

    int s[64], dp[64];
    Products products = {};
    keys.wait_full();
    const u32 stage = ring + keys.index * (STAGE_BYTES / 16);
    multiply_rows<KEYS>(s, q_rows, stage + K_ROWS / 16);
    multiply_halves<KEYS, ROWS>(dp, grad_rows, stage + V_ROWS / 16);
    Ring<STAGES> before = keys;
    for (int tile = 0;; ++tile) {
        // While the tensor cores work: what this tile needs, and the next one's place.
        const float k_scale = *reinterpret_cast<const float*>(shared + RING + keys.index * STAGE_BYTES + K_SCALE);
        const float factor = logit_factor(q_scale, k_scale, a.scale);
        const int first_key = tile * KEYS, query = work.first + warpgroup * ROWS;
        const bool is_cut = first_key + KEYS > work.keys || (IS_CAUSAL && first_key + KEYS > query);
        const bool is_last = tile == work.tiles - 1, is_fast = is_fusible(factor) && !is_cut;
        Ring<STAGES> next = keys;
        if (!is_last) next.advance();
        if (STAGES > 2 && !is_last) next.wait_full();
        const u32 this_stage = ring + keys.index * (STAGE_BYTES / 16), next_stage = ring + next.index * (STAGE_BYTES / 16);

        float ds_scale[2];
        u32 ds_int8[16];
        products_wait<0>();
        pin(s);
        pin(dp);
        if (CHUNKS == 1) pin(products.chunk[0]);
        if (is_last) queries.release();  // so that the next are here in time; what S reads below does not matter
        if (is_fast)
            score_gradients<true>(ds_int8, ds_scale, s, dp, factor, minus_lse, minus_delta, 0, 0, products, dq_sum);
        else
            score_gradients<false>(ds_int8, ds_scale, s, dp, factor, minus_lse, minus_delta, work.keys - first_key,
                                   query + row - first_key, products, dq_sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) products.factor[r] = ds_scale[r] * k_scale;

        if (STAGES == 2 && !is_last) next.wait_full();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            multiply_columns<KEYS>(products.chunk[c], ds_int8, this_stage + (K_COLUMNS + c * 64 * KEYS) / 16);
        if (CHUNKS == 1) {
            if (is_last) break;
            multiply_rows<KEYS>(s, q_rows, next_stage + K_ROWS / 16);
            multiply_halves<KEYS, ROWS>(dp, grad_rows, next_stage + V_ROWS / 16);
            if (tile > 0) before.release();
            before = keys;
        } else {
            // Registers do not hold these products beside S and dP. After the last tile S is made once more, for
            // nothing: a branch between products makes each wait.
            multiply_rows<KEYS>(s, q_rows, next_stage + K_ROWS / 16);
            products_wait<1>();
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                pin(products.chunk[c]);
                accumulate(dq_sum + 32 * c, products.chunk[c], products.factor);
            }
            if (is_last) break;
            multiply_halves<KEYS, ROWS>(dp, grad_rows, next_stage + V_ROWS / 16);
            keys.release();
        }
        keys = next;
    }
    products_wait<0>();
    if (CHUNKS == 1) {
        pin(products.chunk[0]);
        accumulate(dq_sum, products.chunk[0], products.factor);
    }
    if (CHUNKS == 1 && before.index != keys.index) before.release();
    keys.release();
    keys.advance();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq_kernel(const Arguments a) {
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

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the same in a warp, and known to be
    if (warpgroup == CONSUMERS) {
        begin_copying<CONSUMERS>();
        if (threadIdx.x % 128 == 0) copy_packets(a, keys, queries, shared_address(shared), barriers.items);
        return;
    }
    begin_computing<CONSUMERS>();
    for (;;) {
        queries.wait_full();
        const Item& item = barriers.items[queries.parity];
        if (item.head < 0) return;
        Queries work;
        find_queries<CONSUMERS>(a.axes, item, work);
        float dq_sum[D / 2] = {};
        if (work.tiles > 0)
            meet_keys(a, work, warpgroup, shared, keys, queries, dq_sum);
        else
            queries.release();
        find_queries<CONSUMERS>(a.axes, item, work);  // again, not kept: registers are short
        const float scales[2] = {a.scale, a.scale};
        store_rows(a.dq, dq_sum, scales, shared + STAGING + warpgroup * STAGING_BYTES, warpgroup, work.head, a.axes.heads,
                   work.first + warpgroup * ROWS, work.q, a.axes.d);
        queries.advance();
    }
}
