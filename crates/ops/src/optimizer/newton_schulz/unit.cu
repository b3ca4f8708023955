// y = x/(‖x‖ + EPSILON) for each of gridDim.y matrices of ELEMENTS elements, X_STRIDE and Y_STRIDE apart.
// PARTS blocks for each matrix: first every block sums the squares of its stride into partial[matrix][block], then
// every block adds these, in a fixed order, and divides the same elements.
#include "types.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
matrix_squares(const float* __restrict__ x, float* __restrict__ partial) {
  x += blockIdx.y * X_STRIDE;
  float sum = 0.0f;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < ELEMENTS; i += PARTS * THREADS) sum = fmaf(x[i], x[i], sum);
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) partial[blockIdx.y * PARTS + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
matrix_divide(const float* __restrict__ x, const float* __restrict__ partial, Y_T* __restrict__ y) {
  x += blockIdx.y * X_STRIDE;
  y += blockIdx.y * Y_STRIDE;
  partial += blockIdx.y * PARTS;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < PARTS; i += THREADS) sum += partial[i];
  const float below = sqrtf(block_sum<THREADS>(sum)) + EPSILON;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < ELEMENTS; i += PARTS * THREADS)
    store(y + i, __fdiv_rn(x[i], below));
}
