// Adds what `backward.cu` left: da f32 [COUNT] (+)= SCALE · the sum of CHUNKS parts in their order, four
// neighbouring elements a thread.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) dropout_linear_sum(const float* __restrict__ parts, float* __restrict__ da) {
  const int index = (blockIdx.x * THREADS + threadIdx.x) * 4;
  if (index >= COUNT) return;
  float4* to = reinterpret_cast<float4*>(da + index);
  float4 was = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum = was;
  if (ACCUMULATE) was = *to;
#pragma unroll 16
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const float4 x = *reinterpret_cast<const float4*>(parts + (size_t)chunk * COUNT + index);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  *to = make_float4(was.x + SCALE * sum.x, was.y + SCALE * sum.y, was.z + SCALE * sum.z, was.w + SCALE * sum.w);
}
