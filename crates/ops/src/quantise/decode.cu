// The numbers that codes stand for, EACH of them with a scale; a thread has 16 of a block's 4096. Memory-bound.
#include "types.cuh"
#include "codes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
decode(const u8* __restrict__ codes, const float* __restrict__ scale, X_T* __restrict__ x) {
  const size_t first = (size_t)blockIdx.x * (16 * THREADS);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const size_t at = first + i * THREADS + threadIdx.x;
    if (at < COUNT) store(x + at, number_of(codes[at]) * scale[at / EACH]);
  }
}
