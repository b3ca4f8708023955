// The first n of COUNT values in rising order, n = Σ present; equal ones keep their order. One block; each thread counts
// the values below its own: n is the number of pairs in a micro-batch, which is small.
#include "types.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
sorted(const float* __restrict__ x, const float* __restrict__ present, float* __restrict__ y, int* __restrict__ order) {
  float here = 0.0f;
  for (size_t i = threadIdx.x; i < COUNT; i += THREADS) here += present[i] > 0.0f ? 1.0f : 0.0f;
  const int n = (int)block_sum<THREADS>(here);
  for (int i = threadIdx.x; i < COUNT; i += THREADS) {
    if (i >= n) {
      y[i] = 0.0f;
      order[i] = i;
      continue;
    }
    const float own = x[i];
    int rank = 0;
    for (int j = 0; j < n; j++) rank += x[j] < own || (x[j] == own && j < i);
    y[rank] = own;
    order[rank] = i;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
unsorted(const float* __restrict__ y, const int* __restrict__ order, float* __restrict__ x) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < COUNT) x[order[i]] = y[i];
}
