// What the three kernels share: packets, INT8 rounding, scales, documents, results.
//
// A warpgroup owns 64 rows (queries, or keys) and holds a tile of S, dP or a gradient as the tensor cores leave
// it: a thread has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of every 8 columns 2 (lane % 4) and the
// next one. So x[4 j + 2 r + e] is row lane / 4 + 8 r, column 8 j + 2 (lane % 4) + e.
#pragma once

#include "ptx.cuh"

constexpr int D = HEAD_DIM;            // channels, padded: 64 or 128
constexpr int ROWS = 64;               // tokens that a warpgroup owns
constexpr int KEYS = 128;              // keys of a packet

#ifdef P_HALF  // P in 16 bit, times V in forward.cu, dO in dk_dv.cu, which then need these by columns no more
constexpr bool P_IS_HALF = true;
#else
constexpr bool P_IS_HALF = false;
#endif

// Packets, as packets.cu writes them. Tiles are swizzled; rows of 16-bit tiles longer than 128 bytes lie in halves
// of 64 channels, one after the other.
constexpr int Q_TILE = ROWS * D;                   // bytes of 64 tokens in INT8
constexpr int K_TILE = KEYS * D;
constexpr int STATS = ROWS * 8;                    // per query -logsumexp and -delta, fp32
constexpr int TAIL = 16;                           // scales
constexpr int Q_ROWS_BYTES = 3 * Q_TILE + STATS + TAIL;  // Q by rows, dO in 16 bit, stats, scales of Q and dO
constexpr int Q_COLUMNS_BYTES = (P_IS_HALF ? 1 : 2) * Q_TILE;  // Q by columns, and dO if P is in INT8
constexpr int K_ROWS_BYTES = 3 * K_TILE + TAIL;    // K by rows, V in 16 bit, scale of K
constexpr int K_COLUMNS_BYTES = K_TILE;            // K by columns
constexpr int KV_BYTES = 2 * K_TILE + TAIL;        // forward: K by rows, V by columns, their scales

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float INT8_MAX = 127.0f;
#ifdef UNSIGNED_P  // P is never negative: all of 8 bits for it
constexpr bool P_UNSIGNED = true;
constexpr float P_MAX = 255.0f;
#else
constexpr bool P_UNSIGNED = false;
constexpr float P_MAX = INT8_MAX;
#endif
constexpr float ROUNDING_OFFSET = 12582912.0f;     // 1.5 * 2^23: adding it rounds to the nearest integer
constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f;

#define INFINITE __int_as_float(0x7f800000)
constexpr int HIDDEN = -(1 << 30);                 // a masked logit in INT32, far below all others

__host__ __device__ constexpr int align_up(int x, int to) { return (x + to - 1) / to * to; }

// What attention.py launches with must be what the kernel is written for.
#ifdef LAUNCH_THREADS
#define CHECK_LAUNCH(threads, shared_bytes) static_assert(LAUNCH_THREADS == (threads) && LAUNCH_BYTES == (shared_bytes))
#else
#define CHECK_LAUNCH(threads, shared_bytes) static_assert(true)
#endif

// --- Registers ---------------------------------------------------------------------------------------------

// Registers of a thread that computes, and of one that copies, in a program of that many warpgroups that compute and
// one that copies. All together they must not be more than the program starts with, or it waits for them for ever.
__host__ __device__ constexpr int computing_registers(int warpgroups) { return warpgroups == 3 ? 160 : 240; }
__host__ __device__ constexpr int copying_registers(int warpgroups) { return warpgroups == 3 ? 32 : 24; }
__host__ __device__ constexpr int starting_registers(int warpgroups) { return 65536 / (128 * (warpgroups + 1)) / 8 * 8; }

template <int WARPGROUPS>
__device__ __forceinline__ void begin_computing() {
    static_assert(WARPGROUPS * computing_registers(WARPGROUPS) + copying_registers(WARPGROUPS) <=
                  (WARPGROUPS + 1) * starting_registers(WARPGROUPS));
    take_registers<computing_registers(WARPGROUPS)>();
}

template <int WARPGROUPS>
__device__ __forceinline__ void begin_copying() {
    give_registers_back<copying_registers(WARPGROUPS)>();
}

// --- Tiles of products -------------------------------------------------------------------------------------

// Tiles are given as descriptor_base of their addresses.

// S or its transpose: rows at a times rows at b, both (., D) INT8.
template <int N>
__device__ __forceinline__ void multiply_rows(int (&sum)[N / 2], u32 a, u32 b) {
    products_begin();
    multiply_step<0>(sum, descriptor<D>(a), descriptor<D>(b));
#pragma unroll
    for (int i = 1; i < D / 32; ++i) multiply_step<1>(sum, descriptor<D>(a + 2 * i), descriptor<D>(b + 2 * i));
    products_commit();
}

// dP or its transpose, as bits of fp32: 64 rows of a tile of A_ROWS, and N rows, both (., D) in 16 bit.
template <int N, int A_ROWS>
__device__ __forceinline__ void multiply_halves(int (&sum)[N / 2], u32 a, u32 b) {
    products_begin();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const u64 a_tile = descriptor<128>(a + i / 4 * A_ROWS * 8 + i % 4 * 2);
        const u64 b_tile = descriptor<128>(b + i / 4 * N * 8 + i % 4 * 2);
        if (i == 0)
            multiply_step_16<0>(sum, a_tile, b_tile);
        else
            multiply_step_16<1>(sum, a_tile, b_tile);
    }
    products_commit();
}

// P or dS in registers, unsigned or signed, times 64 channels of a tile by columns of N tokens.
template <int N, bool LEFT_UNSIGNED = false>
__device__ __forceinline__ void multiply_columns(int (&sum)[32], const u32 (&a)[N / 8], u32 b) {
    products_begin();
    multiply_step<0, LEFT_UNSIGNED>(sum, a, descriptor<N>(b));
#pragma unroll
    for (int i = 1; i < N / 32; ++i) multiply_step<1, LEFT_UNSIGNED>(sum, a + 4 * i, descriptor<N>(b + 2 * i));
    products_commit();
}

// sum += P in registers, in 16 bit, times all channels of N tokens as they are.
template <int N>
__device__ __forceinline__ void multiply_across(float (&sum)[D / 2], const u32 (&a)[N / 4], u32 b) {
    products_begin();
#pragma unroll
    for (int i = 0; i < N / 16; ++i) multiply_step_16(sum, a + 4 * i, descriptor_across<N * 128>(b + i * (16 * 128 / 16)));
    products_commit();
}

__device__ __forceinline__ float pick(const float2& pair, int i) { return i ? pair.y : pair.x; }

// --- INT8 --------------------------------------------------------------------------------------------------

// Four numbers to which ROUNDING_OFFSET was added, from -128 to 127 or from 0 to 255: their lowest bytes, in order.
__device__ __forceinline__ u32 low_bytes(float a, float b, float c, float d) {
    const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(ab, cd, 0x5410);
}

// x times inverse[row], rounded, as the left operand of a product over its N columns. Within 16 columns that
// product takes position 4 q + 2 h + e for column 8 h + 2 q + e, which is what thread q of 4 holds.
template <int N>
__device__ __forceinline__ void round_tile(u32 (&result)[N / 8], const float (&x)[N / 2], const float (&inverse)[2]) {
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float* p = x + 8 * i + 2 * r;
            const auto rounded = [&](int k) { return fmaf(p[k], inverse[r], ROUNDING_OFFSET); };
            result[2 * i + r] = low_bytes(rounded(0), rounded(1), rounded(4), rounded(5));
        }
    }
}

// The maximum over the four threads that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = nan_max(x, __shfl_xor_sync(0xffffffff, x, 1));
    return nan_max(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ int row_max(int x) {
    x = max(x, __shfl_xor_sync(0xffffffff, x, 1));
    return max(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The INT8 scale for numbers up to `largest` in magnitude, which become integers up to `steps`, INT8_MAX or P_MAX. It is
// never so small that it has no inverse: a row that is smaller still is rounded to zero, or nearly.
__device__ __forceinline__ float scale_of(float largest, float steps) {
    return nan_max(largest, steps * SMALLEST_NORMAL) * (1.0f / steps);
}

// sum += product * factor[row].
__device__ __forceinline__ void accumulate(float* sum, const int (&product)[32], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = fmaf(__int2float_rn(product[i]), factor[i / 2 % 2], sum[i]);
}

// What a product of INT8 is multiplied by to be a logit, to base 2. Always in this order: the backward must find the
// very logits of the forward, and with logits of 1e10 a difference in the last place is one of thousands.
__device__ __forceinline__ float logit_factor(float q_scale, float k_scale, float scale) {
    return __fmul_rn(__fmul_rn(q_scale, __fmul_rn(scale, LOG2_E)), k_scale);
}

// Whether logits are so small, whatever the product, that a fused multiply-add, which does not round the product, may
// take the place of a multiplication and an addition. Else exp2 of the largest logit minus itself could be far from 1.
__device__ __forceinline__ bool is_fusible(float factor) { return factor * (INT8_MAX * INT8_MAX * D) < 2048.0f; }

// --- Where things lie --------------------------------------------------------------------------------------

// A tensor (B, H, N, D); strides in elements, that of D being 1.
struct TokenTensor {
    u16* data;
    i64 stride_b, stride_h, stride_n, stride_d;
};

// Packed documents along one axis of tokens, see sagebwd/kernels/layout.py; null without packing.
struct Segments {
    const int *document, *start, *first_block;
};

struct Document {
    int start, tokens, first_block;
};

__device__ __forceinline__ Document find_extent(const Segments& segments, int tokens, int document) {
    if (segments.start == nullptr) return {0, tokens, 0};
    const int start = segments.start[document];
    return {start, segments.start[document + 1] - start, segments.first_block[document]};
}

__device__ __forceinline__ float infinite_to_nan(float x) {
    return fabsf(x) == INFINITE ? __int_as_float(0x7fffffff) : x;
}

constexpr int STAGING_PITCH = 2 * D + 16;  // so that 8 rows lie in different banks
constexpr int STAGING_BYTES = ROWS * STAGING_PITCH;

// Stores 64 rows times factor[row], the warpgroup's first being token `first` of `document`, by way of `staging`,
// which only this warpgroup uses. fp32 that overflowed becomes NaN: an infinite sum says that an input was not finite.
// REST: stores what rounding to 16 bit takes away.
template <bool REST = false>
__device__ __forceinline__ void store_rows(const TokenTensor& x, const float* values, const float (&factor)[2],
                                           u8* staging, int warpgroup, int head, int heads, int first,
                                           const Document& document, int d) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
        const int r = i % 2, row = thread / 32 * 16 + lane / 4 + 8 * r, channel = i / 2 * 8 + lane % 4 * 2;
        const float a = infinite_to_nan(values[2 * i] * factor[r]), b = infinite_to_nan(values[2 * i + 1] * factor[r]);
        u32 pair = pack_halves(a, b);
        if (REST) pair = pack_halves(a - to_float(pair & 0xffff), b - to_float(pair >> 16));
        *reinterpret_cast<u32*>(staging + row * STAGING_PITCH + channel * 2) = pair;
    }
    warpgroup_sync(warpgroup);
    constexpr int PIECES = D / 8;  // of 16 bytes in a row
    u16* base = x.data + head / heads * x.stride_b + head % heads * x.stride_h + (document.start + first) * x.stride_n;
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / 128; ++i) {
        const int row = (i * 128 + thread) / PIECES, channel = thread % PIECES * 8;
        if (first + row < document.tokens && channel < d)
            *reinterpret_cast<uint4*>(base + row * x.stride_n + channel) =
                *reinterpret_cast<const uint4*>(staging + row * STAGING_PITCH + channel * 2);
    }
}

// --- Items --------------------------------------------------------------------------------------------------
//
// Items differ in length, under the causal mask or with documents, so a program takes the next one when it is free: its
// copying thread takes it, and tells the others. Items of a few heads, which share what they read, come together, the
// longest first, so that the last ones are short.

constexpr int HEADS_TOGETHER = 8;

// Where queries and keys lie. An item is a block of `own` tokens of one of `own_heads`; queries are cut into packets of
// 64, keys of 128. `taken`: how many items were taken after the first of each program; zero at the start.
struct Axes {
    Segments own, q, kv;
    int* taken;
    int n_q, n_kv, d, heads, group, own_heads, own_blocks, q_blocks, kv_blocks;
};

// To be called when all of the item before is on its way: what is left of that hides the wait, and no other program is
// kept from an item that has to wait here.
__device__ __forceinline__ int take_item(const Axes& a) { return gridDim.x + atomicAdd(a.taken, 1); }

// The head of an item, -1 if there is none, and how many blocks of this head are longer under the causal mask.
struct Item {
    int head, longer;
};

__device__ __forceinline__ Item item_at(const Axes& a, int index) {
    if (index >= a.own_heads * a.own_blocks) return {-1, 0};
    const int first_head = index / (HEADS_TOGETHER * a.own_blocks) * HEADS_TOGETHER;
    const int heads = min(HEADS_TOGETHER, a.own_heads - first_head), rest = index - first_head * a.own_blocks;
    return {first_head + rest % heads, rest / heads};
}

struct Queries {
    Document q;
    int document;            // its number, which is that of its keys as well
    int head, first;         // first query
    int q_block, kv_block;   // first packets, counted over all heads
    int q_packets;           // fewer than the warpgroups if the queries end before
    int keys, tiles;         // keys of the document, tiles of them that any query sees
};

// False: there are no queries in this block.
template <int WARPGROUPS>
__device__ __forceinline__ bool find_queries(const Axes& a, const Item& item, Queries& work) {
    const int block = a.own_blocks - 1 - item.longer;
    const int document = a.own.document == nullptr ? 0 : a.own.document[block];
    const Document own = find_extent(a.own, a.n_q, document), kv = find_extent(a.kv, a.n_kv, document);
    work.q = find_extent(a.q, a.n_q, document);
    work.document = document;
    work.head = item.head;
    work.first = (block - own.first_block) * ROWS * WARPGROUPS;
    work.q_block = work.head * a.q_blocks + work.q.first_block + work.first / ROWS;
    work.q_packets = min((work.q.tokens - work.first + ROWS - 1) / ROWS, WARPGROUPS);
    work.kv_block = work.head / a.group * a.kv_blocks + kv.first_block;
    work.keys = kv.tokens;
    work.tiles = ((IS_CAUSAL ? min(kv.tokens, work.first + ROWS * WARPGROUPS) : kv.tokens) + KEYS - 1) / KEYS;
    return work.first < work.q.tokens;
}

// Tiles of keys that the queries of one warpgroup see.
__device__ __forceinline__ int tiles_of(const Queries& work, int warpgroup) {
    return IS_CAUSAL ? min(work.tiles, (work.first + (warpgroup + 1) * ROWS + KEYS - 1) / KEYS) : work.tiles;
}

// --- The ring of stages ------------------------------------------------------------------------------------

// Where a warp is in the ring through which packets come.
template <int STAGES>
struct Ring {
    u32 full, empty;  // addresses of STAGES barriers each
    int index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
    // For readers: wait for the packet, and give its place back, once a warp.
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * index, parity); }
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * index);
    }
    // For the writer: wait for the place; the first time round it is free.
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * index, parity ^ 1); }
};

template <int STAGES>
__device__ __forceinline__ void ring_init(u64 (&full)[STAGES], u64 (&empty)[STAGES], int warpgroups) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&full[i]), 1);
        barrier_init(shared_address(&empty[i]), 4 * warpgroups);
    }
}
