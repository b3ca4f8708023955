// The loss of uneven loads: load f32 [2, EXPERTS] has the choices of each expert and the sums of its probabilities.
//   balanced_loss: y = loss + SCALE * sum over e of load[0][e] load[1][e], f32 [TOKENS]; every block sums the experts.
//   balanced_loss_backward: d[0] = 0, d[1][e] = SCALE * load[0][e] * (sum of dy), one block.
// All sums in a fixed order.
#include "types.cuh"

// The sum over the threads of a block.
__device__ inline float block_sum(float x) {
  __shared__ float parts[THREADS / 32];
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) sum += parts[i];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
balanced_loss(const float* __restrict__ loss, const float* __restrict__ load, float* __restrict__ y) {
  float sum = 0.0f;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) sum += load[e] * load[EXPERTS + e];
  sum = block_sum(sum);
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token < TOKENS) y[token] = loss[token] + SCALE * sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
balanced_loss_backward(const float* __restrict__ dy, const float* __restrict__ load, float* __restrict__ d) {
  float sum = 0.0f;
  for (int token = threadIdx.x; token < TOKENS; token += THREADS) sum += dy[token];
  sum = block_sum(sum);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    d[e] = 0.0f;
    d[EXPERTS + e] = SCALE * load[e] * sum;
  }
}
