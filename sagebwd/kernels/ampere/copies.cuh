// Copies to shared memory, by threads together: of packed blocks, and of tensors.
#pragma once

#include "layout.cuh"
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

// Copies TOKENS tokens in 16 bits from `source` on to a tile: chunks of 64 channels, one after the other. Zeros past `tokens`, if
// there are fewer, and past `d` channels.
template <int THREADS, int TOKENS>
__device__ __forceinline__ void copy_tokens(u32 tile, const u16* source, i64 stride, int tokens, int d, int thread = threadIdx.x) {
    constexpr int PIECES = D / 8, TOKENS_AT_ONCE = THREADS / PIECES;  // pieces of a token, 16 bytes each
    static_assert(THREADS % PIECES == 0);
    const int first = thread / PIECES, channel = thread % PIECES * 8;
    tile += channel / 64 * (TOKENS * 128);
    source += first * stride + channel;
#pragma unroll
    for (int i = 0; i < TOKENS; i += TOKENS_AT_ONCE) {
        const int token = first + i;
        if (i + TOKENS_AT_ONCE <= TOKENS || token < TOKENS)
            cp_async_or_zero(tile + swizzled<128>(token * 128 + channel % 64 * 2), source + i * stride,
                             token < tokens && channel < d);
    }
}
