// y[row, d] = sum over h of x[row, h, d]: a block for each row and WIDE columns. WIDE threads take neighbouring columns, and
// THREADS / WIDE of them share the heads of a column, whose parts are added in a fixed order. Head h of a row of a tensor X
// begins at X_AT(row, h). f32 sums.
#include "types.cuh"

#define LANES (THREADS / WIDE)

extern "C" __global__ void __launch_bounds__(THREADS) sum_heads(const X_T* __restrict__ x, Y_T* __restrict__ y) {
  __shared__ float parts[LANES][WIDE];
  const int row = blockIdx.x, lane = threadIdx.x / WIDE, d = blockIdx.y * WIDE + threadIdx.x % WIDE;
  float sum = 0.0f;
  if (d < COLUMNS)
    for (int h = lane; h < HEADS; h += LANES) sum += load(x + X_AT(row, h) + d);
  parts[lane][threadIdx.x % WIDE] = sum;
#pragma unroll
  for (int half = LANES / 2; half; half /= 2) {
    __syncthreads();
    if (lane < half) parts[lane][threadIdx.x % WIDE] = sum += parts[lane + half][threadIdx.x % WIDE];
  }
  if (lane == 0 && d < COLUMNS) store(y + Y_AT(row, 0) + d, sum);
}
