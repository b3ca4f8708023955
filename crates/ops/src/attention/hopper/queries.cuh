// The work of kernels whose blocks own queries: items of QUERIES queries of HEADS_PER_BLOCK heads that share a key
// head, WARPGROUPS times 64 rows, drawn by ticket; what the rows see is looked up one item ahead. JOINT: all
// warpgroups visit all tiles of an item.
#pragma once
#include "blocks.cuh"

#define QUERIES (64 * WARPGROUPS / HEADS_PER_BLOCK)
#define Q_BLOCKS ((TOKENS + QUERIES - 1) / QUERIES)
#define PACKS (GROUP / HEADS_PER_BLOCK)
#define ITEMS_OF_PAIR (PACKS * Q_BLOCKS)
#define TURNS (JOINT || WARPGROUPS > 1 && HEADS_PER_BLOCK == WARPGROUPS)
#define K_STAGE (KEYS * WIDE * 2)    // bytes of a tile of keys, and of values
#define V_STAGE (KEYS * WIDE_V * 2)

struct Item {
  int b, kv_head, head, query, key, tiles;  // b < 0: there are no more
};

// A block's barriers: items known and forgotten; tiles of queries, keys and values ready and taken.
#define BARRIERS (4 + 2 * Q_STAGES + 2 * STAGES + 2 * V_STAGES)
struct Barriers {
  u32 known, forgotten, q_ready, q_taken, k_ready, k_taken, v_ready, v_taken;
};
__device__ __forceinline__ Barriers make_barriers(const u64 (&words)[BARRIERS]) {
  Barriers on;
  on.known = shared_address(words), on.forgotten = on.known + 16;
  on.q_ready = on.forgotten + 16, on.q_taken = on.q_ready + 8 * Q_STAGES;
  on.k_ready = on.q_taken + 8 * Q_STAGES, on.k_taken = on.k_ready + 8 * STAGES;
  on.v_ready = on.k_taken + 8 * STAGES, on.v_taken = on.v_ready + 8 * V_STAGES;
  if (threadIdx.x == 0) {
    const auto ring = [](int stages, u32 ready, u32 taken, int readers) {
      for (int i = 0; i < stages; i++) barrier_init(ready + 8 * i, 1), barrier_init(taken + 8 * i, readers);
    };
    ring(2, on.known, on.forgotten, WARPGROUPS + 1);
    ring(Q_STAGES, on.q_ready, on.q_taken, WARPGROUPS);
    ring(STAGES, on.k_ready, on.k_taken, WARPGROUPS);
    ring(V_STAGES, on.v_ready, on.v_taken, WARPGROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  return on;
}

// Items in an order in which neighbours read the same keys and long ones come first: SECTION key heads at a time.
__device__ __forceinline__ Item item_of(int ticket, int pairs, const int* drawing) {
  const int section = ticket / (SECTION * ITEMS_OF_PAIR), rest = ticket % (SECTION * ITEMS_OF_PAIR);
  const int here = min(SECTION, pairs - section * SECTION);
  const int block = rest / (here * PACKS), within = rest % (here * PACKS), pair = section * SECTION + within / PACKS;
  Item item;
  item.b = row_of(drawing, pair), item.kv_head = pair % KV_HEADS;
  item.head = item.kv_head * GROUP + within % PACKS * HEADS_PER_BLOCK;
  item.query = (Q_BLOCKS - 1 - block) * QUERIES;
  return item;
}

// A warp's life: draws items and lays down what their rows see, and the rows' statistics where there are any. An item
// is laid down when its slot is forgotten by all that read it.
__device__ __forceinline__ void look_up(Item (&items)[2], int2 (&intervals)[2][QUERIES], float2* of_rows, u32 known,
                                        u32 forgotten, const int* document_start, const int* last_key,
                                        const float* statistics, int* drawing) {
  const int lane = threadIdx.x % 32, pairs = pairs_of(drawing), count = pairs * ITEMS_OF_PAIR;
  int slot = 0;
  u32 parity = 1;
  while (true) {
    int number = 0;
    if (lane == 0) number = atomicAdd(drawing, 1);
    number = __shfl_sync(0xffffffffu, number, 0);
    Item item;
    int2 rows[QUERIES / 32];
    float2 row_statistics[2 * WARPGROUPS];
    item.b = -1;
    if (number < count) {
      item = item_of(number, pairs, drawing);
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
    if (number < count) {
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
    if (number >= count) break;
    slot ^= 1, parity ^= slot == 0;
  }
}

// What the rows of a thread see, tiles that any row of its warpgroup sees, keys that all rows of its warp see.
struct Sight {
  int first[2], last[2], begin, end, all_from, all_to;
  __device__ __forceinline__ bool partly(int key) const { return key < all_from || key > all_to; }
};
// `rows`: intervals of the warpgroup's rows; `key`: the item's first.
__device__ __forceinline__ Sight sight_of(const int2* rows, int key) {
  const int warp = threadIdx.x % 128 / 32 * 16;
  const int2 upper = rows[warp + threadIdx.x % 32 / 4], lower = rows[warp + threadIdx.x % 32 / 4 + 8];
  return {{upper.x, lower.x}, {upper.y, lower.y}, (rows[0].x - key) / KEYS, (rows[63].y - key) / KEYS + 1,
          rows[warp + 15].x, rows[warp].y - (KEYS - 1)};
}

// A warpgroup passes by the tiles [to, from] that only others of its block see.
__device__ __forceinline__ void pass_by(int from, int to, Place<STAGES>& k, Place<V_STAGES>& v, const Barriers& on) {
  for (int tile = from; tile >= to; tile--) {
    barrier_wait(on.k_ready + 8 * k.stage, k.parity);
    barrier_wait(on.v_ready + 8 * v.stage, v.parity);
    if (threadIdx.x % 128 == 0) barrier_arrive(on.k_taken + 8 * k.stage), barrier_arrive(on.v_taken + 8 * v.stage);
    k.advance(), v.advance();
  }
}

// With TURNS, all warpgroups visit the same tiles and queue their products alternately.
__device__ __forceinline__ void begin_turns(int mine) {
  if (TURNS && mine == WARPGROUPS - 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
}
__device__ __forceinline__ void take_turn(int mine) {
  if (TURNS) meet<256>(1 + mine);
}
__device__ __forceinline__ void pass_turn(int mine) {
  if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(1 + (mine + 1) % WARPGROUPS) : "memory");
}

// Takes the scores of keys outside the intervals of a thread's two rows out of a tile that starts at `key`.
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], int key, const Sight& sight) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int from = sight.first[r] - key - threadIdx.x % 4 * 2, to = sight.last[r] - key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      const int column = i / 2 * 8 + i % 2;
      if (column < from || column > to) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITE;
    }
  }
}
