// The loss of uneven loads: load f32 [3, EXPERTS] has the choices of each expert, the sums of its probabilities and of -p ln p.
//   balanced_loss: y = loss + SCALE * (sum over e of load[0][e] load[1][e]) / n^2, f32 [TOKENS], n = sum over e of load[0][e];
//     every block sums the experts.
//   balanced_loss_backward: d[0] = d[2] = 0, d[1][e] = SCALE * load[0][e] * (sum of dy) / n^2, one block.
//   router_report: the choices, n / TOP_K, the entropy, and the loss times n / TOP_K, all divided by PARTS, one block.
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
  __syncthreads();  // before the parts of the next sum
  return sum;
}

// The sum of a row of EXPERTS.
__device__ inline float row_sum(const float* row) {
  float sum = 0.0f;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) sum += row[e];
  return block_sum(sum);
}

// (sum over e of load[0][e] load[1][e]) / n^2; 0 where nothing was chosen.
__device__ inline float unevenness(const float* load) {
  float sum = 0.0f;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) sum += load[e] * load[EXPERTS + e];
  sum = block_sum(sum);
  const float n = row_sum(load);
  return n > 0.0f ? sum / n / n : 0.0f;
}

#if REPORT
extern "C" __global__ void __launch_bounds__(THREADS) router_report(const float* __restrict__ load, float* __restrict__ y) {
  const float uneven = unevenness(load), rows = row_sum(load) / TOP_K, entropy = row_sum(load + 2 * EXPERTS);
  for (int i = threadIdx.x; i < EXPERTS + 3; i += THREADS) {
    const float last = i == EXPERTS ? rows : i == EXPERTS + 1 ? entropy : EXPERTS * (float)TOP_K * TOP_K * uneven * rows;
    const float value = (i < EXPERTS ? load[i] : last) / PARTS;
    y[i] = ACCUMULATE ? y[i] + value : value;
  }
}
#else

extern "C" __global__ void __launch_bounds__(THREADS)
balanced_loss(const float* __restrict__ loss, const float* __restrict__ load, float* __restrict__ y) {
  const float uneven = unevenness(load);
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token < TOKENS) y[token] = loss[token] + SCALE * uneven;
}

extern "C" __global__ void __launch_bounds__(THREADS)
balanced_loss_backward(const float* __restrict__ dy, const float* __restrict__ load, float* __restrict__ d) {
  float sum = 0.0f;
  for (int token = threadIdx.x; token < TOKENS; token += THREADS) sum += dy[token];
  sum = block_sum(sum);
  const float n = row_sum(load);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    d[e] = d[2 * EXPERTS + e] = 0.0f;
    d[EXPERTS + e] = n > 0.0f ? SCALE * load[e] * sum / n / n : 0.0f;
  }
}
#endif
