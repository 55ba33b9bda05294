// Which keys a query sees: the causal mask or, if IS_WINDOWED is defined, keys from query - left to query + right.
#pragma once

#include "int8.cuh"
#include "scheduler.cuh"

#ifdef IS_WINDOWED
constexpr bool HAS_WINDOW = true;
#else
constexpr bool HAS_WINDOW = false;
#endif
static_assert(!(HAS_WINDOW && IS_CAUSAL), "with a window, the causal mask is its right limit");

// A parameter of kernels; without IS_WINDOWED nothing reads it. No limit is one that is larger than all tokens.
struct Window {
    int left, right;

    // `distance`: the key minus the query.
    __device__ __forceinline__ bool hides(int distance) const { return distance > right || distance < -left; }
    // Whether some query of a tile does not see some key. `first_key`: the first key minus the first query.
    __device__ __forceinline__ bool cuts(int first_key) const {
        return first_key + BLOCK_KV - 1 > right || first_key - (BLOCK_Q - 1) < -left;
    }
};

// Masks logits as mask() in softmax.cuh does; `query` is counted from the tile's first key.
template <int N>
__device__ __forceinline__ void mask_outside(int (&s)[N], const Window& window, int query) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (window.hides(column - query - i / 2 % 2 * 8)) s[i] = MASKED;
    }
}

// --- Tiles that a window shows; all others are skipped -------------------------------------------------------

// The first packed block of keys that queries from `first` on see, counted from the first block of a document.
__device__ __forceinline__ int first_key_block(const Window& window, int first) { return max(first - window.left, 0) / BLOCK_KV; }
// The last block + 1 that queries before `end` see.
__device__ __forceinline__ int end_of_key_blocks(const Window& window, int end, int keys) {
    return (min(end + window.right, keys) + BLOCK_KV - 1) / BLOCK_KV;
}

// Leaves the blocks of keys that some query of the work tile sees.
__device__ __forceinline__ void leave_keys_seen(QueryTile& tile, const Window& window) {
    tile.kv_tiles = end_of_key_blocks(window, min(tile.first + tile.q_blocks * BLOCK_Q, tile.q.tokens), tile.keys);
}

// Leaves the blocks of queries that see a key of the work tile: those of whose keys, as above, the work tile is a part.
__device__ __forceinline__ void leave_queries_that_see(KeyTile& tile, const Window& window) {
    const int last_key = min(tile.first + BLOCK_KV, tile.kv.tokens) - 1;
    const int begin = max(tile.first - window.right, 0) / BLOCK_Q, end = (last_key + window.left) / BLOCK_Q + 1;
    const bool none = tile.first - window.right >= tile.q.tokens;
    tile.q_block += begin;
    tile.q_tiles = none ? 0 : max(min(tile.q_tiles, end) - begin, 0);
    tile.first_query = begin * BLOCK_Q;
}
