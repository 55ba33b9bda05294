// Copies of packed blocks to shared memory, by threads together.
#pragma once

#include "ptx_sm80.cuh"

// `bytes` is a multiple of 16. `thread`: which of THREADS this is; by default those of a CTA.
template <int THREADS>
__device__ __forceinline__ void copy_block(u32 shared, const u8* global, int bytes, int thread = threadIdx.x) {
#pragma unroll 1
    for (int i = thread * 16; i < bytes; i += THREADS * 16) cp_async(shared + i, global + i);
}
