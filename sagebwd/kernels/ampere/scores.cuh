// P and dS of a tile of the backward, transposed, (keys, queries): a warp has 16 keys and 64 or 32 queries of it.
#pragma once

#include "int8.cuh"
#include "products.cuh"
#include "window.cuh"

// A packed block of queries by rows, in bytes from its begin: Q, then these. By columns: Q, then dO unless P is in 16 bits.
constexpr int GRAD_ROWS = Q_TILE, STATISTICS = GRAD_ROWS + 2 * Q_TILE, SCALES = STATISTICS + ROW_STATS;
constexpr int GRAD_COLUMNS = Q_TILE;

// This warp's first key of a tile; this thread's first key.
__device__ __forceinline__ int key_of_warp() { return (BLOCK_KV == 64 ? threadIdx.x / 32 % 4 : threadIdx.x / 32) * 16; }
__device__ __forceinline__ int key_of_thread() { return key_of_warp() + threadIdx.x % 32 / 4; }

// K by rows in registers.
__device__ __forceinline__ void load_keys(u32 (&k)[D / 8], u32 rows) {
#pragma unroll
    for (int step = 0; step < D / STEP; ++step)
        load_left<D>(k + 4 * step, left_address<D>(rows), key_of_warp(), step * STEP);
}

// A packed block of queries, or the part of one that this warp has, and the keys of this CTA.
struct Tile {
    float factor;          // from INT8 products to logits
    float2 scales;         // of Q and dO; 1 if tokens have scales
    const float2 *q_scales, *grad_scales;  // of the queries of this thread, if they have some; every fourth is one's own
    float q_factor;        // from scales of Q and K to factors
    float dp_scale;        // of dP in fp16: the product of those of V and dO
    float k_scale[2];      // of the keys of this thread, or of the block
    const u8* statistics;  // -lse of these queries, and BLOCK_Q further on their -delta
    int* largest;          // max |dS| of each query
    bool is_cut;           // whether a mask hides a key from a query
    int keys, first_key;   // the number of keys in the document; the first key minus the first query
    Window window;
};

// How many chunks of 64 bytes of channels are unrolled, so that operands are loaded ahead. Threads of 12 warps lack the registers.
constexpr int UNROLLED_CHUNKS = LAUNCH_THREADS > 256 ? 1 : 2 * D / 64;

// dP of 16 keys, from row `key` on, and of 8 queries for each REGISTERS of the sums: four fp32, or two pairs of fp16.
template <int REGISTERS, int N, class Sum>
__device__ __forceinline__ void contract_values(Sum (&dp)[N], u32 values, u32 grad, int key) {
#pragma unroll
    for (int i = 0; i < N; ++i) dp[i] = 0;
    const u32 v_address = left_address<128>(values), grad_address = right_address<128>(grad);
#pragma unroll(UNROLLED_CHUNKS)
    for (int byte = 0; byte < 2 * D; byte += 64) {
        u32 v[8];
        const u32 v_chunk = v_address + byte / 128 * (BLOCK_KV * 128);
        const u32 grad_chunk = grad_address + byte / 128 * (BLOCK_Q * 128);
        load_left<128>(v, v_chunk, key, byte % 128);
        load_left<128>(v + 4, v_chunk, key, byte % 128 + STEP);
#pragma unroll
        for (int j = 0; j < N / REGISTERS; ++j) {
            u32 b[4];
            load_right<128>(b, grad_chunk, 8 * j, byte % 128);
            mma_16bit(dp + REGISTERS * j, v, b);
            mma_16bit(dp + REGISTERS * j, v + 4, b + 2);
        }
    }
}

// The same in fp32, of fp16 not yet multiplied by its scale.
template <int N>
__device__ __forceinline__ void find_dp(float (&dp)[N], u32 values, u32 grad, int key) {
    if constexpr (DP_IS_FP16) {
        u32 sums[N / 2];
        contract_values<2>(sums, values, grad, key);
#pragma unroll
        for (int i = 0; i < N; ++i) dp[i] = fp16_to_float(sums[i / 2] >> i % 2 * 16 & 0xffff);
    } else {
        contract_values<4>(dp, values, grad, key);
    }
}

// P from S, and dS in place of dP. FAST: every logit allows a fused multiply-add, and none is masked.
// `key`: this thread's first.
template <bool FAST, int N>
__device__ __forceinline__ void find_scores(float (&p)[N], float (&ds)[N], const int (&s)[N], const Tile& tile, int key) {
    const float2* minus_lse = reinterpret_cast<const float2*>(tile.statistics) + threadIdx.x % 4;
    const float2* minus_delta = minus_lse + BLOCK_Q / 2;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 c = minus_lse[4 * j], d = minus_delta[4 * j];
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            const int r = i / 2 % 2, query = 8 * j + threadIdx.x % 4 * 2 + i % 2;
            const float x = __int2float_rn(s[i]), minus = pick(c, i % 2);
            float factor = tile.factor;
            if (HAS_TOKEN_SCALES)
                factor = __fmul_rn(__fmul_rn(pick(tile.q_scales[4 * j], i % 2), tile.q_factor), tile.k_scale[r]);
            p[i] = exp2_fast(FAST ? fmaf(x, factor, minus) : __fadd_rn(__fmul_rn(x, factor), minus));
            const bool is_hidden =
                !FAST && (key + 8 * r >= tile.keys || (IS_CAUSAL && key + 8 * r + tile.first_key > query) ||
                          (HAS_WINDOW && tile.window.hides(key + 8 * r + tile.first_key - query)));
            if (is_hidden) p[i] = 0.0f;
            ds[i] = p[i] * (DP_IS_FP16 ? fmaf(ds[i], tile.dp_scale, pick(d, i % 2)) : ds[i] + pick(d, i % 2));
            if (!HAS_TOKEN_SCALES) continue;
            // The scale of dO runs along the contraction of dV. What is hidden stays zero, even next to a NaN.
            p[i] = is_hidden ? 0.0f : p[i] * pick(tile.grad_scales[4 * j], i % 2);
            if (is_hidden) ds[i] = 0.0f;
        }
    }
}

// dS times a scale of each element. Zero stays zero: it may be hidden, and where a scale is NaN all else in dS is NaN, too.
template <int N, class Scale>
__device__ __forceinline__ void multiply_ds(float (&scaled)[N], const float (&ds)[N], Scale scale) {
#pragma unroll
    for (int i = 0; i < N; ++i) scaled[i] = ds[i] == 0.0f ? 0.0f : ds[i] * scale(i);
}

// Of 2 QUERIES maxima that each lane has, keeps those of one half of the queries, over this lane and its partner.
template <int QUERIES, int N>
__device__ __forceinline__ void keep_half(int (&largest)[N], int partner) {
    const bool is_upper = threadIdx.x & partner;
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        const int kept = is_upper ? largest[i + QUERIES] : largest[i], given = is_upper ? largest[i] : largest[i + QUERIES];
        largest[i] = max(kept, __shfl_xor_sync(0xffffffff, given, partner));
    }
}

// Raises the maxima of |dS| for each of N / 2 queries, 64 or 32, by the 16 keys of this warp.
template <int N>
__device__ __forceinline__ void raise_largest(int* largest, const float (&ds)[N]) {
    int found[N / 2];  // bits: non-negative floats are ordered as their bits, NaN at the top
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const float* x = ds + i / 2 * 4 + i % 2;
        found[i] = __float_as_int(nan_max_abs(fabsf(x[0]), x[2]));
    }
    keep_half<N / 4>(found, 16);
    keep_half<N / 8>(found, 8);
    keep_half<N / 16>(found, 4);
    if constexpr (N == 32) {  // this lane now has queries 2 lane and 2 lane + 1
        atomicMax(largest + threadIdx.x % 32 * 2, found[0]);
        atomicMax(largest + threadIdx.x % 32 * 2 + 1, found[1]);
    } else {
        const int lane = threadIdx.x % 32;
        atomicMax(largest + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2, found[0]);
    }
}

// Stores dS of 16 keys, from `key` on, and N / 2 queries, rounded with a scale for each query or for the tile, transposed, for
// the product with K. Keys r and r + 8 make 16 bits, which can be transposed; then a thread has four keys in the order of
// tiles by columns. Nothing is stored before all is loaded and transposed: the compiler leaves loads and stores of shared memory
// in order, and each transposition would wait for the one before.
template <bool IS_SCALE_OF_TILE = false, int N>
__device__ __forceinline__ void store_ds(u8* target, const float (&ds)[N], const int* largest, int key) {
    const int lane = threadIdx.x % 32;
    const int2* pairs = reinterpret_cast<const int2*>(largest) + lane % 4;
    int2 bits[N / 4];
    u32 four_keys[N / 4];
#pragma unroll
    for (int j = 0; j < N / 4; ++j) bits[j] = IS_SCALE_OF_TILE ? int2{*largest, *largest} : pairs[4 * j];
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float inverse[2] = {reciprocal(scale_of(__int_as_float(bits[j].x), INT8_MAX)),
                                  reciprocal(scale_of(__int_as_float(bits[j].y), INT8_MAX))};
        const auto rounded = [&](int r, int e) { return fmaf(ds[4 * j + 2 * r + e], inverse[e], ROUNDING_OFFSET); };
        const u32 pair = low_bytes(rounded(0, 0), rounded(1, 0), rounded(0, 1), rounded(1, 1));
        four_keys[j] = __byte_perm(transpose_matrix(pair), 0, 0x3120);
    }
    u8* own = target + swizzled<BLOCK_KV>(lane / 4 * BLOCK_KV + key + lane % 4 * 4);  // 8 rows further on it is the same
#pragma unroll
    for (int j = 0; j < N / 4; ++j) *reinterpret_cast<u32*>(own + 8 * j * BLOCK_KV) = four_keys[j];
}
