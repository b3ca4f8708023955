// What attention's kernels for Hopper share: extents, rows of the batch, tiles of a head in shared memory, scores, rows
// written back. Heads are padded to whole halves of 64 columns by the copy engine's zeros. It knows no order of work.
#pragma once
#if IS_F16
#define PRODUCT_TYPES "f32.f16.f16"
#endif
#include "handoff.cuh"
#include "wgmma.cuh"

#define GROUP (HEADS / KV_HEADS)
#define PAIRS (BATCH * KV_HEADS)
#define WIDE ((D + 63) / 64 * 64)     // columns of q and k in shared memory
#define WIDE_V ((DV + 63) / 64 * 64)  // columns of v and o
#define COLUMNS_V (DV > 64 && DV <= 112 ? (DV + 15) / 16 * 16 : WIDE_V)  // those of them that products compute
#define DELTAS ((size_t)BATCH * HEADS * PADDED)  // statistics: lse log2(e) of all rows, then delta of all rows
#define HALF 8192                     // bytes of 64 rows of 64 columns
#define PADDED ((TOKENS + 63) / 64 * 64 + 64)  // rows of the statistics of a head, and of the intervals of a row
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define INFINITE __int_as_float(0x7f800000)
#if HAS_CAP
#define TO_LOG2 (SOFT_CAP * LOG2E)  // from what `capped` gives to the exponent of two
#else
#define TO_LOG2 (SCALE * LOG2E)
#endif

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 both;
#if IS_F16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}
// What stands for a product q.k: itself, or with a cap the tanh of the scaled score over the cap.
__device__ __forceinline__ float capped(float x) {
#if HAS_CAP
  const float e = exp2_approximate(x * (2.0f * LOG2E * SCALE / SOFT_CAP));
  return fmaf(-2.0f, reciprocal(e + 1.0f), 1.0f);
#else
  return x;
#endif
}

// Keys [first, last] that query i of row b sees.
__device__ __forceinline__ int2 keys_of(const int* document_start, const int* last_key, int b, int i) {
  int first = document_start[b * TOKENS + i];
  if (WINDOW) first = max(first, i + 1 - WINDOW);
  const int last = HAS_LAST ? last_key[b * TOKENS + i] : BIDIRECTIONAL ? TOKENS - 1 : i;
  return make_int2(first, last);
}

// What a kernel draws its work by: a ticket, and with BY_ROW how many rows of the batch it computes, and which.
#ifndef BY_ROW
#define BY_ROW 0
#endif
#define DRAWING (BY_ROW ? 2 + BATCH : 1)
__device__ __forceinline__ int pairs_of(const int* drawing) { return BY_ROW ? drawing[1] * KV_HEADS : PAIRS; }
__device__ __forceinline__ int row_of(const int* drawing, int pair) {
  return BY_ROW ? drawing[2 + pair / KV_HEADS] : pair / KV_HEADS;
}

// The warpgroup that feeds the others leaves its registers to them, of which there are CONSUMERS.
template <int CONSUMERS> __device__ __forceinline__ void few_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 3 ? 32 : 24));
}
template <int CONSUMERS> __device__ __forceinline__ void many_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 3 ? 160 : 240));
}

// A place in a ring of tiles, and the parity of its barriers' phase.
template <int STAGES_> struct Place {
  int stage;
  u32 parity;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES_) stage = 0, parity ^= 1;
  }
};

// Rows [first, first + ROWS) of one head into a tile of COLUMNS columns.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void fetch(u32 tile, const TensorMap* map, u32 barrier, int b, int first, int head) {
#pragma unroll
  for (int half = 0; half < COLUMNS / 64; half++)
    copy_box(tile + half * ROWS * 128, map, barrier, half * 64, head, first, b);
}

// x [64, N] = rows of a tile of 64 rows times rows of a tile of N rows, over the first COLUMNS columns.
template <int COLUMNS, int N> __device__ __forceinline__ void scores(float (&x)[N / 2], u32 rows, u32 others) {
#pragma unroll
  for (int c = 0; c < (COLUMNS + 15) / 16; c++)
    product<0, 0>(x, columns_summed(rows + c / 4 * HALF + c % 4 * 32),
                  columns_summed(others + c / 4 * (N * 128) + c % 4 * 32), c);
}

// sum [64, W] += x [64, N] times a tile of N rows.
template <int N, int W>
__device__ __forceinline__ void weighted_rows(float (&sum)[W / 2], const u32 (&x)[N / 4], u32 rows) {
#pragma unroll
  for (int c = 0; c < N / 16; c++)
    product(sum, x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3], rows_summed(rows + c * 2048, N * 128));
}

// 64 rows of W columns as a warpgroup holds them, times a factor for each of a thread's two rows, into a tile.
template <int W> __device__ __forceinline__ void lay_rows(u32 tile, const float (&x)[W / 2], float upper, float lower) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < W / 8; j += 2) {
    const float* y = x + 4 * j;
    store_matrices(tile + j / 8 * HALF + swizzled(row, j % 8 + lane / 16), pair(y[0] * upper, y[1] * upper),
                   pair(y[2] * lower, y[3] * lower), pair(y[4] * upper, y[5] * upper),
                   pair(y[6] * lower, y[7] * lower));
  }
}
template <int N> __device__ __forceinline__ void clear(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = 0.0f;
}
template <int N> __device__ __forceinline__ void round_pairs(u32 (&y)[N], const float (&x)[2 * N]) {
#pragma unroll
  for (int i = 0; i < N; i++) y[i] = pair(x[2 * i], x[2 * i + 1]);
}
// A tile of 64 rows to rows [first, ...) of a head; what is outside the tensor is not stored.
template <int COLUMNS>
__device__ __forceinline__ void store_rows(u32 tile, const TensorMap* map, int b, int first, int head) {
#pragma unroll
  for (int half = 0; half < COLUMNS / 64; half++) store_box(map, tile + half * HALF, half * 64, head, first, b);
}
