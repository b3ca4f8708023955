// scaled = weights·loss_scale, COUNT values of f32. One thread for each value: tokens of a batch, too few to matter.
extern "C" __global__ void __launch_bounds__(THREADS)
scaled_weights(const float* __restrict__ weights, const float* __restrict__ loss_scale, float* __restrict__ scaled) {
  const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < COUNT) scaled[i] = weights[i] * *loss_scale;
}
