// dQ, dK and dV at 128 channels. As backward_dq_warps.cu, but the four more warps own dK, too, of 32 keys each: a thread of 12
// warps has 168 registers, and dK and dV of 16 keys would take 128 of them from the warps that hold S, dP and K as well.
//
// There is room for one block of queries. dS for dK takes the place of Q by rows, which nobody needs once S is computed. Warps
// with keys copy dO, the others Q. A block goes through these barriers:
//   FILLED   its Q by rows is there
//   MAXIMA   the maxima of its dS and its dO by columns are there; nobody needs its rows
//   READ     dS of the block before is in registers, so that there is room for its own
//   STORED   its dS is there, and it is this CTA's turn to add to its dQ; the first time: K is in registers

#include "backward.cuh"
#include "copies.cuh"
#include "key_warps.cuh"
#include "launch.cuh"
#include "turns.cuh"

namespace {

static_assert(WARPS == 12 && D == 128);
static_assert(!P_IS_16BIT);     // dV would need dO by rows, which gives way to the next block's while dV is multiplied
constexpr int HALF_BLOCKS = 2;  // one packed block of keys
constexpr int KEY_THREADS = THREADS - DQ_THREADS;
enum Barrier { FILLED = 4, MAXIMA, READ, STORED };  // lower numbers belong to __syncthreads and to warpgroup_sync

// Shared memory: what warps with keys use alone, a packed block of queries by rows, then what the others use.
constexpr int VALUES = 0;
constexpr int GRADS = VALUES + 2 * K_TILE;  // dO by columns
constexpr int Q_ROWS = GRADS + Q_TILE;      // a packed block
constexpr int K_COLUMNS = Q_ROWS + align_up(PACKED_Q_ROWS_BYTES, 128);
constexpr int DS = K_COLUMNS + K_TILE;              // for dQ: (queries, keys) INT8, keys as in tiles by columns
constexpr int Q_COLUMNS = DS + BLOCK_Q * BLOCK_KV;  // Q alone
constexpr int LARGEST = Q_COLUMNS + Q_TILE;         // of each query, of two tiles in turn
constexpr int K_SCALES = LARGEST + 2 * BLOCK_Q * 4;
constexpr int DK_FACTORS = K_SCALES + K_SCALE_BYTES;  // of each key: the scale of its dS, times that of Q
constexpr int SHARED_BYTES = DK_FACTORS + BLOCK_KV * 4;
constexpr int DS_OF_DK = Q_ROWS;  // (keys, queries) INT8
constexpr int K_ROWS = DS;        // until it is in registers
static_assert(BLOCK_KV * BLOCK_Q <= Q_TILE && K_ROWS + K_TILE <= LARGEST);
static_assert(HALF_BLOCKS * STAGING_BYTES <= Q_ROWS && K_COLUMNS + STAGING_BYTES <= LARGEST);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

__device__ __forceinline__ const u8* rows_of(const Arguments& a, const KeyTile& work, const QueryBlocks& at) {
    return a.packed_q_rows + packed_block(a, work, at) * PACKED_Q_ROWS_BYTES;
}
__device__ __forceinline__ const u8* columns_of(const Arguments& a, const KeyTile& work, const QueryBlocks& at) {
    return a.packed_q_columns + packed_block(a, work, at) * PACKED_Q_COLUMNS_BYTES;
}

// --- dS for dK ---------------------------------------------------------------------------------------------
//
// A thread's share passes to the same lane of another warp, 32 bytes in two halves, which leaves no conflicts of banks.

// Of the 16 keys of a warp with keys.
__device__ __forceinline__ void store_left_of_dk(u8* shared, const Scores& scores) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4* ds = reinterpret_cast<uint4*>(shared + DS_OF_DK) + warp * 64 + lane;
    ds[0] = {scores.ds[0], scores.ds[1], scores.ds[2], scores.ds[3]};
    ds[32] = {scores.ds[4], scores.ds[5], scores.ds[6], scores.ds[7]};
    if (lane % 4 == 0)
        reinterpret_cast<float2*>(shared + DK_FACTORS)[warp * 8 + lane / 4] = {scores.dk_factor[0], scores.dk_factor[1]};
}

// Of two warps with keys: the first and the second half of the keys have one each.
struct LeftOfDk {
    u32 ds[2][BLOCK_Q / 8];
    float factor[2][2];
};

__device__ __forceinline__ LeftOfDk load_left_of_dk(const u8* shared) {
    LeftOfDk left;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int warp = dq_thread() / 32 + 4 * half;
        const uint4* ds = reinterpret_cast<const uint4*>(shared + DS_OF_DK) + warp * 64 + lane;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 words = ds[32 * i];
            u32* own = left.ds[half] + 4 * i;
            own[0] = words.x, own[1] = words.y, own[2] = words.z, own[3] = words.w;
        }
        const float2 factor = reinterpret_cast<const float2*>(shared + DK_FACTORS)[warp * 8 + lane / 4];
        left.factor[half][0] = factor.x, left.factor[half][1] = factor.y;
    }
    return left;
}

// Adds a tile's share to half of the channels of dK of 32 keys. As contract_tokens, but Q is loaded once for both halves of keys.
__device__ __forceinline__ void add_dk(float (&dk)[2][D / 2], const LeftOfDk& left, u32 queries, int first_channel) {
    const u32 address = right_address<BLOCK_Q>(queries);
#pragma unroll
    for (int j = first_channel / 8; j < first_channel / 8 + D / 16; ++j) {
        u32 b[4];
        load_right<BLOCK_Q>(b, address, 8 * j, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int product[4] = {0, 0, 0, 0};
            mma_int8(product, left.ds[half], b);
            mma_int8(product, left.ds[half] + 4, b + 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& sum = dk[half][4 * j + i];
                sum = fmaf(__int2float_rn(product[i]), left.factor[half][i / 2], sum);
            }
        }
    }
}

// Stores a gradient of 64 keys, the first or the second half, that the 128 threads of a warpgroup hold.
__device__ __forceinline__ void store_half(const Arguments& a, const TokenTensor& x, const float (&sums)[D / 2], float scale,
                                           const KeyTile& work, int half, u8* staging, int warpgroup) {
    const float scales[2] = {scale, scale};
    store_rows(x, sums, scales, staging, warpgroup, work.kv_head, a.axes.heads, work.first + half * ROWS, work.kv, a.axes.d);
}

// --- The two kinds of warps --------------------------------------------------------------------------------

// dV, and dS for the others: what the warps with keys do.
__device__ __forceinline__ void own_keys(const Arguments& a, const Window& window, const KeyTile& work, QueryBlocks at,
                                         u8* shared) {
    const u32 base = shared_address(shared);
    int* largest = reinterpret_cast<int*>(shared + LARGEST);
    const auto copy_grads = [&](const u8* grads) {
        copy_block<KEY_THREADS>(base + Q_ROWS + GRAD_ROWS, grads, PACKED_Q_ROWS_BYTES - GRAD_ROWS);
    };
    u32 k[D / 8];
#pragma unroll
    for (int step = 0; step < D / STEP; ++step)
        load_left<D>(k + 4 * step, left_address<D>(base + K_ROWS), key_of_warp(), step * STEP);
    barrier_arrive<THREADS>(STORED);

    float dv[D / 2] = {};
    while (at.left > 0) {
        const int parity = at.left % 2, first_query = work.first_query + at.block * BLOCK_Q;
        cp_async_wait<0>();
        barrier_sync<THREADS>(FILLED);
        copy_block<KEY_THREADS>(base + GRADS, columns_of(a, work, at) + GRAD_COLUMNS, Q_TILE);
        cp_async_commit();
        const Tile tile = describe_tile(shared + Q_ROWS, reinterpret_cast<const float*>(shared + K_SCALES),
                                        largest + parity * BLOCK_Q, first_query, a.scale, work, window);
        Scores scores;
        float ds[32];
        compute_scores(scores, ds, tile, k, base + VALUES, base + Q_ROWS);

        cp_async_wait<0>();
        barrier_sync<KEY_THREADS>(MAXIMA);
        at.advance(work.q_tiles);
        if (at.left > 0) copy_grads(rows_of(a, work, at) + GRAD_ROWS);
        cp_async_commit();
        store_left_of_dk(shared, scores);
        barrier_sync<THREADS>(READ);
        if (threadIdx.x < BLOCK_Q) largest[(1 - parity) * BLOCK_Q + threadIdx.x] = 0;
        store_ds(shared + DS, ds, tile.largest, key_of_warp());
        barrier_arrive<THREADS>(STORED);
        contract_tokens<BLOCK_Q, D, P_IS_UNSIGNED>(dv, scores.p, base + GRADS, scores.dv_factor);
    }
    barrier_sync<KEY_THREADS>(MAXIMA);  // nobody needs V and dO
    const int half = threadIdx.x / 128;
    store_half(a, a.dv, dv, 1.0f, work, half, shared + half * STAGING_BYTES, half);
}

// dK and dQ: what the others do.
__device__ __forceinline__ void own_dk(const Arguments& a, const Window& window, const KeyTile& work, QueryBlocks at,
                                       u8* shared) {
    constexpr int WARPGROUP = KEY_THREADS / 128;
    const u32 base = shared_address(shared);
    const int turn = work.first / BLOCK_KV;
    const auto copy_columns = [&] { copy_block<DQ_THREADS>(base + Q_COLUMNS, columns_of(a, work, at), Q_TILE, dq_thread()); };
    float dk[2][D / 2] = {};
    barrier_sync<THREADS>(STORED);
    if (at.left > 0) {
        barrier_arrive<THREADS>(FILLED);
        barrier_arrive<THREADS>(READ);
        copy_columns();
    }
    cp_async_commit();
    while (at.left > 0) {
        const int parity = at.left % 2, first_query = work.first_query + at.block * BLOCK_Q;
        const int head = work.kv_head * a.axes.group + at.head;
        const i64 block = packed_block(a, work, at);
        at.advance(work.q_tiles);
        wait_for_turn(a, block, first_query, turn, window);
        __syncwarp();
        cp_async_wait<0>();
        barrier_sync<THREADS>(STORED);

        const LeftOfDk left_of_dk = load_left_of_dk(shared);
        warpgroup_sync(WARPGROUP);  // there is room for the next block's Q by rows
        if (at.left > 0) copy_block<DQ_THREADS>(base + Q_ROWS, rows_of(a, work, at), GRAD_ROWS, dq_thread());
        cp_async_commit();
        add_dk(dk, left_of_dk, base + Q_COLUMNS, 0);
        cp_async_wait<0>();
        if (at.left > 0) barrier_arrive<THREADS>(FILLED);
        add_dk(dk, left_of_dk, base + Q_COLUMNS, D / 2);

        warpgroup_sync(WARPGROUP);  // nobody needs this block's Q by columns
        if (at.left > 0) copy_columns();
        cp_async_commit();
        const float k_scale = HAS_TOKEN_SCALES ? 1.0f : *reinterpret_cast<const float*>(shared + K_SCALES);
        const LeftOfDq left =
            load_left_of_dq(base + DS, reinterpret_cast<const int*>(shared + LARGEST) + parity * BLOCK_Q, k_scale);
        if (at.left > 0) barrier_arrive<THREADS>(READ);
        add_dq(a, work, head, block, first_query, turn, window, left, base + K_COLUMNS);
        warpgroup_sync(WARPGROUP);  // all have added, and nobody needs K
        pass_turn(a.turns + block, turn);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) store_half(a, a.dk, dk[half], a.scale, work, half, shared + K_COLUMNS, WARPGROUP);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dk_warps_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const u8* kv = a.packed_kv + i64(work.kv_block) * PACKED_KV_BYTES;
    const QueryBlocks at = {0, work.q_tiles - 1, a.axes.group * work.q_tiles};
    copy_block<THREADS>(base + VALUES, kv + K_TILE, 2 * K_TILE);
    copy_block<THREADS>(base + K_COLUMNS, a.packed_k_columns + i64(work.kv_block) * PACKED_K_COLUMNS_BYTES,
                        PACKED_K_COLUMNS_BYTES);
    copy_block<THREADS>(base + K_SCALES, kv + 3 * K_TILE, K_SCALE_BYTES);
    copy_block<THREADS>(base + K_ROWS, kv, K_TILE);
    if (at.left > 0) copy_block<THREADS>(base + Q_ROWS, rows_of(a, work, at), PACKED_Q_ROWS_BYTES);
    cp_async_commit();
    if (threadIdx.x < 2 * BLOCK_Q) reinterpret_cast<int*>(shared + LARGEST)[threadIdx.x] = 0;
    cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x < KEY_THREADS)
        own_keys(a, window, work, at, shared);
    else
        own_dk(a, window, work, at, shared);
}
