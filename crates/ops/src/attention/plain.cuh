// What the scalar kernels of attention share: who sees whom, rows in shared memory, dot products and weighted sums of
// a tile of 32 tokens. Extents, types and the mask are definitions; see attention.cu.
#pragma once
#include "types.cuh"
#include "reduce.cuh"

#define THREADS (WARPS * 32)
#define ROWS (WARPS * PER_WARP)
#define CHUNKS(columns) (((columns) + 31) / 32)
#define WIDEST (D > DV ? D : DV)
#define LSE_AT(b, h, i) (((size_t)(b) * HEADS + (h)) * TOKENS + (i))
#define INF __int_as_float(0x7f800000)
#ifndef BRANCHES  // after common beginnings: then `last` is the last query that sees each key
#define BRANCHES 0
#endif

// ROWS rows of one side, ROWS of its partner, a tile of 32 rows of the other side, with one column more.
extern __shared__ float memory[];

// Rows [first, first + count) of one head to shared memory, zero beyond the last token.
template <int COLUMNS, int PITCH, typename T>
__device__ __forceinline__ void fetch(float* to, const T* from, size_t stride, int first, int count) {
  for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
    const int row = i / COLUMNS, column = i % COLUMNS;
    to[row * PITCH + column] = first + row < TOKENS ? load(from + (first + row) * stride + column) : 0.0f;
  }
}

// out[r] = row r of this warp's rows . the lane's row of the tile
template <int COLUMNS>
__device__ __forceinline__ void dots(const float* rows, const float* tile, float (&out)[PER_WARP]) {
  const float* mine = tile + (threadIdx.x & 31) * (COLUMNS + 1);
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) out[r] = 0.0f;
#pragma unroll 8
  for (int c = 0; c < COLUMNS; c++) {
    const float x = mine[c];
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) out[r] = fmaf(rows[r * COLUMNS + c], x, out[r]);
  }
}

// sum[r][c] += sum over the tile of weight[r] (held by the token's lane) * the token's column
template <int COLUMNS>
__device__ __forceinline__ void add_weighted(float (&sum)[PER_WARP][CHUNKS(COLUMNS)], const float (&weight)[PER_WARP],
                                             const float* tile) {
  const int lane = threadIdx.x & 31;
  for (int j = 0; j < 32; j++) {
    float x[CHUNKS(COLUMNS)];
#pragma unroll
    for (int c = 0; c < CHUNKS(COLUMNS); c++)
      x[c] = lane + 32 * c < COLUMNS ? tile[j * (COLUMNS + 1) + lane + 32 * c] : 0.0f;
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      const float w = __shfl_sync(0xffffffffu, weight[r], j);
#pragma unroll
      for (int c = 0; c < CHUNKS(COLUMNS); c++) sum[r][c] = fmaf(w, x[c], sum[r][c]);
    }
  }
}

template <int COLUMNS, typename T>
__device__ __forceinline__ void put(T* to, const float (&row)[CHUNKS(COLUMNS)], float factor) {
#pragma unroll
  for (int c = 0; c < CHUNKS(COLUMNS); c++) {
    const int column = (threadIdx.x & 31) + 32 * c;
    if (column < COLUMNS) store(to + column, row[c] * factor);
  }
}

// The first key that query i sees; TOKENS (none) beyond the row.
__device__ __forceinline__ int first_key(const int* starts, int i) {
  if (i >= TOKENS) return TOKENS;
  return WINDOW ? max(starts[i], i + 1 - WINDOW) : starts[i];
}

// The last key that query i sees; the last of the row beyond it.
__device__ __forceinline__ int last_key(const int* last, int i) {
  if (BIDIRECTIONAL || i >= TOKENS) return TOKENS - 1;
  return HAS_LAST ? last[i] : i;
}

// True if key j is in a branch that ends before query i.
__device__ __forceinline__ bool is_hidden(const int* last, int i, int j) {
  return BRANCHES && i < TOKENS && j < TOKENS && last[j] < i;
}

// False if branches hide the 32 keys from `start` on from all queries from `first` on. With branches, a barrier.
__device__ __forceinline__ bool any_seen(const int* last, int start, int first) {
#if BRANCHES
  const int j = start + (threadIdx.x & 31);
  return __syncthreads_or(j < TOKENS && last[j] >= first);
#else
  return true;
#endif
}

// The last query that branches let see any of ROWS keys from `first` on.
__device__ __forceinline__ int last_query(const int* last, int first) {
  if (!BRANCHES) return TOKENS - 1;
  int found = 0;
  for (int j = first; j < min(first + ROWS, TOKENS); j++) found = max(found, last[j]);
  return found;
}

// The first query that sees key j.
__device__ __forceinline__ int first_query(const int* last, int j) {
  if (BIDIRECTIONAL) return 0;
  if (!HAS_LAST) return j;
  int below = -1, found = j;  // a query sees itself
  while (found - below > 1) {
    const int middle = (below + found) / 2;
    if (last[middle] >= j) found = middle;
    else below = middle;
  }
  return found;
}

// The score of a product q.k; leaves its derivative by the product there.
__device__ __forceinline__ float score(float product, float& slope) {
#if HAS_CAP
  const float t = tanhf(product * (SCALE / SOFT_CAP));
  slope = SCALE * (1.0f - t * t);
  return SOFT_CAP * t;
#else
  slope = SCALE;
  return product * SCALE;
#endif
}
