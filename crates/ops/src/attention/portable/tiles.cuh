// Tiles of rows in shared memory, as m16n8k16 and ldmatrix want them, for 16-bit elements (ELEMENT is bf16 or f16).
// Rows are an odd number of 16-byte chunks apart (the padded width and one chunk), so that eight neighbouring rows
// never meet in a bank and every address is a base plus a constant. sm_80 and later.
#pragma once
#include "types.cuh"
#include "mma.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define INF __int_as_float(0x7f800000)
// Columns in multiples of 16 for each of `parts` warps that share a row, and a row's pitch in bytes.
#define PADDED(columns, parts) (((columns) + 16 * (parts) - 1) / (16 * (parts)) * (16 * (parts)))
#define PITCH(padded) (((padded) + 8) * 2)

__device__ __forceinline__ void product(bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
__device__ __forceinline__ void product(f16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(d, a, b0, b1); }
__device__ __forceinline__ u32 pair_of(bf16, float low, float high) { return bf16_pair(low, high); }
__device__ __forceinline__ u32 pair_of(f16, float low, float high) { return f16_pair(low, high); }

// Rows [first, first + ROWS_) of a head to a tile, by all threads of the block; zeros from row TOKENS and column
// COLUMNS on.
template <int ROWS_, int COLUMNS, int PADDED_, int THREADS_>
__device__ __forceinline__ void fetch(u32 tile, const ELEMENT* head, size_t stride, int first) {
  constexpr int CHUNKS = PADDED_ / 8;
#pragma unroll
  for (int i = 0; i < (ROWS_ * CHUNKS + THREADS_ - 1) / THREADS_; i++) {
    const int at = i * THREADS_ + threadIdx.x;
    const int row = THREADS_ % CHUNKS ? at / CHUNKS : i * (THREADS_ / CHUNKS) + threadIdx.x / CHUNKS;
    const int chunk = THREADS_ % CHUNKS ? at % CHUNKS : threadIdx.x % CHUNKS;
    if (ROWS_ * CHUNKS % THREADS_ && at >= ROWS_ * CHUNKS) break;
    const bool inside = first + row < TOKENS && (COLUMNS == PADDED_ || chunk * 8 < COLUMNS);
    copy_async(tile + row * PITCH(PADDED_) + chunk * 16, head + (size_t)(first + row) * stride + chunk * 8, inside);
  }
}

// What a lane adds to a tile's address: for 16 rows as the left factor (and as the right one with rows summed over),
// and for 16 rows as the right factor with columns summed over.
__device__ __forceinline__ u32 left_lane(int pitch) { return threadIdx.x % 16 * pitch + threadIdx.x % 32 / 16 * 16; }
__device__ __forceinline__ u32 right_lane(int pitch) {
  return (threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8) * pitch + threadIdx.x / 8 % 2 * 16;
}

// x [MT][16 rows, 8 NT columns] += left [MT][16 rows, 16 KT] times 16-row groups of `right`, columns summed over.
// `left(a, c)` gives the left factor's 16 columns c; `right_at` holds the lane's part already.
template <int MT_, int NT, int KT, int RIGHT_PITCH, typename Left>
__device__ __forceinline__ void add_scores(float (&x)[MT_][NT][4], Left left, u32 right_at) {
#pragma unroll
  for (int c = 0; c < KT; c++) {
    u32 a[MT_][4];
    left(a, c);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      u32 b[4];
      load_matrices(b, right_at + n * 8 * RIGHT_PITCH + c * 32);
#pragma unroll
      for (int m = 0; m < MT_; m++) {
        product(ELEMENT(), x[m][n], a[m], b[0], b[1]);
        if (n + 1 < NT) product(ELEMENT(), x[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
// With the left factor in shared memory, or held in registers.
template <int MT_, int NT, int KT, int LEFT_PITCH, int RIGHT_PITCH>
__device__ __forceinline__ void scores(float (&x)[MT_][NT][4], u32 left_at, u32 right_at) {
  const auto left = [&](u32 (&a)[MT_][4], int c) {
#pragma unroll
    for (int m = 0; m < MT_; m++) load_matrices(a[m], left_at + m * 16 * LEFT_PITCH + c * 32);
  };
  add_scores<MT_, NT, KT, RIGHT_PITCH>(x, left, right_at);
}
template <int MT_, int NT, int KT, int RIGHT_PITCH>
__device__ __forceinline__ void scores(float (&x)[MT_][NT][4], const u32 (&held)[MT_][KT][4], u32 right_at) {
  const auto left = [&](u32 (&a)[MT_][4], int c) {
#pragma unroll
    for (int i = 0; i < MT_ * 4; i++) a[i / 4][i % 4] = held[i / 4][c][i % 4];
  };
  add_scores<MT_, NT, KT, RIGHT_PITCH>(x, left, right_at);
}
template <int MT_, int KT, int LEFT_PITCH>
__device__ __forceinline__ void hold(u32 (&a)[MT_][KT][4], u32 left_at) {
#pragma unroll
  for (int m = 0; m < MT_; m++)
#pragma unroll
    for (int c = 0; c < KT; c++) load_matrices(a[m][c], left_at + m * 16 * LEFT_PITCH + c * 32);
}

// sum [MT][16, 8 NT] += left [MT][16, 8 RT] times rows of `right`, rows summed over. `left(a, r)` gives the left
// factor's 16 columns from 8 r on.
template <int MT_, int NT, int RT, int RIGHT_PITCH, typename Left>
__device__ __forceinline__ void add_weighted(float (&sum)[MT_][NT][4], Left left, u32 right_at) {
#pragma unroll
  for (int r = 0; r < RT; r += 2) {
    u32 a[MT_][4];
    left(a, r);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      u32 b[4];
      load_transposed(b, right_at + r * 8 * RIGHT_PITCH + n * 16);
#pragma unroll
      for (int m = 0; m < MT_; m++) {
        product(ELEMENT(), sum[m][n], a[m], b[0], b[1]);
        if (n + 1 < NT) product(ELEMENT(), sum[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
// With the left factor in registers, two neighbouring 8-column groups of results rounded.
template <int MT_, int NT, int RT, int RIGHT_PITCH>
__device__ __forceinline__ void weighted_rows(float (&sum)[MT_][NT][4], const float (&x)[MT_][RT][4], u32 right_at) {
  const auto left = [&](u32 (&a)[MT_][4], int r) {
#pragma unroll
    for (int i = 0; i < MT_ * 4; i++)
      a[i / 4][i % 4] = pair_of(ELEMENT(), x[i / 4][r + i % 4 / 2][i % 2 * 2], x[i / 4][r + i % 4 / 2][i % 2 * 2 + 1]);
  };
  add_weighted<MT_, NT, RT, RIGHT_PITCH>(sum, left, right_at);
}
// With the left factor in shared memory.
template <int MT_, int NT, int RT, int LEFT_PITCH, int RIGHT_PITCH>
__device__ __forceinline__ void weighted_rows(float (&sum)[MT_][NT][4], u32 left_at, u32 right_at) {
  const auto left = [&](u32 (&a)[MT_][4], int r) {
#pragma unroll
    for (int m = 0; m < MT_; m++) load_matrices(a[m], left_at + m * 16 * LEFT_PITCH + r * 16);
  };
  add_weighted<MT_, NT, RT, RIGHT_PITCH>(sum, left, right_at);
}
// With the left factor's columns as rows of shared memory: `left_at` holds the lane's part of a right factor.
template <int MT_, int NT, int RT, int LEFT_PITCH, int RIGHT_PITCH>
__device__ __forceinline__ void weighted_columns(float (&sum)[MT_][NT][4], u32 left_at, u32 right_at) {
  const auto left = [&](u32 (&a)[MT_][4], int r) {
#pragma unroll
    for (int m = 0; m < MT_; m++) load_transposed(a[m], left_at + r * 8 * LEFT_PITCH + m * 32);
  };
  add_weighted<MT_, NT, RT, RIGHT_PITCH>(sum, left, right_at);
}

// Results of a warp to rows [first, ...) and columns [column, ...) of a head.
template <int MT_, int NT, int COLUMNS>
__device__ __forceinline__ void write_rows(ELEMENT* head, size_t stride, int first, int column,
                                           const float (&x)[MT_][NT][4], float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT_; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first + m * 16 + half * 8 + lane / 4;
      ELEMENT* to = head + (size_t)row * stride + column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (row < TOKENS && column + n * 8 < COLUMNS)
          *(u32*)(to + n * 8) = pair_of(ELEMENT(), x[m][n][2 * half] * factor, x[m][n][2 * half + 1] * factor);
    }
}

// The warps that share a row hold a product over their own columns each: all get the sum. `mine` and `theirs` are
// rows of 32 numbers in shared memory, one a lane; `id` and THREADS_ name the barrier of these warps.
template <int MT_, int NT, int THREADS_>
__device__ __forceinline__ void add_partner(float (&x)[MT_][NT][4], float* mine, const float* theirs, int id) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < MT_ * NT * 4; i++) mine[i * 32 + lane] = x[i / (NT * 4)][i / 4 % NT][i % 4];
  partial_barrier<THREADS_>(id);
#pragma unroll
  for (int i = 0; i < MT_ * NT * 4; i++) x[i / (NT * 4)][i / 4 % NT][i % 4] += theirs[i * 32 + lane];
}

#ifndef BRANCHES  // after common beginnings: then `last_keys` are the last queries that see each key
#define BRANCHES 0
#endif

// The interval of keys that query i of a row sees, those of other branches among them.
__device__ __forceinline__ int first_seen(const int* starts, int i) {
  return WINDOW ? max(starts[i], i + 1 - WINDOW) : starts[i];
}
__device__ __forceinline__ int last_seen(const int* last_keys, int i) {
  return HAS_LAST ? last_keys[i] : BIDIRECTIONAL ? TOKENS - 1 : i;
}

// The first of the tiles of KEYS_ keys key, key + KEYS_, ... below `end` that holds one which branches do not hide from
// all queries from `row` on. With branches, a barrier.
template <int KEYS_> __device__ __forceinline__ int next_tile(const int* last_queries, int key, int end, int row) {
#if BRANCHES
  for (; key < end; key += KEYS_) {
    bool seen = false;
    for (int j = key + threadIdx.x; j < min(key + KEYS_, end); j += blockDim.x) seen |= last_queries[j] >= row;
    if (__syncthreads_or(seen)) break;
  }
#endif
  return key;
}
// The last queries that see the lane's keys of a tile, and true if those before `row` see them all.
template <int NT_>
__device__ __forceinline__ bool keys_of_lane(int (&until)[NT_ * 2], const int* last_queries, int key, int row) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < NT_ * 2; i++) {
    const int j = key + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    until[i] = BRANCHES && j < TOKENS ? last_queries[j] : TOKENS;
    all &= until[i] + 1 >= row;
  }
  return !BRANCHES || __all_sync(0xffffffffu, all);
}

// Scores in units of log 2. Without a cap (and with a positive scale) they stay as the products give them, and
// FACTOR makes them so.
#define RAW_SCORES (!HAS_CAP && SCALE > 0.0f)
#define FACTOR (RAW_SCORES ? SCALE * LOG2E : 1.0f)
// tanh to the accuracy of a sum with 1; +-1 for the largest arguments.
__device__ __forceinline__ float tanh_by_exp(float x) {
  return fmaf(-2.0f, rcp_approx(exp2_approx(x * (2.0f * LOG2E)) + 1.0f), 1.0f);
}
// A score becomes its weight exp(score - lse) (lse in units of log 2); returns the score's slope under the cap.
__device__ __forceinline__ float weight(float& x, float lse) {
  float slope = 1.0f;
  if (HAS_CAP) {
    const float bent = tanh_by_exp(x * (SCALE / SOFT_CAP));
    slope = fmaf(-bent, bent, 1.0f);
    x = exp2_approx(fmaf(bent, SOFT_CAP * LOG2E, -lse));
  } else {
    x = exp2_approx(fmaf(x, SCALE * LOG2E, -lse));
  }
  return slope;
}
