// In the place of sagebwd/kernels/hopper/ptx.cuh: what CUDA and Hopper's instructions do, on a CPU. A thread of the GPU
// is a thread of the CPU, programs run one after the other, copies and products are done when they are asked for. So
// it shows what the kernels compute and whether they wait for each other, not what happens if they wait too little
// for a copy or a product on its way.
#pragma once

#include <pthread.h>
#include <time.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
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

// --- Threads that meet -------------------------------------------------------------------------------------

static pthread_barrier_t all_threads, warps[32], warpgroups[8];

inline void __syncthreads() { pthread_barrier_wait(&all_threads); }
inline void __syncwarp() { pthread_barrier_wait(&warps[threadIdx.x / 32]); }
inline void warpgroup_sync(int warpgroup) { pthread_barrier_wait(&warpgroups[warpgroup]); }

using OfLanes = u32[32][4];
static OfLanes of_warps[32];

// What `choose` makes of up to four words of every lane of this warp.
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

// --- Shared memory and barriers ----------------------------------------------------------------------------

static u8 shared_memory[256 * 1024] __attribute__((aligned(1024)));

// Where the static variables of a kernel lie may be negative.
inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - shared_memory); }

struct Barrier {
    int arrivals, missing;
    i64 bytes = 0;  // on their way
    u32 phase = 0;
};
static std::map<u32, Barrier> barriers_by_address;
static pthread_mutex_t barriers_in_use = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t phase_is_over = PTHREAD_COND_INITIALIZER;
constexpr int PATIENCE = 100;  // seconds

// Changes the barrier, and ends its phase if nothing is missing any more.
template <class Change>
inline void change_barrier(u32 address, Change change) {
    pthread_mutex_lock(&barriers_in_use);
    Barrier& barrier = barriers_by_address.at(address);
    change(barrier);
    if (barrier.missing < 0) std::abort();  // more came than the kernel said would
    if (barrier.missing == 0 && barrier.bytes == 0) {
        barrier.missing = barrier.arrivals;
        barrier.phase ^= 1;
        pthread_cond_broadcast(&phase_is_over);
    }
    pthread_mutex_unlock(&barriers_in_use);
}

inline void barrier_init(u32 barrier, u32 arrivals) { barriers_by_address[barrier] = {int(arrivals), int(arrivals)}; }
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) {
    change_barrier(barrier, [](Barrier& b) { --b.missing; });
}
inline void barrier_expect_bytes(u32 barrier, u32 bytes) {
    change_barrier(barrier, [=](Barrier& b) { b.bytes += bytes, --b.missing; });
}
inline void barrier_wait(u32 barrier, u32 parity) {
    timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += PATIENCE;
    pthread_mutex_lock(&barriers_in_use);
    while (barriers_by_address.at(barrier).phase == parity)
        if (pthread_cond_timedwait(&phase_is_over, &barriers_in_use, &deadline)) {
            std::fprintf(stderr, "thread %u has waited for %d s: a kernel that hangs\n", threadIdx.x, PATIENCE);
            std::abort();
        }
    pthread_mutex_unlock(&barriers_in_use);
}
inline void copy_async(u32 shared, const u8* global, u32 bytes, u32 barrier) {
    if (shared % 16 || reinterpret_cast<u64>(global) % 16 || bytes % 16 || shared + bytes > sizeof shared_memory) std::abort();
    std::memcpy(shared_memory + shared, global, bytes);
    change_barrier(barrier, [=](Barrier& b) { b.bytes -= bytes; });
}

template <int>
inline void take_registers() {}
template <int>
inline void give_registers_back() {}
inline void shared_write_fence() {}

// --- Numbers -----------------------------------------------------------------------------------------------

#ifdef IS_BF16
inline float to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
inline u16 to_half(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
inline float to_float(u16 bits) { return std::bit_cast<_Float16>(bits); }
inline u16 to_half(float x) { return std::bit_cast<u16>(static_cast<_Float16>(x)); }
#endif
inline u32 pack_halves(float first, float second) { return to_half(first) | u32(to_half(second)) << 16; }

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 1.1754943508222875e-38f ? 0.0f : y;  // subnormal numbers are flushed
}
inline float reciprocal(float x) { return 1.0f / x; }
inline float nan_max(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }
inline float nan_max_abs(float a, float b) { return nan_max(a, std::fabs(b)); }

// --- Products of a warpgroup -------------------------------------------------------------------------------

// A descriptor: the address / 16 in the low half, above it the bytes of a row (descriptor), or of a chunk
// (descriptor_across).
inline u32 descriptor_base(u32 address) { return address >> 4; }
template <int ROW_BYTES>
inline u64 descriptor(u32 low) {
    return u64(ROW_BYTES) << 32 | low;
}
template <int CHUNK_BYTES>
inline u64 descriptor_across(u32 low) {
    return u64(CHUNK_BYTES) << 32 | low;
}
inline u64 descriptor_plain(u32) { return 0; }  // a tile of ones
inline void products_begin() {}
inline void products_commit() {}
template <int>
inline void products_wait() {}
template <class T, int N>
inline void pin(T (&)[N]) {}

// Where byte `i` of a row lies in a swizzled tile whose rows have 64 or 128 bytes.
inline const u8* in_tile(u32 first, u32 row_bytes, int row, int i) {
    const u32 address = first + row * row_bytes + i;
    return shared_memory + (address ^ (address >> 3 & (row_bytes - 16)));
}
inline const u8* in_row(u64 tile, int row, int i) { return in_tile(u32(tile) << 4, tile >> 32, row, i); }
inline int int8_at(u64 tile, int row, int k) { return static_cast<signed char>(*in_row(tile, row, k)); }
inline float half_at(const u8* place) {
    u16 bits;
    std::memcpy(&bits, place, 2);
    return to_float(bits);
}

// Element i of a thread's part of a result, see common.cuh.
inline int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
inline int row_of(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }

template <int ACCUMULATE, int N>
inline void multiply_step(int (&sum)[N], u64 a, u64 b) {
    for (int i = 0; i < N; ++i) {
        if (!ACCUMULATE) sum[i] = 0;
        for (int k = 0; k < 32; ++k) sum[i] += int8_at(a, row_of(i), k) * int8_at(b, column_of(i), k);
    }
}
template <int ACCUMULATE, int N>
inline void multiply_step_16(int (&sum)[N], u64 a, u64 b) {
    for (int i = 0; i < N; ++i) {
        float x = ACCUMULATE ? __int_as_float(sum[i]) : 0.0f;
        for (int k = 0; k < 16; ++k) x += half_at(in_row(a, row_of(i), 2 * k)) * half_at(in_row(b, column_of(i), 2 * k));
        sum[i] = __float_as_int(x);
    }
}

// The two rows of a left operand of which this thread has results, from the registers of the warp: of each row four
// lanes hold 4 PER_WORD columns in words 0 and 1 (which is the second row), and as many in words 2 and 3.
template <class T, int PER_WORD, class Read>
inline auto rows_in_registers(const u32* own, Read read) {
    struct Rows {
        T x[2][8 * PER_WORD];
    };
    return of_all_lanes(own, 4, [&](OfLanes& lanes) {
        Rows rows;
        for (int lane = 0; lane < 4; ++lane)
            for (int word = 0; word < 4; ++word)
                for (int k = 0; k < PER_WORD; ++k)
                    rows.x[word % 2][word / 2 * 4 * PER_WORD + lane * PER_WORD + k] =
                        read(lanes[threadIdx.x % 32 / 4 * 4 + lane][word] >> 32 / PER_WORD * k);
        return rows;
    });
}

template <int ACCUMULATE, bool LEFT_UNSIGNED>
inline void multiply_step(int (&sum)[32], const u32* a, u64 b) {
    const auto rows = rows_in_registers<int, 4>(
        a, [](u32 word) { return LEFT_UNSIGNED ? int(static_cast<u8>(word)) : int(static_cast<signed char>(word)); });
    for (int i = 0; i < 32; ++i) {
        if (!ACCUMULATE) sum[i] = 0;
        for (int k = 0; k < 32; ++k) sum[i] += rows.x[i / 2 % 2][k] * int8_at(b, column_of(i), k);
    }
}
template <int N>
inline void multiply_step_16(float (&sum)[N], const u32* a, u64 b) {
    const auto rows = rows_in_registers<float, 2>(a, [](u32 word) { return to_float(static_cast<u16>(word)); });
    for (int i = 0; i < N; ++i) {
        const int column = column_of(i);
        for (int k = 0; k < 16; ++k) {
            const u32 chunk = (u32(b) << 4) + column / 64 * u32(b >> 32);
            const float right = b ? half_at(in_tile(chunk, 128, k, column % 64 * 2)) : 1.0f;
            sum[i] += rows.x[i / 2 % 2][k] * right;
        }
    }
}

// --- Launches ----------------------------------------------------------------------------------------------

struct Thread {
    unsigned index;
    const void* kernel;
    void (*run)(const void* kernel);
};

inline void* run_programs(void* thread) {
    const Thread& own = *static_cast<Thread*>(thread);
    threadIdx.x = own.index;
    for (unsigned program = 0; program < gridDim.x; ++program) {
        blockIdx.x = program;
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
    std::memset(shared_memory, 0x7f, sizeof shared_memory);  // large, and NaN in 16 bit
    std::vector<Thread> jobs(threads);
    std::vector<pthread_t> running(threads);
    for (unsigned i = 0; i < threads; ++i) {
        jobs[i] = {i, &kernel, [](const void* kernel) { (*static_cast<const Kernel*>(kernel))(); }};
        if (pthread_create(&running[i], nullptr, run_programs, &jobs[i])) std::abort();
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
