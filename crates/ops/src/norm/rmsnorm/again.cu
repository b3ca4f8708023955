// RMS normalisation computed again beside its gradient: y = x·r·w with r = 1/sqrt(mean(x²) + EPS), and
// dx = r·(dy·w − x·r²·mean(dy·w·x)), rounded as if stored, plus the residual gradient. x, dy, residual, y, dx
// [ROWS, COLUMNS], row i at X_AT(i); w [COLUMNS]; r f32 [ROWS]. Threads, order of sums and formulas are those of
// rmsnorm.cu and fused.cu: the bits are those of the two kernels. x is read once.
#include "rows.cuh"

#if OFFSET
#define WEIGHT(w) (1.0f + to_float(w))
#else
#define WEIGHT(w) to_float(w)
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_and_backward_add(const X_T* __restrict__ x, const W_T* __restrict__ w, const DY_T* __restrict__ dy,
                         const RESIDUAL_T* residual, Y_T* __restrict__ y, float* __restrict__ r, DX_T* dx) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  x += X_AT(row);
  dy += DY_AT(row);
  residual += RESIDUAL_AT(row);
  y += Y_AT(row);
  dx += DX_AT(row);
  Pack<X_T, WIDTH> xs[ITEMS];
  Pack<DY_T, WIDTH> dys[ITEMS];
  Pack<RESIDUAL_T, WIDTH> residuals[ITEMS];
  Pack<W_T, WIDTH> ws[ITEMS];
  FOR_PACKS(n, p) {
    xs[n] = read_pack<WIDTH>(x + p * WIDTH);
    dys[n] = read_pack<WIDTH>(dy + p * WIDTH);
    residuals[n] = read_pack<WIDTH>(residual + p * WIDTH);
    ws[n] = read_pack<WIDTH>(w + p * WIDTH);
  }
  float squares = 0.0f, sum = 0.0f;
  FOR_PACKS(n, p) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      squares = fmaf(to_float(xs[n].at[j]), to_float(xs[n].at[j]), squares);
      sum = fmaf(to_float(dys[n].at[j]) * WEIGHT(ws[n].at[j]), to_float(xs[n].at[j]), sum);
    }
  }
  const float scale = rsqrtf(row_sum(squares) * (1.0f / COLUMNS) + EPS);
  if (LANE == 0) r[row] = scale;
  const float mean = row_sum(sum) * (1.0f / COLUMNS) * scale * scale;
  FOR_PACKS(n, p) {
    Pack<Y_T, WIDTH> normed;
    Pack<DX_T, WIDTH> out;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      normed.at[j] = from_float<Y_T>(to_float(xs[n].at[j]) * scale * WEIGHT(ws[n].at[j]));
      const float through = scale * (to_float(dys[n].at[j]) * WEIGHT(ws[n].at[j]) - to_float(xs[n].at[j]) * mean);
      out.at[j] = from_float<DX_T>(__fadd_rn(to_float(from_float<DX_T>(through)), to_float(residuals[n].at[j])));
    }
    write_pack(y + p * WIDTH, normed);
    write_pack(dx + p * WIDTH, out);
  }
}
