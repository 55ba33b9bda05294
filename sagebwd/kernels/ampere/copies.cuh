// Copies of packed blocks to shared memory, by all threads of a CTA.
#pragma once

#include "ptx_sm80.cuh"

// `bytes` is a multiple of 16.
template <int THREADS>
__device__ __forceinline__ void copy_block(u32 shared, const u8* global, int bytes) {
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16) cp_async(shared + i, global + i);
}
