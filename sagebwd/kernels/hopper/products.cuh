// Products of whole tiles by wgmma, 64 rows to a warpgroup; see int8.cuh for how results lie in registers.
//
// Tiles in shared memory are given as descriptor_base of their addresses.
#pragma once

#include "int8.cuh"
#include "layout.cuh"
#include "ptx_sm90.cuh"

// S or its transpose: 64 rows at a times N rows at b, both (., D) INT8.
template <int N>
__device__ __forceinline__ void contract_channels(int (&sum)[N / 2], u32 a, u32 b) {
    constexpr int ROW = CHANNELS_OF_ROW, STEPS = ROW / 32;  // of a chunk, see offset_in_rows
    wgmma_fence();
    wgmma_int8<0>(sum, descriptor<ROW>(a), descriptor<ROW>(b));
#pragma unroll
    for (int i = 1; i < D / 32; ++i)
        wgmma_int8<1>(sum, descriptor<ROW>(a + i / STEPS * (64 * ROW / 16) + i % STEPS * 2),
                      descriptor<ROW>(b + i / STEPS * (N * ROW / 16) + i % STEPS * 2));
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

// P or dS in registers, unsigned or signed INT8, times 64 channels of a tile by columns of N tokens.
template <int N, bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void contract_tokens(int (&sum)[32], const u32 (&a)[N / 8], u32 b) {
    wgmma_fence();
    wgmma_int8<0, LEFT_UNSIGNED>(sum, a, descriptor<N>(b));
#pragma unroll
    for (int i = 1; i < N / 32; ++i) wgmma_int8<1, LEFT_UNSIGNED>(sum, a + 4 * i, descriptor<N>(b + 2 * i));
    wgmma_commit();
}

// sum += factor[row] * P or dS in registers, unsigned or signed INT8, times CHUNKS times 64 channels of a tile by columns of N
// tokens, 64 at a time, by turns in the registers of `first` and `second`: one product is added while the next one is multiplied.
// CHUNKS is even, so that the last one ends in `second`; it is left unfinished, and not added.
template <int CHUNKS, int N, bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void contract_tokens_in_turn(float* sum, int (&first)[32], int (&second)[32], const u32 (&a)[N / 8], u32 b,
                                                        const float (&factor)[2]) {
    constexpr int CHUNK = 64 * N / 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        contract_tokens<N, LEFT_UNSIGNED>(first, a, b + c * CHUNK);
        if (c > 0) {
            wgmma_wait<1>();
            pin(second);
            accumulate(sum + 32 * (c - 1), second, factor);
        }
        contract_tokens<N, LEFT_UNSIGNED>(second, a, b + (c + 1) * CHUNK);
        wgmma_wait<1>();
        pin(first);
        accumulate(sum + 32 * c, first, factor);
    }
}

// sum += 16-bit P or dS in registers, times 2 VALUES channels of N tokens of a 16-bit tile (ROWS_OF_TILE tokens, D).
template <int N, int ROWS_OF_TILE = N, int VALUES>
__device__ __forceinline__ void contract_tokens_16bit(float (&sum)[VALUES], const u32 (&a)[N / 4], u32 b) {
    constexpr int AT_ONCE = VALUES < 64 ? VALUES : 64;  // 128 channels
    wgmma_fence();
#pragma unroll
    for (int first = 0; first < VALUES; first += AT_ONCE)
#pragma unroll
        for (int i = 0; i < N / 16; ++i)
            wgmma_16bit(*reinterpret_cast<float(*)[AT_ONCE]>(sum + first), a + 4 * i,
                        descriptor_mn_major<ROWS_OF_TILE * 128>(b + first / 32 * (ROWS_OF_TILE * 128 / 16) + i * (16 * 128 / 16)));
    wgmma_commit();
}

// dV and dK of a tile of 64 queries, CHUNKS times 64 channels, in the registers of S and dP. The last product of dK is left unfinished
// in dp. 16-bit dV is accumulated by the tensor cores, in registers of its own; `grad_columns` is read otherwise, `grad_rows` then.
template <int CHUNKS, class Sums, class Scores>
__device__ __forceinline__ void multiply_scores(Sums& sums, int (&s)[32], int (&dp)[32], const Scores& scores, u32 q_columns,
                                                u32 grad_columns, u32 grad_rows) {
    constexpr int CHUNK = 64 * 64 / 16;
    if constexpr (P_IS_16BIT) {
        contract_tokens_16bit<64>(sums.dv, scores.p, grad_rows);
        if (CHUNKS == 2) {
            contract_tokens<64>(s, scores.ds, q_columns);
            contract_tokens<64>(dp, scores.ds, q_columns + CHUNK);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dk, s, scores.dk_factor);
        } else {
            contract_tokens<64>(dp, scores.ds, q_columns);
        }
    } else {
        contract_tokens<64, P_IS_UNSIGNED>(s, scores.p, grad_columns);
        if (CHUNKS == 1) {
            contract_tokens<64>(dp, scores.ds, q_columns);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dv, s, scores.dv_factor);
        } else {
            contract_tokens<64, P_IS_UNSIGNED>(dp, scores.p, grad_columns + CHUNK);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dv, s, scores.dv_factor);
            contract_tokens<64>(s, scores.ds, q_columns);
            wgmma_wait<1>();
            pin(dp);
            accumulate(sums.dv + 32, dp, scores.dv_factor);
            contract_tokens<64>(dp, scores.ds, q_columns + CHUNK);
            wgmma_wait<1>();
            pin(s);
            accumulate(sums.dk, s, scores.dk_factor);
        }
    }
}
