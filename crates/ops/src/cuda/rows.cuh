// Rows of COLUMNS elements, each read once in packs of WIDTH by LANES threads and kept in registers.
// Needs COLUMNS, WIDTH (divides COLUMNS), LANES (32, or THREADS for one row per block), THREADS. With SLICES, that many
// times LANES threads share a row; a thread's packs begin at `first_pack`. Rows times slices are fewer than 2^31.
#pragma once
#include "types.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "logistic.cuh"

#define PACKS (COLUMNS / WIDTH)
#ifdef SLICES
#define FIRST_PACK first_pack
#else
#define SLICES 1
#define FIRST_PACK 0
#endif
#define ITEMS ((PACKS + LANES * SLICES - 1) / (LANES * SLICES))
#define ROW (blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES)
#define LANE (threadIdx.x % LANES)

// The packs of a thread: `n` numbers them, `p` is the place in the row.
#define FOR_PACKS(n, p) _Pragma("unroll") for (int n = 0; n < ITEMS; n++) if (const int p = FIRST_PACK + LANE + n * LANES; p < PACKS)

// Sum over a row in a fixed order; reaches every thread of the row.
__device__ __forceinline__ float row_sum(float x) {
#if LANES == 32
  return warp_sum(x);
#else
  return block_sum<THREADS>(x);
#endif
}
