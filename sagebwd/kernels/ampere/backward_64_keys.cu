// dQ, dK and dV with tiles of 64 keys. As backward.cu, but two warps share 16 keys, see warp_pairs.cuh.

#include "backward.cuh"
#include "copies.cuh"
#include "launch.cuh"
#include "turns.cuh"
#include "warp_pairs.cuh"

namespace {

static_assert(WARPS == 8);

// Shared memory: what stays for the whole work tile, then the rows and columns of a block of queries and what the warps
// exchange. Where that is too much, rows and the rest lie in one place: rows are no longer needed when P and dS are known.
constexpr int VALUES = 0;
constexpr int K_COLUMNS = VALUES + 2 * K_TILE;
constexpr int MAXIMA = K_COLUMNS + K_TILE;  // of two tiles in turn
constexpr int Q_ROWS = align_up(MAXIMA + 2 * int(sizeof(Maxima)), 256);  // a packed block
constexpr int ROWS_END = Q_ROWS + align_up(Q_AND_GRAD_BYTES, 256);
constexpr int COLUMNS_BYTES = PACKED_Q_COLUMNS_BYTES + EXCHANGED_BYTES;
constexpr int SHARED_LIMIT = 99 * 1024 - 256;  // of a GeForce, without static variables
constexpr bool IS_ALIASED = ROWS_END + COLUMNS_BYTES > SHARED_LIMIT;
constexpr int Q_COLUMNS = IS_ALIASED ? Q_ROWS : ROWS_END;  // a packed block
constexpr int EXCHANGED = Q_COLUMNS + PACKED_Q_COLUMNS_BYTES;
constexpr int COLUMNS_END = Q_COLUMNS + COLUMNS_BYTES;
constexpr int SHARED_BYTES = ROWS_END > COLUMNS_END ? ROWS_END : COLUMNS_END;
static_assert(K_TILE <= Q_AND_GRAD_BYTES && 2 * HALF_STAGING_BYTES <= SHARED_BYTES);
CHECK_LAUNCH(THREADS, SHARED_BYTES);

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_64_keys_kernel(const Arguments a, const Window window) {
    extern __shared__ __align__(256) u8 shared[];  // no more, because static variables take as much
    __shared__ KeyTile work;
    if (!take_work_tile<HALF_BLOCKS>(a.axes, window, work)) return;
    const u32 base = shared_address(shared);
    const u8* keys = a.packed_k + i64(work.kv_block) * PACKED_KV_BYTES;
    Maxima* maxima = reinterpret_cast<Maxima*>(shared + MAXIMA);

    copy_values(base + VALUES, a, work);
    copy_block<THREADS, K_TILE>(base + Q_ROWS, keys);  // K by rows is needed in registers only
    cp_async_commit();
    clear<THREADS>(maxima[0]);
    clear<THREADS>(maxima[1]);
    cp_async_wait<0>();
    __syncthreads();
    u32 k[D / 8];
    load_keys(k, base + Q_ROWS);
    transpose_keys(shared + K_COLUMNS, shared + Q_ROWS);
    const float v_scale = convert_values(shared + VALUES);
    __syncthreads();

    const u16* grad = first_grad(a, work);
    const auto copy_rows = [&](const QueryBlocks& at) {
        if (at.left > 0) copy_q_and_grad<THREADS>(base + Q_ROWS, a, work, at, grad);
        cp_async_commit();
    };
    const auto copy_columns = [&](const QueryBlocks& at) {
        const u8* columns = a.packed_q_columns + packed_block(a, work, at) * PACKED_Q_COLUMNS_BYTES;
        copy_block<THREADS, PACKED_Q_COLUMNS_BYTES>(base + Q_COLUMNS, columns);
        cp_async_commit();
    };
    QueryBlocks at = query_blocks(a, work);
    copy_rows(at);

    const KeyScales k_scale = load_key_scales(k_scales_of(keys));
    Sums sums = {};
    int* finished = nullptr;  // the turn that this CTA has taken but not yet passed on
    const int turn = work.first / BLOCK_KV;
    while (at.left > 0) {
        QueryBlocks next = at;
        next.advance(work.q_tiles);
        cp_async_wait<0>();
        __syncthreads();  // this block's rows are there; dQ of the last block is written, and nobody needs its columns
        if (!IS_ALIASED) copy_columns(at);

        const int first_query = work.first_query + at.block * BLOCK_Q;
        Maxima& largest = maxima[at.left % 2];
        const Tile tile = describe_tile(shared + Q_ROWS, k_scale, v_scale, first_query, a.scale, work, window);
        clear<THREADS>(maxima[(at.left + 1) % 2]);
        Scores scores;
        compute_scores(scores, largest, tile, k, base + VALUES, base + Q_ROWS);

        cp_async_wait<0>();
        __syncthreads();  // the maxima are there, the columns too unless they lie where the rows are; nobody needs these
        pass_turn(finished, turn);  // not earlier: it waits until additions have arrived; nor later: copies, too
        if (IS_ALIASED) copy_columns(at);
        if (!IS_ALIASED) copy_rows(next);
        const Factors factor = store_scores(shared + EXCHANGED, scores, largest, tile);
        const i64 block = packed_block(a, work, at);
        wait_for_turn(a, block, first_query, turn, window);
        if (IS_ALIASED) cp_async_wait<0>();

        __syncthreads();  // P, dS and the columns are there, and it is this CTA's turn
        multiply_scores(sums, shared + EXCHANGED, base + Q_COLUMNS, factor);
        const LeftOfDq left = load_left_of_dq<HAS_TILE_SCALES>(base + EXCHANGED, largest_of_queries(largest, 0),
                                                               HAS_TOKEN_SCALES ? 1.0f : tile.k_scale[0]);
        add_dq(a, work, work.kv_head * a.axes.group + at.head, block, first_query, turn, window, left, base + K_COLUMNS);
        finished = a.turns + block;
        if (IS_ALIASED) {
            __syncthreads();  // nobody needs the columns
            copy_rows(next);
        }
        at = next;
    }
    __syncthreads();
    pass_turn(finished, turn);
    store_sums(a, sums, work, shared);
}
