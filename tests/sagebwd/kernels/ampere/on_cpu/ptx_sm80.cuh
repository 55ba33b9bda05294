// Stands in for sagebwd/kernels/ampere/ptx_sm80.cuh on a CPU. A copy arrives when its thread waits for it; until then its
// target holds poison, so that a kernel that reads too early gives a wrong result.
#pragma once

#include "ptx.cuh"

inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - shared_memory); }

inline u8* shared_bytes_at(u32 address) {
    if (address % 16 || address > SHARED_ROOM - 16) give_up("an address is not aligned or outside shared memory");
    return shared_memory + address;
}

// --- Copies to shared memory -------------------------------------------------------------------------------

struct Copy {
    u8* target;
    const void* source;
};
constexpr int MOST_COPIES = 256, MOST_GROUPS = 8;
struct Copies {
    Copy copy[MOST_COPIES];
    int count, group_ends[MOST_GROUPS], groups;
};
static Copies copies_of_threads[MOST_FIBERS];

inline void cp_async(u32 shared, const void* global) {
    if (reinterpret_cast<u64>(global) % 16) give_up("the source of a copy is not aligned");
    Copies& copies = copies_of_threads[threadIdx.x];
    if (copies.count == MOST_COPIES) give_up("too many copies without a wait");
    std::memset(shared_bytes_at(shared), POISON, 16);
    copies.copy[copies.count++] = {shared_bytes_at(shared), global};
}

inline void cp_async_or_zero(u32 shared, const void* global, bool exists) {
    alignas(16) static const u8 zeros[16] = {};
    cp_async(shared, exists ? global : zeros);
}

inline void cp_async_commit() {
    Copies& copies = copies_of_threads[threadIdx.x];
    if (copies.groups == MOST_GROUPS) give_up("too many groups of copies without a wait");
    copies.group_ends[copies.groups++] = copies.count;
}

template <int PENDING>
inline void cp_async_wait() {
    Copies& copies = copies_of_threads[threadIdx.x];
    const int finished = copies.groups - PENDING;
    if (finished <= 0) return;
    const int end = copies.group_ends[finished - 1];
    for (int i = 0; i < end; ++i) std::memcpy(copies.copy[i].target, copies.copy[i].source, 16);
    for (int i = end; i < copies.count; ++i) copies.copy[i - end] = copies.copy[i];
    for (int i = finished; i < copies.groups; ++i) copies.group_ends[i - finished] = copies.group_ends[i] - end;
    copies.count -= end;
    copies.groups = PENDING;
}

// --- Matrices of 8 x 8 values of 16 bits -------------------------------------------------------------------

struct LoadMatrix {
    u32* x;
    const u8* row;
};
template <bool IS_TRANSPOSED>
inline void load_matrices(u32* x, u32 address) {
    LoadMatrix own = {x, shared_bytes_at(address)};
    warp_instruction(own, [](LoadMatrix* const* lanes) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                u16 pair[2];
                for (int e = 0; e < 2; ++e) {
                    const int a = lane / 4, b = lane % 4 * 2 + e;
                    const int row = IS_TRANSPOSED ? b : a, column = IS_TRANSPOSED ? a : b;
                    std::memcpy(&pair[e], lanes[8 * i + row]->row + 2 * column, 2);
                }
                lanes[lane]->x[i] = pair[0] | u32(pair[1]) << 16;
            }
    });
}
inline void ldmatrix(u32* x, u32 address) { load_matrices<false>(x, address); }
inline void ldmatrix_trans(u32* x, u32 address) { load_matrices<true>(x, address); }

inline u32 transpose_matrix(u32 x) {
    warp_instruction(x, [](u32* const* lanes) {
        u16 matrix[8][8];
        for (int lane = 0; lane < 32; ++lane)
            for (int e = 0; e < 2; ++e) matrix[lane % 4 * 2 + e][lane / 4] = u16(*lanes[lane] >> 16 * e);
        for (int lane = 0; lane < 32; ++lane)
            *lanes[lane] = matrix[lane / 4][lane % 4 * 2] | u32(matrix[lane / 4][lane % 4 * 2 + 1]) << 16;
    });
    return x;
}

// --- Barriers between some warps of a CTA ------------------------------------------------------------------

static Meeting barriers[16];

template <int THREADS>
inline Meeting& barrier_of(int barrier) {
    Meeting& meeting = barriers[barrier];
    if (meeting.present && meeting.members != THREADS) give_up("threads disagree how many come to a barrier");
    meeting.members = THREADS;
    return meeting;
}
template <int THREADS>
inline void barrier_sync(int barrier) {
    barrier_of<THREADS>(barrier).wait();
}
template <int THREADS>
inline void barrier_arrive(int barrier) {
    barrier_of<THREADS>(barrier).pass();
}

// --- Between CTAs ------------------------------------------------------------------------------------------

// CTAs run one after the other, in the order of their indices: what a CTA waits for must have been released before.
inline void wait_for_value(const int* place, int value) {
    if (*place != value) give_up("it hangs: a CTA waits for one that comes later");
}
inline void release_value(int* place, int value) { *place = value; }
inline float load_from_l2(const float* place) { return *place; }
inline void store_to_l2(float* place, float x) { *place = x; }
inline void add_in_l2(float* place, float x) { *place += x; }
