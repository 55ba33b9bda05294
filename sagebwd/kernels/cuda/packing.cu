// Packs Q, K, V and dO: quantized, tiled and swizzled, so that attention kernels copy them to shared memory as they are.
// Each tensor is read once.
//
// A CTA writes what one tensor contributes to one packed block: one block of tokens of one head. A thread holds 4 pieces,
// each 8 channels of a token.

#include "int8.cuh"
#include "layout.cuh"
#include "nonfinite.cuh"

namespace {

constexpr int PIECES = 4;
template <int TOKENS>
constexpr int THREADS = TOKENS * D / (8 * PIECES);

struct Source {
    TokenTensor tensor;
    int is_contiguous;  // 8 channels of a token can be read at once
};

struct Block {
    int part;                    // which tensor of a packed block
    int head, document, index;   // index: of the block, counted over all heads
    int start, first, tokens;    // first token of the document; first token of the block in it; tokens of the block
};

// Zeros for the kernels that follow: a launch for them alone would take longer than this.
template <int THREADS_OF_CTA>
__device__ __forceinline__ void clear(int* counters, int count) {
    for (int i = blockIdx.x * THREADS_OF_CTA + threadIdx.x; i < count; i += gridDim.x * THREADS_OF_CTA) counters[i] = 0;
}

// The block of this CTA; false if it has no tokens. LAST_FIRST: what the previous kernel read or wrote last is still in the L2
// cache.
template <int TOKENS, int PARTS = 1, bool LAST_FIRST = PARTS == 2>
__device__ __forceinline__ bool find_block(const Segments& segments, int tokens, int blocks, Block& block) {
    const int cta = LAST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    block.part = cta % PARTS;
    block.index = cta / PARTS;
    block.head = block.index / blocks;
    const int index = block.index % blocks;
    block.document = segments.document == nullptr ? 0 : segments.document[index];
    const Document document = find_document(segments, tokens, block.document);
    block.start = document.start;
    block.first = (index - document.first_block) * TOKENS;
    block.tokens = min(document.tokens - block.first, TOKENS);
    return block.tokens > 0;
}

// TOKENS x D values, distributed over the threads: piece i of a thread is 8 channels of one token. Zero where there is no
// token or channel. The four tokens of a thread are neighbours in tiles by columns: of each 16 tokens, position
// 4 q + 2 h + e there takes token 8 h + 2 q + e, the order in which thread q of four holds a row of the other operand.
template <int TOKENS>
struct Tile {
    float x[PIECES][8];

    __device__ __forceinline__ static int quad() { return threadIdx.x / (D / 8); }  // positions 4 quad() and three more
    __device__ __forceinline__ static int token(int i) { return token_at(quad(), i); }
    __device__ __forceinline__ static int channel() { return threadIdx.x % (D / 8) * 8; }
};

// Eight 16-bit values from channel `channel` of a token on; zero outside.
__device__ __forceinline__ uint4 load_piece(const Source& source, const Block& block, int heads, int token, int channel,
                                            int d) {
    uint4 piece = {0, 0, 0, 0};
    if (token >= block.tokens || channel >= d) return piece;
    const TokenTensor& x = source.tensor;
    const u16* row = x.data + block.head / heads * x.stride_b + block.head % heads * x.stride_h +
                     (block.start + block.first + token) * x.stride_n;
    if (source.is_contiguous) return *reinterpret_cast<const uint4*>(row + channel);
    u32* pairs = &piece.x;
#pragma unroll
    for (int e = 0; e < 8; e += 2)
        pairs[e / 2] = row[(channel + e) * x.stride_d] | u32(row[(channel + e + 1) * x.stride_d]) << 16;
    return piece;
}

__device__ __forceinline__ void unpack(float (&x)[8], const uint4& piece) {
    const u32* pairs = &piece.x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = to_float(pairs[e / 2] >> 16 * (e % 2) & 0xffff);
}

// A tile as it lies in memory. All loads are issued before any value is used.
template <int TOKENS>
struct Pieces {
    uint4 raw[PIECES];

    __device__ __forceinline__ void load(const Source& source, const Block& block, int heads, int d) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            raw[i] = load_piece(source, block, heads, Tile<TOKENS>::token(i), Tile<TOKENS>::channel(), d);
    }
    __device__ __forceinline__ void unpack_to(Tile<TOKENS>& tile) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) unpack(tile.x[i], raw[i]);
    }
    __device__ __forceinline__ void round_to_fp16(const Tile<TOKENS>& tile, float factor) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            u32* pairs = &raw[i].x;
#pragma unroll
            for (int e = 0; e < 8; e += 2) pairs[e / 2] = pack_fp16(tile.x[i][e] * factor, tile.x[i][e + 1] * factor);
        }
    }
    // The values as they are, in chunks of 64 channels, one chunk after the other.
    __device__ __forceinline__ void store_16bit(u8* target) const {
        const int channel = Tile<TOKENS>::channel();
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            *reinterpret_cast<uint4*>(target + channel / 64 * (TOKENS * 128) +
                                      swizzled<128>(Tile<TOKENS>::token(i) * 128 + channel % 64 * 2)) = raw[i];
    }
};

struct Axis {
    Segments segments;
    int tokens, d, heads, blocks, documents;
};

// Subtracts the mean of each channel, see token_mean_kernel, from the tokens that exist; nothing if `means` is null.
template <int TOKENS>
__device__ __forceinline__ void subtract(Tile<TOKENS>& tile, const float* means, const Block& block, const Axis& axis) {
    if (means == nullptr || tile.channel() >= axis.d) return;
    const float* mean = means + (i64(block.head) * axis.documents + block.document) * D;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float m = mean[tile.channel() + e];
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            if (tile.token(i) < block.tokens) tile.x[i][e] -= m;
    }
}

// --- INT8 --------------------------------------------------------------------------------------------------

// The scale for magnitudes up to that of these bits: NaN if it is not finite.
__device__ __forceinline__ float scale_of_bits(int largest) {
    const float scale = __fdiv_rn(__int_as_float(largest), INT8_MAX);
    return scale < SMALLEST_NORMAL ? 0.0f : fabsf(scale) == INFINITE ? __int_as_float(0x7fffffff) : scale;
}

// The scale of a tile: NaN if one of its values is not finite. All threads of the CTA call it; they share `slots`.
template <int TOKENS>
__device__ __forceinline__ float find_scale(const Tile<TOKENS>& tile, int (&slots)[16]) {
    int largest = 0;  // bits: magnitudes are ordered as their bits are, infinity and NaN at the top
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_int(tile.x[i][e]) & 0x7fffffff);
    largest = __reduce_max_sync(0xffffffff, largest);
    __syncthreads();  // the slots may still be read
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS<TOKENS> / 32; ++i) largest = max(largest, slots[i]);
    return scale_of_bits(largest);
}

// The scale for each piece of a thread: that of its token, or of the tile.
template <int TOKENS>
__device__ __forceinline__ void find_scales(float (&scales)[PIECES], const Tile<TOKENS>& tile, int (&slots)[16]) {
    const float of_tile = HAS_TOKEN_SCALES ? 0.0f : find_scale(tile, slots);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        scales[i] = of_tile;
        if (!HAS_TOKEN_SCALES) continue;
        int largest = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_int(tile.x[i][e]) & 0x7fffffff);
#pragma unroll
        for (int lane = 1; lane < D / 8; lane *= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, lane));
        scales[i] = scale_of_bits(largest);
    }
}

// The nearest integers to x / scale, as 8 bytes. A multiplication by the reciprocal, corrected once by its remainder, gives
// the quotient of a division with fewer instructions.
__device__ __forceinline__ uint2 quantize(const float (&x)[8], float scale) {
    const float divisor = scale > 0.0f ? scale : 1.0f, inverse = scale > 0.0f ? __frcp_rn(scale) : 0.0f;
    float y[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float quotient = x[e] * inverse;
        y[e] = fmaf(fmaf(-quotient, divisor, x[e]), inverse, quotient) + ROUNDING_OFFSET;
    }
    return {low_bytes(y[0], y[1], y[2], y[3]), low_bytes(y[4], y[5], y[6], y[7])};
}

// --- Tiles of a packed block -------------------------------------------------------------------------------

template <int TOKENS>
__device__ __forceinline__ void store_rows_int8(u8* target, const uint2 (&values)[PIECES]) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        *reinterpret_cast<uint2*>(target + offset_in_rows<TOKENS>(Tile<TOKENS>::token(i), Tile<TOKENS>::channel())) = values[i];
}

// What store_rows_int8 wrote.
template <int TOKENS>
__device__ __forceinline__ void load_rows_int8(uint2 (&values)[PIECES], const u8* source) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        values[i] = *reinterpret_cast<const uint2*>(source +
                                                    offset_in_rows<TOKENS>(Tile<TOKENS>::token(i), Tile<TOKENS>::channel()));
}

// By columns, through `shared`, TOKENS + 4 bytes for each channel: a tile for each STEP tokens, one behind the other. All threads
// call it.
template <int TOKENS, int STEP = TOKENS>
__device__ __forceinline__ void store_columns_int8(u8* target, const uint2 (&values)[PIECES], u8* shared) {
    constexpr int PITCH = TOKENS + 4;  // so that channels lie in different banks
    u32 words[8];
    transpose_tokens(words, values);
    __syncthreads();  // it may still be read
#pragma unroll
    for (int e = 0; e < 8; ++e)
        *reinterpret_cast<u32*>(shared + (Tile<TOKENS>::channel() + e) * PITCH + 4 * Tile<TOKENS>::quad()) = words[e];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PIECES / 2; ++i) {
        const int o = (i * THREADS<TOKENS> + threadIdx.x) * 16, tile = o / (STEP * D), in_tile = o % (STEP * D);
        const u32* column = reinterpret_cast<const u32*>(shared + in_tile / STEP * PITCH + tile * STEP + in_tile % STEP);
        *reinterpret_cast<uint4*>(target + tile * (STEP * D) + swizzled<STEP>(in_tile)) = {column[0], column[1], column[2], column[3]};
    }
}

template <int TOKENS>
__device__ __forceinline__ void quantize_tile(uint2 (&values)[PIECES], const Tile<TOKENS>& tile,
                                              const float (&scales)[PIECES]) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) values[i] = quantize(tile.x[i], scales[i]);
}

// The scales of the tensor that is number `slot` in a packed block. Of one scale for each block: the CTA that writes slot 0
// also clears the slots that no tensor uses, from `used` on.
template <int TOKENS>
__device__ __forceinline__ void store_scales(u8* tail, int slot, const float (&scales)[PIECES], int used) {
    float* slots = reinterpret_cast<float*>(tail);
    if (HAS_TOKEN_SCALES) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            if (Tile<TOKENS>::channel() == 0) slots[slot * TOKENS + Tile<TOKENS>::token(i)] = scales[i];
        return;
    }
    if (threadIdx.x == 0) slots[slot] = scales[0];
    if (slot == 0 && threadIdx.x >= used && threadIdx.x < 4) slots[threadIdx.x] = 0.0f;
}

// The scales that store_scales wrote to slot 0.
template <int TOKENS>
__device__ __forceinline__ void load_scales(float (&scales)[PIECES], const u8* tail) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        scales[i] = reinterpret_cast<const float*>(tail)[HAS_TOKEN_SCALES ? Tile<TOKENS>::token(i) : 0];
}

}  // namespace

// --- The mean of K or V over the tokens of each document ---------------------------------------------------

// Sums over the tokens of each block: (blocks of all heads, D).
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_KV>) token_sum_kernel(Source x, float* sums, Axis axis) {
    constexpr int PARTS = THREADS<BLOCK_KV> / (D / 8);
    __shared__ float parts[PARTS][D];
    Block block;
    if (!find_block<BLOCK_KV>(axis.segments, axis.tokens, axis.blocks, block)) return;
    Tile<BLOCK_KV> tile;
    Pieces<BLOCK_KV> pieces;
    pieces.load(x, block, axis.heads, axis.d);
    pieces.unpack_to(tile);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) sum += tile.x[i][e];
        parts[threadIdx.x / (D / 8)][tile.channel() + e] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= D) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) sum += parts[i][threadIdx.x];
    sums[i64(block.index) * D + threadIdx.x] = sum;
}

// Means from these sums, added in a fixed order: (documents of all heads, D).
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_KV>)
    token_mean_kernel(const float* sums, float* mean, Axis axis) {
    constexpr int LANES = THREADS<BLOCK_KV> / D;
    __shared__ float parts[LANES][D];
    const int head = blockIdx.x / axis.documents, document = blockIdx.x % axis.documents;
    const Document extent = find_document(axis.segments, axis.tokens, document);
    const int blocks = (extent.tokens + BLOCK_KV - 1) / BLOCK_KV, lane = threadIdx.x / D, channel = threadIdx.x % D;
    const float* first = sums + (i64(head) * axis.blocks + extent.first_block) * D + channel;
    float sum = 0.0f;
    for (int i = lane; i < blocks; i += LANES) sum += first[i64(i) * D];
    parts[lane][channel] = sum;
    __syncthreads();
    if (lane != 0) return;
#pragma unroll
    for (int i = 1; i < LANES; ++i) sum += parts[i][channel];
    mean[i64(blockIdx.x) * D + channel] = sum / max(extent.tokens, 1);
}

// --- Packed blocks -----------------------------------------------------------------------------------------

namespace {

// Loads one block of a tensor.
template <int TOKENS>
__device__ __forceinline__ void load(Pieces<TOKENS>& pieces, Tile<TOKENS>& tile, const Source& source, const Block& block,
                                     const Axis& axis) {
    pieces.load(source, block, axis.heads, axis.d);
    pieces.unpack_to(tile);
}

// Writes K minus its mean by rows in INT8; finds the scales.
__device__ __forceinline__ void pack_k(float (&scales)[PIECES], u8* rows, const Source& k, const float* mean, const Block& block,
                                       const Axis& axis, int (&slots)[16]) {
    Pieces<BLOCK_KV> pieces;
    Tile<BLOCK_KV> tile;
    uint2 values[PIECES];
    load(pieces, tile, k, block, axis);
    subtract(tile, mean, block, axis);
    find_scales(scales, tile, slots);
    quantize_tile(values, tile, scales);
    store_rows_int8<BLOCK_KV>(rows, values);
}

}  // namespace

// Forward: Q by rows; its scale. Also clears `counters`.
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_Q>)
    pack_q_kernel(Source q, u8* packed_q, Axis axis, int* counters, int count) {
    __shared__ int slots[16];
    Block block;
    clear<THREADS<BLOCK_Q>>(counters, count);
    if (!find_block<BLOCK_Q>(axis.segments, axis.tokens, axis.blocks, block)) return;
    u8* target = packed_q + i64(block.index) * PACKED_Q_BYTES;
    Pieces<BLOCK_Q> pieces;
    Tile<BLOCK_Q> tile;
    uint2 values[PIECES];
    float scales[PIECES];
    load(pieces, tile, q, block, axis);
    find_scales(scales, tile, slots);
    quantize_tile(values, tile, scales);
    store_rows_int8<BLOCK_Q>(target, values);
    store_scales<BLOCK_Q>(target + Q_TILE, 0, scales, 1);
}

// Forward: V by columns and the scales of K and V to `packed_v`, and K by rows: alone to `packed_k` or, if `packed_kv` is not
// null, in what pack_kv_kernel writes there, which saves the backward a read of K and V. `k_mean`, `v_mean`: what is subtracted
// from them, or null.
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_KV>)
    pack_kv_int8_kernel(Source k, Source v, const float* k_mean, const float* v_mean, u8* packed_k, u8* packed_v, u8* packed_kv,
                        Axis axis) {
    __shared__ int slots[16];
    __shared__ __align__(16) u8 transposed[D * (BLOCK_KV + 4)];
    Block block;
    if (!find_block<BLOCK_KV, 2>(axis.segments, axis.tokens, axis.blocks, block)) return;
    u8* values_block = packed_v + i64(block.index) * PACKED_V_BYTES;
    u8* both = packed_kv == nullptr ? nullptr : packed_kv + i64(block.index) * PACKED_KV_BYTES;
    float scales[PIECES];
    if (block.part == 0) {
        u8* rows = both == nullptr ? packed_k + i64(block.index) * K_TILE : both;
        pack_k(scales, rows, k, k_mean, block, axis, slots);
        store_scales<BLOCK_KV>(values_block + K_TILE, 0, scales, 2);
        if (both != nullptr) store_scales<BLOCK_KV>(both + K_TILE + PACKED_V_16BIT_BYTES, 0, scales, 1);
    } else {
        Pieces<BLOCK_KV> pieces;
        Tile<BLOCK_KV> tile;
        uint2 values[PIECES];
        load(pieces, tile, v, block, axis);
        if (PACKS_16BIT && both != nullptr) pieces.store_16bit(both + K_TILE);
        subtract(tile, v_mean, block, axis);
        find_scales(scales, tile, slots);
        quantize_tile(values, tile, scales);
        store_columns_int8<BLOCK_KV>(values_block, values, transposed);
        store_scales<BLOCK_KV>(values_block + K_TILE, 1, scales, 2);
    }
}

// Backward, and a forward with 16-bit P: K by rows, V as it is, if 16 bits are packed; the scale of K. `k_mean`: what is
// subtracted from K, or null.
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_KV>)
    pack_kv_kernel(Source k, Source v, const float* k_mean, u8* packed_kv, Axis axis) {
    constexpr int PARTS = PACKS_16BIT ? 2 : 1;
    __shared__ int slots[16];
    Block block;
    if (!find_block<BLOCK_KV, PARTS, true>(axis.segments, axis.tokens, axis.blocks, block)) return;
    u8* target = packed_kv + i64(block.index) * PACKED_KV_BYTES;
    if (block.part == 0) {
        float scales[PIECES];
        pack_k(scales, target, k, k_mean, block, axis, slots);
        store_scales<BLOCK_KV>(target + K_TILE + PACKED_V_16BIT_BYTES, 0, scales, 1);
    } else if (PACKS_16BIT) {
        Pieces<BLOCK_KV> pieces;
        pieces.load(v, block, axis.heads, axis.d);
        pieces.store_16bit(target + K_TILE);
    }
}

// Backward: K by columns, from its rows in packed_kv.
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_KV>)
    pack_k_columns_kernel(const u8* packed_kv, u8* packed_k_columns, Axis axis) {
    __shared__ __align__(16) u8 transposed[D * (BLOCK_KV + 4)];
    Block block;
    if (!find_block<BLOCK_KV>(axis.segments, axis.tokens, axis.blocks, block)) return;
    const u8* rows = packed_kv + i64(block.index) * PACKED_KV_BYTES;
    uint2 values[PIECES];
    load_rows_int8<BLOCK_KV>(values, rows);
    store_columns_int8<BLOCK_KV>(packed_k_columns + i64(block.index) * K_TILE, values, transposed);
}

// Backward: dO as it is, if 16 bits are packed, or for dP in fp16, see fp16_grad_scale; -lse and -delta of each token, the scales
// of Q and dO; and, in a packed block of their own, Q by columns, from its rows in `packed_q`, and, if P is in INT8, dO by columns;
// for dK in 16 bits, Q as it is, if 16 bits are packed, the only case in which `q` is read. delta = rowsum(dO * O), section 3 of
// the paper; if COMPENSATE_O is defined, O includes its rounding residual. `grad_lse`, the gradient of the logsumexp, may be null;
// it is subtracted from delta. Also clears `counters`.
extern "C" __global__ void __launch_bounds__(THREADS<BLOCK_Q>)
    pack_grad_kernel(Source q, const u8* packed_q, Source grad, Source out, Source out_residual, const float* lse,
                     u8* packed_grad, u8* packed_q_columns, Axis axis, int* counters, int count, const float* grad_lse) {
    __shared__ int slots[16];
    __shared__ __align__(16) u8 transposed[D * (BLOCK_Q + 4)];
    Block block;
    clear<THREADS<BLOCK_Q>>(counters, count);
    if (!find_block<BLOCK_Q, 2>(axis.segments, axis.tokens, axis.blocks, block)) return;
    u8* target = packed_grad + i64(block.index) * PACKED_GRAD_BYTES;
    u8* columns = packed_q_columns + i64(block.index) * PACKED_Q_COLUMNS_BYTES;
    u8* tail = target + PACKED_GRAD_16BIT_BYTES + ROW_STATS;
    float scales[PIECES];
    Pieces<BLOCK_Q> pieces;
    Tile<BLOCK_Q> tile;
    uint2 values[PIECES];
    if (block.part == 0) {
        const u8* rows = packed_q + i64(block.index) * PACKED_Q_BYTES;
        load_scales<BLOCK_Q>(scales, rows + Q_TILE);
        if constexpr (!DK_IS_16BIT) {
            load_rows_int8<BLOCK_Q>(values, rows);
            store_columns_int8<BLOCK_Q, STEP_Q>(columns, values, transposed);
        } else if constexpr (PACKS_16BIT) {
            pieces.load(q, block, axis.heads, axis.d);
            pieces.store_16bit(columns);
        }
        store_scales<BLOCK_Q>(tail, 0, scales, P_IS_16BIT ? 1 : 2);
        return;
    }
    Pieces<BLOCK_Q> out_pieces;
    out_pieces.load(out, block, axis.heads, axis.d);
#ifdef COMPENSATE_O
    Pieces<BLOCK_Q> residual_pieces;
    residual_pieces.load(out_residual, block, axis.heads, axis.d);
#endif
    load(pieces, tile, grad, block, axis);
    if (PACKS_16BIT) pieces.store_16bit(target);
    float* stats = reinterpret_cast<float*>(target + PACKED_GRAD_16BIT_BYTES);
    const i64 first_row = i64(block.head) * axis.tokens + block.start + block.first;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        float o[8], delta = 0.0f;
        unpack(o, out_pieces.raw[i]);
#ifdef COMPENSATE_O
        float residual[8];
        unpack(residual, residual_pieces.raw[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) o[e] += residual[e];
#endif
#pragma unroll
        for (int e = 0; e < 8; ++e) delta += tile.x[i][e] * o[e];
#pragma unroll
        for (int lane = 1; lane < D / 8; lane *= 2) delta += __shfl_xor_sync(0xffffffff, delta, lane);
        if (tile.channel() == 0) {
            const int token = tile.token(i);
            if (grad_lse != nullptr && token < block.tokens) delta -= grad_lse[first_row + token];
            stats[BLOCK_Q + token] = -infinite_to_nan(delta);
        }
    }
    if (threadIdx.x < BLOCK_Q) {
        stats[threadIdx.x] = threadIdx.x < block.tokens ? -lse[first_row + threadIdx.x] : -INFINITE;
    }
    if (P_IS_16BIT) return;
    find_scales(scales, tile, slots);
    quantize_tile(values, tile, scales);
    store_columns_int8<BLOCK_Q, STEP_Q>(columns + Q_TILE, values, transposed);
    store_scales<BLOCK_Q>(tail, 1, scales, 2);
    if constexpr (DP_IS_FP16) {
        pieces.round_to_fp16(tile, inverse_of_power(fp16_grad_scale(scales[0])));
        pieces.store_16bit(target);
    }
}
