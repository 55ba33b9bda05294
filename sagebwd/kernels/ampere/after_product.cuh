// What a loop of mma.sync calls. It does nothing, and costs nothing. scripts/bench/throttled.py replaces this header: there, more
// products follow, as if tensor cores were slower. They leave all bits as they are.
#pragma once

#include "ptx.cuh"

// After a product. sums: GROUPS groups of four registers, all with values; the product went to group `own`, or will be added to
// it. product: how many products came before in the loop. b: any four registers, usually the right operands.
template <int GROUPS, class T>
__device__ __forceinline__ void after_int8(T* sums, int own, int product, const u32* b) {}
template <int GROUPS, class T>
__device__ __forceinline__ void after_16bit(T* sums, int own, int product, const u32* b) {}

// Before the products of group `own` begin, where x adds them up and `sums` has no values yet.
template <int GROUPS>
__device__ __forceinline__ void before_group(int (&x)[4], int* sums, int own) {}
