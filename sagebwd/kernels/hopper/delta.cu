// delta = rowsum(P * dP) of the backward's own P and dP, in place of rowsum(dO * O): an item is 192 queries of one head,
// which meet all keys that they see. The result goes where packets.cu left the other one, for dk_dv.cu and dq.cu to read.

#include "common.cuh"

namespace {

constexpr int STAGES = D == 64 ? 4 : 3;
constexpr int CONSUMERS = 3;           // warpgroups that compute; one more copies
constexpr int THREADS = 128 * (CONSUMERS + 1);

// A stage in shared memory is a packet of 128 keys as it comes.
constexpr int V_ROWS = K_TILE;
constexpr int K_SCALE = 3 * K_TILE;
constexpr int STAGE_BYTES = align_up(K_ROWS_BYTES, 1024);

// Before the stages the packets of queries, one for each warpgroup.
constexpr int GRAD_ROWS = Q_TILE;
constexpr int STATISTICS = 3 * Q_TILE;
constexpr int SCALES = STATISTICS + STATS;
constexpr int QUERY_BYTES = align_up(Q_ROWS_BYTES, 1024);
constexpr int RING = CONSUMERS * QUERY_BYTES;
CHECK_LAUNCH(THREADS, RING + STAGES * STAGE_BYTES);

struct Barriers {
    u64 full[STAGES], empty[STAGES], queries_full[1], queries_empty[1];
    Item items[2];  // whose queries are here, and whose are next, in turn
};

struct Arguments {
    u8* q_rows;
    const u8* k_rows;
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
        for (int w = 0; w < CONSUMERS; ++w) {  // past the end the last packet again, as in dq.cu
            const i64 block = work.q_block + min(w, work.q_packets - 1);
            copy_async(shared + w * QUERY_BYTES, a.q_rows + block * Q_ROWS_BYTES, Q_ROWS_BYTES, queries.full);
        }
        queries.advance();
#pragma unroll 1
        for (i64 block = work.kv_block; block < work.kv_block + work.tiles; ++block) {
            keys.wait_empty();
            const u32 full = keys.full + 8 * keys.index, stage = shared + RING + keys.index * STAGE_BYTES;
            barrier_expect_bytes(full, K_ROWS_BYTES);
            copy_async(stage, a.k_rows + block * K_ROWS_BYTES, K_ROWS_BYTES, full);
            keys.advance();
        }
    }
    queries.wait_empty();
    items[queries.parity] = item;  // none
    barrier_arrive(queries.full);
}

// P of one tile, from S, as bits of fp32 in its place. FAST: every logit allows a fused multiply-add, and none is masked.
// Else columns from `keys` on are masked, and those after `query` + 8 r if IS_CAUSAL.
template <bool FAST>
__device__ __forceinline__ void probabilities(int (&s)[64], float factor, const float (&minus_lse)[2], int keys, int query) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int r = i / 2 % 2;
        const float x = __int2float_rn(s[i]);
        float p = exp2_fast(FAST ? fmaf(x, factor, minus_lse[r]) : __fadd_rn(__fmul_rn(x, factor), minus_lse[r]));
        if (!FAST) {
            const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            if (column >= keys || (IS_CAUSAL && column > query + 8 * r)) p = 0.0f;
        }
        s[i] = __float_as_int(p);
    }
}

// The sums of P * dP that this thread has a part in: rows `row` and `row` + 8, two parts each.
__device__ __forceinline__ void meet_keys(const Arguments& a, const Queries& work, int tiles, int warpgroup,
                                          const u8* shared, Ring<STAGES>& keys, float (&sum)[4]) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    const u32 base = descriptor_base(shared_address(shared));
    const u32 q_rows = base + warpgroup * (QUERY_BYTES / 16), grad_rows = q_rows + GRAD_ROWS / 16;
    const u8* packet = shared + warpgroup * QUERY_BYTES;
    const float q_scale = *reinterpret_cast<const float*>(packet + SCALES);
    const float* stats = reinterpret_cast<const float*>(packet + STATISTICS);
    const float minus_lse[2] = {stats[row], stats[row + 8]};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        int s[64], dp[64];
        keys.wait_full();
        const u32 stage = base + (RING + keys.index * STAGE_BYTES) / 16;
        multiply_rows<KEYS>(s, q_rows, stage);
        multiply_halves<KEYS, ROWS>(dp, grad_rows, stage + V_ROWS / 16);
        const float k_scale = *reinterpret_cast<const float*>(shared + RING + keys.index * STAGE_BYTES + K_SCALE);
        const float factor = logit_factor(q_scale, k_scale, a.scale);
        const int first_key = tile * KEYS, query = work.first + warpgroup * ROWS;
        const bool is_cut = first_key + KEYS > work.keys || (IS_CAUSAL && first_key + KEYS > query);
        products_wait<1>();
        pin(s);
        if (is_fusible(factor) && !is_cut)
            probabilities<true>(s, factor, minus_lse, 0, 0);
        else
            probabilities<false>(s, factor, minus_lse, work.keys - first_key, query + row - first_key);
        products_wait<0>();
        pin(dp);
        keys.release();
        keys.advance();
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i % 4] = fmaf(__int_as_float(s[i]), __int_as_float(dp[i]), sum[i % 4]);
    }
}

// Stores -delta of this warpgroup's queries, if there are any.
__device__ __forceinline__ void store_delta(const Arguments& a, const Queries& work, int warpgroup, const float (&sum)[4]) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    float* stats = reinterpret_cast<float*>(a.q_rows + i64(work.q_block + warpgroup) * Q_ROWS_BYTES + STATISTICS);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float delta = sum[2 * r] + sum[2 * r + 1];
        delta += __shfl_xor_sync(0xffffffff, delta, 1);
        delta += __shfl_xor_sync(0xffffffff, delta, 2);
        if (thread % 4 == 0 && warpgroup < work.q_packets) stats[ROWS + row + 8 * r] = -infinite_to_nan(delta);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_kernel(const Arguments a) {
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
        float sum[4] = {};
        const int tiles = warpgroup < work.q_packets ? tiles_of(work, warpgroup) : 0;
        meet_keys(a, work, tiles, warpgroup, shared, keys, sum);
        queries.release();
        for (int tile = tiles; tile < work.tiles; ++tile) {  // which other warpgroups see
            keys.wait_full();
            keys.release();
            keys.advance();
        }
        store_delta(a, work, warpgroup, sum);
        queries.advance();
    }
}
