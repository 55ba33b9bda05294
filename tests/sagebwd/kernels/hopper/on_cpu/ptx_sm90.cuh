// Stands in for sagebwd/kernels/hopper/ptx_sm90.cuh on a CPU. Bulk copies and wgmma complete as late as they may: when a thread
// waits for them. Until then what they write is poison. So a kernel that waits too little, or gives memory back too early,
// computes something else. Only the left operands of wgmma that are in registers are read at once.
#pragma once

#include <functional>
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

// Writes a copy to shared memory.
struct BulkCopy {
    std::function<void()> write;
    u32 bytes;
};
static std::map<u32, std::vector<BulkCopy>> copies_by_barrier;  // in flight

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
inline void finish_copies(u32 barrier) {
    std::vector<BulkCopy>& copies = copies_by_barrier[barrier];
    for (const BulkCopy& copy : copies) {
        copy.write();
        change_barrier(barrier, [=](Barrier& b) { b.bytes -= copy.bytes; });
    }
    copies.clear();
}
inline void barrier_wait(u32 barrier, u32 parity) {
    wait_until([=] {
        finish_copies(barrier);
        return barriers_by_address.at(barrier).phase != parity;
    });
}
inline void barrier_wait_asleep(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }
inline void bulk_copy(u32 shared, const u8* global, u32 bytes, u32 barrier) {
    if (shared % 16 || reinterpret_cast<u64>(global) % 16 || bytes % 16 || shared + bytes > sizeof shared_memory)
        give_up("a bulk copy is not aligned or leaves shared memory");
    std::memset(shared_memory + shared, POISON, bytes);
    copies_by_barrier[barrier].push_back({[=] { std::memcpy(shared_memory + shared, global, bytes); }, bytes});
}

// conftest.py makes it: where (B, H, N, D) begins, sizes of D, N, H and B, and strides of the last three in elements.
struct TensorMap {
    const u16* data;
    u64 sizes[4], strides[3];
    u64 unused[8];
};
inline void tensor_copy(u32 shared, const TensorMap& x, int channel, int token, int head, int sequence, u32 barrier) {
    constexpr int BOX = 64, BYTES = 2 * BOX * BOX;
    if (shared % 1024 || shared + BYTES > sizeof shared_memory) give_up("a box is not aligned or leaves shared memory");
    if (x.data == nullptr) give_up("a kernel reads a tensor without a tensor map");
    std::memset(shared_memory + shared, POISON, BYTES);
    const auto write = [=, map = x] {
        const u16* first = map.data + head * map.strides[1] + sequence * map.strides[2];
        for (int n = 0; n < BOX; ++n)
            for (int d = 0; d < BOX; ++d) {
                const bool is_inside = token + n < map.sizes[1] && channel + d < map.sizes[0];
                const u16 value = is_inside ? first[(token + n) * map.strides[0] + channel + d] : 0;
                const u32 o = 128 * n + 2 * d;
                std::memcpy(shared_memory + shared + (o ^ (o >> 3 & 112)), &value, 2);
            }
    };
    copies_by_barrier[barrier].push_back({write, BYTES});
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
    let_time_pass();
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
inline void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
    StoreMatrix own = {address, {a, b, c, d}};
    if (own.address % 16 || own.address > sizeof shared_memory - 16) give_up("a row of a matrix is not aligned or outside");
    warp_instruction(own, [](StoreMatrix* const* lanes) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int e = 0; e < 2; ++e) {
                    const int row = lane / 4, column = lane % 4 * 2 + e;
                    const u16 value = static_cast<u16>(lanes[lane]->x[i] >> 16 * e);
                    std::memcpy(shared_memory + lanes[8 * i + row]->address + 2 * column, &value, 2);
                }
    });
}

// --- Between CTAs ------------------------------------------------------------------------------------------

// CTAs run one after the other: another one has released the value before, or another thread of this one will.
inline void wait_for_value(const int* place, int value) {
    wait_until([=] { return *place == value; });
}
inline void release_value(int* place, int value) { *place = value; }

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

// The products of a thread that are in flight, in the order of their groups. Their sums are kept here; the thread's own
// registers are poison.
struct Product {
    u32* sum;
    void (*add)(const Product&, u32*);
    u64 a, b;
    int group;
    u32 rows[64];  // of a left operand in registers
};
struct Sum {
    u32 *registers, kept[64];
    int size;
};
constexpr int MOST_PRODUCTS = 48, MOST_SUMS = 4;
struct Products {
    Product product[MOST_PRODUCTS];
    Sum sum[MOST_SUMS];
    int count, sums, groups;

    Sum& sum_of(u32* registers) {
        for (int i = 0; i < sums; ++i)
            if (sum[i].registers == registers) return sum[i];
        if (sums == MOST_SUMS) give_up("too many products without a wait");
        sum[sums].registers = nullptr;
        return sum[sums++];
    }
    bool is_in_flight(u32* registers) const {
        for (int i = 0; i < count; ++i)
            if (product[i].sum == registers) return true;
        return false;
    }
};
static Products products_of_threads[MOST_FIBERS];

template <class T, int N>
inline Product& issue(T (&sum)[N], u64 a, u64 b, void (*add)(const Product&, u32*)) {
    Products& products = products_of_threads[threadIdx.x];
    Sum& kept = products.sum_of(reinterpret_cast<u32*>(sum));
    if (kept.registers == nullptr) {
        std::memcpy(kept.kept, sum, sizeof sum);
        std::memset(sum, POISON, sizeof sum);
        kept.registers = reinterpret_cast<u32*>(sum), kept.size = sizeof sum;
    }
    if (products.count == MOST_PRODUCTS) give_up("too many products without a wait");
    Product& product = products.product[products.count++];
    product.sum = kept.registers, product.add = add, product.a = a, product.b = b, product.group = products.groups;
    return product;
}
inline void wgmma_commit() { ++products_of_threads[threadIdx.x].groups; }

template <int PENDING>
inline void wgmma_wait() {
    Products& products = products_of_threads[threadIdx.x];
    int done = 0, left = 0;
    for (; done < products.count && products.product[done].group < products.groups - PENDING; ++done)
        products.product[done].add(products.product[done], products.sum_of(products.product[done].sum).kept);
    for (int i = done; i < products.count; ++i) products.product[i - done] = products.product[i];
    products.count -= done;
    for (int i = 0; i < products.sums; ++i) {
        if (products.is_in_flight(products.sum[i].registers))
            products.sum[left++] = products.sum[i];
        else
            std::memcpy(products.sum[i].registers, products.sum[i].kept, products.sum[i].size);
    }
    products.sums = left;
}
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
    issue(sum, a, b, [](const Product& product, u32* sums) {
        int* sum = reinterpret_cast<int*>(sums);
        for (int i = 0; i < N; ++i) {
            if (!ACCUMULATE) sum[i] = 0;
            for (int k = 0; k < 32; ++k)
                sum[i] += int8_at(product.a, row_of(i), k) * int8_at(product.b, column_of(i), k);
        }
    });
}
template <int ACCUMULATE, int N>
inline void wgmma_16bit(int (&sum)[N], u64 a, u64 b) {
    issue(sum, a, b, [](const Product& product, u32* sum) {
        for (int i = 0; i < N; ++i) {
            float x = ACCUMULATE ? __uint_as_float(sum[i]) : 0.0f;
            for (int k = 0; k < 16; ++k)
                x += value_at(in_row(product.a, row_of(i), 2 * k)) * value_at(in_row(product.b, column_of(i), 2 * k));
            sum[i] = __float_as_uint(x);
        }
    });
}

// The two rows of a left operand of which this thread has results, from the registers of the warp: of each row four
// lanes hold 4 PER_WORD columns in words 0 and 1 (which is the second row), and as many in words 2 and 3.
template <class T, int PER_WORD>
struct Rows {
    T x[2][8 * PER_WORD];
};
template <class T, int PER_WORD, class Read>
inline Rows<T, PER_WORD> rows_in_registers(const u32* own, Read read) {
    return of_all_lanes(own, 4, [&](OfLanes& lanes) {
        Rows<T, PER_WORD> rows;
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
    using Left = Rows<int, 4>;
    const Left rows = rows_in_registers<int, 4>(
        a, [](u32 word) { return LEFT_UNSIGNED ? int(static_cast<u8>(word)) : int(static_cast<signed char>(word)); });
    Product& product = issue(sum, 0, b, [](const Product& product, u32* sums) {
        const Left& rows = reinterpret_cast<const Left&>(product.rows);
        int* sum = reinterpret_cast<int*>(sums);
        for (int i = 0; i < 32; ++i) {
            if (!ACCUMULATE) sum[i] = 0;
            for (int k = 0; k < 32; ++k) sum[i] += rows.x[i / 2 % 2][k] * int8_at(product.b, column_of(i), k);
        }
    });
    std::memcpy(product.rows, &rows, sizeof rows);
}
template <int N>
inline void wgmma_16bit(float (&sum)[N], const u32* a, u64 b) {
    using Left = Rows<float, 2>;
    const Left rows = rows_in_registers<float, 2>(a, [](u32 word) { return to_float(static_cast<u16>(word)); });
    Product& product = issue(sum, 0, b, [](const Product& product, u32* sums) {
        const Left& rows = reinterpret_cast<const Left&>(product.rows);
        float* sum = reinterpret_cast<float*>(sums);
        for (int i = 0; i < N; ++i) {
            const int column = column_of(i);
            for (int k = 0; k < 16; ++k) {
                const u32 chunk = (u32(product.b) << 4) + column / 64 * u32(product.b >> 32);
                const float right = product.b ? value_at(in_tile(chunk, 128, k, column % 64 * 2)) : 1.0f;
                sum[i] += rows.x[i / 2 % 2][k] * right;
            }
        }
    });
    std::memcpy(product.rows, &rows, sizeof rows);
}

// Both operands MN-major: lines of 64 rows of a, or columns of b, one line for each k.
inline float value_at(u64 tile, int k, int i) { return value_at(in_tile(u32(tile) << 4, 128, k, 2 * i)); }
template <int ACCUMULATE, int N>
inline void wgmma_16bit(float (&sum)[N], u64 a, u64 b) {
    issue(sum, a, b, [](const Product& product, u32* sums) {
        float* sum = reinterpret_cast<float*>(sums);
        for (int i = 0; i < N; ++i) {
            if (!ACCUMULATE) sum[i] = 0.0f;
            for (int k = 0; k < 16; ++k) sum[i] += value_at(product.a, k, row_of(i)) * value_at(product.b, k, column_of(i));
        }
    });
}
