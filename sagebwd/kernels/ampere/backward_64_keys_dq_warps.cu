// dQ, dK and dV with tiles of 64 keys. As backward_64_keys.cu, but four more warps copy the blocks of queries, multiply dQ and take
// turns, see backward_dq_warps.cu. The eight warps that share keys wait for each other only: for the maxima, and two by two for P
// and dS. That is written for 64 channels.
//
// Rows of a block of queries are copied when nobody needs those of the block before, columns at the same time to a second place. A
// block goes through these barriers:
//   FILLED   it is there; dS of the block before is in registers, so that there is room for its own
//   MAXIMA   the maxima of its P and dS are there
//   FREED    the same, and nobody needs its rows and the columns of the block before
//   STORED   its dS is there
//   PAIRS    its P and dS for dV and dK are there, of two warps; one barrier for each two

#include "backward.cuh"
#include "copies.cuh"
#include "launch.cuh"
#include "turns.cuh"
#include "warp_pairs.cuh"

namespace {

static_assert(WARPS == 12 && D == 64);
constexpr int KEY_THREADS = THREADS - DQ_THREADS;
enum Barrier { FILLED = 4, MAXIMA, FREED, STORED, PAIRS };  // lower numbers belong to __syncthreads and to warpgroup_sync

// Shared memory: what warps with keys use alone, blocks of queries, then what the others use and what the warps exchange.
constexpr int VALUES = 0;
constexpr int Q_ROWS = VALUES + 2 * K_TILE;                          // a packed block
constexpr int Q_COLUMNS = Q_ROWS + align_up(Q_AND_GRAD_BYTES, 256);  // two packed blocks
constexpr int K_COLUMNS = Q_COLUMNS + 2 * PACKED_Q_COLUMNS_BYTES;
constexpr int EXCHANGED = K_COLUMNS + K_TILE;
constexpr int LARGEST = EXCHANGED + EXCHANGED_BYTES;  // maxima of two tiles in turn
constexpr int SHARED_BYTES = LARGEST + 2 * int(sizeof(Maxima));
constexpr int K_ROWS = EXCHANGED;  // until it is in registers
static_assert(K_TILE <= EXCHANGED_BYTES && 2 * HALF_STAGING_BYTES <= Q_COLUMNS);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

__device__ __forceinline__ int columns_of(const QueryBlocks& at) { return Q_COLUMNS + at.left % 2 * PACKED_Q_COLUMNS_BYTES; }
__device__ __forceinline__ Maxima& maxima_of(u8* shared, int parity) {
    return reinterpret_cast<Maxima*>(shared + LARGEST)[parity];
}

// COPIERS threads call it; `thread`: which one this is.
template <int COPIERS>
__device__ __forceinline__ void copy_queries(const Arguments& a, const KeyTile& work, const QueryBlocks& at, const u16* grad,
                                             u32 base, int thread) {
    const u8* columns = a.packed_q_columns + packed_block(a, work, at) * PACKED_Q_COLUMNS_BYTES;
    copy_q_and_grad<COPIERS>(base + Q_ROWS, a, work, at, grad, thread);
    copy_block<COPIERS, PACKED_Q_COLUMNS_BYTES>(base + columns_of(at), columns, thread);
}

// dK and dV, and dS for the others: what the warps with keys do.
__device__ __forceinline__ void own_keys(const Arguments& a, const Window& window, const KeyTile& work, QueryBlocks at,
                                         u8* shared, const float* k_scales, float v_scale) {
    const u32 base = shared_address(shared);
    const KeyScales k_scale = load_key_scales(k_scales);
    u32 k[D / 8];
    load_keys(k, base + K_ROWS);
    Sums sums = {};
    for (; at.left > 0; at.advance(work.q_tiles)) {
        const int parity = at.left % 2, first_query = work.first_query + at.block * BLOCK_Q;
        Maxima& largest = maxima_of(shared, parity);
        barrier_sync<THREADS>(FILLED);
        const Tile tile = describe_tile(shared + Q_ROWS, k_scale, v_scale, first_query, a.scale, work, window);
        clear<KEY_THREADS>(maxima_of(shared, 1 - parity));
        Scores scores;
        compute_scores(scores, largest, tile, k, base + VALUES, base + Q_ROWS);

        barrier_arrive<THREADS>(FREED);
        barrier_sync<KEY_THREADS>(MAXIMA);
        const Factors factor = store_scores(shared + EXCHANGED, scores, largest, tile);
        barrier_arrive<THREADS>(STORED);
        barrier_sync<64>(PAIRS + threadIdx.x / 32 % 4);
        multiply_scores(sums, shared + EXCHANGED, base + columns_of(at), factor);
    }
    store_sums(a, sums, work, shared);  // behind MAXIMA nobody needs values, keys and rows
}

// dQ: what the others do.
__device__ __forceinline__ void add_to_queries(const Arguments& a, const Window& window, const KeyTile& work, QueryBlocks at,
                                               u8* shared, const float* k_scales) {
    constexpr int WARPGROUP = KEY_THREADS / 128;
    const u32 base = shared_address(shared);
    const u16* grad = first_grad(a, work);
    const int turn = work.first / BLOCK_KV;
    const float k_scale = HAS_TOKEN_SCALES ? 1.0f : *k_scales;
    if (at.left > 0) barrier_arrive<THREADS>(FILLED);
    while (at.left > 0) {
        const int* largest = largest_of_queries(maxima_of(shared, at.left % 2), 0);
        const int first_query = work.first_query + at.block * BLOCK_Q, head = work.kv_head * a.axes.group + at.head;
        const i64 block = packed_block(a, work, at);
        at.advance(work.q_tiles);
        barrier_sync<THREADS>(FREED);
        if (at.left > 0) copy_queries<DQ_THREADS>(a, work, at, grad, base, dq_thread());
        cp_async_commit();

        barrier_sync<THREADS>(STORED);
        LeftOfDq left[DQ_PASSES];
#pragma unroll
        for (int pass = 0; pass < DQ_PASSES; ++pass)
            left[pass] = load_left_of_dq<HAS_TILE_SCALES>(base + EXCHANGED, largest, k_scale, pass);
        cp_async_wait<0>();
        if (at.left > 0) barrier_arrive<THREADS>(FILLED);
        wait_for_turn(a, block, first_query, turn, window);  // after FILLED: warps with keys go on meanwhile
        __syncwarp();
        warpgroup_sync(WARPGROUP);
#pragma unroll
        for (int pass = 0; pass < DQ_PASSES; ++pass)
            add_dq(a, work, head, block, first_query, turn, window, left[pass], base + K_COLUMNS, pass);
        warpgroup_sync(WARPGROUP);  // all have added
        pass_turn(a.turns + block, turn);
        __syncwarp();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_64_keys_dq_warps_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(256) u8 shared[];
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const u8* keys = a.packed_k + i64(work.kv_block) * PACKED_KV_BYTES;
    const QueryBlocks at = query_blocks(a, work);
    copy_values(base + VALUES, a, work);
    copy_block<THREADS, K_TILE>(base + K_ROWS, keys);
    if (at.left > 0) copy_queries<THREADS>(a, work, at, first_grad(a, work), base, threadIdx.x);
    cp_async_commit();
    clear<THREADS>(maxima_of(shared, 0));
    clear<THREADS>(maxima_of(shared, 1));
    cp_async_wait<0>();
    __syncthreads();
    const float v_scale = convert_values(shared + VALUES);
    transpose_keys(shared + K_COLUMNS, shared + K_ROWS);
    __syncthreads();  // dS will lie where K by rows is
    if (threadIdx.x < KEY_THREADS)
        own_keys(a, window, work, at, shared, k_scales_of(keys), v_scale);
    else
        add_to_queries(a, window, work, at, shared, k_scales_of(keys));
}
