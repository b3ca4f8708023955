// RMS normalisation: y = x·r·w, r = 1/sqrt(mean(x²) + EPS); dx = r·(dy·w − x·r²·mean(dy·w·x)).
// x, y, dx, dy [rows, COLUMNS], row i at X_AT(i); w [COLUMNS]; r f32 [rows].
// One block per row; sums in f32, by warp shuffles and then over the warps in order (deterministic).
#include "types.cuh"
#include "reduce.cuh"

#if OFFSET
#define WEIGHT(w) (1.0f + load(w))
#else
#define WEIGHT(w) load(w)
#endif

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm(const X_T* __restrict__ x, const W_T* __restrict__ w, Y_T* __restrict__ y, float* __restrict__ r) {
  const size_t row = blockIdx.x;
  x += X_AT(row);
  y += Y_AT(row);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const float v = load(x + i);
    sum = fmaf(v, v, sum);
  }
  const float scale = rsqrtf(block_sum<THREADS>(sum) * (1.0f / COLUMNS) + EPS);
  if (threadIdx.x == 0) r[row] = scale;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) store(y + i, load(x + i) * scale * WEIGHT(w + i));
}
#endif

#if defined(DX_T)
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_backward(const X_T* __restrict__ x, const W_T* __restrict__ w, const float* __restrict__ r,
                 const DY_T* __restrict__ dy, DX_T* __restrict__ dx) {
  const size_t row = blockIdx.x;
  x += X_AT(row);
  dy += DY_AT(row);
  dx += DX_AT(row);
  const float scale = r[row];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) sum = fmaf(load(dy + i) * WEIGHT(w + i), load(x + i), sum);
  const float mean = block_sum<THREADS>(sum) * (1.0f / COLUMNS) * scale * scale;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
    store(dx + i, scale * (load(dy + i) * WEIGHT(w + i) - load(x + i) * mean));
}
#endif

#if defined(ROWS_PER_BLOCK)
// Column sums over ROWS_PER_BLOCK rows: partial[blockIdx.y][column].
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_weight_partial(const X_T* __restrict__ x, const float* __restrict__ r, const DY_T* __restrict__ dy,
                       float* __restrict__ partial) {
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= COLUMNS) return;
  const int first = blockIdx.y * ROWS_PER_BLOCK;
  const int last = min(first + ROWS_PER_BLOCK, ROWS);
  float sum = 0.0f;
  for (int row = first; row < last; row++)
    sum = fmaf(load(dy + DY_AT(row) + column) * load(x + X_AT(row) + column), r[row], sum);
  partial[(size_t)blockIdx.y * COLUMNS + column] = sum;
}
#endif

#if defined(PARTS)
extern "C" __global__ void __launch_bounds__(THREADS)
sum_partials(const float* __restrict__ partial, float* __restrict__ out) {
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= COLUMNS) return;
  float sum = 0.0f;
  for (int part = 0; part < PARTS; part++) sum += partial[(size_t)part * COLUMNS + column];
  out[column] = ACCUMULATE ? out[column] + sum : sum;
}
#endif
