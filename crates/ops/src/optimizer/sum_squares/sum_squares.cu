// Σ x² over COUNT values, added to out[0]. First every block sums its stride into partial[block],
// then one block adds the partial sums: a fixed order, no atomics.
#include "types.cuh"
#include "reduce.cuh"

#if defined(PARTIAL)
extern "C" __global__ void __launch_bounds__(THREADS)
sum_squares_partial(const float* __restrict__ x, float* __restrict__ partial) {
  float sum = 0.0f;
  for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < COUNT; i += (size_t)gridDim.x * THREADS)
    sum = fmaf(x[i], x[i], sum);
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
#endif

#if defined(PARTS)
extern "C" __global__ void __launch_bounds__(THREADS)
sum_squares_total(const float* __restrict__ partial, float* __restrict__ out) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < PARTS; i += THREADS) sum += partial[i];
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) *out += sum;
}
#endif
