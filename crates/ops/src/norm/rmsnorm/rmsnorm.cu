// RMS normalisation: y = x·r·w, r = 1/sqrt(mean(x²) + EPS); dx = r·(dy·w − x·r²·mean(dy·w·x)).
// x, y, dx, dy [ROWS, COLUMNS], row i at X_AT(i); w [COLUMNS]; r f32 [ROWS].
// A warp per row up to 256 packs, else a block per row; a row is read once and kept in registers.
#include "rows.cuh"

#if OFFSET
#define WEIGHT(w) (1.0f + to_float(w))
#else
#define WEIGHT(w) to_float(w)
#endif

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm(const X_T* __restrict__ x, const W_T* __restrict__ w, Y_T* __restrict__ y, float* __restrict__ r) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  x += X_AT(row);
  y += Y_AT(row);
  Pack<X_T, WIDTH> xs[ITEMS];
  float sum = 0.0f;
  FOR_PACKS(n, p) {
    xs[n] = read_pack<WIDTH>(x + p * WIDTH);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) sum = fmaf(to_float(xs[n].at[j]), to_float(xs[n].at[j]), sum);
  }
  const float scale = rsqrtf(row_sum(sum) * (1.0f / COLUMNS) + EPS);
  if (LANE == 0) r[row] = scale;
  FOR_PACKS(n, p) {
    const Pack<W_T, WIDTH> ws = read_pack<WIDTH>(w + p * WIDTH);
    Pack<Y_T, WIDTH> out;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) out.at[j] = from_float<Y_T>(to_float(xs[n].at[j]) * scale * WEIGHT(ws.at[j]));
    write_pack(y + p * WIDTH, out);
  }
}
#endif

#if defined(DX_T)
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_backward(const X_T* __restrict__ x, const W_T* __restrict__ w, const float* __restrict__ r,
                 const DY_T* __restrict__ dy, DX_T* __restrict__ dx) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  x += X_AT(row);
  dy += DY_AT(row);
  dx += DX_AT(row);
  Pack<X_T, WIDTH> xs[ITEMS];
  Pack<DY_T, WIDTH> dys[ITEMS];
  Pack<W_T, WIDTH> ws[ITEMS];
  const float scale = r[row];
  FOR_PACKS(n, p) {
    xs[n] = read_pack<WIDTH>(x + p * WIDTH);
    dys[n] = read_pack<WIDTH>(dy + p * WIDTH);
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
      out.at[j] = from_float<DX_T>(through);
    }
    write_pack(dx + p * WIDTH, out);
  }
}
#endif
