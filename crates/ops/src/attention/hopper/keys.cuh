// The work of kernels whose blocks own keys: items of TILE keys of one key head, drawn by ticket, with the queries that
// see them; the copies that feed an item. A step is a block of 64 queries of one query head: blocks from the last to
// the first, for each the query heads that share the key head, or with SHARES those of this item's share of them.
#pragma once
#include "blocks.cuh"

#define K_TILES ((TOKENS + TILE - 1) / TILE)
#define GROUPS (TILE / 64)  // of 64 keys
#ifndef SHARES
#define SHARES 1
#endif
#define EACH (GROUP / SHARES)  // query heads of an item
#ifndef BLOCK_ALIGNMENT
#define BLOCK_ALIGNMENT 4  // of the first query of an item, for the copies of its statistics
#endif
// Shared memory, in bytes from its aligned start: k and v of an item in groups of 64 rows, which take dk and dv in the
// end, and steps: q, d_o, statistics and intervals of their queries.
#define K_ROWS (64 * WIDE * 2)
#define V_ROWS (64 * WIDE_V * 2)
#define KV_STAGE (GROUPS * (K_ROWS + V_ROWS))
#define STEP (K_ROWS + V_ROWS)
#define ROWS_STAGE 1024
#define AT_KV 0
#define AT_STEPS (AT_KV + KV_STAGES * KV_STAGE)
#define AT_ROWS (AT_STEPS + STAGES * STEP)

struct Item {
  int b, kv_head, head, key, query, blocks;  // b < 0: there are no more
  int begin[GROUPS], end[GROUPS];      // blocks of queries that see a group of keys
};

// A block's barriers: items known and forgotten; keys ready and taken; steps ready and taken.
#define BARRIERS (4 + 2 * KV_STAGES + 2 * STAGES)
struct Barriers {
  u32 known, forgotten, keys_ready, keys_taken, ready, taken;
};
// READERS of an item, warpgroups that own its keys, arrivals that give a step back.
template <int READERS, int OWNERS, int TAKERS> __device__ __forceinline__ Barriers make_barriers(u32 words) {
  Barriers on;
  on.known = words, on.forgotten = on.known + 16;
  on.keys_ready = on.forgotten + 16, on.keys_taken = on.keys_ready + 8 * KV_STAGES;
  on.ready = on.keys_taken + 8 * KV_STAGES, on.taken = on.ready + 8 * STAGES;
  if (threadIdx.x == 0) {
    const auto ring = [](int stages, u32 ready, u32 taken, int readers) {
      for (int i = 0; i < stages; i++) barrier_init(ready + 8 * i, 1), barrier_init(taken + 8 * i, readers);
    };
    ring(2, on.known, on.forgotten, READERS);
    ring(KV_STAGES, on.keys_ready, on.keys_taken, OWNERS);
    ring(STAGES, on.ready, on.taken, TAKERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  return on;
}

// First of [low, high) for which `holds` is false, which it stays from there on; a warp searches together.
template <typename Holds> __device__ __forceinline__ int first_without(int low, int high, Holds holds) {
  while (low < high) {
    const int stride = (high - low + 31) / 32, at = low + (threadIdx.x % 32 + 1) * stride - 1;
    const int count = __popc(__ballot_sync(0xffffffffu, at < high && holds(at)));
    high = min(high, low + (count + 1) * stride - 1);
    low = min(high, low + count * stride);
  }
  return low;
}

// Items in an order in which neighbours read the same queries and long ones come first: SECTION (shares of) key heads at a
// time.
__device__ __forceinline__ Item item_of(int ticket, int pairs, const int* drawing, const int2* intervals) {
  const int section = ticket / (SECTION * K_TILES), rest = ticket % (SECTION * K_TILES);
  const int here = min(SECTION, pairs - section * SECTION), share = section * SECTION + rest % here, pair = share / SHARES;
  Item item;
  item.b = row_of(drawing, pair), item.kv_head = pair % KV_HEADS, item.key = rest / here * TILE;
  item.head = item.kv_head * GROUP + share % SHARES * EACH;
  const int2* rows = intervals + item.b * PADDED;
  int from[GROUPS], to[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int key = item.key + g * 64, last = min(key + 63, TOKENS - 1);
    from[g] = HAS_LAST ? first_without(0, min(key, TOKENS), [&](int i) { return rows[i].y < key; })
                       : BIDIRECTIONAL ? 0 : key;
    to[g] = key < TOKENS ? first_without(last, TOKENS, [&](int i) { return rows[i].x <= last; }) : 0;
  }
  item.query = from[0] / BLOCK_ALIGNMENT * BLOCK_ALIGNMENT;
  item.blocks = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    item.begin[g] = (from[g] - item.query) / 64;
    item.end[g] = (to[g] - item.query + 63) / 64;
    item.blocks = max(item.blocks, item.end[g]);
  }
  return item;
}

// A warp's life: draws items and lays them down. A slot is overwritten when all that read it have forgotten it.
__device__ __forceinline__ void look_up(Item (&items)[2], const Barriers& on, const int2* intervals, int* drawing) {
  const int lane = threadIdx.x % 32, pairs = pairs_of(drawing) * SHARES, count = pairs * K_TILES;
  int slot = 0;
  u32 parity = 1;
  while (true) {
    int number = 0;
    if (lane == 0) number = atomicAdd(drawing, 1);
    number = __shfl_sync(0xffffffffu, number, 0);
    Item item;
    item.b = -1;
    if (number < count) item = item_of(number, pairs, drawing, intervals);
    barrier_wait(on.forgotten + 8 * slot, parity);
    if (lane == 0) {
      items[slot] = item;
      barrier_arrive(on.known + 8 * slot);
    }
    if (number >= count) break;
    slot ^= 1, parity ^= slot == 0;
  }
}

// A thread's life: feeds the copy engine, item by item, step by step.
__device__ __forceinline__ void feed(const Item (&items)[2], u32 at, const Barriers& on, const TensorMap* q,
                                     const TensorMap* k, const TensorMap* v, const TensorMap* d_o,
                                     const float* statistics, const int2* intervals) {
  Place<2> slot = {0, 0};
  Place<KV_STAGES> of_keys = {0, 1};
  Place<STAGES> of_step = {0, 1};
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item item = items[slot.stage];
    barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();
    if (item.b < 0) return;
    const u32 keys = at + AT_KV + of_keys.stage * KV_STAGE, keys_barrier = on.keys_ready + 8 * of_keys.stage;
    barrier_wait(on.keys_taken + 8 * of_keys.stage, of_keys.parity);
    barrier_expect(keys_barrier, KV_STAGE);
    for (int g = 0; g < GROUPS; g++) {
      fetch<64, WIDE>(keys + g * K_ROWS, k, keys_barrier, item.b, item.key + g * 64, item.kv_head);
      fetch<64, WIDE_V>(keys + GROUPS * K_ROWS + g * V_ROWS, v, keys_barrier, item.b, item.key + g * 64, item.kv_head);
    }
    of_keys.advance();
    for (int block = item.blocks - 1; block >= 0; block--)
#pragma unroll 1
      for (int h = item.head; h < item.head + EACH; h++) {
        const int query = item.query + block * 64;
        const u32 barrier = on.ready + 8 * of_step.stage, step = at + AT_STEPS + of_step.stage * STEP;
        const u32 rows = at + AT_ROWS + of_step.stage * ROWS_STAGE;
        barrier_wait(on.taken + 8 * of_step.stage, of_step.parity);
        barrier_expect(barrier, STEP + ROWS_STAGE);
        fetch<64, WIDE>(step, q, barrier, item.b, query, h);
        fetch<64, WIDE_V>(step + K_ROWS, d_o, barrier, item.b, query, h);
        const float* of_rows = statistics + (size_t)(item.b * HEADS + h) * PADDED + query;
        copy_bytes(rows, of_rows, 256, barrier);
        copy_bytes(rows + 256, of_rows + DELTAS, 256, barrier);
        copy_bytes(rows + 512, intervals + item.b * PADDED + query, 512, barrier);
        of_step.advance();
      }
  }
}

// Takes the scores of queries that do not see a thread's two keys, `key` and the eighth after, out of a block.
__device__ __forceinline__ void hide(float (&s)[32], int key, const int4* intervals) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int4 two = intervals[j * 4 + threadIdx.x % 4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int mine = key + r * 8;
      if (mine < two.x || mine > two.y) s[4 * j + 2 * r] = -INFINITE;
      if (mine < two.z || mine > two.w) s[4 * j + 2 * r + 1] = -INFINITE;
    }
  }
}
