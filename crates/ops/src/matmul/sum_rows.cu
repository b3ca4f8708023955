// Column sums: out[c] = sum over rows of x[row][c], in f32.
// x [ROWS, COLUMNS], row i at X_AT(i); partial f32 [parts, COLUMNS]; out f32 [COLUMNS].
// One thread per column and part of ROWS_PER_BLOCK rows; the parts are added in order (deterministic).
#include "types.cuh"

#if defined(X_T)
extern "C" __global__ void __launch_bounds__(THREADS)
sum_rows_partial(const X_T* __restrict__ x, float* __restrict__ partial) {
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= COLUMNS) return;
  const int first = blockIdx.y * ROWS_PER_BLOCK;
  const int last = min(first + ROWS_PER_BLOCK, ROWS);
  float sum = 0.0f;
  for (int row = first; row < last; row++) sum += load(x + X_AT(row) + column);
  partial[(size_t)blockIdx.y * COLUMNS + column] = sum;
}
#endif

#if defined(PARTS)
extern "C" __global__ void __launch_bounds__(THREADS)
sum_rows_total(const float* __restrict__ partial, float* __restrict__ out) {
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= COLUMNS) return;
  float sum = 0.0f;
  for (int part = 0; part < PARTS; part++) sum += partial[(size_t)part * COLUMNS + column];
  out[column] = ACCUMULATE ? out[column] + sum : sum;
}
#endif
