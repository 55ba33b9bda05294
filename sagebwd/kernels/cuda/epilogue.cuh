// Results: from the registers of 128 threads, through shared memory, to rows of a tensor.
#pragma once

#include "layout.cuh"
#include "nonfinite.cuh"

constexpr int ROWS = 64;  // of the tile that 128 threads hold

// Shared memory for rows of so many channels. Bytes of a row; the padding puts 8 rows into different banks.
__host__ __device__ constexpr int staging_pitch(int channels) { return 2 * channels + 16; }
__host__ __device__ constexpr int staging_bytes(int channels) { return ROWS * staging_pitch(channels); }
constexpr int STAGING_BYTES = staging_bytes(D);

// Stores 64 rows times factor[row], CHANNELS of them from `first_channel` on; the first row is token `first` of `document`.
// `staging` is shared memory that only this warpgroup uses: through it, neighbouring threads store neighbouring 16 bytes.
// fp32 that overflowed becomes NaN, because an infinite sum says that an input was not finite. RESIDUAL: stores what rounding
// to 16 bits takes away.
template <int CHANNELS, bool RESIDUAL = false>
__device__ __forceinline__ void store_channels(const TokenTensor& x, const float* values, const float (&factor)[2],
                                               u8* staging, int warpgroup, int head, int heads, int first,
                                               const Document& document, int d, int first_channel = 0) {
    constexpr int PITCH = staging_pitch(CHANNELS);
    const int thread = threadIdx.x % 128, lane = thread % 32;
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int i = 0; i < CHANNELS / 4; ++i) {
        const int r = i % 2, row = thread / 32 * 16 + lane / 4 + 8 * r, channel = i / 2 * 8 + lane % 4 * 2;
        const float a = infinite_to_nan(values[2 * i] * factor[r]), b = infinite_to_nan(values[2 * i + 1] * factor[r]);
        u32 pair = pack_16bit(a, b);
        if (RESIDUAL) pair = pack_16bit(a - to_float(pair & 0xffff), b - to_float(pair >> 16));
        *reinterpret_cast<u32*>(staging + row * PITCH + channel * 2) = pair;
    }
    warpgroup_sync(warpgroup);
    constexpr int PIECES = CHANNELS / 8;  // of 16 bytes in a row
    u16* base = x.data + head / heads * x.stride_b + head % heads * x.stride_h + (document.start + first) * x.stride_n;
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / 128; ++i) {
        const int row = (i * 128 + thread) / PIECES, channel = thread % PIECES * 8;
        if (first + row < document.tokens && first_channel + channel < d)
            *reinterpret_cast<uint4*>(base + row * x.stride_n + first_channel + channel) =
                *reinterpret_cast<const uint4*>(staging + row * PITCH + channel * 2);
    }
}

// The same, CHANNELS of them, but only PART at a time through shared memory.
template <int CHANNELS, int PART, bool RESIDUAL = false>
__device__ __forceinline__ void store_in_parts(const TokenTensor& x, const float* values, const float (&factor)[2],
                                               u8* staging, int warpgroup, int head, int heads, int first,
                                               const Document& document, int d, int first_channel = 0) {
#pragma unroll
    for (int c = 0; c < CHANNELS; c += PART)
        store_channels<PART, RESIDUAL>(x, values + c / 2, factor, staging, warpgroup, head, heads, first, document, d,
                                       first_channel + c);
}
