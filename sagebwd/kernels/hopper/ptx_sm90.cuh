// Hopper's instructions as functions: mbarriers, bulk copies, setmaxnreg, wgmma.
#pragma once

#include "ptx.cuh"

// --- mbarriers ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialized barriers visible to bulk copies.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;"); }

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// The same for a thread that is in no hurry.
__device__ __forceinline__ void barrier_wait_asleep(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "nanosleep.u32 40;\n"
        "bra wait;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Copies `bytes` to shared memory; the barrier counts them. All three are multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 shared, const u8* global, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// What the hardware knows of a tensor: made by the driver, see tensor_map.py. A kernel takes it as a __grid_constant__.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Copies a box of a tensor (B, H, N, D) to shared memory, in 128-byte rows, swizzled as wgmma expects: 64 channels of 64 tokens
// from these on. Zeros outside of the tensor; the barrier counts all bytes of the box.
__device__ __forceinline__ void tensor_copy(u32 shared, const TensorMap& x, int channel, int token, int head, int sequence,
                                            u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            shared),
        "l"(&x), "r"(channel), "r"(token), "r"(head), "r"(sequence), "r"(barrier)
        : "memory");
}

// From shared to global memory: copies, or adds fp32. The bytes are a multiple of 16. Groups are those of the thread.
__device__ __forceinline__ void bulk_store(float* global, u32 shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add(float* global, u32 shared, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory was read, or until global memory was written.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Makes what threads wrote to shared memory visible to wgmma and bulk copies.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders accesses to global memory by this thread and by bulk copies.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- Matrices of 8 x 8 values of 16 bits -------------------------------------------------------------------
//
// In a register a lane has columns 2 (lane % 4) and the next one of row lane / 4.

// Stores four matrices; lane l gives the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// --- wgmma -------------------------------------------------------------------------------------------------
//
// An operand in shared memory is a tile whose rows are contiguous along the contraction: 64 or 128 bytes each,
// swizzled (see layout.cuh), aligned to 8 rows.

// A descriptor is `descriptor_base(address) + offset in bytes / 16`, completed by the length of a row.
__device__ __forceinline__ u32 descriptor_base(u32 address) { return 1 << 16 | address >> 4; }

template <int ROW_BYTES>
__device__ __forceinline__ u64 descriptor(u32 low) {
    static_assert(ROW_BYTES == 64 || ROW_BYTES == 128);
    constexpr u32 swizzle = ROW_BYTES == 128 ? 1 : 2;
    constexpr u32 stride = 8 * ROW_BYTES / 16;  // from 8 rows to the next 8
    return u64(swizzle << 30 | stride) << 32 | low;
}

// Of a 16-bit operand that is MN-major: a right one contiguous along its columns, or a left one along its rows, and not
// along the contraction; the hardware transposes it. Lines hold 64 of them; chunks of 64 lie CHUNK_BYTES apart.
template <int CHUNK_BYTES>
__device__ __forceinline__ u64 descriptor_mn_major(u32 low) {
    constexpr u32 swizzle = 1, stride = 8 * 128 / 16;
    return u64(swizzle << 30 | stride) << 32 | u32(CHUNK_BYTES / 16) << 16 | (low & 0xffff);
}

// Of a tile of 8 rows of 32 bytes that is not swizzled: two blocks of 128 bytes, the left and right halves of rows.
__device__ __forceinline__ u64 descriptor_unswizzled(u32 address) {
    constexpr u32 stride = 128 / 16;
    return u64(stride) << 32 | stride << 16 | (address >> 4 & 0x3fff);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the committed groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of a result before the wait for it.
template <int N>
__device__ __forceinline__ void pin(int (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
#define REGISTERS_8(c, x, i) \
    c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), c(x[i + 7])
#define REGISTERS_16(c, x) REGISTERS_8(c, x, 0), REGISTERS_8(c, x, 8)
#define REGISTERS_32(c, x) REGISTERS_16(c, x), REGISTERS_8(c, x, 16), REGISTERS_8(c, x, 24)
#define REGISTERS_64(c, x)                                                                                    \
    REGISTERS_32(c, x), REGISTERS_8(c, x, 32), REGISTERS_8(c, x, 40), REGISTERS_8(c, x, 48), REGISTERS_8(c, x, 56)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32                                                                     \
    NAMES_16 ", "                                                                    \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                              \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "  \
             "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// One step of a (64, N) product of two operands in shared memory, whose sums take so many REGISTERS. ACCUMULATE 0 starts a new sum.
// The numbers are those of what follows the sums: a, b and ACCUMULATE.
#define WGMMA(name, type, constraint, registers, a_number, b_number, accumulate_number, kind, options)                     \
    template <int ACCUMULATE>                                                                                              \
    __device__ __forceinline__ void name(type(&sum)[registers], u64 a, u64 b) {                                            \
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #accumulate_number ", 0;\n"                     \
                     "wgmma.mma_async.sync.aligned." kind " {" NAMES_##registers "}, %" #a_number ", %" #b_number            \
                     ", accumulate" options ";\n}\n"                                                                       \
                     : REGISTERS_##registers(constraint, sum)                                                              \
                     : "l"(a), "l"(b), "n"(ACCUMULATE));                                                                   \
    }
#define KIND_16BIT(n) "m64n" #n "k16.f32." TYPE_16BIT "." TYPE_16BIT

// In INT8, 32 deep.
WGMMA(wgmma_int8, int, "+r", 16, 16, 17, 18, "m64n32k32.s32.s8.s8", "")
WGMMA(wgmma_int8, int, "+r", 32, 32, 33, 34, "m64n64k32.s32.s8.s8", "")
WGMMA(wgmma_int8, int, "+r", 64, 64, 65, 66, "m64n128k32.s32.s8.s8", "")
// In 16 bits, 16 deep. Sums are fp32, passed as bits, so that the registers of an INT8 product can be reused.
WGMMA(wgmma_16bit, int, "+r", 16, 16, 17, 18, KIND_16BIT(32), ", 1, 1, 0, 0")
WGMMA(wgmma_16bit, int, "+r", 32, 32, 33, 34, KIND_16BIT(64), ", 1, 1, 0, 0")
WGMMA(wgmma_16bit, int, "+r", 64, 64, 65, 66, KIND_16BIT(128), ", 1, 1, 0, 0")
// The same with both operands MN-major, see descriptor_mn_major.
WGMMA(wgmma_16bit, float, "+f", 16, 16, 17, 18, KIND_16BIT(32), ", 1, 1, 1, 1")
WGMMA(wgmma_16bit, float, "+f", 32, 32, 33, 34, KIND_16BIT(64), ", 1, 1, 1, 1")
#undef WGMMA

// sum (+)= a b in INT8 with the left operand in registers; with LEFT_UNSIGNED its bytes are 0 ... 255, not -128 ... 127.
template <int ACCUMULATE, bool LEFT_UNSIGNED>
__device__ __forceinline__ void wgmma_int8(int (&sum)[32], const u32* a, u64 b) {
#define WGMMA_INT8(left)                                                                                             \
    asm volatile(                                                                                                       \
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n64k32.s32." left ".s8 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, accumulate;" \
        "\n}\n"                                                                                                         \
        : REGISTERS_32("+r", sum)                                                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE))
    if constexpr (LEFT_UNSIGNED)
        WGMMA_INT8("u8");
    else
        WGMMA_INT8("s8");
#undef WGMMA_INT8
}

// sum += a b, with the left operand in registers and the right one MN-major, see descriptor_mn_major.
__device__ __forceinline__ void wgmma_16bit(float (&sum)[32], const u32* a, u64 b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE_16BIT "." TYPE_16BIT
        " {" NAMES_32 "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, 1;\n}\n"
        : REGISTERS_32("+f", sum)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_16bit(float (&sum)[64], const u32* a, u64 b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE_16BIT "." TYPE_16BIT
        " {" NAMES_64 "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, 1;\n}\n"
        : REGISTERS_64("+f", sum)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same with 8 columns and a right operand that is not MN-major.
__device__ __forceinline__ void wgmma_16bit(float (&sum)[4], const u32* a, u64 b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE_16BIT "." TYPE_16BIT
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, accumulate, 1, 1, 0;\n}\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
