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
    // Whether some query of a tile does not see some of its KEYS. `first_key`: the first key minus the first query. A limit that
    // hides nothing in the whole document cuts no tile, though a tile may reach beyond the document: what is not cut is rounded
    // otherwise, and a document alone has no such limit (Window.narrowed in window.py).
    template <int KEYS = BLOCK_KV>
    __device__ __forceinline__ bool cuts(int first_key, int queries, int keys) const {
        const bool cuts_right = (right == 0 || right < keys - 1) && first_key + KEYS - 1 > right;
        return cuts_right || ((left == 0 || left < queries - 1) && first_key - (STEP_Q - 1) < -left);
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
    tile.kv_tiles = end_of_key_blocks(window, min(end_of_block(tile.first + tile.q_blocks * STEP_Q), tile.q.tokens), tile.keys);
}

// Packed blocks of keys, counted from the first block of a document; end <= begin: none.
struct KeyRange {
    int begin, end;
};

// The blocks that the queries of a work tile see, and those that its packed block `block` sees.
__device__ __forceinline__ KeyRange keys_seen(QueryTile& tile, const Window& window) {
    if constexpr (!HAS_WINDOW) return {0, tile.kv_tiles};
    leave_keys_seen(tile, window);
    return {first_key_block(window, begin_of_block(tile.first)), tile.kv_tiles};
}
__device__ __forceinline__ KeyRange keys_seen_by(const QueryTile& tile, const Window& window, int block) {
    if (block >= tile.q_blocks) return {0, 0};
    if constexpr (!HAS_WINDOW) return {0, visible_kv_tiles(tile, block)};
    const int first = tile.first + block * STEP_Q;
    const int end = min(end_of_block(first + STEP_Q), tile.q.tokens);
    return {first_key_block(window, begin_of_block(first)), end_of_key_blocks(window, end, tile.keys)};
}

// Blocks of queries, counted from the first block of a document; end <= begin: none.
struct QueryRange {
    int begin, end;
};

// The blocks that see a key of the packed block whose first key is `first`.
__device__ __forceinline__ QueryRange queries_that_see(const KeyTile& tile, const Window& window, int first) {
    const int last_key = min(first + BLOCK_KV, tile.kv.tokens) - 1, begin = max(first - window.right, 0) / STEP_Q;
    const int blocks = (tile.q.tokens + STEP_Q - 1) / STEP_Q;
    const bool none = first - window.right >= tile.q.tokens;
    return {begin, none ? 0 : min(blocks, (last_key + window.left) / STEP_Q + 1)};
}

// Leaves the blocks of queries that see a key of the packed blocks, two at most, of which the work tile is a part. KEYS: of the
// work tile.
template <int KEYS>
__device__ __forceinline__ void leave_queries_that_see(KeyTile& tile, const Window& window) {
    const int last = min(tile.first + KEYS, tile.kv.tokens) - 1;
    const QueryRange first_block = queries_that_see(tile, window, tile.first / BLOCK_KV * BLOCK_KV);
    const QueryRange last_block = queries_that_see(tile, window, last / BLOCK_KV * BLOCK_KV);
    tile.q_block = tile.q.first_block * STEPS_OF_BLOCK + first_block.begin;
    tile.q_tiles = max(max(first_block.end, last_block.end) - first_block.begin, 0);  // the last block may be seen by none
    tile.first_query = first_block.begin * STEP_Q;
}
