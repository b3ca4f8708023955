// The work of kernels whose blocks own queries: items of QUERIES queries of HEADS_PER_BLOCK heads that share a key
// head, WARPGROUPS times 64 rows, drawn by ticket; what the rows see is looked up one item ahead.
#pragma once
#include "blocks.cuh"

#define QUERIES (64 * WARPGROUPS / HEADS_PER_BLOCK)
#define Q_BLOCKS ((TOKENS + QUERIES - 1) / QUERIES)
#define PACKS (GROUP / HEADS_PER_BLOCK)
#define PAIRS (BATCH * KV_HEADS)
#define ITEMS (PAIRS * PACKS * Q_BLOCKS)
#define TURNS (WARPGROUPS > 1 && HEADS_PER_BLOCK == WARPGROUPS)

struct Item {
  int b, kv_head, head, query, key, tiles;  // b < 0: there are no more
};

// Items in an order in which neighbours read the same keys and long ones come first: SECTION key heads at a time.
__device__ __forceinline__ Item item_of(int ticket) {
  const int section = ticket / (SECTION * PACKS * Q_BLOCKS), rest = ticket % (SECTION * PACKS * Q_BLOCKS);
  const int here = min(SECTION, PAIRS - section * SECTION);
  const int block = rest / (here * PACKS), within = rest % (here * PACKS), pair = section * SECTION + within / PACKS;
  Item item;
  item.b = pair / KV_HEADS, item.kv_head = pair % KV_HEADS;
  item.head = item.kv_head * GROUP + within % PACKS * HEADS_PER_BLOCK;
  item.query = (Q_BLOCKS - 1 - block) * QUERIES;
  return item;
}

// A warp's life: draws items and lays down what their rows see, and the rows' statistics where there are any. An item is
// laid down when its slot is forgotten by all that read it.
__device__ __forceinline__ void look_up(Item (&items)[2], int2 (&intervals)[2][QUERIES], float2* of_rows, u32 known,
                                        u32 forgotten, const int* document_start, const int* last_key,
                                        const float* statistics, int* ticket) {
  const int lane = threadIdx.x % 32;
  int slot = 0;
  u32 parity = 1;
  while (true) {
    int number = 0;
    if (lane == 0) number = atomicAdd(ticket, 1);
    number = __shfl_sync(0xffffffffu, number, 0);
    Item item;
    int2 rows[QUERIES / 32];
    float2 row_statistics[2 * WARPGROUPS];
    item.b = -1;
    if (number < ITEMS) {
      item = item_of(number);
#pragma unroll
      for (int i = 0; i < QUERIES / 32; i++)
        rows[i] = keys_of(document_start, last_key, item.b, min(item.query + i * 32 + lane, TOKENS - 1));
      if (statistics) {
#pragma unroll
        for (int i = 0; i < 2 * WARPGROUPS; i++) {
          const int w = i / 2, head = item.head + w % HEADS_PER_BLOCK;
          const int query = item.query + w / HEADS_PER_BLOCK * 64 + i % 2 * 32 + lane;
          const float* of_row = statistics + (size_t)(item.b * HEADS + head) * PADDED + min(query, PADDED - 1);
          row_statistics[i] = make_float2(of_row[0], of_row[DELTAS]);
        }
      }
      item.key = __shfl_sync(0xffffffffu, rows[0].x, 0);
      item.tiles = (__shfl_sync(0xffffffffu, rows[QUERIES / 32 - 1].y, 31) - item.key) / KEYS + 1;
    }
    barrier_wait(forgotten + 8 * slot, parity);
    if (number < ITEMS) {
#pragma unroll
      for (int i = 0; i < QUERIES / 32; i++) intervals[slot][i * 32 + lane] = rows[i];
      if (statistics) {
#pragma unroll
        for (int i = 0; i < 2 * WARPGROUPS; i++) of_rows[slot * WARPGROUPS * 64 + i * 32 + lane] = row_statistics[i];
      }
    }
    if (lane == 0) items[slot] = item;
    __syncwarp();
    if (lane == 0) barrier_arrive(known + 8 * slot);
    if (number >= ITEMS) break;
    slot ^= 1, parity ^= slot == 0;
  }
}

// Takes the scores of keys outside the intervals of a thread's two rows out of a tile that starts at `key`.
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], int key, const int (&first)[2], const int (&last)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int from = first[r] - key - threadIdx.x % 4 * 2, to = last[r] - key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      const int column = i / 2 * 8 + i % 2;
      if (column < from || column > to) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITE;
    }
  }
}
