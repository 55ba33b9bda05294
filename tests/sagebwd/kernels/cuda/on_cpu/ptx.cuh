// Stands in for sagebwd/kernels/cuda/ptx.cuh on a CPU: CUDA C++ itself, and the instructions that all GPUs have. The threads
// of a CTA are fibers, see fibers.cuh; CTAs run one after the other.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fibers.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// --- CUDA --------------------------------------------------------------------------------------------------

// -Og compiles in half the time of -O1, which more than pays, but for the products of mma.
#define HOT __attribute__((optimize("O2")))

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, gridDim;  // threadIdx is that of the running fiber

struct float2 {
    float x, y;
};
struct int2 {
    int x, y;
};
struct uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
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
inline int atomicAdd(int* sum, int x) { return std::exchange(*sum, *sum + x); }
inline int atomicMax(int* largest, int x) { return std::exchange(*largest, max(*largest, x)); }

inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = u64(high) << 32 | low;
    u32 chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return chosen;
}

// --- Synchronization ---------------------------------------------------------------------------------------

static Meeting all_threads, warpgroups[8], warps[32];

inline void __syncthreads() { all_threads.wait(); }
inline void warpgroup_sync(int warpgroup) { warpgroups[warpgroup].wait(); }

// An instruction of a whole warp: when its last lane has come, `execute` gets pointers to the operands of all 32.
template <class Operands, class Execute>
inline void warp_instruction(Operands& own, Execute execute) {
    static const char instruction = 0;  // one for each type of `execute`: its address tells instructions apart
    warps[threadIdx.x / 32].wait(&instruction, threadIdx.x % 32, &own, [&](void* const* lanes) {
        execute(reinterpret_cast<Operands* const*>(lanes));
    });
}

inline void __syncwarp() {
    int nothing;
    warp_instruction(nothing, [](int* const*) {});
}

// What `choose` returns for this lane and up to four words of every lane of the warp.
using OfLanes = u32[32][4];
template <class Choose>
inline auto of_all_lanes(const u32* own, int words, Choose choose) {
    struct Words {
        const u32* own;
        OfLanes all;
    } result = {own};
    warp_instruction(result, [=](Words* const* lanes) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < words; ++i) lanes[0]->all[lane][i] = lanes[lane]->own[i];
        for (int lane = 1; lane < 32; ++lane) std::memcpy(lanes[lane]->all, lanes[0]->all, sizeof(OfLanes));
    });
    return choose(result.all);
}

template <class T>
struct Shuffled {
    T x;
    int from;
    T result;
};
template <class T>
inline T __shfl_sync(u32, T x, int lane) {
    Shuffled<T> own = {x, lane};
    warp_instruction(own, [](Shuffled<T>* const* lanes) {
        for (int i = 0; i < 32; ++i) lanes[i]->result = lanes[lanes[i]->from]->x;
    });
    return own.result;
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T x, int other) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ other);
}
inline int __reduce_max_sync(u32, int x) {
    warp_instruction(x, [](int* const* lanes) {
        int largest = *lanes[0];
        for (int i = 0; i < 32; ++i) largest = max(largest, *lanes[i]);
        for (int i = 0; i < 32; ++i) *lanes[i] = largest;
    });
    return x;
}
inline int __any_sync(u32 mask, bool x) { return __reduce_max_sync(mask, x); }

// --- Arithmetic --------------------------------------------------------------------------------------------

inline float fp16_to_float(u16 bits) { return std::bit_cast<_Float16>(bits); }
inline u16 to_fp16(float x) { return std::bit_cast<u16>(static_cast<_Float16>(x)); }
inline u32 pack_fp16(float first, float second) {
    if (random_order) let_time_pass();
    return to_fp16(first) | u32(to_fp16(second)) << 16;
}

#ifdef IS_BF16
inline float to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
inline u16 to_16bit(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
inline float to_float(u16 bits) { return fp16_to_float(bits); }
inline u16 to_16bit(float x) { return to_fp16(x); }
#endif
inline u32 pack_16bit(float first, float second) { return to_16bit(first) | u32(to_16bit(second)) << 16; }

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    if (y != y) return __int_as_float(0x7fffffff);  // the only NaN of a GPU, which is positive
    return y < 1.1754943508222875e-38f ? 0.0f : y;  // flushes subnormal results
}
inline float reciprocal(float x) { return 1.0f / x; }
inline float nan_max(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float nan_max_abs(float a, float b) { return nan_max(a, std::fabs(b)); }

// --- Launches ----------------------------------------------------------------------------------------------

constexpr int SHARED_ROOM = 256 * 1024;
static u8 shared_memory[SHARED_ROOM] __attribute__((aligned(1024)));  // dynamic
constexpr u8 POISON = 0x7f;                                           // large in INT8 and fp32, NaN in fp16

// May be negative: the static variables of a kernel lie outside shared_memory.
inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - shared_memory); }

// CTAs run one after the other: another one has released the value before, or another thread of this one will.
inline void wait_for_value(const int* place, int value) {
    wait_until([=] { return *place == value; });
}
inline void release_value(int* place, int value) { *place = value; }

template <class Kernel>
inline void run_ctas(unsigned grid, unsigned threads, int shared_bytes, const Kernel& kernel) {
    gridDim.x = grid;
    all_threads.members = threads;
    for (Meeting& warp : warps) warp.members = 32;
    for (Meeting& warpgroup : warpgroups) warpgroup.members = 128;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        std::memset(shared_memory, POISON, sizeof shared_memory);
        run_fibers(threads, &threadIdx.x, kernel);
        const u8* end = shared_memory + shared_bytes;  // where poison begins that nobody wrote
        if (*end != POISON || std::memcmp(end, end + 1, SHARED_ROOM - shared_bytes - 1))
            give_up("a thread wrote past the end of shared memory");
    }
}

template <class... Types, std::size_t... I>
inline void launch(unsigned grid, unsigned threads, int shared_bytes, void** arguments, void (*kernel)(Types...),
                   std::index_sequence<I...>) {
    run_ctas(grid, threads, shared_bytes, [=] { kernel(*static_cast<std::remove_const_t<Types>*>(arguments[I])...); });
}

// As cuLaunchKernel: the addresses of the kernel's arguments.
template <class... Types>
inline void launch(unsigned grid, unsigned threads, int shared_bytes, void** arguments, void (*kernel)(Types...)) {
    launch(grid, threads, shared_bytes, arguments, kernel, std::index_sequence_for<Types...>{});
}
