// Σ weights·token_loss and Σ weights over n values, f32. One block: every thread sums its stride,
// then the threads are added in a fixed order. n is tokens of a batch: too few to matter.
#include "types.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
weighted_sum(const float* __restrict__ token_loss, const float* __restrict__ weights, float* __restrict__ loss_sum,
             float* __restrict__ weight_sum) {
  float loss = 0.0f, weight = 0.0f;
  for (size_t i = threadIdx.x; i < COUNT; i += THREADS) {
    loss = fmaf(weights[i], token_loss[i], loss);
    weight += weights[i];
  }
  loss = block_sum<THREADS>(loss);
  weight = block_sum<THREADS>(weight);
  if (threadIdx.x == 0) {
    *loss_sum = ACCUMULATE ? *loss_sum + loss : loss;
    *weight_sum = ACCUMULATE ? *weight_sum + weight : weight;
  }
}
