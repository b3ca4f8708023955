// RMS normalisation joined with the residual addition beside it:
//   add_rmsnorm: sum = a + b, then r and y of `rmsnorm` from the sum as it is stored;
//   rmsnorm_backward_add: dx of `rmsnorm_backward` as it would be stored, plus the residual gradient.
// Rows at X_AT(row); w [COLUMNS]; r f32 [rows]. One block per row. Loops, order of sums and formulas
// are those of rmsnorm.cu, and the added sum is kept out of contraction: the bits are those of the pair.
#include "types.cuh"
#include "reduce.cuh"

#if OFFSET
#define WEIGHT(w) (1.0f + load(w))
#else
#define WEIGHT(w) load(w)
#endif

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS)
add_rmsnorm(const A_T* __restrict__ a, const B_T* __restrict__ b, const W_T* __restrict__ w, SUM_T* sum, Y_T* __restrict__ y,
            float* __restrict__ r) {
  const size_t row = blockIdx.x;
  a += A_AT(row);
  b += B_AT(row);
  sum += SUM_AT(row);
  y += Y_AT(row);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const SUM_T stored = from_float<SUM_T>(__fadd_rn(load(a + i), load(b + i)));
    sum[i] = stored;
    const float v = to_float(stored);
    squares = fmaf(v, v, squares);
  }
  const float scale = rsqrtf(block_sum<THREADS>(squares) * (1.0f / COLUMNS) + EPS);
  if (threadIdx.x == 0) r[row] = scale;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) store(y + i, load(sum + i) * scale * WEIGHT(w + i));
}
#endif

#if defined(DX_T)
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_backward_add(const X_T* __restrict__ x, const W_T* __restrict__ w, const float* __restrict__ r,
                     const DY_T* __restrict__ dy, const RESIDUAL_T* residual, DX_T* dx) {
  const size_t row = blockIdx.x;
  x += X_AT(row);
  dy += DY_AT(row);
  residual += RESIDUAL_AT(row);
  dx += DX_AT(row);
  const float scale = r[row];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) sum = fmaf(load(dy + i) * WEIGHT(w + i), load(x + i), sum);
  const float mean = block_sum<THREADS>(sum) * (1.0f / COLUMNS) * scale * scale;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const float through = scale * (load(dy + i) * WEIGHT(w + i) - load(x + i) * mean);
    store(dx + i, __fadd_rn(to_float(from_float<DX_T>(through)), load(residual + i)));
  }
}
#endif
