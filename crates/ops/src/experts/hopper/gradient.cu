// dw[g][m, k] = sum over the rows r of group g of a[r, m] b[r, k], on Hopper's tensor cores (wgmma) and copy engine: a, b bf16
// or f16, dw f32 [GROUPS, M, K] dense, added to if ACCUMULATE. offsets i32 [GROUPS + 1] say where the rows of a group begin, on
// the device alone.
//
// Two blocks of a cluster take TALL rows of dw each and the same WIDE columns; each fetches half of b for both. One warp
// fetches, two warpgroups multiply 64 rows of dw each, STAGES steps of DEEP rows in flight. Where dw has few rows or columns
// (adapters), a CLUSTER is one block, and one warpgroup or fewer columns suffice. The last step of a group reads into
// the next: what is after the end is set to zero in shared memory, up to the next multiple of 16, and no more is multiplied.
// An element of dw is added to once, by the copy engine: nothing is waited for. If SCALED, sums are multiplied with the scales
// of a and b.
#include "handoff.cuh"
#include "wgmma.cuh"
#include "steps.cuh"

#define TALL (64 * HALVES)
#define BOX_BYTES (DEEP * 64 * 2)
#define STAGE_BYTES ((TALL + WIDE) / 64 * BOX_BYTES)
#define PIECE_BYTES (64 * 32 * 4)
#define PAIRS ((M + CLUSTER * TALL - 1) / (CLUSTER * TALL))
#define ACROSS ((K + WIDE - 1) / WIDE)
#define TILES (GROUPS * PAIRS * ACROSS)

// Rows first … end of a tile's group, its first row and column of dw of this block, and its group.
struct Tile {
  int first, end, m, k, group;
};

__device__ __forceinline__ Tile tile_at(int t, const int* offsets, u32 rank) {
  const int group = t / (PAIRS * ACROSS), rest = t % (PAIRS * ACROSS);
  return {offsets[group], offsets[group + 1], (rest % PAIRS * CLUSTER + (int)rank) * TALL, rest / PAIRS * WIDE, group};
}

__device__ __forceinline__ void fetch(const TensorMap* a, const TensorMap* b, const int* offsets, Stages at, u32 rank) {
  for (int t = blockIdx.x / CLUSTER; t < TILES; t += gridDim.x / CLUSTER) {
    const Tile tile = tile_at(t, offsets, rank);
    for (int row = tile.first; row < tile.end; row += DEEP, at.next()) {
      barrier_wait(at.empty(), at.phase ^ 1);
      const u32 to = at.memory(), barrier = at.full();
      barrier_expect(barrier, STAGE_BYTES);
      for (int i = 0; i < TALL / 64; i++) copy_box(to + i * BOX_BYTES, a, barrier, tile.m + i * 64, row, 0, 0);
      for (int i = rank; i < WIDE / 64; i += CLUSTER) {
        const u32 at_b = to + (TALL / 64 + i) * BOX_BYTES;
        if (CLUSTER == 2) copy_box_to_both(at_b, b, barrier, tile.k + i * 64, row, 0, 0);
        else copy_box(at_b, b, barrier, tile.k + i * 64, row, 0, 0);
      }
    }
  }
}

// Zeros after the first `rows` rows of a stage, up to the next multiple of 16.
__device__ __forceinline__ void cut(u32 stage, int rows) {
  const int chunks = ((rows + 15) / 16 * 16 - rows) * (STAGE_BYTES / BOX_BYTES) * 8;
  for (int i = threadIdx.x - 128; i < chunks; i += 128 * HALVES) {
    const int box = i / 8 % (STAGE_BYTES / BOX_BYTES), row = rows + i / 8 / (STAGE_BYTES / BOX_BYTES);
    clear_shared(stage + box * BOX_BYTES + row * 128 + i % 8 * 16);
  }
  publish_to_products();
  meet<128 * HALVES>(1);
}

// 16 rows of a stage, from the `i`-th 16 on.
__device__ __forceinline__ void multiply(float (&sum)[WIDE / 2], u32 stage, int half, int i) {
  const u32 left = stage + half * BOX_BYTES + i * 2048, right = stage + TALL / 64 * BOX_BYTES + i * 2048;
  product<1, 1>(sum, rows_summed(left, BOX_BYTES), rows_summed(right, BOX_BYTES), 1);
}

// A warpgroup's sums through two pieces of 64 rows of 32 columns in shared memory: the copy engine writes whole lines, or adds
// to them, while the next tile is multiplied. (Pairs written by threads take three times as long on an H200.)
__device__ __forceinline__ void give(const float (&sum)[WIDE / 2], float scale, const Tile& tile, const TensorMap* dw, u32 mine,
                                     int half) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, m = tile.m + half * 64;
#pragma unroll
  for (int piece = 0; piece < WIDE / 32; piece++) {
    const int k = tile.k + piece * 32;
    if (m >= M || k >= K) break;
    const u32 to = mine + piece % 2 * PIECE_BYTES;
    // The piece before is in the other half; the last ones of the tile before may be in either.
    if (thread == 0 && piece) stores_read<1>();
    if (thread == 0 && !piece) stores_read<0>();
    meet<128>(2 + half);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float* s = sum + piece * 16 + j * 4 + h * 2;
        write_shared(to + swizzled(warp * 16 + h * 8 + lane / 4, j * 2 + lane % 4 / 2) + lane % 2 * 8, scale * s[0], scale * s[1]);
      }
    publish_to_products();
    meet<128>(2 + half);
    if (thread) continue;
    if (ACCUMULATE) add_box(dw, to, k, m, tile.group, 0);
    else store_box(dw, to, k, m, tile.group, 0);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
grouped_weight_gradient(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                        const int* __restrict__ offsets,
#if SCALED
                        const float* __restrict__ scale_a, const float* __restrict__ scale_b,
#endif
                        const __grid_constant__ TensorMap dw) {
  extern __shared__ unsigned char raw[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const Stages stages = begin(raw, barriers, STAGE_BYTES);
  const int warpgroup = threadIdx.x / 128;
  const u32 rank = cluster_rank();
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) fetch(&a, &b, offsets, stages, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half = warpgroup - 1;
#if SCALED
    const float scale = *scale_a * *scale_b;
#else
    const float scale = 1.0f;
#endif
    Walk walk = {stages};
    for (int t = blockIdx.x / CLUSTER; t < TILES; t += gridDim.x / CLUSTER) {
      const Tile tile = tile_at(t, offsets, rank);
      float sum[WIDE / 2];
#pragma unroll
      for (int i = 0; i < WIDE / 2; i++) sum[i] = 0.0f;
      const int full = (tile.end - tile.first) / DEEP, left = (tile.end - tile.first) % DEEP;
      for (int step = 0; step < full; step++) {
        const u32 stage = walk.take();
        products_begin();
#pragma unroll
        for (int i = 0; i < DEEP / 16; i++) multiply(sum, stage, half, i);
        products_commit();
        products_wait<1>();
        if (step) walk.release(2);
      }
      products_wait<0>();
      if (full) walk.release(1);
      if (left) {
        const u32 stage = walk.take();
        if (left % 16) cut(stage, left);
        for (int i = 0; i * 16 < left; i++) {
          products_begin();
          multiply(sum, stage, half, i);
          products_commit();
          products_wait<0>();
        }
        walk.release(1);
      }
      if (ACCUMULATE && tile.first == tile.end) continue;
      give(sum, scale, tile, &dw, stages.base + STAGES * STAGE_BYTES + half * 2 * PIECE_BYTES, half);
    }
    if (threadIdx.x % 128 == 0) stores_done();
  }
  // A block stays until its neighbour has taken all that comes from it.
  cluster_meet();
}
