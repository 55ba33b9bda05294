// O and the logsumexp. A CTA owns 128 queries of one head, 16 each warp; it loops over all keys that they see, a packed block
// at a time.
//
// Two groups of four warps take turns: while one multiplies P of the last block by its V, and Q by K of this one, the other
// finds P. So tensor cores and shared memory work while others compute, and there is one warp of each group for each of an
// SM's four schedulers. The first group copies the blocks.

#include "copies.cuh"
#include "epilogue.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "products.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "window.cuh"

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int BLOCK_WARPS = BLOCK_Q / 16, BLOCKS = WARPS / BLOCK_WARPS;  // warps that share a packed block of queries; blocks
constexpr int HALVES = 16 * WARPS / ROWS;                                // of the queries, for the epilogue
constexpr int CTAS_PER_SM = D == 64 && !P_IS_16BIT && !HAS_TOKEN_SCALES ? 2 : 1;

static_assert(P_IS_16BIT ? !HAS_TOKEN_SCALES : !COMPENSATES);

// Whether a tile that is not skipped may hide all its keys from a query.
constexpr bool MAY_HIDE_ALL = HAS_WINDOW || (IS_CAUSAL && BLOCK_Q > BLOCK_KV);

// Shared memory: two stages for K and V of a packed block, V by columns in INT8 or, if P is in 16 bits, as it is; and scales of
// three blocks, because one group may still read those of a block when the block after the next is copied. At first the
// second stage may hold the queries, at the end the stages are staging for the epilogue.
constexpr int V_TILE = (P_IS_16BIT ? 2 : 1) * K_TILE, STAGE_BYTES = K_TILE + V_TILE;
constexpr int SCALE_BYTES = scale_bytes(P_IS_16BIT ? 1 : 2, BLOCK_KV);
constexpr int ALIGNED = D > 128 ? D : 128;           // see left_address
constexpr int QUERY_BYTES = align_up(PACKED_Q_BYTES, ALIGNED), QUERIES_BYTES = BLOCKS * QUERY_BYTES;
// Of 256 channels, Q would take too many registers. It stays in shared memory if there is room beside 16-bit V.
constexpr bool Q_IN_REGISTERS = D <= 128 || P_IS_16BIT;
constexpr int QUERIES = Q_IN_REGISTERS ? STAGE_BYTES : 2 * STAGE_BYTES;  // where they are at first, or all the time
constexpr int SCALES = QUERIES + QUERIES_BYTES > 2 * STAGE_BYTES ? QUERIES + QUERIES_BYTES : 2 * STAGE_BYTES;
constexpr int OPERAND_BYTES = SCALES + 3 * SCALE_BYTES;
constexpr int SHARED_BYTES = OPERAND_BYTES > HALVES * STAGING_BYTES ? OPERAND_BYTES : HALVES * STAGING_BYTES;
static_assert(SCALE_BYTES == (P_IS_16BIT ? PACKED_KV_BYTES - K_TILE : PACKED_V_BYTES - V_TILE));
static_assert(STAGE_BYTES % ALIGNED == 0 && !PACKS_16BIT);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

constexpr int GROUP = THREADS / 2;
enum Barrier { FIRST_MULTIPLIES = 4, SECOND_MULTIPLIES };  // lower numbers belong to __syncthreads and to warpgroup_sync

// The online softmax of a warp's 16 queries: O and l up to a common factor per row, and the maximum m of the logits.
struct State {
    float o[D / 2], m[2];
    float l[2];          // of the columns of this thread, unless it is compensated, and then:
    float l_rounded[4];  // over a whole row: [0] and [1] of row lane / 4, [2] and [3] of row + 8
};

// Q of a warp's 16 queries: in registers, or in shared memory from `row` of `tile` on.
struct Queries {
    u32 values[D / 8], tile;
    int row;
};

// Reads them to registers.
__device__ __forceinline__ void load_queries(Queries& q) {
    const u32 queries = left_address<D>(q.tile);
#pragma unroll
    for (int step = 0; step < D / STEP; ++step) load_left<D>(q.values + 4 * step, queries, q.row, step * STEP);
}

// P of a warp's 16 queries and a tile of keys, as the left operand of its product with V: in INT8, 127 being the maximum, or
// in 16 bits. The factors are those of the rows of the product.
struct Probabilities {
    u32 rounded[P_IS_16BIT ? BLOCK_KV / 4 : BLOCK_KV / 8];
    float factor[2];
};

// The keys of a tile that a warp's queries see. `keys` and `query`: the number of keys left, and this thread's first query,
// counted from the tile's first key.
struct Visible {
    bool is_cut;
    int keys, query;
};

// S of a tile.
__device__ __forceinline__ void multiply_keys(int (&s)[BLOCK_KV / 2], const Queries& q, u32 keys) {
    if constexpr (Q_IN_REGISTERS)
        contract_channels<BLOCK_KV>(s, q.values, keys);
    else
        contract_channels<BLOCK_KV>(s, q.tile, q.row, keys);
}

// o += P V of a tile.
template <int WORDS>
__device__ __forceinline__ void multiply_values(State& state, const u32 (&p)[WORDS], const float (&factor)[2], u32 values) {
    if constexpr (P_IS_16BIT) {
        contract_tokens_16bit<BLOCK_KV>(state.o, p, values);
        if constexpr (COMPENSATES) {
            const u32 one = pack_16bit(1.0f, 1.0f), ones[2] = {one, one};
#pragma unroll
            for (int i = 0; i < BLOCK_KV / 16; ++i) mma_16bit(state.l_rounded, p + 4 * i, ones);
        }
    } else {
        contract_tokens<BLOCK_KV, D, P_IS_UNSIGNED>(state.o, p, values, factor);
    }
}

// Raises the running maximum to that of another tile. `share` is the factor for P that was computed with the tile's own
// maximum, which is -infinity where the tile hides all its keys.
__device__ __forceinline__ void raise_maximum(State& state, const float (&m_tile)[2], float (&share)[2]) {
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float m = fmaxf(state.m[r], m_tile[r]);
        const float shift = MAY_HIDE_ALL && m == -INFINITE ? 0.0f : m;
        share[r] = exp2_fast(m_tile[r] - shift);
        rescale[r] = exp2_fast(state.m[r] - shift);
        state.m[r] = m;
        state.l[r] *= rescale[r];
    }
    // Rare: most maxima are found in the first tiles.
    if (!__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) state.o[i] *= rescale[i / 2 % 2];
    if constexpr (COMPENSATES) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.l_rounded[i] *= rescale[i / 2];
    }
}

// P of a warp's logits whose maximum per row is m. Adds share[row] * P to l.
template <bool FAST, int WORDS>
__device__ __forceinline__ void exponentiate(u32 (&rounded)[WORDS], const int (&s)[BLOCK_KV / 2], float factor,
                                             const float (&m)[2], const float (&share)[2], State& state) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < BLOCK_KV / 16; ++j) {  // 16 columns
        float p[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            p[e] = probability<FAST>(s[8 * j + e], factor, m[e / 2 % 2]);
            if (!COMPENSATES) sum[e % 4] += p[e];
        }
        if constexpr (P_IS_16BIT) {
#pragma unroll
            for (int k = 0; k < 4; ++k) rounded[4 * j + k] = pack_16bit(p[2 * k], p[2 * k + 1]);
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const auto integer = [&](int k) { return fmaf(p[2 * r + k], P_MAX, ROUNDING_OFFSET); };
                rounded[2 * j + r] = low_bytes(integer(0), integer(1), integer(4), integer(5));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.l[r] = fmaf(sum[2 * r] + sum[2 * r + 1], share[r], state.l[r]);
}

// P of a tile. `factor`: from S to logits.
__device__ __forceinline__ void find_p(State& state, Probabilities& p, int (&s)[BLOCK_KV / 2], float factor, float v_scale,
                                       const Visible& visible, const Window& window) {
    int largest[2] = {MASKED, MASKED};
    if (visible.is_cut) mask(s, visible.keys, visible.query);
    if (HAS_WINDOW && visible.is_cut) mask_outside(s, window, visible.query);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i) largest[i / 2 % 2] = max(largest[i / 2 % 2], s[i]);
    float m_tile[2], share[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int m = row_max(largest[r]);
        m_tile[r] = MAY_HIDE_ALL && m == MASKED ? -INFINITE : __fmul_rn(__int2float_rn(m), factor);
    }
    raise_maximum(state, m_tile, share);
    if (P_IS_16BIT) share[0] = share[1] = 1.0f;  // P is computed with the running maximum, and has no scale

    const float (&m)[2] = P_IS_16BIT ? state.m : m_tile;
    if (is_fusible(factor) && !visible.is_cut)
        exponentiate<true>(p.rounded, s, factor, m, share, state);
    else
        exponentiate<false>(p.rounded, s, factor, m, share, state);
#pragma unroll
    for (int r = 0; r < 2; ++r) p.factor[r] = share[r] * (v_scale * (1.0f / P_MAX));
}

// The same where each key and each value has a scale of its own. `q_factor`: from a row of S times a scale of K to logits.
// P is multiplied by the scales of V before it is rounded, so that its row needs a maximum of its own.
template <class P>  // a template, because what is not for this kind of P must not be compiled
__device__ __forceinline__ void find_p_of_token_scales(State& state, P& p, int (&s)[BLOCK_KV / 2], const float (&q_factor)[2],
                                                       const u8* scales, const Visible& visible, const Window& window) {
    const float2 *k_scales = reinterpret_cast<const float2*>(scales) + threadIdx.x % 4, *v_scales = k_scales + BLOCK_KV / 2;
    float x[BLOCK_KV / 2], m_tile[2] = {-INFINITE, -INFINITE}, share[2];
    if (visible.is_cut) mask(s, visible.keys, visible.query);
    if (HAS_WINDOW && visible.is_cut) mask_outside(s, window, visible.query);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i) {
        const int r = i / 2 % 2;
        const float factor = __fmul_rn(q_factor[r], pick(k_scales[i / 4 * 4], i % 2));
        x[i] = s[i] == MASKED ? -INFINITE : __fmul_rn(__int2float_rn(s[i]), factor);
        m_tile[r] = nan_max(m_tile[r], x[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) m_tile[r] = row_max(m_tile[r]);
    raise_maximum(state, m_tile, share);

    float sum[2] = {0.0f, 0.0f}, largest[2] = {0.0f, 0.0f}, inverse[2];
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i) {
        const int r = i / 2 % 2;
        const bool is_masked = x[i] == -INFINITE;
        const float m = MAY_HIDE_ALL && m_tile[r] == -INFINITE ? 0.0f : m_tile[r];
        const float e = exp2_fast(__fadd_rn(x[i], -m));
        sum[r] += e;
        x[i] = is_masked ? 0.0f : e * pick(v_scales[i / 4 * 4], i % 2);
        largest[r] = nan_max(largest[r], x[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        state.l[r] = fmaf(sum[r], share[r], state.l[r]);
        const float scale = scale_of(row_max(largest[r]), P_MAX);
        inverse[r] = reciprocal(scale);
        p.factor[r] = share[r] * scale;
    }
    round_tile<BLOCK_KV>(p.rounded, x, inverse);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) forward_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ QueryTile work;  // there it costs no registers
    __shared__ bool has_queries;
    if (threadIdx.x == 0) has_queries = find_query_tile<BLOCKS>(a.axes, work_tile_at(a.axes, blockIdx.x), work);
    if constexpr (HAS_WINDOW) {
        if (threadIdx.x == 0) leave_keys_seen(work, window);
    }
    __syncthreads();
    if (!has_queries) return;
    const u32 base = shared_address(shared);
    const int warp = threadIdx.x / 32, block = warp / BLOCK_WARPS, lane_row = warp % BLOCK_WARPS * 16 + threadIdx.x % 32 / 4;
    const int first = work.first + block * BLOCK_Q;
    int tiles = block < work.q_blocks ? visible_kv_tiles(work, block) : 0, begin = 0, own_begin = 0;
    // A block that is not full may not see all tiles that a full one would.
    if (IS_CAUSAL && BLOCK_Q > BLOCK_KV) tiles = min(tiles, (work.q.tokens + BLOCK_KV - 1) / BLOCK_KV);
    if constexpr (HAS_WINDOW) {
        begin = first_key_block(window, work.first);
        own_begin = first_key_block(window, first);
        if (tiles > 0) tiles = end_of_key_blocks(window, min(first + BLOCK_Q, work.q.tokens), work.keys);
    }
    const auto scales_of = [&](int tile) { return SCALES + tile % 3 * SCALE_BYTES; };
    const auto stage_of = [&](int tile) { return (tile - begin) % 2 * STAGE_BYTES; };
    const auto packed_keys = [&](int tile) { return a.packed_k + (work.kv_block + i64(tile)) * a.k_stride; };
    const auto packed_values = [&](int tile) { return a.packed_v + (work.kv_block + i64(tile)) * a.v_stride; };
    const auto copy_keys = [&](int tile) {
        copy_block<GROUP, K_TILE>(base + stage_of(tile), packed_keys(tile));
        const u8* scales = P_IS_16BIT ? packed_keys(tile) + K_TILE : packed_values(tile) + V_TILE;
        copy_block<GROUP, SCALE_BYTES>(base + scales_of(tile), scales);
    };
    const auto copy_values = [&](int tile) {
        const u32 target = base + stage_of(tile) + K_TILE;
        if constexpr (P_IS_16BIT) {
            const int first_key = tile * BLOCK_KV;
            const u16* v = token_of(a.v, work.head / a.axes.group, a.axes.heads / a.axes.group, work.kv_start + first_key);
            copy_tokens<GROUP, BLOCK_KV>(target, v, a.v.stride_n, work.keys - first_key, a.axes.d);
        } else {
            copy_block<GROUP, V_TILE>(target, packed_values(tile));
        }
    };
    const bool is_first_group = warp < WARPS / 2;
    const int end = work.kv_tiles;
    const auto let_the_other_group_multiply = [&] {
        barrier_arrive<THREADS>(is_first_group ? SECOND_MULTIPLIES : FIRST_MULTIPLIES);
    };

    for (int i = 0; i < work.q_blocks; ++i) {
        const u8* queries = a.packed_q + (work.q_block + i64(i)) * PACKED_Q_BYTES;
        copy_block<THREADS, PACKED_Q_BYTES>(base + QUERIES + i * QUERY_BYTES, queries);
    }
    if (is_first_group && begin < end) copy_keys(begin);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    Queries q;
    q.tile = base + QUERIES + block * QUERY_BYTES;
    q.row = warp % BLOCK_WARPS * 16;
    if (Q_IN_REGISTERS) load_queries(q);
    const float* q_scales = reinterpret_cast<const float*>(shared + QUERIES + block * QUERY_BYTES + Q_TILE);
    float q_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) q_scale[r] = q_scales[HAS_TOKEN_SCALES ? lane_row + 8 * r : 0];

    State state = {};
    state.m[0] = state.m[1] = -INFINITE;
    Probabilities p;
    const auto sees = [&](int tile) { return tile >= (HAS_WINDOW ? own_begin : begin) && tile < tiles; };
    if (!is_first_group && begin <= end) let_the_other_group_multiply();
    for (int tile = begin; tile <= end; ++tile) {
        if (is_first_group) cp_async_wait<0>();
        // K and V are there, and the other group has multiplied.
        barrier_sync<THREADS>(is_first_group ? FIRST_MULTIPLIES : SECOND_MULTIPLIES);
        if (is_first_group) {
            if (tile + 1 < end) copy_keys(tile + 1);
            if (tile < end) copy_values(tile);
            cp_async_commit();
        }
        if (sees(tile - 1)) multiply_values(state, p.rounded, p.factor, base + stage_of(tile - 1) + K_TILE);
        if (!sees(tile)) {
            if (is_first_group || tile < end) let_the_other_group_multiply();
            continue;
        }
        int s[BLOCK_KV / 2];
        multiply_keys(s, q, base + stage_of(tile));
        let_the_other_group_multiply();

        const int first_key = tile * BLOCK_KV;
        const bool is_cut = first_key + BLOCK_KV > work.keys || (IS_CAUSAL && first_key + BLOCK_KV > first) ||
                            (HAS_WINDOW && window.cuts(first_key - first, work.q.tokens, work.keys));
        const Visible visible = {is_cut, work.keys - first_key, first + lane_row - first_key};
        if constexpr (HAS_TOKEN_SCALES) {
            const float q_factor[2] = {logit_factor(q_scale[0], 1.0f, a.scale), logit_factor(q_scale[1], 1.0f, a.scale)};
            find_p_of_token_scales(state, p, s, q_factor, shared + scales_of(tile), visible, window);
        } else {
            const float2 scales = *reinterpret_cast<const float2*>(shared + scales_of(tile));
            find_p(state, p, s, logit_factor(q_scale[0], scales.x, a.scale), scales.y, visible, window);
        }
    }

    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float l = COMPENSATES ? state.l_rounded[2 * r] : state.l[r];
        if (!COMPENSATES) {
            l += __shfl_xor_sync(0xffffffff, l, 1);
            l += __shfl_xor_sync(0xffffffff, l, 2);
        }
        inverse[r] = l == 0.0f ? 0.0f : 1.0f / l;  // without keys O is zero
        const int token = first + lane_row + 8 * r;
        if (threadIdx.x % 4 == 0 && token < work.q.tokens)
            a.lse[i64(work.head) * a.axes.n_q + work.q.start + token] = state.m[r] + log2f(l);
    }
#ifdef SMOOTH_V
    // A query without keys stays zero: the mean of no values is zero.
    add_mean(state.o, inverse, a.v_mean + (i64(work.head / a.axes.group) * a.documents + work.document) * D);
    inverse[0] = inverse[1] = 1.0f;
#endif
    if constexpr (HAS_WINDOW) {  // a query that sees no key: not even a NaN among the values is its own
#pragma unroll
        for (int i = 0; i < D / 2; ++i)
            if (first + lane_row + i / 2 % 2 * 8 - window.left >= work.keys) state.o[i] = 0.0f;
    }
    __syncthreads();  // the stages may still be read
    const int half = BLOCK_Q == ROWS ? block : warp / 4, row = BLOCK_Q == ROWS ? first : work.first + half * ROWS;
    u8* staging = shared + half * STAGING_BYTES;
    store_channels<D>(a.out, state.o, inverse, staging, half, work.head, a.axes.heads, row, work.q, a.axes.d);
    if constexpr (COMPENSATES)
        store_channels<D, true>(a.out_residual, state.o, inverse, staging, half, work.head, a.axes.heads, row, work.q, a.axes.d);
}
