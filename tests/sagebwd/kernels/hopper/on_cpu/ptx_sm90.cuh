// Stands in for sagebwd/kernels/hopper/ptx_sm90.cuh on a CPU. Bulk copies to shared memory and wgmma complete as soon as they
// are issued. So this shows what the kernels compute and whether they deadlock, not what happens if they wait too little for
// such a copy or a product in flight. Bulk copies from shared memory complete as late as they may.
#pragma once

#include <map>
#include <vector>

#include "ptx.cuh"

// --- Shared memory and mbarriers ---------------------------------------------------------------------------

// May be negative: the static variables of a kernel lie outside shared_memory.
inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - shared_memory); }

struct Barrier {
    int arrivals, missing;
    i64 bytes = 0;  // in flight
    u32 phase = 0;
};
static std::map<u32, Barrier> barriers_by_address;

// Changes the barrier, and completes its phase if nothing is pending any more.
template <class Change>
inline void change_barrier(u32 address, Change change) {
    Barrier& barrier = barriers_by_address.at(address);
    change(barrier);
    if (barrier.missing < 0) give_up("more arrivals at an mbarrier than the kernel announced");
    if (barrier.missing == 0 && barrier.bytes == 0) {
        barrier.missing = barrier.arrivals;
        barrier.phase ^= 1;
    }
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
    wait_until([=] { return barriers_by_address.at(barrier).phase != parity; });
}
inline void bulk_copy(u32 shared, const u8* global, u32 bytes, u32 barrier) {
    if (shared % 16 || reinterpret_cast<u64>(global) % 16 || bytes % 16 || shared + bytes > sizeof shared_memory)
        give_up("a bulk copy is not aligned or leaves shared memory");
    std::memcpy(shared_memory + shared, global, bytes);
    change_barrier(barrier, [=](Barrier& b) { b.bytes -= bytes; });
}


// What a thread stores or adds to global memory. Shared memory is read when the thread waits for that, and global memory is
// written when it waits for that.
struct BulkStore {
    float* target;
    u32 source, bytes;
    bool is_sum, is_committed, is_read;
    std::vector<float> values;
};
static std::map<unsigned, std::vector<BulkStore>> bulk_stores;  // by thread

inline void bulk_store_or_add(float* global, u32 shared, u32 bytes, bool is_sum) {
    if (shared % 16 || reinterpret_cast<u64>(global) % 16 || bytes % 16 || shared + bytes > sizeof shared_memory)
        give_up("a bulk store is not aligned or leaves shared memory");
    bulk_stores[threadIdx.x].push_back({global, shared, bytes, is_sum});
}
inline void bulk_store(float* global, u32 shared, u32 bytes) { bulk_store_or_add(global, shared, bytes, false); }
inline void bulk_add(float* global, u32 shared, u32 bytes) { bulk_store_or_add(global, shared, bytes, true); }
inline void bulk_commit() {
    for (BulkStore& store : bulk_stores[threadIdx.x]) store.is_committed = true;
}
inline void bulk_wait_read() {
    for (BulkStore& store : bulk_stores[threadIdx.x]) {
        if (!store.is_committed || store.is_read) continue;
        store.values.resize(store.bytes / 4);
        std::memcpy(store.values.data(), shared_memory + store.source, store.bytes);
        store.is_read = true;
    }
}
inline void bulk_wait() {
    bulk_wait_read();
    for (const BulkStore& store : bulk_stores[threadIdx.x])
        for (u32 i = 0; i < store.values.size(); ++i)
            store.target[i] = store.is_sum ? store.target[i] + store.values[i] : store.values[i];
    std::erase_if(bulk_stores[threadIdx.x], [](const BulkStore& store) { return store.is_read; });
}

inline void two_warpgroups_sync() {
    static Meeting meeting;
    meeting.members = 256;
    meeting.wait();
}

template <int>
inline void setmaxnreg_inc() {}
template <int>
inline void setmaxnreg_dec() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}

// --- Matrices of 8 x 8 values of 16 bits -------------------------------------------------------------------

struct StoreMatrix {
    u32 address, x[4];
};
template <bool IS_TRANSPOSED>
inline void store_matrices(StoreMatrix own) {
    if (own.address % 16 || own.address > sizeof shared_memory - 16) give_up("a row of a matrix is not aligned or outside");
    warp_instruction(own, [](StoreMatrix* const* lanes) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int e = 0; e < 2; ++e) {
                    const int a = lane / 4, b = lane % 4 * 2 + e;
                    const int row = IS_TRANSPOSED ? b : a, column = IS_TRANSPOSED ? a : b;
                    const u16 value = static_cast<u16>(lanes[lane]->x[i] >> 16 * e);
                    std::memcpy(shared_memory + lanes[8 * i + row]->address + 2 * column, &value, 2);
                }
    });
}
inline void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) { store_matrices<false>({address, {a, b, c, d}}); }
inline void stmatrix_trans(u32 address, u32 a, u32 b, u32 c, u32 d) { store_matrices<true>({address, {a, b, c, d}}); }

inline float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
inline u16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float first, float second) { return to_bf16(first) | u32(to_bf16(second)) << 16; }

// --- Between CTAs ------------------------------------------------------------------------------------------

// CTAs run one after the other: another one has released the value before, or another thread of this one will.
inline void wait_for_value(const int* place, int value) {
    wait_until([=] { return *place == value; });
}
inline void release_value(int* place, int value) { *place = value; }
inline float4 load_from_l2(const float4* place) { return *place; }

// --- wgmma -------------------------------------------------------------------------------------------------

// A descriptor: the address / 16 in the low half, above it the bytes of a row (descriptor), or of a chunk
// (descriptor_mn_major).
inline u32 descriptor_base(u32 address) { return address >> 4; }
template <int ROW_BYTES>
inline u64 descriptor(u32 low) {
    return u64(ROW_BYTES) << 32 | low;
}
template <int CHUNK_BYTES>
inline u64 descriptor_mn_major(u32 low) {
    return u64(CHUNK_BYTES) << 32 | low;
}
inline u64 descriptor_unswizzled(u32) { return 0; }  // a tile of ones
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int>
inline void wgmma_wait() {}
template <class T, int N>
inline void pin(T (&)[N]) {}

// Where byte `i` of a row lies in a swizzled tile whose rows have 64 or 128 bytes.
inline const u8* in_tile(u32 first, u32 row_bytes, int row, int i) {
    const u32 address = first + row * row_bytes + i;
    return shared_memory + (address ^ (address >> 3 & (row_bytes - 16)));
}
inline const u8* in_row(u64 tile, int row, int i) { return in_tile(u32(tile) << 4, tile >> 32, row, i); }
inline int int8_at(u64 tile, int row, int k) { return static_cast<signed char>(*in_row(tile, row, k)); }
inline float value_at(const u8* place) {
    u16 bits;
    std::memcpy(&bits, place, 2);
    return to_float(bits);
}

// Element i of a thread's part of a result, see int8.cuh.
inline int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
inline int row_of(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }

template <int ACCUMULATE, int N>
inline void wgmma_int8(int (&sum)[N], u64 a, u64 b) {
    for (int i = 0; i < N; ++i) {
        if (!ACCUMULATE) sum[i] = 0;
        for (int k = 0; k < 32; ++k) sum[i] += int8_at(a, row_of(i), k) * int8_at(b, column_of(i), k);
    }
}
template <int ACCUMULATE, int N>
inline void wgmma_16bit(int (&sum)[N], u64 a, u64 b) {
    for (int i = 0; i < N; ++i) {
        float x = ACCUMULATE ? __int_as_float(sum[i]) : 0.0f;
        for (int k = 0; k < 16; ++k) x += value_at(in_row(a, row_of(i), 2 * k)) * value_at(in_row(b, column_of(i), 2 * k));
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
inline void wgmma_int8(int (&sum)[32], const u32* a, u64 b) {
    const auto rows = rows_in_registers<int, 4>(
        a, [](u32 word) { return LEFT_UNSIGNED ? int(static_cast<u8>(word)) : int(static_cast<signed char>(word)); });
    for (int i = 0; i < 32; ++i) {
        if (!ACCUMULATE) sum[i] = 0;
        for (int k = 0; k < 32; ++k) sum[i] += rows.x[i / 2 % 2][k] * int8_at(b, column_of(i), k);
    }
}
template <int N>
inline void wgmma_16bit(float (&sum)[N], const u32* a, u64 b) {
    const auto rows = rows_in_registers<float, 2>(a, [](u32 word) { return to_float(static_cast<u16>(word)); });
    for (int i = 0; i < N; ++i) {
        const int column = column_of(i);
        for (int k = 0; k < 16; ++k) {
            const u32 chunk = (u32(b) << 4) + column / 64 * u32(b >> 32);
            const float right = b ? value_at(in_tile(chunk, 128, k, column % 64 * 2)) : 1.0f;
            sum[i] += rows.x[i / 2 % 2][k] * right;
        }
    }
}

// Both operands MN-major: lines of 64 rows of a, or columns of b, one line for each k.
template <int ACCUMULATE>
inline void wgmma_bf16(float (&sum)[32], u64 a, u64 b) {
    const auto at = [](u64 tile, int k, int i) {
        u16 bits;
        std::memcpy(&bits, in_tile(u32(tile) << 4, 128, k, 2 * i), 2);
        return bf16_to_float(bits);
    };
    for (int i = 0; i < 32; ++i) {
        if (!ACCUMULATE) sum[i] = 0.0f;
        for (int k = 0; k < 16; ++k) sum[i] += at(a, k, row_of(i)) * at(b, k, column_of(i));
    }
}
