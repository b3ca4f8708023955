// Σ x², in a fixed order and without atomics. block_squares: each block of threads sums one block of elements, which
// begins on a multiple of 256 and has any number; four sums of a thread hide the latency of its loads. total_squares:
// one block of threads sums the COUNT sums.
#include "types.cuh"
#include "reduce.cuh"

#if defined(BLOCK_SQUARES)
extern "C" __global__ void __launch_bounds__(THREADS)
block_squares(const float* __restrict__ x, const int2* __restrict__ blocks, float* __restrict__ sums) {
  const int2 block = blocks[blockIdx.x];
  const float* const from = x + (size_t)block.x * 256;
  const int packs = block.y / 4;
  float sum[4] = {};
#pragma unroll 4
  for (int i = threadIdx.x; i < packs; i += THREADS) {
    const float4 v = reinterpret_cast<const float4*>(from)[i];
    sum[0] = fmaf(v.x, v.x, sum[0]);
    sum[1] = fmaf(v.y, v.y, sum[1]);
    sum[2] = fmaf(v.z, v.z, sum[2]);
    sum[3] = fmaf(v.w, v.w, sum[3]);
  }
  const int rest = 4 * packs + threadIdx.x;
  if (rest < block.y) sum[0] = fmaf(from[rest], from[rest], sum[0]);
  const float total = block_sum<THREADS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}
#endif

#if defined(TOTAL_SQUARES)
extern "C" __global__ void __launch_bounds__(THREADS)
total_squares(const float* __restrict__ sums, float* __restrict__ total) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x; i < COUNT; i += THREADS) sum += sums[i];
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) *total = sum;
}
#endif
