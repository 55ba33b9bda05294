// Stands in for sagebwd/kernels/hopper/ptx_sm90.cuh on a CPU. Bulk copies and wgmma complete as late as they may: when a thread
// waits for them. Until then what they write is poison. So a kernel that waits too little, or gives memory back too early,
// computes something else. Only the left operands of wgmma that are in registers are read at once.
#pragma once

#include "ptx.cuh"

// --- mbarriers ---------------------------------------------------------------------------------------------

// Plain arrays: containers of the standard library would take a third of the time that a kernel takes to compile.
struct Barrier {
    u32 address;
    int arrivals, missing;
    i64 bytes;  // in flight
    u32 phase;
};
constexpr int MOST_BARRIERS = 64;
static Barrier barriers[MOST_BARRIERS];
static int initialized = 0;

inline Barrier& barrier_at(u32 address, bool is_new = false) {
    for (int i = 0; i < initialized; ++i)
        if (barriers[i].address == address) return barriers[i];
    if (!is_new || initialized == MOST_BARRIERS) give_up("an mbarrier is not initialized, or too many are");
    return barriers[initialized++];
}

// Changes the barrier, and completes its phase if nothing is pending any more.
template <class Change>
inline void change_barrier(u32 address, Change change) {
    Barrier& barrier = barrier_at(address);
    change(barrier);
    if (barrier.missing < 0) give_up("more arrivals at an mbarrier than the kernel announced");
    if (barrier.missing == 0 && barrier.bytes == 0) {
        barrier.missing = barrier.arrivals;
        barrier.phase ^= 1;
    }
}

inline void barrier_init(u32 barrier, u32 arrivals) {
    barrier_at(barrier, true) = {barrier, int(arrivals), int(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) {
    change_barrier(barrier, [](Barrier& b) { --b.missing; });
}
inline void barrier_expect_bytes(u32 barrier, u32 bytes) {
    change_barrier(barrier, [=](Barrier& b) { b.bytes += bytes, --b.missing; });
}

// conftest.py makes it: where (B, H, N, D) begins, sizes of D, N, H and B, and strides of the last three in elements.
struct TensorMap {
    const u16* data;
    u64 sizes[4], strides[3];
    u64 unused[8];
};

// A copy to shared memory in flight: of bytes that lie together, or of a box of a tensor.
struct BulkCopy {
    u32 barrier, shared, bytes;
    const u8* source;  // nullptr: a box
    TensorMap map;
    int channel, token, head, sequence;
};
constexpr int BOX = 64, MOST_COPIES = 256;
static BulkCopy copies[MOST_COPIES];
static int copies_in_flight = 0;

inline void start_copy(const BulkCopy& copy) {
    if (copies_in_flight == MOST_COPIES) give_up("too many copies without a wait");
    std::memset(shared_memory + copy.shared, POISON, copy.bytes);
    copies[copies_in_flight++] = copy;
}
inline void write_copy(const BulkCopy& copy) {
    if (copy.source) {
        std::memcpy(shared_memory + copy.shared, copy.source, copy.bytes);
        return;
    }
    const TensorMap& map = copy.map;
    const u16* first = map.data + copy.head * map.strides[1] + copy.sequence * map.strides[2];
    for (int n = 0; n < BOX; ++n)
        for (int d = 0; d < BOX; ++d) {
            const bool is_inside = copy.token + n < map.sizes[1] && copy.channel + d < map.sizes[0];
            const u16 value = is_inside ? first[(copy.token + n) * map.strides[0] + copy.channel + d] : 0;
            const u32 o = 128 * n + 2 * d;
            std::memcpy(shared_memory + copy.shared + (o ^ (o >> 3 & 112)), &value, 2);
        }
}
inline void finish_copies(u32 barrier) {
    int left = 0;
    for (int i = 0; i < copies_in_flight; ++i) {
        const BulkCopy& copy = copies[i];
        if (copy.barrier == barrier) {
            write_copy(copy);
            change_barrier(barrier, [&](Barrier& b) { b.bytes -= copy.bytes; });
        } else {
            copies[left++] = copy;
        }
    }
    copies_in_flight = left;
}
inline void barrier_wait(u32 barrier, u32 parity) {
    wait_until([=] {
        finish_copies(barrier);
        return barrier_at(barrier).phase != parity;
    });
}
inline void barrier_wait_asleep(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }
inline void bulk_copy(u32 shared, const u8* global, u32 bytes, u32 barrier) {
    if (shared % 16 || reinterpret_cast<u64>(global) % 16 || bytes % 16 || shared + bytes > sizeof shared_memory)
        give_up("a bulk copy is not aligned or leaves shared memory");
    start_copy({barrier, shared, bytes, global});
}
inline void tensor_copy(u32 shared, const TensorMap& x, int channel, int token, int head, int sequence, u32 barrier) {
    constexpr int BYTES = 2 * BOX * BOX;
    if (shared % 1024 || shared + BYTES > sizeof shared_memory) give_up("a box is not aligned or leaves shared memory");
    if (x.data == nullptr) give_up("a kernel reads a tensor without a tensor map");
    start_copy({barrier, shared, BYTES, nullptr, x, channel, token, head, sequence});
}

// What a thread stores or adds to global memory. Shared memory is read when the thread waits for that, and global memory is
// written when it waits for that.
struct BulkStore {
    float* target;
    u32 source, bytes;
    bool is_sum, is_committed;
    float* values;  // nullptr until they are read
};
constexpr int MOST_STORES = 64;
struct BulkStores {
    BulkStore store[MOST_STORES];
    int count;
};
static BulkStores stores_of_threads[MOST_FIBERS];

inline void bulk_store_or_add(float* global, u32 shared, u32 bytes, bool is_sum) {
    if (shared % 16 || reinterpret_cast<u64>(global) % 16 || bytes % 16 || shared + bytes > sizeof shared_memory)
        give_up("a bulk store is not aligned or leaves shared memory");
    BulkStores& stores = stores_of_threads[threadIdx.x];
    if (stores.count == MOST_STORES) give_up("too many bulk stores without a wait");
    stores.store[stores.count++] = {global, shared, bytes, is_sum};
}
inline void bulk_store(float* global, u32 shared, u32 bytes) { bulk_store_or_add(global, shared, bytes, false); }
inline void bulk_add(float* global, u32 shared, u32 bytes) { bulk_store_or_add(global, shared, bytes, true); }
inline void bulk_commit() {
    BulkStores& stores = stores_of_threads[threadIdx.x];
    for (int i = 0; i < stores.count; ++i) stores.store[i].is_committed = true;
}
inline void bulk_wait_read() {
    let_time_pass();
    BulkStores& stores = stores_of_threads[threadIdx.x];
    for (int i = 0; i < stores.count; ++i) {
        BulkStore& store = stores.store[i];
        if (!store.is_committed || store.values) continue;
        store.values = static_cast<float*>(std::malloc(store.bytes));
        std::memcpy(store.values, shared_memory + store.source, store.bytes);
    }
}
inline void bulk_wait() {
    bulk_wait_read();
    BulkStores& stores = stores_of_threads[threadIdx.x];
    int left = 0;
    for (int i = 0; i < stores.count; ++i) {
        BulkStore store = stores.store[i];
        if (!store.values) {
            stores.store[left++] = store;
            continue;
        }
        for (u32 k = 0; k < store.bytes / 4; ++k)
            store.target[k] = store.is_sum ? store.target[k] + store.values[k] : store.values[k];
        std::free(store.values);
    }
    stores.count = left;
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

// Where byte `i` of a row lies in a swizzled tile whose rows have 64 or 128 bytes. 16 bytes lie together.
[[gnu::always_inline]] inline const u8* in_tile(u32 first, u32 row_bytes, int row, int i) {
    const u32 address = first + row * row_bytes + i;
    return shared_memory + (address ^ (address >> 3 & (row_bytes - 16)));
}

// The 32 bytes of a row that a product takes.
[[gnu::always_inline]] inline void read_row(u64 tile, int row, void* bytes) {
    for (int i = 0; i < 32; i += 16) std::memcpy(static_cast<u8*>(bytes) + i, in_tile(u32(tile) << 4, tile >> 32, row, i), 16);
}
HOT inline void read_row(u64 tile, int row, int (&x)[32]) {
    signed char bytes[32];
    read_row(tile, row, static_cast<void*>(bytes));
    for (int k = 0; k < 32; ++k) x[k] = bytes[k];
}
HOT inline void read_row(u64 tile, int row, float (&x)[16]) {
    u16 bits[16];
    read_row(tile, row, static_cast<void*>(bits));
    for (int k = 0; k < 16; ++k) x[k] = to_float(bits[k]);
}
inline float value_at(const u8* place) {
    u16 bits;
    std::memcpy(&bits, place, 2);
    return to_float(bits);
}

// Element i of a thread's part of a result, see int8.cuh.
inline int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
inline int row_of(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }

// What this thread has of two rows times columns, which read(column, x) gives: four elements at a time.
template <bool ACCUMULATE, int N, class T, int DEPTH, class Read>
HOT inline void multiply(u32* sums, const T (&rows)[2][DEPTH], Read read) {
    using Ints = int __attribute__((vector_size(16)));
    using Floats = float __attribute__((vector_size(16)));
    using Four = std::conditional_t<std::is_same_v<T, int>, Ints, Floats>;
    for (int i = 0; i < N; i += 4) {
        T x[DEPTH], y[DEPTH];
        read(column_of(i), x), read(column_of(i + 1), y);
        Four sum = {};
        if (ACCUMULATE) std::memcpy(&sum, sums + i, sizeof sum);
        for (int k = 0; k < DEPTH; ++k) {
            const Four left = {rows[0][k], rows[0][k], rows[1][k], rows[1][k]}, right = {x[k], y[k], x[k], y[k]};
            sum += left * right;
        }
        std::memcpy(sums + i, &sum, sizeof sum);
    }
}
template <bool ACCUMULATE, int N, class T, int DEPTH>
inline void multiply_rows(const Product& product, u32* sums) {
    T rows[2][DEPTH];
    for (int i = 0; i < 2; ++i) read_row(product.a, row_of(2 * i), rows[i]);
    multiply<ACCUMULATE, N>(sums, rows, [&](int column, T(&x)[DEPTH]) { read_row(product.b, column, x); });
}

template <int ACCUMULATE, int N>
inline void wgmma_int8(int (&sum)[N], u64 a, u64 b) {
    issue(sum, a, b, multiply_rows<ACCUMULATE, N, int, 32>);
}
template <int ACCUMULATE, int N>
inline void wgmma_16bit(int (&sum)[N], u64 a, u64 b) {
    issue(sum, a, b, multiply_rows<ACCUMULATE, N, float, 16>);
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
        const Left& left = reinterpret_cast<const Left&>(product.rows);
        multiply<ACCUMULATE, 32>(sums, left.x, [&](int column, int (&x)[32]) { read_row(product.b, column, x); });
    });
    std::memcpy(product.rows, &rows, sizeof rows);
}
template <int N>
inline void wgmma_16bit(float (&sum)[N], const u32* a, u64 b) {
    using Left = Rows<float, 2>;
    const Left rows = rows_in_registers<float, 2>(a, [](u32 word) { return to_float(static_cast<u16>(word)); });
    Product& product = issue(sum, 0, b, [](const Product& product, u32* sums) {
        const Left& left = reinterpret_cast<const Left&>(product.rows);
        multiply<true, N>(sums, left.x, [&](int column, float (&x)[16]) {
            const u32 chunk = (u32(product.b) << 4) + column / 64 * u32(product.b >> 32);
            for (int k = 0; k < 16; ++k) x[k] = product.b ? value_at(in_tile(chunk, 128, k, column % 64 * 2)) : 1.0f;
        });
    });
    std::memcpy(product.rows, &rows, sizeof rows);
}

// Both operands MN-major: lines of 64 rows of a, or columns of b, one line for each k.
template <int ACCUMULATE, int N>
inline void wgmma_16bit(float (&sum)[N], u64 a, u64 b) {
    issue(sum, a, b, [](const Product& product, u32* sums) {
        const auto read_line = [](u64 tile, int i, float (&x)[16]) {
            for (int k = 0; k < 16; ++k) x[k] = value_at(in_tile(u32(tile) << 4, 128, k, 2 * i));
        };
        float rows[2][16];
        for (int i = 0; i < 2; ++i) read_line(product.a, row_of(2 * i), rows[i]);
        multiply<ACCUMULATE, N>(sums, rows, [&](int column, float (&x)[16]) { read_line(product.b, column, x); });
    });
}
