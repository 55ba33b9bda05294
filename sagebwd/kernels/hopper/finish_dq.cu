// dQ from the fp32 sums that backward.cu leaves, a CTA for each chunk.
//
// A kernel of its own: the CTA that added last would have to do this for every block of queries, and others wait for it.

#include "launch.cuh"
#include "nonfinite.cuh"
#include "scheduler.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int CHANNELS = 64, CHUNKS = D / CHANNELS;  // of a CTA; CTAs of a packed block of queries
constexpr int TURNS = D / 64;                        // of a CTA: see query_gradient.cuh
CHECK_LAUNCH(THREADS, 0);

struct Arguments {
    const float* dq_sums;  // of each packed block of queries, chunk by chunk, transposed, as the threads that computed it held it
    const int* turns;      // of each chunk: 0 if nothing was added to it, and its sum is not set
    TokenTensor dq;
    Axes axes;  // of q, `heads` are those of queries
    float scale;
};

// 16 channels of two queries in 16 bits, from the threads of a warpgroup that held dQ transposed: see int8.cuh.
struct Piece {
    uint4 x[2][2];  // query, then 8 channels

    // With the neighbouring thread: the even one of two takes the first 8 channels of both, the odd one the others. Together they
    // then store 32 bytes of a row at once, a sector of the L2 cache.
    __device__ __forceinline__ void exchange() {
        const bool is_odd = threadIdx.x % 2;
#pragma unroll
        for (int query = 0; query < 2; ++query) {
            uint4(&own)[2] = x[query];
            const uint4 given = own[!is_odd];
            uint4 taken;
            taken.x = __shfl_xor_sync(0xffffffff, given.x, 1), taken.y = __shfl_xor_sync(0xffffffff, given.y, 1);
            taken.z = __shfl_xor_sync(0xffffffff, given.z, 1), taken.w = __shfl_xor_sync(0xffffffff, given.w, 1);
            own[0] = is_odd ? taken : own[0];
            own[1] = is_odd ? own[1] : taken;
        }
    }
};
__device__ __forceinline__ Piece load_piece(const float4* sums, float scale) {
    Piece piece = {};
    float x[8][4];
#pragma unroll
    for (int channel = 0; channel < 8; ++channel) {
        float4 four = sums[4 * channel];
#ifdef INT_SUMS
        const auto exact = [](float bits) { return __int2float_rn(__float_as_int(bits)) * (1.0f / INT_SUMS); };
        four = {exact(four.x), exact(four.y), exact(four.z), exact(four.w)};
#endif
        x[channel][0] = four.x, x[channel][1] = four.y, x[channel][2] = four.z, x[channel][3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto pair = [&](int c) {
            return pack_16bit(infinite_to_nan(x[c][i] * scale), infinite_to_nan(x[c + 1][i] * scale));
        };
        piece.x[i % 2][i / 2] = {pair(0), pair(2), pair(4), pair(6)};
    }
    return piece;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) finish_dq_kernel(const Arguments a) {
    const int chunk = gridDim.x - 1 - blockIdx.x;  // the sums that were added to last are still in the L2 cache
    const int packed_block = chunk / CHUNKS, first_channel = chunk % CHUNKS * CHANNELS;
    const int head = packed_block / a.axes.q_blocks, block = packed_block % a.axes.q_blocks;
    const Document q = find_document(a.axes.q, a.axes.n_q, a.axes.q.document == nullptr ? 0 : a.axes.q.document[block]);
    const int first = (block - q.first_block) * BLOCK_Q;
    if (first >= q.tokens) return;
    const float4* sums = reinterpret_cast<const float4*>(a.dq_sums) + i64(chunk) * (BLOCK_Q * CHANNELS / 4);
    // Neighbouring threads have neighbouring channels: those of one warp that computed dQ each.
    const int warp = threadIdx.x % 4, query = threadIdx.x / 4 * 2;
    Piece piece = load_piece(sums + query / 8 * 128 + warp * 32 + query % 8 / 2, a.scale);
#ifndef NO_TURNS
    if (a.turns[chunk * TURNS] == 0) piece = {};  // queries that see no key: nothing was stored
#endif
    piece.exchange();
    const int channel = first_channel + warp / 2 * 32 + warp % 2 * 8;
    u16* base = a.dq.data + head / a.axes.heads * a.dq.stride_b + head % a.axes.heads * a.dq.stride_h +
                (q.start + first + query) * a.dq.stride_n + channel;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (first + query + i % 2 < q.tokens && channel + i / 2 * 16 < a.axes.d)
            *reinterpret_cast<uint4*>(base + i % 2 * a.dq.stride_n + i / 2 * 16) = piece.x[i % 2][i / 2];
}
