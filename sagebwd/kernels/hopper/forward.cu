// O and the logsumexp. A work tile is 128 or 192 queries of one head; it loops over all keys that they see.

#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "registers.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "window.cuh"

namespace {

constexpr int CONSUMERS = D == 64 ? 3 : 2;  // warpgroups; one more is the producer
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int STAGES = D == 256 ? (P_IS_16BIT ? 3 : 5) : (D == 64 ? 6 : P_IS_16BIT ? 3 : 4) * 128 / BLOCK_KV;
constexpr bool IS_SHORT = STAGES == 3;  // so few stages that the next one is waited for as late as possible
constexpr bool MAY_HIDE_ALL = HAS_WINDOW || (IS_CAUSAL && BLOCK_Q > BLOCK_KV);  // a tile may hide all keys from a query
constexpr int CHUNKS = D / 64;  // of 64 channels; P V is computed chunk by chunk
// Whether registers hold too few chunks of a product at once: see contract_tokens_in_turn. It is then added in its own tile.
constexpr bool IN_TURN = D == 256 && !P_IS_16BIT;

static_assert(STEP_Q == ROWS && (P_IS_16BIT ? !HAS_TOKEN_SCALES : !COMPENSATES));

// A stage in shared memory: a packed block of keys. V is by columns in INT8 or, if P is in 16 bits, as it is; its scales follow.
constexpr int K_ROWS = 0;
constexpr int VALUES = K_ROWS + K_TILE;
constexpr int V_BYTES = P_IS_16BIT ? K_AND_V_BYTES - K_TILE : PACKED_V_BYTES;
constexpr int KV_BYTES = VALUES + V_BYTES;
constexpr int SCALES = KV_BYTES - scale_bytes(P_IS_16BIT ? 1 : 2, BLOCK_KV);
constexpr int STAGE_BYTES = align_up(KV_BYTES, 1024);

// Before the stages: 64 queries and their scale for each consumer. Behind them: staging for the epilogue.
constexpr int Q_BYTES = STEP_TILE + scale_bytes(1, STEP_Q);
constexpr int QUERY_BYTES = align_up(Q_BYTES, 1024);
constexpr int RING = CONSUMERS * QUERY_BYTES;
constexpr int STAGING = RING + STAGES * STAGE_BYTES;
constexpr int STORED_CHANNELS = D == 256 ? 32 : D;  // through staging at once
constexpr int PART_STAGING = staging_bytes(STORED_CHANNELS);
CHECK_LAUNCH(THREADS, STAGING + CONSUMERS * PART_STAGING);

struct Barriers {
    u64 full[STAGES], empty[STAGES], queries_full[1], queries_empty[1];
    WorkTile work_tiles[2];  // whose queries are in shared memory, and whose come next, in turn
};

__device__ __forceinline__ void producer_loop(const Arguments& a, const Window& window, const TensorMaps& maps,
                                              Ring<STAGES> keys, Ring<1> queries, u32 shared, WorkTile (&work_tiles)[2]) {
    QueryTile work;
    WorkTile work_tile;
    for (int index = blockIdx.x; (work_tile = work_tile_at(a.axes, index)).head >= 0; index = next_work_tile(a.axes)) {
        if (!find_query_tile<CONSUMERS>(a.axes, work_tile, work)) continue;
        queries.wait_empty();
        work_tiles[queries.parity] = work_tile;
        barrier_expect_bytes(queries.full, work.q_blocks * Q_BYTES);
        for (int w = 0; w < work.q_blocks; ++w)
            copy_q(shared + w * QUERY_BYTES, a.packed_q, step_at(work.q_block + w), queries.full);
        queries.advance();
        const KeyRange seen = keys_seen(work, window);
        const Head kv_head = head_of(work.head / a.axes.group, a.axes.heads / a.axes.group);
#pragma unroll 1
        for (int tile = seen.begin; tile < seen.end; ++tile) {
            const i64 block = work.kv_block + tile;
            keys.wait_empty();
            const u32 full = keys.full + 8 * keys.index;
            barrier_expect_bytes(full, KV_BYTES);
            const u32 stage = shared + RING + keys.index * STAGE_BYTES;
            if constexpr (P_IS_16BIT) {
                copy_k_and_v(stage, stage + SCALES, a.packed_k, maps, block, kv_head, tile * BLOCK_KV, full);
            } else {
                bulk_copy(stage + K_ROWS, a.packed_k + block * a.k_stride, K_TILE, full);
                bulk_copy(stage + VALUES, a.packed_v + block * a.v_stride, V_BYTES, full);
            }
            keys.advance();
        }
    }
    queries.wait_empty();
    work_tiles[queries.parity] = work_tile;  // tells the consumers that there is no other
    barrier_arrive(queries.full);
}

// The online softmax of 64 queries: O and l up to a common factor per row, and the maximum m of the logits. With P in
// INT8 the product of the last tile is not yet added to o, unless IN_TURN; the true value is o + product * factor.
struct State {
    float o[D / 2], m[2];
    float l[2];          // of the columns of this thread, unless it is compensated, and then:
    float l_rounded[4];  // over a whole row: [0] and [1] of row lane / 4, [2] and [3] of row + 8
    int product[IN_TURN ? 1 : CHUNKS][32];
    float factor[2];
};

constexpr int LOGITS = BLOCK_KV / 2;  // that a thread holds

// Adds the elements of the last product to o, spread evenly over the logits: those of logit i.
__device__ __forceinline__ void accumulate_elements(State& state, int i) {
    constexpr int ELEMENTS = 32 * CHUNKS;
    if (IN_TURN) return;
#pragma unroll
    for (int k = (i * ELEMENTS + LOGITS - 1) / LOGITS; k < ((i + 1) * ELEMENTS + LOGITS - 1) / LOGITS; ++k)
        state.o[k] = fmaf(__int2float_rn(state.product[k / 32][k % 32]), state.factor[k / 2 % 2], state.o[k]);
}

// P of one tile, whose largest logit per row is `m_tile`: in INT8, as the left operand of a product (see round_tile), and
// its sum per row. The product of the previous tile is accumulated in between, so that more units are busy.
template <bool FAST>
__device__ __forceinline__ void probabilities(u32 (&p_int8)[LOGITS / 4], const int (&s)[LOGITS], float factor,
                                              const float (&m_tile)[2], float (&sum)[2], State& state) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < LOGITS / 8; ++j) {  // 16 columns
        float p[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int i = 8 * j + e;
            p[e] = probability<FAST>(s[i], factor, m_tile[i / 2 % 2]);
            part[e % 4] += p[e];
            accumulate_elements(state, i);
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

// The same in 16 bits, for logits whose running maximum is `m`.
template <bool FAST>
__device__ __forceinline__ void probabilities(u32 (&p_16bit)[LOGITS / 2], const int (&s)[LOGITS], float factor, const float (&m)[2],
                                              float (&sum)[2], State&) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < LOGITS / 2; ++k) {  // two columns
        const int r = k % 2;
        const float first = probability<FAST>(s[2 * k], factor, m[r]), second = probability<FAST>(s[2 * k + 1], factor, m[r]);
        if (!COMPENSATES) part[2 * r] += first, part[2 * r + 1] += second;
        p_16bit[k] = pack_16bit(first, second);
    }
    sum[0] = part[0] + part[1];
    sum[1] = part[2] + part[3];
}

// P of one tile in INT8, where each key and each value has a scale of its own; finds `m_tile`, too. P is multiplied by the scales
// of V before it is rounded, so that its row needs a scale, `p_scale`. `q_factor`: from a row of S times a scale of K to logits.
// `k_scales`: from this thread's first column on; every fourth is one's own, and those of V follow. IS_CUT: S may be MASKED.
template <bool IS_CUT, int WORDS>
__device__ __forceinline__ void probabilities_of_tokens(u32 (&p_int8)[WORDS], const int (&s)[LOGITS], const float (&q_factor)[2],
                                                        const float2* k_scales, float (&m_tile)[2], float (&sum)[2],
                                                        float (&p_scale)[2], State& state) {
    const float2* v_scales = k_scales + BLOCK_KV / 2;
    float x[LOGITS];  // logits, then P
    m_tile[0] = m_tile[1] = -INFINITE;
#pragma unroll
    for (int i = 0; i < LOGITS; ++i) {
        const int r = i / 2 % 2;
        const float factor = __fmul_rn(q_factor[r], pick(k_scales[i / 4 * 4], i % 2));
        x[i] = IS_CUT && s[i] == MASKED ? -INFINITE : __fmul_rn(__int2float_rn(s[i]), factor);
        m_tile[r] = nan_max(m_tile[r], x[i]);
    }
    float shift[2], part[4] = {0.0f, 0.0f, 0.0f, 0.0f}, inverse[2];
    int largest[2] = {0, 0};  // bits: non-negative floats are ordered as their bits, NaN at the top
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        m_tile[r] = row_max(m_tile[r]);
        shift[r] = MAY_HIDE_ALL && m_tile[r] == -INFINITE ? 0.0f : m_tile[r];
    }
#pragma unroll
    for (int i = 0; i < LOGITS; ++i) {
        const int r = i / 2 % 2;
        const bool is_masked = IS_CUT && x[i] == -INFINITE;
        const float p = exp2_fast(__fadd_rn(x[i], -shift[r]));
        part[i % 4] += p;
        x[i] = is_masked ? 0.0f : p * pick(v_scales[i / 4 * 4], i % 2);  // 0 even next to a NaN
        largest[r] = max(largest[r], __float_as_int(x[i]));
        accumulate_elements(state, i);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] = part[2 * r] + part[2 * r + 1];
        p_scale[r] = scale_of(__int_as_float(row_max(largest[r])), P_MAX);
        inverse[r] = reciprocal(p_scale[r]);
    }
    round_tile<BLOCK_KV>(p_int8, x, inverse);
}

// Raises the running maximum to that of another tile. o is multiplied by the resulting factor `rescale` here, l by the
// caller. `share` is the factor for P that was computed with the tile's own maximum.
__device__ __forceinline__ void raise_maximum(State& state, const float (&m_tile)[2], float (&rescale)[2],
                                              float (&share)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float m = fmaxf(state.m[r], m_tile[r]);
        const float shift = MAY_HIDE_ALL && m == -INFINITE ? 0.0f : m;  // a query may have seen no key yet
        share[r] = exp2_fast(m_tile[r] - shift);
        rescale[r] = exp2_fast(state.m[r] - shift);
        state.m[r] = m;
    }
    // Rare: most maxima are found in the first tiles.
    if (__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) state.o[i] *= rescale[i / 2 % 2];
        if constexpr (COMPENSATES) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state.l_rounded[i] *= rescale[i / 2];
        }
    }
}

// P times V of a tile. In INT8 the product has a scale and goes to state.product; in 16 bits it is added to state.o.
// `ones`: see ones_tile.
template <int WORDS>
__device__ __forceinline__ void multiply_values(State& state, const u32 (&p)[WORDS], u32 values, u64 ones) {
    if constexpr (P_IS_16BIT) {
        contract_tokens_16bit<BLOCK_KV>(state.o, p, values);
        if constexpr (COMPENSATES) {  // summed by the tensor cores, which have time to spare
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BLOCK_KV / 16; ++i) wgmma_16bit(state.l_rounded, p + 4 * i, ones);
            wgmma_commit();
        }
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            contract_tokens<BLOCK_KV, P_IS_UNSIGNED>(state.product[c], p, values + c * 64 * BLOCK_KV / 16);
    }
}

// Where a product is added in its own tile: P times V, added to state.o, and then the next S, whose rows of K are at `next_k_rows`.
template <int WORDS>
__device__ __forceinline__ void multiply_values_in_turn(State& state, int (&s)[LOGITS], const u32 (&p)[WORDS], u32 values, u32 q_rows,
                                                        u32 next_k_rows) {
    if constexpr (IN_TURN) {
        contract_tokens_in_turn<CHUNKS, BLOCK_KV, P_IS_UNSIGNED>(state.o, s, state.product[0], p, values, state.factor);
        contract_channels<BLOCK_KV>(s, q_rows, next_k_rows);
        wgmma_wait<1>();
        pin(state.product[0]);
        accumulate(state.o + D / 2 - 32, state.product[0], state.factor);
    }
}

// The descriptor of a tile of 16 x 8 ones in shared memory, which all threads write; visible after the next __syncthreads.
__device__ __forceinline__ u64 ones_tile() {
    if constexpr (COMPENSATES) {
        __shared__ __align__(128) u32 ones[64];
        if (threadIdx.x < 64) ones[threadIdx.x] = pack_16bit(1.0f, 1.0f);
        fence_proxy_async();
        return descriptor_unswizzled(shared_address(ones));
    }
    return 0;
}

// Call it after the wait for the product.
__device__ __forceinline__ void finish_product(State& state) {
    if constexpr (P_IS_16BIT) {
        pin(state.o);
        if constexpr (COMPENSATES) pin(state.l_rounded);
    } else if (!IN_TURN) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) pin(state.product[c]);
    }
}

__device__ __forceinline__ void consumer_loop(const Arguments& a, const Window& window, const QueryTile& work,
                                              const KeyRange& own, int warpgroup, u8* shared, u64 ones, Ring<STAGES>& keys,
                                              Ring<1>& queries, State& state) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, first = work.first + warpgroup * ROWS;
    const u32 base = descriptor_base(shared_address(shared));
    const u32 q_rows = base + warpgroup * (QUERY_BYTES / 16), ring = base + RING / 16;

    const float* q_scales = reinterpret_cast<const float*>(shared + warpgroup * QUERY_BYTES + STEP_TILE);
    const float q_scale[2] = {q_scales[HAS_TOKEN_SCALES ? row : 0], q_scales[HAS_TOKEN_SCALES ? row + 8 : 0]};
    const float q_factor[2] = {logit_factor(q_scale[0], 1.0f, a.scale), logit_factor(q_scale[1], 1.0f, a.scale)};
    int s[LOGITS];
    Ring<STAGES> before = keys;
    if constexpr (P_IS_16BIT) finish_product(state);  // zero o before the first wgmma: later writes would serialize it
    keys.wait_full();
    contract_channels<BLOCK_KV>(s, q_rows, ring + (keys.index * STAGE_BYTES + K_ROWS) / 16);
    for (int tile = own.begin;; ++tile) {
        // While the tensor cores work: load what this tile needs, and wait for the next stage.
        const float2* kv_scales = reinterpret_cast<const float2*>(shared + RING + keys.index * STAGE_BYTES + SCALES);
        const float2 scales = *kv_scales;  // of the block, if it has some
        const float factor = logit_factor(q_scale[0], scales.x, a.scale);
        const int first_key = tile * BLOCK_KV;
        const bool is_cut = first_key + BLOCK_KV > work.keys || (IS_CAUSAL && first_key + BLOCK_KV > first) ||
                            (HAS_WINDOW && window.cuts(first_key - first, work.q.tokens, work.keys));
        const bool is_last = tile == own.end - 1, is_fast = is_fusible(factor) && !is_cut;
        Ring<STAGES> next = keys;
        if (!is_last) {
            next.advance();
            if (!IS_SHORT) next.wait_full();
        }

        float m_tile[2], rescale[2], share[2], sum[2], p_scale[2] = {scales.y * (1.0f / P_MAX), scales.y * (1.0f / P_MAX)};
        u32 p[LOGITS / (P_IS_16BIT ? 2 : 4)];
        wgmma_wait<0>();
        pin(s);
        finish_product(state);
        if (tile > own.begin) before.release();
        if (is_last) queries.release();  // early, so that the next ones arrive in time; the last S below is never used
        if (is_cut) mask(s, work.keys - first_key, first + row - first_key);
        if (HAS_WINDOW && is_cut) mask_outside(s, window, first + row - first_key);
        if constexpr (HAS_TOKEN_SCALES) {
            if (is_cut)
                probabilities_of_tokens<true>(p, s, q_factor, kv_scales + thread % 4, m_tile, sum, p_scale, state);
            else
                probabilities_of_tokens<false>(p, s, q_factor, kv_scales + thread % 4, m_tile, sum, p_scale, state);
        } else {
            int largest[2] = {MASKED, MASKED};
#pragma unroll
            for (int i = 0; i < LOGITS; i += 2) largest[i / 2 % 2] = max(max(largest[i / 2 % 2], s[i]), s[i + 1]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int m = row_max(largest[r]);
                m_tile[r] = MAY_HIDE_ALL && m == MASKED ? -INFINITE : __fmul_rn(__int2float_rn(m), factor);
            }
            if constexpr (P_IS_16BIT) raise_maximum(state, m_tile, rescale, share);  // before the product is added to o
            const float (&maximum)[2] = P_IS_16BIT ? state.m : m_tile;
            if (is_fast)
                probabilities<true>(p, s, factor, maximum, sum, state);
            else
                probabilities<false>(p, s, factor, maximum, sum, state);
        }
        if (IS_SHORT && !is_last) next.wait_full();
        const u32 values = ring + (keys.index * STAGE_BYTES + VALUES) / 16;
        const u32 next_k_rows = ring + (next.index * STAGE_BYTES + K_ROWS) / 16;
        if constexpr (!IN_TURN) {
            multiply_values(state, p, values, ones);
            // After the last tile S is computed once more and not used: a branch between wgmmas would serialize them.
            contract_channels<BLOCK_KV>(s, q_rows, next_k_rows);
        }
        if constexpr (!P_IS_16BIT) raise_maximum(state, m_tile, rescale, share);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.factor[r] = share[r] * p_scale[r];
            if (!COMPENSATES) state.l[r] = state.l[r] * rescale[r] + (P_IS_16BIT ? sum[r] : sum[r] * share[r]);
        }
        if constexpr (IN_TURN) multiply_values_in_turn(state, s, p, values, q_rows, next_k_rows);
        before = keys;
        if (is_last) break;
        keys = next;
    }
    wgmma_wait<0>();
    finish_product(state);
    if constexpr (!P_IS_16BIT && !IN_TURN) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) accumulate(state.o + 32 * c, state.product[c], state.factor);
    }
    keys.release();
    keys.advance();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_kernel(const Arguments a, const Window window,
                                                                        const __grid_constant__ TensorMaps maps) {
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

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the compiler then knows that it is warp-uniform
    if (warpgroup == CONSUMERS) {
        begin_producer<CONSUMERS>();
        if (threadIdx.x % 128 == 0) producer_loop(a, window, maps, keys, queries, shared_address(shared), barriers.work_tiles);
        return;
    }
    begin_consumer<CONSUMERS>();
    const int thread = threadIdx.x % 128;
    for (;;) {
        queries.wait_full();
        const WorkTile& work_tile = barriers.work_tiles[queries.parity];
        if (work_tile.head < 0) return;
        QueryTile work;
        find_query_tile<CONSUMERS>(a.axes, work_tile, work);
        State state = {};
        state.m[0] = state.m[1] = -INFINITE;
        const KeyRange seen = keys_seen(work, window), own = keys_seen_by(work, window, warpgroup);
        const bool sees_any = own.begin < own.end;
        if (HAS_WINDOW && sees_any) skip(keys, own.begin - seen.begin);
        if (sees_any)
            consumer_loop(a, window, work, own, warpgroup, shared, ones, keys, queries, state);
        else
            queries.release();
        queries.advance();
        // Tiles that only other warpgroups see.
        for (int tile = HAS_WINDOW && !sees_any ? seen.begin : own.end; tile < seen.end; ++tile) {
            keys.wait_full();
            keys.release();
            keys.advance();
        }
        const int first = work.first + warpgroup * ROWS;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float l = COMPENSATES ? state.l_rounded[2 * r] : state.l[r];
            if (!COMPENSATES) {
                l += __shfl_xor_sync(0xffffffff, l, 1);
                l += __shfl_xor_sync(0xffffffff, l, 2);
            }
            inverse[r] = l == 0.0f ? 0.0f : 1.0f / l;  // without keys O is zero
            const int token = first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
            if (thread % 4 == 0 && token < work.q.tokens)
                a.lse[i64(work.head) * a.axes.n_q + work.q.start + token] = state.m[r] + log2f(l);
        }
#ifdef SMOOTH_V
        // Only now, when the registers of S and P are free. A query without keys stays zero: the mean of no values is zero.
        add_mean(state.o, inverse, a.v_mean + (i64(work.head / a.axes.group) * a.documents + work.document) * D);
        inverse[0] = inverse[1] = 1.0f;
#endif
        if constexpr (HAS_WINDOW) {  // a query that sees no key: not even a NaN among the values is its own
            const int query = first + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
            for (int i = 0; i < D / 2; ++i)
                if (query + i / 2 % 2 * 8 - window.left >= work.keys) state.o[i] = 0.0f;
        }
        u8* staging = shared + STAGING + warpgroup * PART_STAGING;
        store_in_parts<D, STORED_CHANNELS>(a.out, state.o, inverse, staging, warpgroup, work.head, a.axes.heads, first, work.q,
                                           a.axes.d);
        if constexpr (COMPENSATES)
            store_in_parts<D, STORED_CHANNELS, true>(a.out_residual, state.o, inverse, staging, warpgroup, work.head,
                                                     a.axes.heads, first, work.q, a.axes.d);
    }
}
