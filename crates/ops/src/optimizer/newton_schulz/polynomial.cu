// p = A·I + B·x + C·square, element by element over matrices [N, N], COUNT elements in all. One thread each:
// the sizes are those of the smaller side of a weight, far below the products around it.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
newton_schulz_polynomial(const T* __restrict__ x, const float* __restrict__ square, T* __restrict__ p) {
  const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= COUNT) return;
  const u64 row = i / N % N, column = i % N;
  float sum = __fadd_rn(__fmul_rn(B, load(x + i)), __fmul_rn(C, square[i]));
  if (row == column) sum = __fadd_rn(sum, A);
  store(p + i, sum);
}
