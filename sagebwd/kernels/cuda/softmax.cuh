// What forward kernels share: their arguments, P of a logit, and the mean of V.
#pragma once

#include "int8.cuh"
#include "scheduler.cuh"

#ifdef COMPENSATE_O  // l is the sum of P as rounded to 16 bits, and the rounding error of O is stored as well
constexpr bool COMPENSATES = true;
#else
constexpr bool COMPENSATES = false;
#endif

struct Arguments {
    const u8 *packed_q, *packed_k, *packed_v;
    int k_stride, v_stride;  // bytes from block to block of the last two
    TokenTensor out, out_residual;  // out_residual: written if COMPENSATE_O is defined
    float* lse;
    Axes axes;
    float scale;
    // Read if SMOOTH_V is defined.
    int documents;
    const float* v_mean;  // of each document of each key head, see token_mean_kernel
    TokenTensor v;        // for kernels that do not pack it in 16 bits
};

// P of one logit, with the maximum `m` subtracted. FAST: every logit allows a fused multiply-add, and none is masked.
template <bool FAST>
__device__ __forceinline__ float probability(int s, float factor, float m) {
    const float x = __int2float_rn(s);
    const float p = exp2_fast(FAST ? fmaf(x, factor, -m) : __fadd_rn(__fmul_rn(x, factor), -m));
    return !FAST && s == MASKED ? 0.0f : p;
}

// Masks columns from `keys` on, and those after `query` + 8 r if IS_CAUSAL.
template <int N>
__device__ __forceinline__ void mask(int (&s)[N], int keys, int query) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (column >= keys || (IS_CAUSAL && column > query + i / 2 % 2 * 8)) s[i] = MASKED;
    }
}

// o = o * inverse[row] + mean: adds the mean that was subtracted from V, because the rows of P sum to 1.
__device__ __forceinline__ void add_mean(float (&o)[D / 2], const float (&inverse)[2], const float* mean) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {  // 8 columns
        const float2 m = *reinterpret_cast<const float2*>(mean + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) o[4 * j + k] = fmaf(o[4 * j + k], inverse[k / 2], pick(m, k % 2));
    }
}
