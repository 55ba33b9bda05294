// O and the logsumexp: an item is 128 or 192 queries of one head, which meet all keys that they see.

#include "common.cuh"

namespace {

constexpr int CONSUMERS = D == 64 ? 3 : 2;  // warpgroups that compute; one more copies
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int STAGES = D == 64 ? 6 : P_IS_HALF ? 3 : 4;
constexpr bool IS_SHORT = STAGES == 3;  // one stage is read, one was, one is filled: it is waited for as late as can be
constexpr int CHUNKS = D / 64;  // of 64 channels, in which O is multiplied

#ifdef COMPENSATE_O  // O is divided by the sum of P as it was rounded to 16 bit, and what rounding takes from O is kept
constexpr bool COMPENSATES = true;
#else
constexpr bool COMPENSATES = false;
#endif
static_assert(P_IS_HALF || !COMPENSATES);

// A stage in shared memory: the packet of 128 keys. V is by columns in INT8 or, if P is in 16 bit, as it is.
constexpr int PACKET_BYTES = P_IS_HALF ? K_ROWS_BYTES : KV_BYTES;
constexpr int K_ROWS = 0;
constexpr int VALUES = K_ROWS + K_TILE;
constexpr int SCALES = PACKET_BYTES - TAIL;
constexpr int STAGE_BYTES = align_up(PACKET_BYTES, 1024);

// Before the stages the packets of queries, one for each warpgroup; behind them room to store results.
constexpr int Q_BYTES = Q_TILE + TAIL;
constexpr int QUERY_BYTES = align_up(Q_BYTES, 1024);
constexpr int RING = CONSUMERS * QUERY_BYTES;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * STAGING_BYTES);

struct Barriers {
    u64 full[STAGES], empty[STAGES], queries_full[1], queries_empty[1];
    Item items[2];  // whose queries are here, and whose are next, in turn
};

struct Arguments {
    const u8 *queries, *keys;
    TokenTensor out, rest;  // rest: written if COMPENSATE_O is defined
    float* lse;
    Axes axes;
    float scale;
    // Read if SMOOTH_V is defined.
    int documents;
    const float* v_mean;  // of each document of each key head, see mean_kernel
};

__device__ __forceinline__ void copy_packets(const Arguments& a, Ring<STAGES> keys, Ring<1> queries, u32 shared, Item (&items)[2]) {
    Queries work;
    Item item;
    for (int index = blockIdx.x; (item = item_at(a.axes, index)).head >= 0; index = take_item(a.axes)) {
        if (!find_queries<CONSUMERS>(a.axes, item, work)) continue;
        queries.wait_empty();
        items[queries.parity] = item;
        barrier_expect_bytes(queries.full, work.q_packets * Q_BYTES);
        for (int w = 0; w < work.q_packets; ++w)
            copy_async(shared + w * QUERY_BYTES, a.queries + i64(work.q_block + w) * Q_BYTES, Q_BYTES, queries.full);
        queries.advance();
#pragma unroll 1
        for (i64 block = work.kv_block; block < work.kv_block + work.tiles; ++block) {
            keys.wait_empty();
            const u32 full = keys.full + 8 * keys.index;
            barrier_expect_bytes(full, PACKET_BYTES);
            copy_async(shared + RING + keys.index * STAGE_BYTES, a.keys + block * PACKET_BYTES, PACKET_BYTES, full);
            keys.advance();
        }
    }
    queries.wait_empty();
    items[queries.parity] = item;  // none
    barrier_arrive(queries.full);
}

// What a warpgroup keeps of its 64 queries: O and l up to a common factor per row, and the maximum m of the logits.
// With P in INT8 the product of the last tile is not yet in o: o + product * factor is what it should be.
struct State {
    float o[D / 2], l[2], m[2];
    float l_rounded[4];  // sums of P as rounded, over all threads of a row: each twice for row lane / 4, then for + 8
    int product[CHUNKS][32];
    float factor[2];
};

// P of one logit, less the maximum `m`. FAST: every logit allows a fused multiply-add, and none is masked.
template <bool FAST>
__device__ __forceinline__ float probability(int s, float factor, float m) {
    const float x = __int2float_rn(s);
    const float p = exp2_fast(FAST ? fmaf(x, factor, -m) : __fadd_rn(__fmul_rn(x, factor), -m));
    return !FAST && s == HIDDEN ? 0.0f : p;
}

// P of one tile, whose largest logit per row is `m_tile`: in INT8, as the left operand of a product (see
// round_tile), and its sum per row. The product of the previous tile is added up on the way, which keeps more units
// busy.
template <bool FAST>
__device__ __forceinline__ void probabilities(u32 (&p_int8)[16], const int (&s)[64], float factor,
                                              const float (&m_tile)[2], float (&sum)[2], State& state) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // 16 columns
        float p[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int i = 8 * j + e;
            p[e] = probability<FAST>(s[i], factor, m_tile[i / 2 % 2]);
            part[e % 4] += p[e];
            if (e % 2 == 0 || CHUNKS == 2) {
                const int k = CHUNKS == 2 ? i : i / 2, row = k / 2 % 2;
                state.o[k] = fmaf(__int2float_rn(state.product[k / 32][k % 32]), state.factor[row], state.o[k]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto rounded = [&](int k) { return fmaf(p[2 * r + k], P_MAX, ROUNDING_OFFSET); };
            p_int8[2 * j + r] = low_bytes(rounded(0), rounded(1), rounded(4), rounded(5));
        }
    }
    sum[0] = part[0] + part[1];
    sum[1] = part[2] + part[3];
}

// The same in 16 bit, for logits whose maximum so far is `m`.
template <bool FAST>
__device__ __forceinline__ void probabilities(u32 (&p_half)[32], const int (&s)[64], float factor, const float (&m)[2],
                                              float (&sum)[2], State&) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < 32; ++k) {  // two columns
        const int r = k % 2;
        const float first = probability<FAST>(s[2 * k], factor, m[r]), second = probability<FAST>(s[2 * k + 1], factor, m[r]);
        part[2 * r] += first;
        part[2 * r + 1] += second;
        p_half[k] = pack_halves(first, second);
    }
    sum[0] = part[0] + part[1];
    sum[1] = part[2] + part[3];
}

// Raises the maximum to that of another tile too. What was so far is worth `rescale` then, o already, l not yet; logits less
// the tile's own maximum are worth `share`.
__device__ __forceinline__ void raise_maximum(State& state, const float (&m_tile)[2], float (&rescale)[2], float (&share)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float m = fmaxf(state.m[r], m_tile[r]);
        share[r] = exp2_fast(m_tile[r] - m);
        rescale[r] = exp2_fast(state.m[r] - m);
        state.m[r] = m;
    }
    // Seldom: most maxima are found in the first tiles.
    if (__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) state.o[i] *= rescale[i / 2 % 2];
        if constexpr (COMPENSATES) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state.l_rounded[i] *= rescale[i / 2];
        }
    }
}

// P times the values of a tile: beside o in INT8, which has a scale, into it in 16 bit.
// `ones`: of ones_tile.
template <int WORDS>
__device__ __forceinline__ void multiply_values(State& state, const u32 (&p)[WORDS], u32 values, u64 ones) {
    if constexpr (P_IS_HALF) {
        multiply_across<KEYS>(state.o, p, values);
        if constexpr (COMPENSATES) {  // summed by the tensor cores, which have time
            products_begin();
#pragma unroll
            for (int i = 0; i < KEYS / 16; ++i) multiply_step_16(state.l_rounded, p + 4 * i, ones);
            products_commit();
        }
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) multiply_columns<KEYS, P_UNSIGNED>(state.product[c], p, values + c * 64 * KEYS / 16);
    }
}

// A tile of 16 x 8 ones in shared memory, which all threads write; visible after the next __syncthreads.
__device__ __forceinline__ u64 ones_tile() {
    if constexpr (COMPENSATES) {
        __shared__ __align__(128) u32 ones[64];
        if (threadIdx.x < 64) ones[threadIdx.x] = pack_halves(1.0f, 1.0f);
        shared_write_fence();
        return descriptor_plain(shared_address(ones));
    }
    return 0;
}

// To be called behind the wait for the product.
__device__ __forceinline__ void finish_product(State& state) {
    if constexpr (P_IS_HALF) {
        pin(state.o);
        if constexpr (COMPENSATES) pin(state.l_rounded);
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) pin(state.product[c]);
    }
}

// Hides columns from `keys` on, and those after `query` + 8 r if IS_CAUSAL.
__device__ __forceinline__ void mask(int (&s)[64], int keys, int query) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (column >= keys || (IS_CAUSAL && column > query + i / 2 % 2 * 8)) s[i] = HIDDEN;
    }
}

__device__ __forceinline__ void meet_keys(const Arguments& a, const Queries& work, int tiles, int warpgroup, u8* shared,
                                          u64 ones, Ring<STAGES>& keys, Ring<1>& queries, State& state) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, first = work.first + warpgroup * ROWS;
    const u32 base = descriptor_base(shared_address(shared));
    const u32 q_rows = base + warpgroup * (QUERY_BYTES / 16), ring = base + RING / 16;

    const float q_scale = *reinterpret_cast<const float*>(shared + warpgroup * QUERY_BYTES + Q_TILE);
    int s[64];
    Ring<STAGES> before = keys;
    if constexpr (P_IS_HALF) finish_product(state);  // zeros that came after the first product would make it wait
    keys.wait_full();
    multiply_rows<KEYS>(s, q_rows, ring + (keys.index * STAGE_BYTES + K_ROWS) / 16);
    for (int tile = 0;; ++tile) {
        // While the tensor cores work: what this tile needs, and the next one's place.
        const float2 scales = *reinterpret_cast<const float2*>(shared + RING + keys.index * STAGE_BYTES + SCALES);
        const float factor = logit_factor(q_scale, scales.x, a.scale);
        const int first_key = tile * KEYS;
        const bool is_cut = first_key + KEYS > work.keys || (IS_CAUSAL && first_key + KEYS > first);
        const bool is_last = tile == tiles - 1, is_fast = is_fusible(factor) && !is_cut;
        Ring<STAGES> next = keys;
        if (!is_last) {
            next.advance();
            if (!IS_SHORT) next.wait_full();
        }

        float m_tile[2], rescale[2], share[2], sum[2];
        u32 p[P_IS_HALF ? 32 : 16];
        products_wait<0>();
        pin(s);
        finish_product(state);
        if (tile > 0) before.release();
        if (is_last) queries.release();  // so that the next are here in time; what S reads below does not matter
        if (is_cut) mask(s, work.keys - first_key, first + row - first_key);
        int largest[2] = {HIDDEN, HIDDEN};
#pragma unroll
        for (int i = 0; i < 64; i += 2) largest[i / 2 % 2] = max(max(largest[i / 2 % 2], s[i]), s[i + 1]);
#pragma unroll
        for (int r = 0; r < 2; ++r) m_tile[r] = __fmul_rn(__int2float_rn(row_max(largest[r])), factor);
        if constexpr (P_IS_HALF) raise_maximum(state, m_tile, rescale, share);  // the product is added to o as it is
        const float (&largest_so_far)[2] = P_IS_HALF ? state.m : m_tile;
        if (is_fast)
            probabilities<true>(p, s, factor, largest_so_far, sum, state);
        else
            probabilities<false>(p, s, factor, largest_so_far, sum, state);
        if (IS_SHORT && !is_last) next.wait_full();
        multiply_values(state, p, ring + (keys.index * STAGE_BYTES + VALUES) / 16, ones);
        // After the last tile S is made once more, for nothing: a branch between products makes each wait.
        multiply_rows<KEYS>(s, q_rows, ring + (next.index * STAGE_BYTES + K_ROWS) / 16);

        if constexpr (!P_IS_HALF) raise_maximum(state, m_tile, rescale, share);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.factor[r] = share[r] * (scales.y * (1.0f / P_MAX));
            state.l[r] = state.l[r] * rescale[r] + (P_IS_HALF ? sum[r] : sum[r] * share[r]);
        }
        before = keys;
        if (is_last) break;
        keys = next;
    }
    products_wait<0>();
    finish_product(state);
    if constexpr (!P_IS_HALF) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) accumulate(state.o + 32 * c, state.product[c], state.factor);
    }
    keys.release();
    keys.advance();
}

// O times inverse[row], and on top the mean of V, which V in INT8 is without: the rows of P sum to 1. Only now are its
// numbers loaded, when the registers of S and P are free.
__device__ __forceinline__ void add_mean(float (&o)[D / 2], const float (&inverse)[2], const float* mean) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {  // 8 columns
        const float2 m = *reinterpret_cast<const float2*>(mean + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) o[4 * j + k] = fmaf(o[4 * j + k], inverse[k / 2], pick(m, k % 2));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_kernel(const Arguments a) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    const u64 ones = ones_tile();
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
    const int thread = threadIdx.x % 128;
    for (;;) {
        queries.wait_full();
        const Item& item = barriers.items[queries.parity];
        if (item.head < 0) return;
        Queries work;
        find_queries<CONSUMERS>(a.axes, item, work);
        State state = {};
        state.m[0] = state.m[1] = -INFINITE;
        const int tiles = warpgroup < work.q_packets ? tiles_of(work, warpgroup) : 0;
        if (tiles > 0)
            meet_keys(a, work, tiles, warpgroup, shared, ones, keys, queries, state);
        else
            queries.release();
        queries.advance();
        for (int tile = tiles; tile < work.tiles; ++tile) {  // which other warpgroups see
            keys.wait_full();
            keys.release();
            keys.advance();
        }
        const int first = work.first + warpgroup * ROWS;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float l = state.l[r];
            l += __shfl_xor_sync(0xffffffff, l, 1);
            l += __shfl_xor_sync(0xffffffff, l, 2);
            const float divisor = COMPENSATES ? state.l_rounded[2 * r] : l;
            inverse[r] = divisor == 0.0f ? 0.0f : 1.0f / divisor;  // without keys O is zero
            const int token = first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
            if (thread % 4 == 0 && token < work.q.tokens)
                a.lse[i64(work.head) * a.axes.n_q + work.q.start + token] = state.m[r] + log2f(l);
        }
#ifdef SMOOTH_V
        // A query without keys keeps its zero: the mean of no values is zero.
        add_mean(state.o, inverse, a.v_mean + (i64(work.head / a.axes.group) * a.documents + work.document) * D);
        inverse[0] = inverse[1] = 1.0f;
#endif
        u8* staging = shared + STAGING + warpgroup * STAGING_BYTES;
        store_rows(a.out, state.o, inverse, staging, warpgroup, work.head, a.axes.heads, first, work.q, a.axes.d);
        if constexpr (COMPENSATES)
            store_rows<true>(a.rest, state.o, inverse, staging, warpgroup, work.head, a.axes.heads, first, work.q, a.axes.d);
    }
}
