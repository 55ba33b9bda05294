// The tile scheduler: which block of tokens of which head a CTA works on next.
//
// Work tiles differ in length, under the causal mask or with documents. So CTAs are persistent and take the next work tile
// from a counter when they are free (dynamic scheduling). The order is LPT, longest processing time first: the last work
// tiles are short, and all CTAs end at nearly the same time. A few heads that read the same K and V, or that fit the L2
// cache together, are taken side by side.
#pragma once

#include "layout.cuh"

constexpr int HEADS_TOGETHER = 8;

// Where queries and keys lie. A work tile is a block of tokens of one of `work_heads`, either of queries (forward, dQ) or of
// keys (dK, dV). Packed blocks have 64 queries and 128 keys, or others; work tiles are several of them. Below, a block of queries is
// a step, STEP_Q of them: a packed block or, where a warpgroup takes 64 of 128 queries, half of one.
struct Axes {
    Segments work, q, kv;
    int* tile_counter;  // work tiles taken after the first of each CTA; zero at the start
    int n_q, n_kv, d, heads, group, work_heads, work_blocks, q_blocks, kv_blocks;
};

// Call it when all loads of the current work tile are issued: they hide the latency of the atomic, and no other CTA is kept
// from a work tile that would have to wait here.
__device__ __forceinline__ int next_work_tile(const Axes& a) { return gridDim.x + atomicAdd(a.tile_counter, 1); }

struct WorkTile {
    int head;  // -1: there is no such work tile
    int rank;  // of the block in its head, the longest under the causal mask being 0
};

__device__ __forceinline__ WorkTile work_tile_at(const Axes& a, int index) {
    if (index >= a.work_heads * a.work_blocks) return {-1, 0};
    const int first_head = index / (HEADS_TOGETHER * a.work_blocks) * HEADS_TOGETHER;
    const int heads = min(HEADS_TOGETHER, a.work_heads - first_head), offset = index - first_head * a.work_blocks;
    return {first_head + offset % heads, offset / heads};
}

// A work tile of queries.
struct QueryTile {
    Document q;
    int document;            // its index, which is that of its keys as well
    int head, first;         // first query
    int q_block, kv_block;   // first step; first packed block of keys; both counted over all heads
    int q_blocks;            // steps that exist, at most BLOCKS
    int keys, kv_tiles;      // keys of the document; packed blocks of keys that any query sees
    int kv_start;            // first key of the document
};

// All steps of a packed block visit the same keys, those of its tiles: a NaN in a tile then shows in all of its rows, as in the
// reference. These are the first query of the block that holds this one, and the end of the block that holds the last before `end`.
__device__ __forceinline__ int begin_of_block(int query) { return STEPS_OF_BLOCK == 1 ? query : query / BLOCK_Q * BLOCK_Q; }
__device__ __forceinline__ int end_of_block(int end) { return STEPS_OF_BLOCK == 1 ? end : align_up(end, BLOCK_Q); }

// BLOCKS: steps in a work tile. False: there are no queries in this one.
template <int BLOCKS>
__device__ __forceinline__ bool find_query_tile(const Axes& a, const WorkTile& work_tile, QueryTile& tile) {
    const int block = a.work_blocks - 1 - work_tile.rank;  // the last queries see the most keys
    const int document = a.work.document == nullptr ? 0 : a.work.document[block];
    const Document work = find_document(a.work, a.n_q, document), kv = find_document(a.kv, a.n_kv, document);
    tile.q = find_document(a.q, a.n_q, document);
    tile.document = document;
    tile.head = work_tile.head;
    tile.first = (block - work.first_block) * STEP_Q * BLOCKS;
    tile.q_block = (tile.head * a.q_blocks + tile.q.first_block) * STEPS_OF_BLOCK + tile.first / STEP_Q;
    tile.q_blocks = min((tile.q.tokens - tile.first + STEP_Q - 1) / STEP_Q, BLOCKS);
    tile.kv_block = tile.head / a.group * a.kv_blocks + kv.first_block;
    tile.keys = kv.tokens;
    tile.kv_start = kv.start;
    int end = end_of_block(tile.first + STEP_Q * BLOCKS);
    if (STEPS_OF_BLOCK > 1) end = min(end, tile.q.tokens);
    tile.kv_tiles = ((IS_CAUSAL ? min(kv.tokens, end) : kv.tokens) + BLOCK_KV - 1) / BLOCK_KV;
    return tile.first < tile.q.tokens;
}

// Packed blocks of keys that the packed block of one step sees.
__device__ __forceinline__ int visible_kv_tiles(const QueryTile& tile, int block) {
    const int end = end_of_block(tile.first + (block + 1) * STEP_Q);
    return IS_CAUSAL ? min(tile.kv_tiles, (end + BLOCK_KV - 1) / BLOCK_KV) : tile.kv_tiles;
}

// A work tile of keys.
struct KeyTile {
    Document q, kv;
    int kv_head, first;     // first key
    int kv_block;           // packed block that holds `first`, counted over all heads; `first` is its key 0 or 64
    int half_blocks;        // halves of packed blocks that exist, at most HALF_BLOCKS
    int q_block, q_tiles;   // steps that see a key: the first of them, in its head; how many
    int first_query;        // of these steps
};

// HALF_BLOCKS: 64 keys each, in a work tile. False: there are no keys in this one.
template <int HALF_BLOCKS>
__device__ __forceinline__ bool find_key_tile(const Axes& a, const WorkTile& work_tile, KeyTile& tile) {
    constexpr int KEYS = BLOCK_KV / 2;
    const int block = work_tile.rank;  // the first keys are seen by the most queries
    const int document = a.work.document == nullptr ? 0 : a.work.document[block];
    const Document work = find_document(a.work, a.n_kv, document);
    tile.q = find_document(a.q, a.n_q, document);
    tile.kv = find_document(a.kv, a.n_kv, document);
    tile.kv_head = work_tile.head;
    tile.first = (block - work.first_block) * KEYS * HALF_BLOCKS;
    tile.kv_block = tile.kv_head * a.kv_blocks + tile.kv.first_block + tile.first / BLOCK_KV;
    tile.half_blocks = min((tile.kv.tokens - tile.first + KEYS - 1) / KEYS, HALF_BLOCKS);
    const int end = (tile.q.tokens + STEP_Q - 1) / STEP_Q, begin = IS_CAUSAL ? min(tile.first / STEP_Q, end) : 0;
    tile.q_block = tile.q.first_block * STEPS_OF_BLOCK + begin;
    tile.q_tiles = end - begin;
    tile.first_query = begin * STEP_Q;
    return tile.first < tile.kv.tokens;
}
