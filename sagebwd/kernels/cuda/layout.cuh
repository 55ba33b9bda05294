// Where operands lie in memory: tensors with strides, packed documents, and the packed blocks that packing.cu writes.
#pragma once

#include "ptx.cuh"

__host__ __device__ constexpr int align_up(int x, int to) { return (x + to - 1) / to * to; }

// --- Tensors and documents ---------------------------------------------------------------------------------

// A tensor (B, H, N, D); strides in elements.
struct TokenTensor {
    u16* data;
    i64 stride_b, stride_h, stride_n, stride_d;
};

// Where a token of a head begins. `head`: counted over all heads of all sequences, `heads` of each.
__device__ __forceinline__ u16* token_of(const TokenTensor& x, int head, int heads, int token) {
    return x.data + head / heads * x.stride_b + head % heads * x.stride_h + token * x.stride_n;
}

// Packed documents along one axis of tokens, see sagebwd/kernels/layout.py; null without packing.
struct Segments {
    const int *document, *start, *first_block;
};

// One document: its first token, how many it has, its first block.
struct Document {
    int start, tokens, first_block;
};

__device__ __forceinline__ Document find_document(const Segments& segments, int tokens, int document) {
    if (segments.start == nullptr) return {0, tokens, 0};
    const int start = segments.start[document];
    return {start, segments.start[document + 1] - start, segments.first_block[document]};
}

// --- Packed blocks -----------------------------------------------------------------------------------------

#ifndef TILE_Q
#define TILE_Q 64
#define TILE_KV 128
#endif
#ifndef Q_STEP
#define Q_STEP TILE_Q
#endif
constexpr int D = HEAD_DIM;         // channels, padded: 64, 128 or 256
constexpr int CHANNELS_OF_ROW = D < 128 ? D : 128;  // in tiles of INT8 rows that are cut into chunks, see offset_in_rows
constexpr int BLOCK_Q = TILE_Q;     // queries of a packed block: 64 or 128
constexpr int BLOCK_KV = TILE_KV;   // keys of a packed block: 128 or 64
constexpr int STEP_Q = Q_STEP;      // queries that kernels take at once: a packed block, or 64 of 128. Cuts tiles by columns, too
constexpr int STEPS_OF_BLOCK = BLOCK_Q / STEP_Q;

#ifdef P_16BIT  // P stays in 16 bits, times V in the forward, times dO in the backward, which then needs no dO by columns
constexpr bool P_IS_16BIT = true;
#else
constexpr bool P_IS_16BIT = false;
#endif

#ifdef DK_16BIT  // dS stays in 16 bits, times Q in 16 bits; P does, too
constexpr bool DK_IS_16BIT = true;
#else
constexpr bool DK_IS_16BIT = false;
#endif
static_assert(P_IS_16BIT || !DK_IS_16BIT);

#ifdef TOKEN_SCALES  // a scale for each token of Q, K, V and dO in INT8, instead of one for each block
constexpr bool HAS_TOKEN_SCALES = true;
#else
constexpr bool HAS_TOKEN_SCALES = false;
#endif

#ifdef SCALES_OF_TILES  // one scale for all P, and one for all dS, of a tile; otherwise one for each output row of a product
constexpr bool HAS_TILE_SCALES = true;
#else
constexpr bool HAS_TILE_SCALES = false;
#endif

#ifdef ROWS_IN_CHUNKS  // see offset_in_rows
constexpr bool HAS_ROWS_IN_CHUNKS = true;
#else
constexpr bool HAS_ROWS_IN_CHUNKS = false;
#endif

#ifdef DP_FP16  // dP is a product of V and dO in fp16, with fp16 sums: see convert_values
constexpr bool DP_IS_FP16 = true;
#else
constexpr bool DP_IS_FP16 = false;
#endif
static_assert(!DP_IS_FP16 || !(P_IS_16BIT || HAS_TOKEN_SCALES));

#ifdef UNPACKED_16BIT  // kernels read V and dO in 16 bits, and Q for dK in 16 bits, where they are
constexpr bool PACKS_16BIT = false;
#else
constexpr bool PACKS_16BIT = true;
#endif

// Bytes. All tiles are swizzled, see swizzled(). A 16-bit tile is cut into chunks of 64 channels, rows of 128 bytes, one
// chunk after the other.
constexpr int Q_TILE = BLOCK_Q * D;                       // a block of queries in INT8
constexpr int STEP_TILE = STEP_Q * D;                     // a step of queries in INT8
constexpr int K_TILE = BLOCK_KV * D;                      // a block of keys in INT8
constexpr int ROW_STATS = BLOCK_Q * 8;                    // -logsumexp of all queries, then -delta of all, fp32
constexpr int TAIL = 16;                                  // scales of blocks, padded to what a bulk copy takes
// Scales of so many tensors, of all tokens of a block each or of the block.
__host__ __device__ constexpr int scale_bytes(int tensors, int tokens) { return HAS_TOKEN_SCALES ? tensors * tokens * 4 : TAIL; }
constexpr int PACKED_Q_BYTES = Q_TILE + scale_bytes(1, BLOCK_Q);         // Q by rows; its scale
constexpr int PACKED_V_BYTES = K_TILE + scale_bytes(2, BLOCK_KV);        // forward: V by columns; scales of K and V
constexpr int PACKED_V_16BIT_BYTES = PACKS_16BIT ? 2 * K_TILE : 0;
constexpr int PACKED_GRAD_16BIT_BYTES = PACKS_16BIT || DP_IS_FP16 ? 2 * Q_TILE : 0;
constexpr int PACKED_KV_BYTES = K_TILE + PACKED_V_16BIT_BYTES + scale_bytes(1, BLOCK_KV);  // K by rows, V in 16 bits; K's scale
// dO in 16 bits, stats; scales of Q and dO.
constexpr int PACKED_GRAD_BYTES = PACKED_GRAD_16BIT_BYTES + ROW_STATS + scale_bytes(2, BLOCK_Q);
// In shared memory: K by rows, V in 16 bits; K's scale. And of a step: Q by rows, dO in 16 bits, stats; scales of Q and dO.
constexpr int K_AND_V_BYTES = 3 * K_TILE + scale_bytes(1, BLOCK_KV);
constexpr int STEP_STATS = STEP_Q * 8;
constexpr int Q_AND_GRAD_BYTES = 3 * STEP_TILE + STEP_STATS + scale_bytes(2, STEP_Q);
// In shared memory, of a step: Q by columns, and dO if P is in INT8; or, for dK in 16 bits, Q in 16 bits.
constexpr int Q_COLUMNS_BYTES = (P_IS_16BIT && !DK_IS_16BIT ? 1 : 2) * STEP_TILE;
constexpr int PACKED_Q_COLUMNS_BYTES = DK_IS_16BIT && !PACKS_16BIT ? 0 : STEPS_OF_BLOCK * Q_COLUMNS_BYTES;
static_assert(STEPS_OF_BLOCK == 1 || !(HAS_TOKEN_SCALES || P_IS_16BIT));

// Where byte o of a tile with rows of 64, 128 or 256 bytes lies: 16-byte pieces are permuted within 8 rows, so that 8 rows
// at one column lie in different banks. This is the order that wgmma expects of shared memory, where rows have up to 128.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled(int o) {
    if (ROW_BYTES == 256) return o ^ (o >> 4 & 112);
    return o ^ (o >> 3 & (ROW_BYTES - 16));
}

// Where a channel of a token lies in a tile of TOKENS INT8 rows. wgmma takes rows of up to 128 bytes: for it longer ones are cut
// into chunks of 128 channels, one chunk after the other.
template <int TOKENS>
__device__ __forceinline__ int offset_in_rows(int token, int channel) {
    constexpr int ROW = HAS_ROWS_IN_CHUNKS ? CHANNELS_OF_ROW : D;
    return channel / ROW * (TOKENS * ROW) + swizzled<ROW>(token * ROW + channel % ROW);
}
