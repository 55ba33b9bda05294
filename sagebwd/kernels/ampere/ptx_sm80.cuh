// Instructions of Ampere and later GPUs as functions: cp.async, ldmatrix, movmatrix, and acquire and release.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

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

// Waits until another CTA has released `value` at `place`, and sees what it wrote before.
__device__ __forceinline__ void wait_for_value(const int* place, int value) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(place) : "memory");
    while (found != value);
}

__device__ __forceinline__ void release_value(int* place, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

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
