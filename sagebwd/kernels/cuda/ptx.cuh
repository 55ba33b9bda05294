// Instructions that every GPU since Ampere has and CUDA C++ does not name, as functions. Nothing here needs wgmma or TMA.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Waits for the 128 threads of a warpgroup. Named barrier 0 belongs to __syncthreads.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Waits until another CTA has released `value` at `place`, and sees what it wrote before.
__device__ __forceinline__ void wait_for_value(const int* place, int value) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(place) : "memory");
    while (found != value);
}

__device__ __forceinline__ void release_value(int* place, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
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

__device__ __forceinline__ float fp16_to_float(u16 bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

__device__ __forceinline__ float to_float(u16 bits) {
#ifdef IS_BF16
    return __uint_as_float(u32(bits) << 16);
#else
    return fp16_to_float(bits);
#endif
}

// Two values rounded to 16 bits, the first in the low half.
__device__ __forceinline__ u32 pack_16bit(float first, float second) {
    u32 y;
    asm("cvt.rn." TYPE_16BIT "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}

// The same in fp16, whatever the type of the tensors.
__device__ __forceinline__ u32 pack_fp16(float first, float second) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}
