// Stands in for sagebwd/kernels/cuda/ptx.cuh on a CPU: CUDA C++ itself, and the instructions that all GPUs have. Each GPU
// thread is a CPU thread; CTAs run one after the other.
#pragma once

#include <pthread.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// --- CUDA --------------------------------------------------------------------------------------------------

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index {
    unsigned x;
};
static thread_local Index threadIdx, blockIdx;
static Index gridDim;

struct float2 {
    float x, y;
};
struct uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline int atomicAdd(int* sum, int x) { return __atomic_fetch_add(sum, x, __ATOMIC_SEQ_CST); }

inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = u64(high) << 32 | low;
    u32 chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return chosen;
}

// --- Synchronization ---------------------------------------------------------------------------------------

static pthread_barrier_t all_threads, warps[32], warpgroups[8];

inline void __syncthreads() { pthread_barrier_wait(&all_threads); }
inline void __syncwarp() { pthread_barrier_wait(&warps[threadIdx.x / 32]); }
inline void warpgroup_sync(int warpgroup) { pthread_barrier_wait(&warpgroups[warpgroup]); }

using OfLanes = u32[32][4];
static OfLanes of_warps[32];

// What `choose` returns for up to four words of every lane of this warp.
template <class Choose>
inline auto of_all_lanes(const u32* own, int words, Choose choose) {
    OfLanes& lanes = of_warps[threadIdx.x / 32];
    for (int i = 0; i < words; ++i) lanes[threadIdx.x % 32][i] = own[i];
    __syncwarp();
    auto chosen = choose(lanes);
    __syncwarp();
    return chosen;
}

template <class T>
inline T __shfl_sync(u32, T x, int lane) {
    const u32 own = std::bit_cast<u32>(x);
    return std::bit_cast<T>(of_all_lanes(&own, 1, [&](OfLanes& lanes) { return lanes[lane][0]; }));
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T x, int other) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ other);
}
inline int __any_sync(u32, bool x) {
    const u32 own = x;
    return of_all_lanes(&own, 1, [](OfLanes& lanes) {
        int any = 0;
        for (auto& lane : lanes) any |= lane[0];
        return any;
    });
}
inline int __reduce_max_sync(u32, int x) {
    const u32 own = x;
    return of_all_lanes(&own, 1, [](OfLanes& lanes) {
        int largest = lanes[0][0];
        for (auto& lane : lanes) largest = max(largest, lane[0]);
        return largest;
    });
}

// Dynamic shared memory.
static u8 shared_memory[256 * 1024] __attribute__((aligned(1024)));

// --- Arithmetic --------------------------------------------------------------------------------------------

#ifdef IS_BF16
inline float to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
inline u16 to_16bit(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
inline float to_float(u16 bits) { return std::bit_cast<_Float16>(bits); }
inline u16 to_16bit(float x) { return std::bit_cast<u16>(static_cast<_Float16>(x)); }
#endif
inline u32 pack_16bit(float first, float second) { return to_16bit(first) | u32(to_16bit(second)) << 16; }

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 1.1754943508222875e-38f ? 0.0f : y;  // flushes subnormal results
}
inline float reciprocal(float x) { return 1.0f / x; }
inline float nan_max(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }
inline float nan_max_abs(float a, float b) { return nan_max(a, std::fabs(b)); }

// --- Launches ----------------------------------------------------------------------------------------------

struct Thread {
    unsigned index;
    const void* kernel;
    void (*run)(const void* kernel);
};

inline void* run_ctas(void* thread) {
    const Thread& own = *static_cast<Thread*>(thread);
    threadIdx.x = own.index;
    for (unsigned cta = 0; cta < gridDim.x; ++cta) {
        blockIdx.x = cta;
        own.run(own.kernel);
        __syncthreads();
    }
    return nullptr;
}

template <class Kernel>
inline void run_threads(unsigned grid, unsigned threads, const Kernel& kernel) {
    gridDim.x = grid;
    pthread_barrier_init(&all_threads, nullptr, threads);
    for (unsigned i = 0; i < threads / 32; ++i) pthread_barrier_init(&warps[i], nullptr, 32);
    for (unsigned i = 0; i < threads / 128; ++i) pthread_barrier_init(&warpgroups[i], nullptr, 128);
    std::memset(shared_memory, 0x7f, sizeof shared_memory);  // large, and NaN in 16 bits
    std::vector<Thread> jobs(threads);
    std::vector<pthread_t> running(threads);
    for (unsigned i = 0; i < threads; ++i) {
        jobs[i] = {i, &kernel, [](const void* kernel) { (*static_cast<const Kernel*>(kernel))(); }};
        if (pthread_create(&running[i], nullptr, run_ctas, &jobs[i])) std::abort();
    }
    for (pthread_t& thread : running) pthread_join(thread, nullptr);
}

template <class... Types, std::size_t... I>
inline void launch(unsigned grid, unsigned threads, void** arguments, void (*kernel)(Types...), std::index_sequence<I...>) {
    run_threads(grid, threads, [=] { kernel(*static_cast<std::remove_const_t<Types>*>(arguments[I])...); });
}

// As cuLaunchKernel: the addresses of the kernel's arguments.
template <class... Types>
inline void launch(unsigned grid, unsigned threads, void** arguments, void (*kernel)(Types...)) {
    launch(grid, threads, arguments, kernel, std::index_sequence_for<Types...>{});
}
