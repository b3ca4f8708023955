// Weight gradient of a normalisation: dw = Σ over rows of dy·x·r, in f32, in a fixed order; if CENTERED, of
// dy·(x − mean)·r. x, dy [ROWS, COLUMNS], row i at X_AT(i); mean, r f32 [ROWS]; partial f32 [PARTS, COLUMNS]; dw f32 [COLUMNS].
// A block takes ROWS_PER_PART rows of ACROSS packs of columns: ACROSS × DOWN threads, each sums every
// DOWN-th row of its WIDTH columns, then the block adds its DOWN sums.
#include "types.cuh"
#include "pack.cuh"

#if defined(DY_T)
extern "C" __global__ void __launch_bounds__(ACROSS * DOWN)
norm_weight_partial(const X_T* __restrict__ x,
#if CENTERED
                    const float* __restrict__ mean,
#endif
                    const float* __restrict__ r, const DY_T* __restrict__ dy, float* __restrict__ partial) {
  __shared__ float sums[DOWN][ACROSS * WIDTH];
  const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
  const int column = (blockIdx.x * ACROSS + across) * WIDTH;
  const int first = blockIdx.y * ROWS_PER_PART, last = min(first + ROWS_PER_PART, ROWS);
  float sum[WIDTH] = {};
  if (column < COLUMNS) {
#pragma unroll 4
    for (int row = first + down; row < last; row += DOWN) {
      const Pack<X_T, WIDTH> xs = read_pack<WIDTH>(x + X_AT(row) + column);
      const Pack<DY_T, WIDTH> dys = read_pack<WIDTH>(dy + DY_AT(row) + column);
      const float scale = r[row];
#pragma unroll
      for (int j = 0; j < WIDTH; j++) {
#if CENTERED
        const float value = to_float(xs.at[j]) - mean[row];
#else
        const float value = to_float(xs.at[j]);
#endif
        sum[j] = fmaf(to_float(dys.at[j]) * value, scale, sum[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < WIDTH; j++) sums[down][across * WIDTH + j] = sum[j];
  __syncthreads();
  for (int i = threadIdx.x; i < ACROSS * WIDTH; i += ACROSS * DOWN) {
    float total = 0.0f;
#pragma unroll
    for (int d = 0; d < DOWN; d++) total += sums[d][i];
    const int out = blockIdx.x * ACROSS * WIDTH + i;
    if (out < COLUMNS) partial[(size_t)blockIdx.y * COLUMNS + out] = total;
  }
}
#endif

#if defined(PARTS)
// 32 columns and 32 strands of parts per block.
extern "C" __global__ void __launch_bounds__(1024)
sum_partials(const float* __restrict__ partial, float* __restrict__ dw) {
  __shared__ float sums[32][32];
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < COLUMNS)
#pragma unroll 4
    for (int part = strand; part < PARTS; part += 32) sum += partial[(size_t)part * COLUMNS + column];
  sums[strand][lane] = sum;
  __syncthreads();
  if (strand == 0 && column < COLUMNS) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < 32; s++) total += sums[s][lane];
    dw[column] = ACCUMULATE ? dw[column] + total : total;
  }
}
#endif
