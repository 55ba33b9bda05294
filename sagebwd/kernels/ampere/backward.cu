// dQ, dK and dV. A CTA owns 128 keys of one key head, 16 each warp; it loops over all queries that see them.
//
// For dQ, dS has a scale for each query, and the warps exchange it through shared memory. dQ of a block of queries is added up
// in fp32, one CTA after the other in the order of their keys (turns), so the result does not depend on timing.

#include "backward.cuh"
#include "copies.cuh"
#include "key_warps.cuh"
#include "launch.cuh"
#include "turns.cuh"

namespace {

static_assert(WARPS == 8);
constexpr int HALF_BLOCKS = 16 * WARPS / ROWS;  // of keys; four warps share one

// Shared memory: what stays for the whole work tile, then one block of queries, then what the warps exchange.
constexpr int VALUES = 0;
constexpr int K_COLUMNS = VALUES + 2 * K_TILE;
constexpr int Q_ROWS = K_COLUMNS + K_TILE;                              // a packed block
constexpr int Q_COLUMNS = Q_ROWS + align_up(Q_AND_GRAD_BYTES, 128);  // a packed block
constexpr int DS = Q_COLUMNS + PACKED_Q_COLUMNS_BYTES;                  // (queries, keys) INT8, keys as in tiles by columns
constexpr int LARGEST = DS + BLOCK_Q * BLOCK_KV;                        // of each query, of two tiles in turn
constexpr int K_SCALES = LARGEST + 2 * BLOCK_Q * 4;                     // waiting for a turn empties the L1 cache
constexpr int SHARED_BYTES = K_SCALES + K_SCALE_BYTES;
static_assert(K_TILE <= Q_AND_GRAD_BYTES && HALF_BLOCKS * STAGING_BYTES <= LARGEST);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const u8* keys = a.packed_k + i64(work.kv_block) * PACKED_KV_BYTES;
    const float* k_scales = reinterpret_cast<const float*>(shared + K_SCALES);
    int* largest = reinterpret_cast<int*>(shared + LARGEST);

    copy_values(base + VALUES, a, work);
    copy_block<THREADS, K_SCALE_BYTES>(base + K_SCALES, keys + K_TILE);
    copy_block<THREADS, K_TILE>(base + Q_ROWS, keys);  // K by rows is needed in registers only
    cp_async_commit();
    if (threadIdx.x < 2 * BLOCK_Q) largest[threadIdx.x] = 0;
    cp_async_wait<0>();
    __syncthreads();
    u32 k[D / 8];
    load_keys(k, base + Q_ROWS);
    transpose_keys(shared + K_COLUMNS, shared + Q_ROWS);
    const float v_scale = convert_values(shared + VALUES);
    __syncthreads();

    const u16* grad = first_grad(a, work);
    const auto copy_rows = [&](const QueryBlocks& at) {
        copy_q_and_grad<THREADS>(base + Q_ROWS, a, work, at, grad);
    };
    const auto copy_columns = [&](const QueryBlocks& at) {
        const u8* columns = a.packed_q_columns + packed_block(a, work, at) * PACKED_Q_COLUMNS_BYTES;
        copy_block<THREADS, PACKED_Q_COLUMNS_BYTES>(base + Q_COLUMNS, columns);
    };
    QueryBlocks at = {0, work.q_tiles - 1, a.axes.group * work.q_tiles};
    if (at.left > 0) copy_rows(at);
    cp_async_commit();
    if (at.left > 0) copy_columns(at);
    cp_async_commit();

    Sums sums = {};
    int* finished = nullptr;  // the turn that this CTA has taken but not yet passed on
    const int turn = work.first / BLOCK_KV;
    while (at.left > 0) {
        QueryBlocks next = at;
        next.advance(work.q_tiles);
        cp_async_wait<1>();
        __syncthreads();  // this block's rows are there; dQ of the last block is written

        const int first_query = work.first_query + at.block * BLOCK_Q;
        const Tile tile = describe_tile(shared + Q_ROWS, k_scales, v_scale, largest + at.left % 2 * BLOCK_Q, first_query,
                                        a.scale, work, window);
        if (threadIdx.x < BLOCK_Q) largest[(at.left + 1) % 2 * BLOCK_Q + threadIdx.x] = 0;
        Scores scores;
        float ds[32];
        compute_scores(scores, ds, tile, k, base + VALUES, base + Q_ROWS);

        cp_async_wait<0>();
        __syncthreads();  // the maxima and this block's columns are there; nobody needs its rows but for 16-bit dV
        pass_turn(finished, turn);  // not earlier: it waits until additions have arrived; nor later: copies, too
        if (!P_IS_16BIT && next.left > 0) copy_rows(next);
        if (!P_IS_16BIT) cp_async_commit();
        store_ds(shared + DS, ds, tile.largest, key_of_warp());
        multiply_scores(sums, scores, base + Q_ROWS, base + Q_COLUMNS);
        const i64 block = packed_block(a, work, at);
        wait_for_turn(a, block, first_query, turn, window);

        __syncthreads();  // dS is there, it is this CTA's turn, and nobody needs the columns
        if (P_IS_16BIT && next.left > 0) copy_rows(next);
        if (P_IS_16BIT) cp_async_commit();
        if (next.left > 0) copy_columns(next);
        cp_async_commit();
        const LeftOfDq left = load_left_of_dq(base + DS, tile.largest, HAS_TOKEN_SCALES ? 1.0f : tile.k_scale[0]);
        add_dq(a, work, work.kv_head * a.axes.group + at.head, block, first_query, turn, window, left, base + K_COLUMNS);
        finished = a.turns + block;
        at = next;
    }
    __syncthreads();
    pass_turn(finished, turn);

    store_sums(a, sums, work, shared);
}
