// Low-rank addends onto a product that is already there: D[:, slice s] += SCALE·T_s·op(B_s), bf16, summed in
// f32 and rounded once. D [ROWS, …] by D_ROW; T_s [ROWS, RANK] by T_ROW(s), 4-byte aligned; B_s [count, RANK] by
// B_ROW(s), or [RANK, count] where B_ACROSS. A warp takes 32 columns of one slice and TALL rows. The columns of
// its four 8-wide products are distributed so that a lane's results are one after another in D: 16 bytes a row.
#include "intrinsics.cuh"

#define TALL 64
#define STEPS ((RANK + 15) / 16)

struct alignas(16) Eight { u32 pair[4]; };

__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

extern "C" __global__ void __launch_bounds__(256) addends(unsigned short* d, FACTORS) {
  const unsigned short* const ts[] = {TS};
  const unsigned short* const bs[] = {BS};
  const int firsts[] = {FIRSTS}, counts[] = {COUNTS}, t_rows[] = {T_ROWS}, b_rows[] = {B_ROWS};
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  // Groups of 32 columns are numbered through the slices.
  int tile = blockIdx.x * 8 + threadIdx.x / 32, slice = 0;
#pragma unroll
  for (int s = 0; s < SLICES - 1; s++)
    if (slice == s && tile >= counts[s] / 32) tile -= counts[s] / 32, slice = s + 1;
  const unsigned short *t = ts[0], *b = bs[0];
  int first = firsts[0], count = counts[0], t_row = t_rows[0], b_row = b_rows[0];
#pragma unroll
  for (int s = 1; s < SLICES; s++)
    if (slice == s) t = ts[s], b = bs[s], first = firsts[s], count = counts[s], t_row = t_rows[s], b_row = b_rows[s];
  if (tile * 32 >= count) return;
  const int row0 = blockIdx.y * TALL;
  d += (size_t)first + tile * 32 + quad * 8;
  Eight old[TALL / 8];
#pragma unroll
  for (int i = 0; i < TALL / 8; i++) {
    const int row = row0 + i * 8 + group;
    if (row < ROWS) old[i] = *reinterpret_cast<const Eight*>(d + (size_t)row * D_ROW);
  }
  // Product j's column n stands for column 8·(n/2) + 2·j + n%2 of the 32.
  u32 factor[STEPS][4][2];
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = k * 16 + half * 8 + quad * 2, c = tile * 32 + group / 2 * 8 + j * 2 + group % 2;
        if (r >= RANK) factor[k][j][half] = 0;
        else if (B_ACROSS) factor[k][j][half] = b[(size_t)r * b_row + c] | (u32)b[(size_t)(r + 1) * b_row + c] << 16;
        else factor[k][j][half] = *reinterpret_cast<const u32*>(b + (size_t)c * b_row + r);
      }
#pragma unroll
  for (int i = 0; i < TALL / 16; i++) {
    const int row = row0 + i * 16 + group;
    float sum[4][4] = {};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      u32 a[4];
#pragma unroll
      for (int part = 0; part < 4; part++) {
        const int at = row + part % 2 * 8, r = k * 16 + part / 2 * 8 + quad * 2;
        a[part] = at < ROWS && r < RANK ? *reinterpret_cast<const u32*>(t + (size_t)at * t_row + r) : 0;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) mma_bf16_ordered(sum[j], a, factor[k][j][0], factor[k][j][1]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (row + half * 8 < ROWS) {
        const Eight& was = old[i * 2 + half];
        Eight now;
#pragma unroll
        for (int j = 0; j < 4; j++)
          now.pair[j] = bf16_pair(fmaf(SCALE, sum[j][half * 2], low(was.pair[j])), fmaf(SCALE, sum[j][half * 2 + 1], high(was.pair[j])));
        *reinterpret_cast<Eight*>(d + (size_t)(row + half * 8) * D_ROW) = now;
      }
  }
}
