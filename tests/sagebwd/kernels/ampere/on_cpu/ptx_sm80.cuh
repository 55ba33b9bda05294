// Stands in for sagebwd/kernels/ampere/ptx_sm80.cuh on a CPU. A copy arrives when its thread waits for it; until then its
// target holds poison, so that a kernel that reads too early gives a wrong result.
#pragma once

#include "ptx.cuh"

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

// --- mma.sync ----------------------------------------------------------------------------------------------

template <class T>
struct Mma {
    T* sum;
    const u32 *a, *b;
};
using Int8Columns = int __attribute__((vector_size(32)));
using Float8Columns = float __attribute__((vector_size(32)));
template <class T>
using Vector8 = std::conditional_t<std::is_same_v<T, int>, Int8Columns, Float8Columns>;

// PER_WORD values in a word, each of which LEFT or RIGHT takes from the low end of a word.
template <int PER_WORD, auto LEFT, auto RIGHT, class T>
inline void mma(T* sum, const u32* a, const u32* b) {
    Mma<T> own = {sum, a, b};
    warp_instruction(own, [](Mma<T>* const* lanes) HOT {
        constexpr int BITS = 32 / PER_WORD, DEPTH = 8 * PER_WORD;
        T rows[16][DEPTH];
        Vector8<T> columns[DEPTH];
        for (int lane = 0; lane < 32; ++lane)
            for (int k = 0; k < PER_WORD; ++k) {
                const int at = lane % 4 * PER_WORD + k;
                for (int word = 0; word < 4; ++word)
                    rows[lane / 4 + word % 2 * 8][at + word / 2 * 4 * PER_WORD] = LEFT(lanes[lane]->a[word] >> BITS * k);
                for (int word = 0; word < 2; ++word)
                    columns[at + word * 4 * PER_WORD][lane / 4] = RIGHT(lanes[lane]->b[word] >> BITS * k);
            }
        for (int row = 0; row < 16; ++row) {
            const auto sum_of = [&](int column) -> T& { return lanes[row % 8 * 4 + column / 2]->sum[row / 8 * 2 + column % 2]; };
            Vector8<T> sums;
            for (int column = 0; column < 8; ++column) sums[column] = sum_of(column);
            for (int k = 0; k < DEPTH; ++k) sums += rows[row][k] * columns[k];
            for (int column = 0; column < 8; ++column) sum_of(column) = sums[column];
        }
    });
}

[[gnu::always_inline]] inline int signed_byte(u32 word) { return static_cast<signed char>(word); }
[[gnu::always_inline]] inline int unsigned_byte(u32 word) { return static_cast<u8>(word); }
[[gnu::always_inline]] inline float half_word(u32 word) { return to_float(static_cast<u16>(word)); }

template <bool LEFT_UNSIGNED = false>
inline void mma_int8(int (&sum)[4], const u32* a, const u32* b) {
    mma<4, LEFT_UNSIGNED ? unsigned_byte : signed_byte, signed_byte>(sum, a, b);
}
inline void mma_16bit(float* sum, const u32* a, const u32* b) { mma<2, half_word, half_word>(sum, a, b); }

[[gnu::always_inline]] inline float fp16_word(u32 word) { return fp16_to_float(static_cast<u16>(word)); }

// 16 products are added before they are rounded to fp16, as a GPU does it.
inline void mma_16bit(u32* sum, const u32* a, const u32* b) {
    float wide[4];
    for (int i = 0; i < 4; ++i) wide[i] = fp16_word(sum[i / 2] >> i % 2 * 16);
    mma<2, fp16_word, fp16_word>(wide, a, b);
    for (int i = 0; i < 2; ++i) sum[i] = pack_fp16(wide[2 * i], wide[2 * i + 1]);
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

inline float load_from_l2(const float* place) { return *place; }
inline void store_to_l2(float* place, float x) { *place = x; }
inline void add_in_l2(float* place, float x) { *place += x; }
