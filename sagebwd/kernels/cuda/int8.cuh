// INT8: scales, rounding, and what INT8 products become.
//
// A tile in registers is as tensor cores leave it: a thread has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of
// every 8 columns 2 (lane % 4) and the next one. So x[4 j + 2 r + e] is row lane / 4 + 8 r, column 8 j + 2 (lane % 4) + e.
#pragma once

#include "layout.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float INT8_MAX = 127.0f;
#ifdef UNSIGNED_P  // P is never negative, so it can have all 8 bits
constexpr bool P_IS_UNSIGNED = true;
constexpr float P_MAX = 255.0f;
#else
constexpr bool P_IS_UNSIGNED = false;
constexpr float P_MAX = INT8_MAX;
#endif
constexpr float ROUNDING_OFFSET = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f;
constexpr int MASKED = -(1 << 30);              // S of a masked logit, far below all others

// Of the two columns e that a thread holds next to each other.
__device__ __forceinline__ float pick(const float2& pair, int e) { return e ? pair.y : pair.x; }

// --- Rounding ----------------------------------------------------------------------------------------------

// Four values to which ROUNDING_OFFSET was added, from -128 to 127 or from 0 to 255: their lowest bytes, in order.
__device__ __forceinline__ u32 low_bytes(float a, float b, float c, float d) {
    const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(ab, cd, 0x5410);
}

// x times inverse[row], rounded, as the left operand of a product over its N columns. Within 16 columns that
// product takes position 4 q + 2 h + e for column 8 h + 2 q + e, which is what thread q of 4 holds.
template <int N>
__device__ __forceinline__ void round_tile(u32 (&result)[N / 8], const float (&x)[N / 2], const float (&inverse)[2]) {
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float* p = x + 8 * i + 2 * r;
            const auto rounded = [&](int k) { return fmaf(p[k], inverse[r], ROUNDING_OFFSET); };
            result[2 * i + r] = low_bytes(rounded(0), rounded(1), rounded(4), rounded(5));
        }
    }
}

// P or dS as the left operand of a product: in 16 bits as they are, or in INT8.
template <int WORDS, int N>
__device__ __forceinline__ void round_operand(u32 (&rounded)[WORDS], const float (&x)[N], const float (&inverse)[2]) {
    if constexpr (WORDS == N / 2) {
#pragma unroll
        for (int k = 0; k < WORDS; ++k) rounded[k] = pack_16bit(x[2 * k], x[2 * k + 1]);
    } else {
        round_tile<2 * N>(rounded, x, inverse);
    }
}

// Byte k of the result is byte i of word k, for four i.
__device__ __forceinline__ void transpose_bytes(u32 (&result)[4], u32 a, u32 b, u32 c, u32 d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    result[0] = __byte_perm(ab, cd, 0x5410);
    result[1] = __byte_perm(ab, cd, 0x7632);
    const u32 ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    result[2] = __byte_perm(ab_high, cd_high, 0x5410);
    result[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Tiles by columns hold tokens in this order, too: at position 4 quad + i.
__device__ __forceinline__ int token_at(int quad, int i) { return quad / 4 * 16 + i / 2 * 8 + quad % 4 * 2 + i % 2; }

// 8 channels of four tokens become a word of these four for each channel.
__device__ __forceinline__ void transpose_tokens(u32 (&words)[8], const uint2 (&tokens)[4]) {
    transpose_bytes(*reinterpret_cast<u32(*)[4]>(words), tokens[0].x, tokens[1].x, tokens[2].x, tokens[3].x);
    transpose_bytes(*reinterpret_cast<u32(*)[4]>(words + 4), tokens[0].y, tokens[1].y, tokens[2].y, tokens[3].y);
}

// --- Scales ------------------------------------------------------------------------------------------------

// The maximum over the four threads that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = nan_max(x, __shfl_xor_sync(0xffffffff, x, 1));
    return nan_max(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ int row_max(int x) {
    x = max(x, __shfl_xor_sync(0xffffffff, x, 1));
    return max(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The scale that maps magnitudes up to `largest` to integers up to `steps`, INT8_MAX or P_MAX. It is never so small that it
// has no inverse: a row that is smaller still is rounded to zero, or nearly.
__device__ __forceinline__ float scale_of(float largest, float steps) {
    return nan_max(largest, steps * SMALLEST_NORMAL) * (1.0f / steps);
}

// Of dO and V in fp16 for dP: the largest power of two up to `x`, zero or normal; infinity for infinity and NaN. Values are
// multiplied by its inverse: zero for zero and infinity, so that only NaN and infinity become NaN.
__device__ __forceinline__ float power_of_two(float x) { return __int_as_float(__float_as_int(x) & 0x7f800000); }
__device__ __forceinline__ float inverse_of_power(float power) { return power > 0.0f ? __frcp_rn(power) : 0.0f; }

// The scale of dO in fp16 from that in INT8. In fp16 dO is below 2^14 / D and V below 2: no sum of D products overflows.
__device__ __forceinline__ float fp16_grad_scale(float int8_scale) { return power_of_two(int8_scale) * (D / 64); }

// --- What INT8 products become -----------------------------------------------------------------------------

// sum += product * factor[row].
__device__ __forceinline__ void accumulate(float* sum, const int (&product)[32], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = fmaf(__int2float_rn(product[i]), factor[i / 2 % 2], sum[i]);
}

// The factor from an INT8 product to a logit, to base 2. The order of multiplications is fixed: the backward must
// recompute the very logits of the forward, and at logits of 1e10 a difference in the last place is one of thousands.
__device__ __forceinline__ float logit_factor(float q_scale, float k_scale, float scale) {
    return __fmul_rn(__fmul_rn(q_scale, __fmul_rn(scale, LOG2_E)), k_scale);
}

// Whether all logits are so small that a fused multiply-add, which does not round the product, may replace a
// multiplication and an addition. With larger logits exp2 of the largest logit minus itself could be far from 1. With scales of
// tokens nothing does: that would depend on tokens that the mask hides.
__device__ __forceinline__ bool is_fusible(float factor) { return factor * (INT8_MAX * INT8_MAX * D) < 2048.0f; }
