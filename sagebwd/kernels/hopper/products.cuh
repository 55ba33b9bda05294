// Products of whole tiles by wgmma, 64 rows to a warpgroup; see int8.cuh for how results lie in registers.
//
// Tiles in shared memory are given as descriptor_base of their addresses.
#pragma once

#include "layout.cuh"
#include "ptx_sm90.cuh"

// S or its transpose: rows at a times rows at b, both (., D) INT8.
template <int N>
__device__ __forceinline__ void contract_channels(int (&sum)[N / 2], u32 a, u32 b) {
    wgmma_fence();
    wgmma_int8<0>(sum, descriptor<D>(a), descriptor<D>(b));
#pragma unroll
    for (int i = 1; i < D / 32; ++i) wgmma_int8<1>(sum, descriptor<D>(a + 2 * i), descriptor<D>(b + 2 * i));
    wgmma_commit();
}

// dP or its transpose, as bits of fp32: 64 rows of a tile of A_ROWS, and N rows of one of B_ROWS, both (., D) in 16 bits.
template <int N, int A_ROWS, int B_ROWS = N>
__device__ __forceinline__ void contract_channels_16bit(int (&sum)[N / 2], u32 a, u32 b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const u64 a_tile = descriptor<128>(a + i / 4 * A_ROWS * 8 + i % 4 * 2);
        const u64 b_tile = descriptor<128>(b + i / 4 * B_ROWS * 8 + i % 4 * 2);
        if (i == 0)
            wgmma_16bit<0>(sum, a_tile, b_tile);
        else
            wgmma_16bit<1>(sum, a_tile, b_tile);
    }
    wgmma_commit();
}

// S or its transpose, in INT32, or in fp32 as bits where S is in 16 bits: 64 rows at a times N rows at b.
template <int N>
__device__ __forceinline__ void multiply_queries_and_keys(int (&sum)[N / 2], u32 a, u32 b) {
    if constexpr (S_IS_16BIT)
        contract_channels_16bit<N, 64>(sum, a, b);
    else
        contract_channels<N>(sum, a, b);
}

__device__ __forceinline__ float value_of_s(int s) { return S_IS_16BIT ? __int_as_float(s) : __int2float_rn(s); }

// P or dS in registers, unsigned or signed INT8, times 64 channels of a tile by columns of N tokens.
template <int N, bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void contract_tokens(int (&sum)[32], const u32 (&a)[N / 8], u32 b) {
    wgmma_fence();
    wgmma_int8<0, LEFT_UNSIGNED>(sum, a, descriptor<N>(b));
#pragma unroll
    for (int i = 1; i < N / 32; ++i) wgmma_int8<1, LEFT_UNSIGNED>(sum, a + 4 * i, descriptor<N>(b + 2 * i));
    wgmma_commit();
}

// sum += 16-bit P or dS in registers, times all channels of N tokens of a 16-bit tile (ROWS_OF_TILE tokens, D).
template <int N, int ROWS_OF_TILE = N>
__device__ __forceinline__ void contract_tokens_16bit(float (&sum)[D / 2], const u32 (&a)[N / 4], u32 b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < N / 16; ++i)
        wgmma_16bit(sum, a + 4 * i, descriptor_mn_major<ROWS_OF_TILE * 128>(b + i * (16 * 128 / 16)));
    wgmma_commit();
}
