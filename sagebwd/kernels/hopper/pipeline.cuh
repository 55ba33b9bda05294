// The pipeline from the producer to the consumers: a ring of stages in shared memory, each with two mbarriers.
#pragma once

#include "layout.cuh"
#include "ptx_sm90.cuh"

// Where a warp is in the ring through which packed blocks come.
template <int STAGES>
struct Ring {
    u32 full, empty;  // addresses of STAGES barriers each
    int index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
    // Consumers: wait for the data of the stage, and release the stage, once a warp.
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * index, parity); }
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * index);
    }
    // Who fills a stage by ordinary stores: each warp says that its own are done, after fence_proxy_async.
    __device__ __forceinline__ void fill() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(full + 8 * index);
    }
    // Producer: wait until the stage is released; the first time round it is free.
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * index, parity ^ 1); }
};

// A stage is full after `filling` arrivals and empty after `releasing`.
template <int STAGES>
__device__ __forceinline__ void ring_init(u64 (&full)[STAGES], u64 (&empty)[STAGES], int filling, int releasing) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&full[i]), filling);
        barrier_init(shared_address(&empty[i]), releasing);
    }
}

// Of a producer thread and so many warpgroups of consumers.
template <int STAGES>
__device__ __forceinline__ void ring_init(u64 (&full)[STAGES], u64 (&empty)[STAGES], int consumers) {
    ring_init(full, empty, 1, 4 * consumers);
}

// --- Copies of blocks --------------------------------------------------------------------------------------

// What is read where it is: tensors (B, H, N, D), see tensor_map.py. V, dO and Q if 16 bits are not packed; K for dQ in 16 bits.
struct TensorMaps {
    TensorMap v, grad, q, k;
};

// A head of a sequence.
struct Head {
    int sequence, index;
};

// `head` is counted over all heads of all sequences, `heads` of each.
__device__ __forceinline__ Head head_of(int head, int heads) { return {head / heads, head % heads}; }

// Copies 64 tokens from `first` on: chunks of 64 channels, CHUNK_BYTES apart. Zeros past the end.
template <int CHUNK_BYTES>
__device__ __forceinline__ void copy_tokens(u32 target, const TensorMap& x, const Head& head, int first, u32 full) {
#pragma unroll
    for (int c = 0; c < D / 64; ++c) tensor_copy(target + c * CHUNK_BYTES, x, c * 64, first, head.index, head.sequence, full);
}

// A step of queries: its packed block, counted over all heads, and which step of the block it is.
struct Step {
    i64 block;
    int part;
};
__device__ __forceinline__ Step step_at(i64 step) { return {step / STEPS_OF_BLOCK, int(step % STEPS_OF_BLOCK)}; }

// Copies Q by rows and its scale, one behind the other.
__device__ __forceinline__ void copy_q(u32 target, const u8* packed_q, const Step& step, u32 full) {
    const u8* source = packed_q + step.block * PACKED_Q_BYTES;
    if constexpr (STEPS_OF_BLOCK == 1) {
        bulk_copy(target, source, PACKED_Q_BYTES, full);
    } else {
        bulk_copy(target, source + step.part * STEP_TILE, STEP_TILE, full);
        bulk_copy(target + STEP_TILE, source + Q_TILE, TAIL, full);
    }
}

// Copies Q by rows, dO, its statistics and the scales, Q_AND_GRAD_BYTES, one behind the other; with 256 channels the statistics and
// what follows them to `statistics`, and only with GRAD_SCALES the scales of dO. `first`: the step's first token, also below.
template <bool GRAD_SCALES = true>
__device__ __forceinline__ void copy_q_and_grad(u32 target, u32 statistics, const u8* packed_q, const u8* packed_grad,
                                                const TensorMaps& maps, const Step& step, const Head& head, int first, u32 full) {
    bulk_copy(target, packed_q + step.block * PACKED_Q_BYTES + step.part * STEP_TILE, STEP_TILE, full);
    target += STEP_TILE;
    const u8* source = packed_grad + step.block * PACKED_GRAD_BYTES;
    constexpr int CHUNK_BYTES = STEP_Q * 128;  // 64 channels of dO
    if constexpr (!PACKS_16BIT) {
        copy_tokens<CHUNK_BYTES>(target, maps.grad, head, first, full);
        target += 2 * STEP_TILE;
    }
    if constexpr (D == 256) {
        if constexpr (PACKS_16BIT) bulk_copy(target, source, PACKED_GRAD_16BIT_BYTES, full);
        bulk_copy(statistics, source + PACKED_GRAD_16BIT_BYTES, STEP_STATS + scale_bytes(GRAD_SCALES ? 2 : 1, STEP_Q), full);
    } else if constexpr (STEPS_OF_BLOCK == 1) {
        bulk_copy(target, source, PACKED_GRAD_BYTES, full);
    } else {
        if constexpr (PACKS_16BIT) {
#pragma unroll
            for (int c = 0; c < D / 64; ++c)
                bulk_copy(target + c * CHUNK_BYTES, source + (c * STEPS_OF_BLOCK + step.part) * CHUNK_BYTES, CHUNK_BYTES, full);
            target += 2 * STEP_TILE;
            source += PACKED_GRAD_16BIT_BYTES;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)  // -logsumexp, -delta
            bulk_copy(target + i * STEP_Q * 4, source + (i * STEPS_OF_BLOCK + step.part) * STEP_Q * 4, STEP_Q * 4, full);
        bulk_copy(target + STEP_STATS, source + ROW_STATS, TAIL, full);
    }
}

// Copies what dV and dK multiply P and dS by, Q_COLUMNS_BYTES.
__device__ __forceinline__ void copy_q_columns(u32 target, const u8* packed_q_columns, const TensorMaps& maps, const Step& step,
                                               const Head& head, int first, u32 full) {
    const u8* source = packed_q_columns + step.block * PACKED_Q_COLUMNS_BYTES;
    if constexpr (PACKED_Q_COLUMNS_BYTES == 0) {
        copy_tokens<STEP_Q * 128>(target, maps.q, head, first, full);
    } else if constexpr (STEPS_OF_BLOCK == 1) {
        bulk_copy(target, source, PACKED_Q_COLUMNS_BYTES, full);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)  // Q, dO
            bulk_copy(target + i * STEP_TILE, source + (i * STEPS_OF_BLOCK + step.part) * STEP_TILE, STEP_TILE, full);
    }
}

// Copies K by rows, V in 16 bits and the scale of K, K_AND_V_BYTES, one behind the other; with 256 channels the scale to `scale`.
__device__ __forceinline__ void copy_k_and_v(u32 target, u32 scale, const u8* packed_kv, const TensorMaps& maps, i64 block,
                                             const Head& head, int first, u32 full) {
    const u8* source = packed_kv + block * PACKED_KV_BYTES;
    if constexpr (PACKS_16BIT && D < 256) {
        bulk_copy(target, source, PACKED_KV_BYTES, full);
        return;
    }
    constexpr int TILES = K_TILE + PACKED_V_16BIT_BYTES;
    bulk_copy(target, source, TILES, full);
    if constexpr (!PACKS_16BIT) {
#pragma unroll
        for (int token = 0; token < BLOCK_KV; token += 64)
            copy_tokens<BLOCK_KV * 128>(target + K_TILE + token * 128, maps.v, head, first + token, full);
    }
    bulk_copy(D == 256 ? scale : target + 3 * K_TILE, source + TILES, PACKED_KV_BYTES - TILES, full);
}

// Releases stages that only other consumers need.
template <int STAGES>
__device__ __forceinline__ void skip(Ring<STAGES>& ring, int stages) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
        ring.wait_full();
        ring.release();
        ring.advance();
    }
}
