// bias -= RATE * sign(excess), f32 [COUNT], where `applied` is not 0. A thread has one element.
extern "C" __global__ void __launch_bounds__(THREADS)
even_bias(const float* __restrict__ excess, const float* __restrict__ applied, float* __restrict__ bias) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= COUNT || applied[0] == 0.0f) return;
  const float x = excess[i];
  if (x > 0.0f) bias[i] -= RATE;
  if (x < 0.0f) bias[i] += RATE;
}
