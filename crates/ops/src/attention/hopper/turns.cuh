// dq of blocks of queries as a sum over the tiles of keys, in their order: the sums in f32 in global memory, a turn for
// each, and the threads that keep the turns. A step's part of dq comes through shared memory; parts of even and of odd
// steps have a thread each.
#pragma once
#include "keys.cuh"
#include "semaphore.cuh"

#define Q_BLOCKS ((TOKENS + 63) / 64)
#define PART_BYTES (64 * WIDE * 4)

// Barriers of even and odd steps: a part filled and emptied; the turn has come for the tile that writes dq itself.
struct Turns {
  u32 filled, emptied, ours;
};
__device__ __forceinline__ Turns make_turns(u32 words, int fillers) {
  const Turns turns = {words, words + 16, words + 32};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 16; i += 8)
      barrier_init(turns.filled + i, fillers), barrier_init(turns.emptied + i, 1), barrier_init(turns.ours + i, 1);
  }
  return turns;
}

// A part of dq from shared memory to the sums: as the first, or added.
__device__ __forceinline__ void give(float4* sums, u32 part, bool first) {
  if (first)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums), "r"(part), "n"(PART_BYTES)
                 : "memory");
  else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums), "r"(part),
                 "n"(PART_BYTES)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The life of the thread that keeps the turns of the steps of one parity.
__device__ __forceinline__ void keep_turns(const Item (&items)[2], int parity, const Barriers& on, const Turns& turns,
                                           u32 part, const int2* intervals, float4* dq_sums, int* counts) {
  const u32 filled = turns.filled + 8 * parity, emptied = turns.emptied + 8 * parity, ours = turns.ours + 8 * parity;
  Place<2> slot = {0, 0};
  int step = 0;
  u32 filled_parity = 0;
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item& item = items[slot.stage];
    const int b = item.b, head = item.head, tile = item.key / TILE;
    const int first_block = item.query / 64, blocks = item.blocks;
    barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();
    if (b < 0) return;
    for (int block = first_block + blocks - 1; block >= first_block; block--) {
      const int2* rows = intervals + b * PADDED + block * 64;
      const int turn = tile - rows[0].x / TILE;
      const bool last = rows[63].y / TILE == tile;
#pragma unroll 1
      for (int h = head; h < head + EACH; h++) {
        if (step++ % 2 != parity) continue;
        const size_t at = (size_t)(b * HEADS + h) * Q_BLOCKS + block;
        if (!last) barrier_wait(filled, filled_parity);
        if (turn > 0)
          while (semaphore_value(counts + at) < turn) {}
        asm volatile("fence.proxy.async;" ::: "memory");
        if (last) {
          barrier_arrive(ours);
          barrier_wait(filled, filled_parity);
        }
        filled_parity ^= 1;
        if (last) continue;
        give(dq_sums + at * (PART_BYTES / 16), part, turn == 0);
        stores_read<0>();
        barrier_arrive(emptied);
        stores_done();
        asm volatile("fence.proxy.async;" ::: "memory");
        __threadfence();
        set_semaphore(counts + at, turn + 1);
      }
    }
  }
}
