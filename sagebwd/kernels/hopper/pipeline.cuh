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

// Copies Q by rows and dO with its statistics of packed block `block`, Q_AND_GRAD_BYTES, one behind the other.
__device__ __forceinline__ void copy_q_and_grad(u32 target, const u8* packed_q, const u8* packed_grad, i64 block, u32 full) {
    bulk_copy(target, packed_q + block * PACKED_Q_BYTES, Q_ROWS_TILE, full);
    bulk_copy(target + Q_ROWS_TILE, packed_grad + block * PACKED_GRAD_BYTES, PACKED_GRAD_BYTES, full);
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
