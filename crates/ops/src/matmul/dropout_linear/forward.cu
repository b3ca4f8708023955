// t = SCALE·(x where kept)·aᵀ with few rows in a: x is read once, its mask made in registers, bf16 products summed in
// f32. x [ROWS, COLUMNS], row i at X_AT(i); a [RANK, COLUMNS], dense; t [ROWS, RANK], row i at Y_AT(i). A block takes
// TALL tiles of 16 rows; its warps share out pieces of 32 columns and add their sums in order. The columns of a product
// are distributed so that a lane holds eight neighbours of a row: 16 bytes, two blocks of random words. What a lane
// will need waits in its own places of shared memory, STAGES pieces at a time.
#include "mma.cuh"
#include "mask.cuh"

#define RANKS (RANK / 8)
// Every tile is full.
#define WHOLE (ROWS % (TALL * 16) == 0)
#define STAGE ((TALL * 2 + RANKS) * 512)

extern "C" __global__ void __launch_bounds__(32 * WARPS)
dropout_linear(const bf16* __restrict__ x, const int* __restrict__ micro_step, const bf16* __restrict__ a, bf16* __restrict__ t,
               u32 stream) {
  extern __shared__ __align__(16) float parts[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int row0 = blockIdx.x * TALL * 16 + group;
  const u32 ring = shared_address(parts) + warp * STAGES * STAGE + lane * 16, step = (u32)*micro_step;
  const auto fetch = [&](int piece) {
    const int column = (piece * WARPS + warp) * 32 + quad * 8;
    const u32 to = ring + piece % STAGES * STAGE;
    if (column < COLUMNS) {
#pragma unroll
      for (int i = 0; i < TALL * 2; i++) {
        const int row = row0 + i * 8;
        copy_async(to + i * 512, x + X_AT(row) + column, WHOLE || row < ROWS);
      }
#pragma unroll
      for (int n = 0; n < RANKS; n++) copy_async(to + (TALL * 2 + n) * 512, a + (size_t)(n * 8 + group) * COLUMNS + column, true);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  float sum[TALL][RANKS][4] = {};
  for (int piece = 0; (piece * WARPS + warp) * 32 < COLUMNS; piece++) {
    wait_copies<STAGES - 2>();
    fetch(piece + STAGES - 1);
    const u32 at = ring + piece % STAGES * STAGE;
    const u32 column = (piece * WARPS + warp) * 32 + quad * 8;
    u32 first[TALL][4], second[TALL][4];
#pragma unroll
    for (int i = 0; i < TALL; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 block = ((u32)(row0 + i * 16 + half * 8) * COLUMNS + column) / 4;
        const Mask left = mask_of(stream, step, block), right = mask_of(stream, step, block + 1);
        const uint4 now = load_shared_16(at + (i * 2 + half) * 512);
        first[i][half] = now.x & low_halves(left.of[0], left.of[1]), first[i][half + 2] = now.y & low_halves(left.of[2], left.of[3]);
        second[i][half] = now.z & low_halves(right.of[0], right.of[1]), second[i][half + 2] = now.w & low_halves(right.of[2], right.of[3]);
      }
#pragma unroll
    for (int n = 0; n < RANKS; n++) {
      const uint4 factor = load_shared_16(at + (TALL * 2 + n) * 512);
#pragma unroll
      for (int i = 0; i < TALL; i++) mma(sum[i][n], first[i], factor.x, factor.y);
#pragma unroll
      for (int i = 0; i < TALL; i++) mma(sum[i][n], second[i], factor.z, factor.w);
    }
  }
  wait_copies<0>();
#pragma unroll
  for (int i = 0; i < TALL; i++) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < RANKS; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(parts + (warp * 16 + group + half * 8) * RANK + n * 8 + quad * 2) =
            make_float2(sum[i][n][half * 2], sum[i][n][half * 2 + 1]);
    __syncthreads();
    for (int at = threadIdx.x * 2; at < 16 * RANK; at += 64 * WARPS) {
      float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 part = *reinterpret_cast<const float2*>(parts + w * 16 * RANK + at);
        total.x += part.x, total.y += part.y;
      }
      const int row = blockIdx.x * TALL * 16 + i * 16 + at / RANK;
      if (row < ROWS) *reinterpret_cast<u32*>(t + Y_AT(row) + at % RANK) = pair(SCALE * total.x, SCALE * total.y);
    }
  }
}
