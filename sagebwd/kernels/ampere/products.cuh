// Operands of mma.sync, from tiles in shared memory that packing.cu swizzled; see int8.cuh for how results lie in registers.
//
// All rows of a tile are contiguous along the contraction, 64, 128 or 256 bytes each. One load brings 16 rows by 32 bytes of a
// left operand, or 8 rows by 64 bytes of a right one: 32 bytes are one step, of 32 INT8 or 16 16-bit values.
#pragma once

#include "layout.cuh"
#include "ptx_sm80.cuh"

constexpr int STEP = 32;  // bytes

// Where this lane begins to read. A tile is aligned to its rows, at least 128 bytes, so adding rows, and an XOR with bytes, leads to the rest.
template <int ROW_BYTES>
__device__ __forceinline__ u32 left_address(u32 tile) {
    const int lane = threadIdx.x % 32;
    return tile + swizzled<ROW_BYTES>(lane % 16 * ROW_BYTES + lane / 16 * 16);
}
template <int ROW_BYTES>
__device__ __forceinline__ u32 right_address(u32 tile) {
    const int lane = threadIdx.x % 32;
    return tile + swizzled<ROW_BYTES>(lane % 8 * ROW_BYTES + lane / 8 * 16);
}
__device__ __forceinline__ u32 right_address_trans(u32 tile) { return tile + swizzled<128>(threadIdx.x % 32 * 128); }

// One step of rows `row` to `row` + 15; `row` is a multiple of 8, `byte` one of 32.
template <int ROW_BYTES>
__device__ __forceinline__ void load_left(u32* a, u32 address, int row, int byte) {
    ldmatrix(a, (address ^ byte) + row * ROW_BYTES);
}

// Two steps of rows `row` to `row` + 7, which are columns of the product; `byte` is a multiple of 64.
template <int ROW_BYTES>
__device__ __forceinline__ void load_right(u32 (&b)[4], u32 address, int row, int byte) {
    ldmatrix(b, (address ^ byte) + row * ROW_BYTES);
}

// Two steps of 16-bit values of which the rows, `row` to `row` + 31, are contracted: 8 columns from byte `byte` on.
__device__ __forceinline__ void load_right_trans(u32 (&b)[4], u32 address, int row, int byte) {
    ldmatrix_trans(b, (address ^ byte) + row * 128);
}

// A tile of COLUMNS columns of S or its transpose: 16 rows in registers times rows in shared memory, both D INT8.
template <int COLUMNS>
__device__ __forceinline__ void contract_channels(int (&sum)[COLUMNS / 2], const u32 (&a)[D / 8], u32 tile) {
    const u32 address = right_address<D>(tile);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        int x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < D / STEP; step += 2) {
            u32 b[4];
            load_right<D>(b, address, 8 * j, step * STEP);
            mma_int8(x, a + 4 * step, b);
            mma_int8(x, a + 4 * step + 4, b + 2);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[4 * j + i] = x[i];
    }
}

// The same with 16 rows, from `row` on, of a tile at `left` in shared memory.
template <int COLUMNS>
__device__ __forceinline__ void contract_channels(int (&sum)[COLUMNS / 2], u32 left, int row, u32 tile) {
    const u32 left_from = left_address<D>(left), right_from = right_address<D>(tile);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sum[i] = 0;
#pragma unroll 1
    for (int byte = 0; byte < D; byte += 2 * STEP) {
        u32 a[8];
        load_left<D>(a, left_from, row, byte);
        load_left<D>(a + 4, left_from, row, byte + STEP);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            u32 b[4];
            int(&x)[4] = *reinterpret_cast<int(*)[4]>(sum + 4 * j);
            load_right<D>(b, right_from, 8 * j, byte);
            mma_int8(x, a, b);
            mma_int8(x, a + 4, b + 2);
        }
    }
}

// sum += factor[row] * P or dS in registers, (16, TOKENS) INT8, times CHANNELS channels of a tile by columns.
template <int TOKENS, int CHANNELS, bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void contract_tokens(float* sum, const u32 (&a)[TOKENS / 8], u32 tile, const float (&factor)[2]) {
    const u32 address = right_address<TOKENS>(tile);
#pragma unroll
    for (int j = 0; j < CHANNELS / 8; ++j) {
        int product[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < TOKENS / STEP; step += 2) {
            u32 b[4];
            load_right<TOKENS>(b, address, 8 * j, step * STEP);
            mma_int8<LEFT_UNSIGNED>(product, a + 4 * step, b);
            mma_int8<LEFT_UNSIGNED>(product, a + 4 * step + 4, b + 2);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[4 * j + i] = fmaf(__int2float_rn(product[i]), factor[i / 2], sum[4 * j + i]);
    }
}

// sum += 16-bit P in registers, (16, TOKENS), times all channels of a 16-bit tile.
template <int TOKENS>
__device__ __forceinline__ void contract_tokens_16bit(float (&sum)[D / 2], const u32 (&a)[TOKENS / 4], u32 tile) {
    const u32 address = right_address_trans(tile);
#pragma unroll
    for (int token = 0; token < TOKENS; token += 32)
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
            u32 b[4];
            load_right_trans(b, address + j / 8 * (TOKENS * 128), token, j % 8 * 16);
            mma_16bit(sum + 4 * j, a + token / 4, b);
            mma_16bit(sum + 4 * j, a + token / 4 + 4, b + 2);
        }
}
