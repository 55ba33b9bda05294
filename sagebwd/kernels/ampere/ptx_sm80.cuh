// Instructions of Ampere and later GPUs as functions: cp.async, ldmatrix, movmatrix, mma.sync, and sums in the L2 cache.
#pragma once

#include "ptx.cuh"

// --- Copies to shared memory -------------------------------------------------------------------------------

// 16 bytes, past the L1 cache.
__device__ __forceinline__ void cp_async(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, or zeros if there is nothing to read.
__device__ __forceinline__ void cp_async_or_zero(u32 shared, const void* global, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's committed groups are unfinished. Other threads see them after a barrier.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- Matrices of 8 x 8 values of 16 bits -------------------------------------------------------------------
//
// A thread holds 32 bits of each: of row lane / 4, columns 2 (lane % 4) and the next one.

// Four matrices; lane l gives the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void ldmatrix(u32* x, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_trans(u32* x, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ u32 transpose_matrix(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// --- mma.sync ----------------------------------------------------------------------------------------------
//
// sum (16 x 8) += a b. The left operand is four registers, the right one two; see products.cuh.

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

// The same of fp16, with fp16 sums: two in a register.
__device__ __forceinline__ void mma_16bit(u32* sum, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(sum[0]), "+r"(sum[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// --- Barriers between some warps of a CTA ------------------------------------------------------------------
//
// By number; it is complete when THREADS have come, whether they wait for the others or not.

template <int THREADS>
__device__ __forceinline__ void barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void barrier_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// --- Between CTAs ------------------------------------------------------------------------------------------

// Past the L1 cache, which does not see what other CTAs write.
__device__ __forceinline__ float load_from_l2(const float* place) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(place) : "memory");
    return x;
}

__device__ __forceinline__ void store_to_l2(float* place, float x) {
    asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(place), "f"(x) : "memory");
}

// The L2 cache adds, so that nobody waits for the sum to come.
__device__ __forceinline__ void add_in_l2(float* place, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(place), "f"(x) : "memory");
}
