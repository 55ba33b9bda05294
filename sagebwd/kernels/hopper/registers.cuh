// How a CTA divides its registers: consumer warpgroups, which compute, take what the producer warpgroup gives back.
#pragma once

#include "ptx_sm90.cuh"

// Registers of a thread, in a CTA of that many consumer warpgroups and one producer warpgroup. Their sum must not exceed
// what the CTA starts with: setmaxnreg would wait for registers that never become free.
__host__ __device__ constexpr int consumer_registers(int consumers) { return consumers == 3 ? 160 : 240; }
__host__ __device__ constexpr int producer_registers(int consumers) { return consumers == 3 ? 32 : 24; }
__host__ __device__ constexpr int starting_registers(int consumers) { return 65536 / (128 * (consumers + 1)) / 8 * 8; }

template <int CONSUMERS>
__device__ __forceinline__ void begin_consumer() {
    static_assert(CONSUMERS * consumer_registers(CONSUMERS) + producer_registers(CONSUMERS) <=
                  (CONSUMERS + 1) * starting_registers(CONSUMERS));
    setmaxnreg_inc<consumer_registers(CONSUMERS)>();
}

template <int CONSUMERS>
__device__ __forceinline__ void begin_producer() {
    setmaxnreg_dec<producer_registers(CONSUMERS)>();
}
