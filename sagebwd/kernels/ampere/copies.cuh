// Copies of packed blocks to shared memory, by threads together.
#pragma once

#include "ptx_sm80.cuh"

// BYTES is a multiple of 16. `thread`: which of THREADS this is; by default those of a CTA. Unrolled, so that addresses are
// constants away from one: in a loop, each copy would wait until the one before has read its address.
template <int THREADS, int BYTES>
__device__ __forceinline__ void copy_block(u32 shared, const u8* global, int thread = threadIdx.x) {
    shared += thread * 16, global += thread * 16;
#pragma unroll
    for (int i = 0; i < BYTES; i += THREADS * 16)
        if (i + THREADS * 16 <= BYTES || i + thread * 16 < BYTES) cp_async(shared + i, global + i);
}
