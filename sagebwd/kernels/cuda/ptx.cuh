// Instructions that every GPU since Ampere has and CUDA C++ does not name, as functions. Nothing here needs wgmma or TMA.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Waits for the 128 threads of a warpgroup. Named barrier 0 belongs to __syncthreads.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The maximum; NaN if either is NaN, unlike fmaxf.
__device__ __forceinline__ float nan_max(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// max(a, |b|), in one instruction.
__device__ __forceinline__ float nan_max_abs(float a, float b) { return nan_max(a, fabsf(b)); }

// The 16-bit type of the tensors, as PTX spells it.
#ifdef IS_BF16
#define TYPE_16BIT "bf16"
#else
#define TYPE_16BIT "f16"
#endif

__device__ __forceinline__ float to_float(u16 bits) {
#ifdef IS_BF16
    return __uint_as_float(u32(bits) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
#endif
}

// Two values rounded to 16 bits, the first in the low half.
__device__ __forceinline__ u32 pack_16bit(float first, float second) {
    u32 y;
    asm("cvt.rn." TYPE_16BIT "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}

// --- mma.sync ----------------------------------------------------------------------------------------------
//
// sum (16 x 8) += a b. The left operand is four registers, the right one two; see ampere/products.cuh.

#define MMA_INT8(left)                                                                                        \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." left ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                    \
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// INT8, 32 deep; with LEFT_UNSIGNED the bytes of a are 0 ... 255, not -128 ... 127.
template <bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void mma_int8(int (&sum)[4], const u32* a, const u32* b) {
    if constexpr (LEFT_UNSIGNED)
        MMA_INT8("u8");
    else
        MMA_INT8("s8");
}
#undef MMA_INT8

// 16 bits, 16 deep, fp32 sums.
__device__ __forceinline__ void mma_16bit(float* sum, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE_16BIT "." TYPE_16BIT
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
