// p = UNIT·I + LINEAR·x + QUADRATIC·square, element by element over matrices [SIDE, SIDE], COUNT elements in all.
// One thread each: the sizes are those of the smaller side of a weight, far below the products around it.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
newton_schulz_polynomial(const MATRIX_T* __restrict__ x, const float* __restrict__ square,
                         MATRIX_T* __restrict__ p) {
  const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= COUNT) return;
  const u64 row = i / SIDE % SIDE, column = i % SIDE;
  float sum = __fadd_rn(__fmul_rn(LINEAR, load(x + i)), __fmul_rn(QUADRATIC, square[i]));
  if (row == column) sum = __fadd_rn(sum, UNIT);
  store(p + i, sum);
}
