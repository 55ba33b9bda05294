// dQ, dK and dV. As backward.cu, but four more warps copy the blocks of queries, multiply dQ and take turns. So the eight warps
// that own keys wait neither for copies nor for other CTAs, and a scheduler has three warps to choose from. That leaves each
// thread 168 registers, which is enough for 64 channels.
//
// Blocks of queries lie in two stages in turn. A block goes through these barriers:
//   FILLED   it is there; dS of the block before is in registers, so that there is room for its own
//   MAXIMA   the maxima of its dS are there
//   STORED   its dS is there, and it is this CTA's turn to add to its dQ
//   FREED    nobody needs it, and its dQ is added; one for each stage, because warps with keys run ahead

#include "backward.cuh"
#include "copies.cuh"
#include "key_warps.cuh"
#include "launch.cuh"
#include "turns.cuh"

namespace {

static_assert(WARPS == 12 && D == 64);
constexpr int HALF_BLOCKS = 2;  // one packed block of keys
constexpr int KEY_THREADS = THREADS - DQ_THREADS;
enum Barrier { FILLED = 4, MAXIMA, STORED, FREED };  // lower numbers belong to __syncthreads and to warpgroup_sync

// Shared memory: what stays for the whole work tile, with two blocks of queries in between, then what the warps exchange.
constexpr int VALUES = 0;
constexpr int STAGES = VALUES + 2 * K_TILE;
constexpr int COLUMNS = align_up(Q_AND_GRAD_BYTES, 128);  // of a stage
constexpr int STAGE_BYTES = COLUMNS + PACKED_Q_COLUMNS_BYTES;
constexpr int K_COLUMNS = STAGES + 2 * STAGE_BYTES;
constexpr int K_ROWS = K_COLUMNS + K_TILE;
constexpr int DS = K_ROWS + K_TILE;               // (queries, keys) INT8, keys as in tiles by columns
constexpr int LARGEST = DS + BLOCK_Q * BLOCK_KV;  // of each query, of two tiles in turn
constexpr int K_SCALES = LARGEST + 2 * BLOCK_Q * 4;
constexpr int SHARED_BYTES = K_SCALES + K_SCALE_BYTES;
static_assert(HALF_BLOCKS * STAGING_BYTES <= K_COLUMNS);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

__device__ __forceinline__ int stage_of(const QueryBlocks& at) { return STAGES + at.left % 2 * STAGE_BYTES; }

// COPIERS threads call it; `thread`: which one this is.
template <int COPIERS>
__device__ __forceinline__ void copy_queries(const Arguments& a, const KeyTile& work, const QueryBlocks& at, const u16* grad,
                                             u32 base, int thread) {
    const u8* columns = a.packed_q_columns + packed_block(a, work, at) * PACKED_Q_COLUMNS_BYTES;
    const u32 stage = base + stage_of(at);
    copy_q_and_grad<COPIERS>(stage, a, work, at, grad, thread);
    copy_block<COPIERS, PACKED_Q_COLUMNS_BYTES>(stage + COLUMNS, columns, thread);
}

// dK and dV, and dS for the others: what the warps with keys do.
__device__ __forceinline__ void own_keys(const Arguments& a, const Window& window, const KeyTile& work, QueryBlocks at,
                                         u8* shared, float v_scale) {
    const u32 base = shared_address(shared);
    int* largest = reinterpret_cast<int*>(shared + LARGEST);
    Sums sums = {};
    for (; at.left > 0; at.advance(work.q_tiles)) {
        const int parity = at.left % 2, stage = stage_of(at), first_query = work.first_query + at.block * BLOCK_Q;
        barrier_sync<THREADS>(FILLED);
        const Tile tile = describe_tile(shared + stage, reinterpret_cast<const float*>(shared + K_SCALES), v_scale,
                                        largest + parity * BLOCK_Q, first_query, a.scale, work, window);
        if (threadIdx.x < BLOCK_Q) largest[(1 - parity) * BLOCK_Q + threadIdx.x] = 0;
        u32 k[D / 8];
        load_keys(k, base + K_ROWS);
        Scores scores;
        float ds[32];
        compute_scores(scores, ds, tile, k, base + VALUES, base + stage);

        barrier_sync<KEY_THREADS>(MAXIMA);
        store_ds(shared + DS, ds, tile.largest, key_of_warp());
        barrier_arrive<THREADS>(STORED);
        multiply_scores(sums, scores, base + stage, base + stage + COLUMNS);
        if (at.left > 1) barrier_arrive<THREADS>(FREED + parity);
    }
    barrier_sync<KEY_THREADS>(MAXIMA);  // nobody needs values and queries
    store_sums(a, sums, work, shared);
}

// dQ: what the others do.
__device__ __forceinline__ void add_to_queries(const Arguments& a, const Window& window, const KeyTile& work, QueryBlocks at,
                                               u8* shared) {
    const u32 base = shared_address(shared);
    const u16* grad = first_grad(a, work);
    const int turn = work.first / BLOCK_KV;
    int* finished = nullptr;  // the turn that this CTA has taken but not yet passed on
    if (at.left > 0) barrier_arrive<THREADS>(FILLED);
    while (at.left > 0) {
        const int parity = at.left % 2, first_query = work.first_query + at.block * BLOCK_Q;
        const i64 block = packed_block(a, work, at);
        QueryBlocks next = at;
        next.advance(work.q_tiles);
        if (finished != nullptr) barrier_sync<THREADS>(FREED + 1 - parity);
        pass_turn(finished, turn);  // before copies, for which it would wait
        if (next.left > 0) copy_queries<DQ_THREADS>(a, work, next, grad, base, dq_thread());
        cp_async_commit();
        wait_for_turn(a, block, first_query, turn, window);
        __syncwarp();

        barrier_sync<THREADS>(STORED);
        const float k_scale = HAS_TOKEN_SCALES ? 1.0f : *reinterpret_cast<const float*>(shared + K_SCALES);
        const LeftOfDq left =
            load_left_of_dq(base + DS, reinterpret_cast<const int*>(shared + LARGEST) + parity * BLOCK_Q, k_scale);
        cp_async_wait<0>();
        if (next.left > 0) barrier_arrive<THREADS>(FILLED);
        add_dq(a, work, work.kv_head * a.axes.group + at.head, block, first_query, turn, window, left, base + K_COLUMNS);
        finished = a.turns + block;
        at = next;
    }
    warpgroup_sync(KEY_THREADS / 128);
    pass_turn(finished, turn);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dq_warps_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const u8* keys = a.packed_k + i64(work.kv_block) * PACKED_KV_BYTES;
    const QueryBlocks at = {0, work.q_tiles - 1, a.axes.group * work.q_tiles};
    copy_values(base + VALUES, a, work);
    copy_block<THREADS, K_SCALE_BYTES>(base + K_SCALES, keys + K_TILE);
    copy_block<THREADS, K_TILE>(base + K_ROWS, keys);
    if (at.left > 0) copy_queries<THREADS>(a, work, at, first_grad(a, work), base, threadIdx.x);
    cp_async_commit();
    if (threadIdx.x < 2 * BLOCK_Q) reinterpret_cast<int*>(shared + LARGEST)[threadIdx.x] = 0;
    cp_async_wait<0>();
    __syncthreads();
    transpose_keys(shared + K_COLUMNS, shared + K_ROWS);  // seen by those who compute dQ when dS is
    const float v_scale = convert_values(shared + VALUES);
    if (threadIdx.x < KEY_THREADS)
        own_keys(a, window, work, at, shared, v_scale);
    else
        add_to_queries(a, window, work, at, shared);
}
