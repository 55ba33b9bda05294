// dQ from the fp32 sums that backward.cu leaves, a CTA for each chunk.
//
// A kernel of its own: the CTA that added last would have to do this for every block of queries, and others wait for it.

#include "launch.cuh"
#include "nonfinite.cuh"
#include "scheduler.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int CHANNELS = 64, CHUNKS = D / CHANNELS;  // of a chunk; in a packed block of queries
CHECK_LAUNCH(THREADS, 0);

struct Arguments {
    const float* dq_sums;  // of each packed block of queries, chunk by chunk, as the threads that computed it held them
    const int* turns;      // of each chunk: 0 if nothing was added to it, and its sum is not set
    TokenTensor dq;
    Axes axes;  // of q, `heads` are those of queries
    float scale;
};

// Two rows, 8 apart, of 8 channels in 16 bits. Four threads of a warpgroup held them: see int8.cuh.
struct Rows {
    u32 pairs[2][4];
};
__device__ __forceinline__ Rows load_rows(const float4* sums, float scale) {
    Rows rows;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 x = sums[j];
        rows.pairs[0][j] = pack_16bit(infinite_to_nan(x.x * scale), infinite_to_nan(x.y * scale));
        rows.pairs[1][j] = pack_16bit(infinite_to_nan(x.z * scale), infinite_to_nan(x.w * scale));
    }
    return rows;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) finish_dq_kernel(const Arguments a) {
    const int packed_block = blockIdx.x / CHUNKS, first_channel = blockIdx.x % CHUNKS * CHANNELS;
    const int head = packed_block / a.axes.q_blocks, block = packed_block % a.axes.q_blocks;
    const Document q = find_document(a.axes.q, a.axes.n_q, a.axes.q.document == nullptr ? 0 : a.axes.q.document[block]);
    const int first = (block - q.first_block) * BLOCK_Q;
    if (first >= q.tokens) return;
    const bool is_empty = a.turns[blockIdx.x] == 0;  // queries that see no key
    const float4* sums = reinterpret_cast<const float4*>(a.dq_sums) + i64(blockIdx.x) * (BLOCK_Q * CHANNELS / 4);
    u16* base = a.dq.data + head / a.axes.heads * a.dq.stride_b + head % a.axes.heads * a.dq.stride_h +
                (q.start + first) * a.dq.stride_n + first_channel;
    // Neighbouring threads have neighbouring channels.
    const int channel = threadIdx.x % (CHANNELS / 8) * 8;
#pragma unroll
    for (int four = threadIdx.x / (CHANNELS / 8); four < BLOCK_Q / 2; four += THREADS / (CHANNELS / 8)) {
        const Rows rows = is_empty ? Rows{} : load_rows(sums + channel / 8 * 128 + 4 * four, a.scale);
        const int row = four / 8 * 16 + four % 8;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (first + row + 8 * r < q.tokens && first_channel + channel < a.axes.d)
                *reinterpret_cast<uint4*>(base + (row + 8 * r) * a.dq.stride_n + channel) = {
                    rows.pairs[r][0], rows.pairs[r][1], rows.pairs[r][2], rows.pairs[r][3]};
    }
}
