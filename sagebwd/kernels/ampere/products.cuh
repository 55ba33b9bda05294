// Operands of mma.sync, from tiles in shared memory that packing.cu swizzled; see int8.cuh for how results lie in registers.
//
// All rows of a tile are contiguous along the contraction, 64 or 128 bytes each. One load brings 16 rows by 32 bytes of a
// left operand, or 8 rows by 64 bytes of a right one: 32 bytes are one step, of 32 INT8 or 16 16-bit values.
#pragma once

#include "layout.cuh"
#include "ptx_sm80.cuh"

constexpr int STEP = 32;  // bytes

// One step of rows `row` to `row` + 15; `row` is a multiple of 8, `byte` one of 32.
template <int ROW_BYTES>
__device__ __forceinline__ void load_left(u32* a, u32 tile, int row, int byte) {
    const int lane = threadIdx.x % 32;
    ldmatrix(a, tile + row * ROW_BYTES + (swizzled<ROW_BYTES>(lane % 16 * ROW_BYTES + lane / 16 * 16) ^ byte));
}

// Two steps of rows `row` to `row` + 7, which are columns of the product; `byte` is a multiple of 64.
template <int ROW_BYTES>
__device__ __forceinline__ void load_right(u32 (&b)[4], u32 tile, int row, int byte) {
    const int lane = threadIdx.x % 32;
    ldmatrix(b, tile + row * ROW_BYTES + (swizzled<ROW_BYTES>(lane % 8 * ROW_BYTES + lane / 8 * 16) ^ byte));
}

// Two steps of 16-bit values of which the rows, `row` to `row` + 31, are contracted: 8 columns from byte `byte` on.
__device__ __forceinline__ void load_right_trans(u32 (&b)[4], u32 tile, int row, int byte) {
    const int lane = threadIdx.x % 32;
    ldmatrix_trans(b, tile + row * 128 + (swizzled<128>(lane * 128) ^ byte));
}

// A tile of COLUMNS columns of S or its transpose: 16 rows in registers times rows in shared memory, both D INT8.
template <int COLUMNS>
__device__ __forceinline__ void contract_channels(int (&sum)[COLUMNS / 2], const u32 (&a)[D / 8], u32 tile) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        int x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < D / STEP; step += 2) {
            u32 b[4];
            load_right<D>(b, tile, 8 * j, step * STEP);
            mma_int8(x, a + 4 * step, b);
            mma_int8(x, a + 4 * step + 4, b + 2);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[4 * j + i] = x[i];
    }
}

// P or dS in registers, (16, TOKENS) INT8, times 8 channels of a tile by columns, from row `channel` on.
template <int TOKENS, bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void contract_tokens(int (&sum)[4], const u32 (&a)[TOKENS / 8], u32 tile, int channel) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
    for (int step = 0; step < TOKENS / STEP; step += 2) {
        u32 b[4];
        load_right<TOKENS>(b, tile, channel, step * STEP);
        mma_int8<LEFT_UNSIGNED>(sum, a + 4 * step, b);
        mma_int8<LEFT_UNSIGNED>(sum, a + 4 * step + 4, b + 2);
    }
}

// sum += 16-bit P in registers, (16, TOKENS), times all channels of a 16-bit tile.
template <int TOKENS>
__device__ __forceinline__ void contract_tokens_16bit(float (&sum)[D / 2], const u32 (&a)[TOKENS / 4], u32 tile) {
#pragma unroll
    for (int token = 0; token < TOKENS; token += 32)
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
            u32 b[4];
            load_right_trans(b, tile + j / 8 * (TOKENS * 128), token, j % 8 * 16);
            mma_16bit(sum + 4 * j, a + token / 4, b);
            mma_16bit(sum + 4 * j, a + token / 4 + 4, b + 2);
        }
}

// sum += product * factor[row], of 8 columns.
__device__ __forceinline__ void accumulate(float* sum, const int (&product)[4], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(__int2float_rn(product[i]), factor[i / 2], sum[i]);
}
