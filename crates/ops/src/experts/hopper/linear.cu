// y[r, n] = sum over k of x[r, k] w[g][n, k] (w[g][k, n] if TRANSPOSED) for the rows of each group g, on Hopper's tensor
// cores (wgmma) and copy engine: bf16 or f16, sums in f32, rounded once. With R, the sum over R of t[r, j] b[g][n, j] (b[g][j, n]
// if ACROSS) goes on in the same registers: few more steps of the same kind. offsets i32 [GROUPS + 1] say where the rows of a
// group begin, on the device alone.
//
// The tensor cores get w as the left and x as the right factor: a tile is 64 columns of y for a warpgroup, but any multiple of
// 16 rows up to TALL. A group is cut into as few tiles as can be, all of one height, so a group of 260 rows takes two of 144
// and hardly more time than its rows need. Two blocks of a cluster take WIDE columns of y each and the same rows; each fetches
// half of the rows for both. One warp finds the tiles and fetches, two warpgroups multiply, STAGES steps of DEEP in flight.
// Few columns (adapters) are read for, not multiplied: a CLUSTER of one block, one warpgroup, lower tiles, more steps in flight.
// Persistent blocks: tile after tile of BAND neighbours down, then across, so what is read again is in the L2 cache.
// If SCALED, the sum is multiplied with the scale of x and that of w[g] before R goes on. Where CODES_TYPES, x and w are codes
// of eight bits, K pairs in a row. The tensor cores keep fewer bits of such a sum than f32 has; if PROMOTED, every 128 terms are
// added to f32 sums.
#include "handoff.cuh"
#include "wgmma.cuh"
#include "steps.cuh"
#include "types.cuh"

#define BOX_ROWS 32
#define HALF_BYTES (64 * DEEP * 2)
#define W_BYTES (HALVES * HALF_BYTES)
#define X_BOX_BYTES (BOX_ROWS * DEEP * 2)
#define STAGE_BYTES (W_BYTES + TALL * DEEP * 2)
#define PIECE_BYTES (64 * 64 * 2)
#define WIDE (64 * HALVES)
#define PAIRS ((N + CLUSTER * WIDE - 1) / (CLUSTER * WIDE))
#define STEPS ((K + DEEP - 1) / DEEP)
// Steps of the second product, after these.
#define MORE ((R + DEEP - 1) / DEEP)
#define BAND 4

// First row of a tile, how many, first column of this block, group; no rows after the last tile.
struct Tile {
  int row, rows, column, group;
};

// The tiles of all groups in order. A warp looks at 32 groups at once, a lane at one of them.
struct Tiles {
  const int* offsets;
  int lane, from, before, first, rows, own, up_to;
  // Groups from `group` on; `tiles` are in those before.
  __device__ __forceinline__ void look(int group, int tiles) {
    from = group, before = tiles;
    const bool inside = group + lane < GROUPS;
    first = inside ? offsets[group + lane] : 0;
    rows = inside ? offsets[group + lane + 1] - first : 0;
    up_to = own = (rows + TALL - 1) / TALL * PAIRS;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, up_to, step);
      if (lane >= step) up_to += other;
    }
  }
  // The tile of number `t`, which is larger from call to call.
  __device__ __forceinline__ Tile find(int t, u32 rank) {
    for (;;) {
      const int all = __shfl_sync(0xffffffffu, up_to, 31);
      if (t < before + all) break;
      if (from + 32 >= GROUPS) return {0, 0, 0, 0};
      look(from + 32, before + all);
    }
    const int which = __ffs(__ballot_sync(0xffffffffu, t - before < up_to)) - 1;
    const int inside = t - before - __shfl_sync(0xffffffffu, up_to - own, which);
    const int begin = __shfl_sync(0xffffffffu, first, which), count = __shfl_sync(0xffffffffu, rows, which);
    const int parts = (count + TALL - 1) / TALL, height = ((count + parts - 1) / parts + 15) / 16 * 16;
    const int band = inside / (BAND * PAIRS), rest = inside % (BAND * PAIRS), here = min(BAND, parts - band * BAND);
    const int row = (band * BAND + rest % here) * height;
    return {begin + row, min(height, count - row), (rest / here * CLUSTER + (int)rank) * WIDE, from + which};
  }
};

// Adds a step of `terms` to the sums of ROWS rows; `turned` if w lies across the sum. The first one begins a sum, one that
// is not `alone` lets the step before be filled again.
template <int ROWS, bool TURNED>
__device__ __forceinline__ void step(Walk& walk, float (&sum)[ROWS / 2], int half, int terms, bool first, bool alone) {
  const u32 stage = walk.take(), w = stage + half * HALF_BYTES, x = stage + W_BYTES;
  products_begin();
#pragma unroll
  for (int i = 0; i < DEEP / 16; i++) {
    if (i * 16 >= terms) break;
    const u64 left = TURNED ? rows_summed(w + i * 2048, HALF_BYTES) : columns_summed(w + i * 32);
    product<TURNED, 0>(sum, left, columns_summed(x + i * 32), !first || i);
  }
  products_commit();
  products_wait<1>();
  if (!alone) walk.release(2);
}

#ifdef CODES_TYPES
// Begins the products of the next 128 codes, from 0 on if `first`.
template <int ROWS> __device__ __forceinline__ void begin_codes(Walk& walk, float (&sum)[ROWS / 2], int half, bool first) {
  const u32 stage = walk.take(), w = stage + half * HALF_BYTES, x = stage + W_BYTES;
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; i++) product_of_codes(sum, columns_summed(w + i * 32), columns_summed(x + i * 32), !first || i);
  products_commit();
}

template <int COUNT> __device__ __forceinline__ void add(float (&sum)[COUNT], const float (&more)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum[i] += more[i];
}

// The sum over K; nothing is in flight after it.
template <int ROWS> __device__ __forceinline__ void multiply_codes(Walk& walk, float (&sum)[ROWS / 2], int half) {
#if PROMOTED
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sum[i] = 0.0f;
  int k = 0;
  // Taller tiles leave no registers for a third sum.
  for (; ROWS <= 128 && k + 1 < STEPS; k += 2) {
    float even[ROWS / 2], odd[ROWS / 2];
    begin_codes<ROWS>(walk, even, half, true);
    begin_codes<ROWS>(walk, odd, half, true);
    products_wait<1>();
    walk.release(2);
    add(sum, even);
    products_wait<0>();
    walk.release(1);
    add(sum, odd);
  }
  for (; k < STEPS; k++) {
    float last[ROWS / 2];
    begin_codes<ROWS>(walk, last, half, true);
    products_wait<0>();
    walk.release(1);
    add(sum, last);
  }
#else
  for (int k = 0; k < STEPS; k++) {
    begin_codes<ROWS>(walk, sum, half, !k);
    products_wait<1>();
    if (k) walk.release(2);
  }
  products_wait<0>();
  walk.release(1);
#endif
}
#endif

// The sums of a tile of up to ROWS rows, in the first ROWS / 2 registers.
template <int ROWS> __device__ __forceinline__ void multiply(Walk& walk, float (&all)[TALL / 2], int half, float scale) {
  float(&sum)[ROWS / 2] = reinterpret_cast<float(&)[ROWS / 2]>(all);
#ifdef CODES_TYPES
  multiply_codes<ROWS>(walk, sum, half);
#else
  for (int k = 0; k < STEPS; k++) step<ROWS, TRANSPOSED>(walk, sum, half, DEEP, !k, !k);
#endif
#if SCALED
#ifndef CODES_TYPES
  products_wait<0>();
  walk.release(1);
#endif
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sum[i] *= scale;
  if (!MORE) return;
#endif
#pragma unroll
  for (int k = 0; k < MORE; k++) step<ROWS, ACROSS>(walk, sum, half, R - k * DEEP, false, SCALED && !k);
  products_wait<0>();
  walk.release(1);
}

// A step of a tile: WIDE columns of w for this block, and its half of the rows for both.
template <bool TURNED>
__device__ __forceinline__ void fetch_step(const TensorMap* x, const TensorMap* w, const Tile& tile, int k, u32 to, u32 barrier,
                                           u32 rank) {
  const int boxes = (tile.rows + BOX_ROWS - 1) / BOX_ROWS;
  barrier_expect(barrier, W_BYTES + boxes * X_BOX_BYTES);
  if (TURNED)
    for (int i = 0; i < HALVES; i++)
      copy_box(to + i * HALF_BYTES, w, barrier, tile.column + i * 64, k * DEEP, tile.group, 0);
  else copy_box(to, w, barrier, k * DEEP, tile.column, tile.group, 0);
  for (int box = rank; box < boxes; box += CLUSTER) {
    const u32 at = to + W_BYTES + box * X_BOX_BYTES;
    if (CLUSTER == 2) copy_box_to_both(at, x, barrier, k * DEEP, tile.row + box * BOX_ROWS, 0, 0);
    else copy_box(at, x, barrier, k * DEEP, tile.row + box * BOX_ROWS, 0, 0);
  }
}

// Fetches the tiles of this block, and says after the last that there are no more.
__device__ __forceinline__ void fetch(const TensorMap* x, const TensorMap* w, const int* offsets, const TensorMap* t,
                                      const TensorMap* b, Tile* tile_of, Stages at, u32 rank) {
  const int lane = threadIdx.x % 32;
  Tiles tiles = {offsets, lane};
  tiles.look(0, 0);
  for (int number = blockIdx.x / CLUSTER;; number += gridDim.x / CLUSTER) {
    const Tile tile = tiles.find(number, rank);
    if (lane == 0) {
      for (int k = 0; k < (tile.rows ? STEPS + MORE : 1); k++, at.next()) {
        barrier_wait(at.empty(), at.phase ^ 1);
        if (!k) tile_of[at.index] = tile;
        if (!tile.rows) {
          barrier_arrive(at.full());
          break;
        }
        if (k < STEPS) fetch_step<TRANSPOSED>(x, w, tile, k, at.memory(), at.full(), rank);
        else fetch_step<ACROSS>(t, b, tile, k - STEPS, at.memory(), at.full(), rank);
      }
    }
    __syncwarp();
    if (!tile.rows) return;
  }
}

// Rounds a warpgroup's sums, and stores them through two pieces of 64 rows of 64 columns in shared memory.
__device__ __forceinline__ void give(const float (&sum)[TALL / 2], const Tile& tile, const TensorMap* map, Y_T* y, u32 mine,
                                     int half) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, column = tile.column + half * 64;
#pragma unroll
  for (int piece = 0; piece < TALL / 64; piece++) {
    const int left = tile.rows - piece * 64;
    if (left <= 0 || column >= N) break;
    const u32 to = mine + piece % 2 * PIECE_BYTES;
    // The piece before is in the other half; what a tile before stored may be in either.
    if (thread == 0 && piece) stores_read<1>();
    if (thread == 0 && !piece) stores_read<0>();
    meet<128>(1 + half);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* s = sum + piece * 32 + j * 4;
      store_matrices_transposed(to + swizzled((j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2), PAIR(s[0], s[1]),
                                PAIR(s[2], s[3]), PAIR(s[4], s[5]), PAIR(s[6], s[7]));
    }
    publish_to_products();
    meet<128>(1 + half);
    if (left >= 64) {
      if (thread == 0) store_box(map, to, column, tile.row + piece * 64, 0, 0);
    } else {
      // What is below belongs to other groups.
      for (int row = thread / 8; row < left; row += 16) {
        const int chunk = thread % 8;
        if (column + chunk * 8 < N)
          *(uint4*)(y + Y_AT(tile.row + piece * 64 + row) + column + chunk * 8) = read_shared(to + swizzled(row, chunk));
      }
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
grouped_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const int* __restrict__ offsets,
#if SCALED
               const float* __restrict__ scale_x, const float* __restrict__ scale_w,
#endif
#if R
               const __grid_constant__ TensorMap t, const __grid_constant__ TensorMap b,
#endif
               const __grid_constant__ TensorMap map, Y_T* __restrict__ y) {
#if !R
  const TensorMap &t = x, &b = w;
#endif
  extern __shared__ unsigned char raw[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ Tile tile_of[STAGES];
  const Stages stages = begin(raw, barriers, STAGE_BYTES);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x < 32) fetch(&x, &w, offsets, &t, &b, tile_of, stages, cluster_rank());
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int half = warpgroup - 1;
    Walk walk = {stages};
    float sum[TALL / 2];
    for (;;) {
      walk.wait();
      const Tile tile = tile_of[walk.at.index];
      if (!tile.rows) break;
#if SCALED
      const float scale = *scale_x * scale_w[tile.group];
#else
      const float scale = 1.0f;
#endif
      switch ((tile.rows + 15) / 16) {
#define OF(PARTS) \
  case PARTS: multiply<PARTS * 16>(walk, sum, half, scale); break;
        OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8)
#if TALL > 128
        OF(9) OF(10) OF(11) OF(12)
#endif
#if TALL > 192
        OF(13) OF(14) OF(15) OF(16)
#endif
      }
      give(sum, tile, &map, y, stages.base + STAGES * STAGE_BYTES + half * 2 * PIECE_BYTES, half);
    }
    if (threadIdx.x % 128 == 0) stores_done();
  }
  // A block stays until its neighbour has taken all that comes from it.
  cluster_meet();
}
