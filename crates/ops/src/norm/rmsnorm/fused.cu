// RMS normalisation joined with the residual addition beside it:
//   add_rmsnorm: sum = a + b, then r and y of `rmsnorm` from the sum as it is stored;
//   rmsnorm_backward_add: dx of `rmsnorm_backward` as it would be stored, plus the residual gradient.
// Rows at X_AT(row); w [COLUMNS]; r f32 [ROWS]. Threads, order of sums and formulas are those of
// rmsnorm.cu, and the added sum is kept out of contraction: the bits are those of the pair. All of a row is asked
// for before the first of it is used: on an H200 that is 76 % in place of 62 % of the copy rate for 4096 rows of
// 1024 backward, 96 % in place of 84 % for 16,384 rows (a copy of as many bytes reaches 79 % and 87 %).
#include "rows.cuh"

#if OFFSET
#define WEIGHT(w) (1.0f + to_float(w))
#else
#define WEIGHT(w) to_float(w)
#endif

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS)
add_rmsnorm(const A_T* __restrict__ a, const B_T* __restrict__ b, const W_T* __restrict__ w, SUM_T* sum,
            Y_T* __restrict__ y, float* __restrict__ r) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  a += A_AT(row);
  b += B_AT(row);
  sum += SUM_AT(row);
  y += Y_AT(row);
  Pack<SUM_T, WIDTH> xs[ITEMS];
  Pack<W_T, WIDTH> ws[ITEMS];
  float squares = 0.0f;
  FOR_PACKS(n, p) {
    const Pack<A_T, WIDTH> as = read_pack<WIDTH>(a + p * WIDTH);
    const Pack<B_T, WIDTH> bs = read_pack<WIDTH>(b + p * WIDTH);
    ws[n] = read_pack<WIDTH>(w + p * WIDTH);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      xs[n].at[j] = from_float<SUM_T>(__fadd_rn(to_float(as.at[j]), to_float(bs.at[j])));
      squares = fmaf(to_float(xs[n].at[j]), to_float(xs[n].at[j]), squares);
    }
    write_pack(sum + p * WIDTH, xs[n]);
  }
  const float scale = rsqrtf(row_sum(squares) * (1.0f / COLUMNS) + EPS);
  if (LANE == 0) r[row] = scale;
  FOR_PACKS(n, p) {
    Pack<Y_T, WIDTH> out;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) out.at[j] = from_float<Y_T>(to_float(xs[n].at[j]) * scale * WEIGHT(ws[n].at[j]));
    write_pack(y + p * WIDTH, out);
  }
}
#endif

#if defined(DX_T)
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_backward_add(const X_T* __restrict__ x, const W_T* __restrict__ w, const float* __restrict__ r,
                     const DY_T* __restrict__ dy, const RESIDUAL_T* residual, DX_T* dx) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  x += X_AT(row);
  dy += DY_AT(row);
  residual += RESIDUAL_AT(row);
  dx += DX_AT(row);
  Pack<X_T, WIDTH> xs[ITEMS];
  Pack<DY_T, WIDTH> dys[ITEMS];
  Pack<RESIDUAL_T, WIDTH> residuals[ITEMS];
  Pack<W_T, WIDTH> ws[ITEMS];
  const float scale = r[row];
  FOR_PACKS(n, p) {
    xs[n] = read_pack<WIDTH>(x + p * WIDTH);
    dys[n] = read_pack<WIDTH>(dy + p * WIDTH);
    residuals[n] = read_pack<WIDTH>(residual + p * WIDTH);
    ws[n] = read_pack<WIDTH>(w + p * WIDTH);
  }
  float sum = 0.0f;
  FOR_PACKS(n, p) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
      sum = fmaf(to_float(dys[n].at[j]) * WEIGHT(ws[n].at[j]), to_float(xs[n].at[j]), sum);
  }
  const float mean = row_sum(sum) * (1.0f / COLUMNS) * scale * scale;
  FOR_PACKS(n, p) {
    Pack<DX_T, WIDTH> out;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float through = scale * (to_float(dys[n].at[j]) * WEIGHT(ws[n].at[j]) - to_float(xs[n].at[j]) * mean);
      out.at[j] = from_float<DX_T>(__fadd_rn(to_float(from_float<DX_T>(through)), to_float(residuals[n].at[j])));
    }
    write_pack(dx + p * WIDTH, out);
  }
}
#endif
