// Layer normalisation: y = (x − mean)·r·w + b, r = 1/sqrt(var + EPS); with n = (x − mean)·r and g = dy·w,
// dx = r·(g − mean(g) − n·mean(g·n)). `add_layernorm` first adds two tensors, `layernorm_backward_add` adds
// the residual gradient to dx; what lies between is rounded as it would be stored, and sums are kept out of
// contraction, so that the bits are those of the pair.
// Rows at X_AT(row); w, b [COLUMNS]; mean, r f32 [ROWS]. A warp per row up to 256 packs, else a block per row;
// a row is read once and kept in registers.
#include "rows.cuh"

#if defined(Y_T)
// mean and r of a row in registers; called by every thread of the row.
__device__ __forceinline__ void statistics(const Pack<X_T, WIDTH>* xs, float& mean, float& scale) {
  float sum = 0.0f;
  FOR_PACKS(n, p) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) sum = __fadd_rn(sum, to_float(xs[n].at[j]));
  }
  mean = row_sum(sum) * (1.0f / COLUMNS);
  float squares = 0.0f;
  FOR_PACKS(n, p) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float off = __fsub_rn(to_float(xs[n].at[j]), mean);
      squares = fmaf(off, off, squares);
    }
  }
  scale = rsqrtf(row_sum(squares) * (1.0f / COLUMNS) + EPS);
}

__device__ __forceinline__ void write_row(const Pack<X_T, WIDTH>* xs, const W_T* w, const BIAS_T* b, float mean,
                                          float scale, Y_T* y) {
  FOR_PACKS(n, p) {
    const Pack<W_T, WIDTH> ws = read_pack<WIDTH>(w + p * WIDTH);
    const Pack<BIAS_T, WIDTH> bs = read_pack<WIDTH>(b + p * WIDTH);
    Pack<Y_T, WIDTH> out;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float normal = __fmul_rn(__fsub_rn(to_float(xs[n].at[j]), mean), scale);
      out.at[j] = from_float<Y_T>(fmaf(normal, to_float(ws.at[j]), to_float(bs.at[j])));
    }
    write_pack(y + p * WIDTH, out);
  }
}

#if !defined(A_T)
extern "C" __global__ void __launch_bounds__(THREADS)
layernorm(const X_T* __restrict__ x, const W_T* __restrict__ w, const BIAS_T* __restrict__ b, Y_T* __restrict__ y,
          float* __restrict__ mean, float* __restrict__ r) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  Pack<X_T, WIDTH> xs[ITEMS];
  FOR_PACKS(n, p) xs[n] = read_pack<WIDTH>(x + X_AT(row) + p * WIDTH);
  float center, scale;
  statistics(xs, center, scale);
  if (LANE == 0) mean[row] = center, r[row] = scale;
  write_row(xs, w, b, center, scale, y + Y_AT(row));
}
#else
extern "C" __global__ void __launch_bounds__(THREADS)
add_layernorm(const A_T* __restrict__ first, const B_T* __restrict__ second, const W_T* __restrict__ w,
              const BIAS_T* __restrict__ b, X_T* sum, Y_T* __restrict__ y, float* __restrict__ mean,
              float* __restrict__ r) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  Pack<X_T, WIDTH> xs[ITEMS];
  FOR_PACKS(n, p) {
    const Pack<A_T, WIDTH> as = read_pack<WIDTH>(first + A_AT(row) + p * WIDTH);
    const Pack<B_T, WIDTH> bs = read_pack<WIDTH>(second + B_AT(row) + p * WIDTH);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) xs[n].at[j] = from_float<X_T>(__fadd_rn(to_float(as.at[j]), to_float(bs.at[j])));
    write_pack(sum + X_AT(row) + p * WIDTH, xs[n]);
  }
  float center, scale;
  statistics(xs, center, scale);
  if (LANE == 0) mean[row] = center, r[row] = scale;
  write_row(xs, w, b, center, scale, y + Y_AT(row));
}
#endif
#endif

#if defined(DX_T)
extern "C" __global__ void __launch_bounds__(THREADS)
#if defined(RESIDUAL_T)
layernorm_backward_add
#else
layernorm_backward
#endif
(const X_T* __restrict__ x, const W_T* __restrict__ w, const float* __restrict__ mean, const float* __restrict__ r,
 const DY_T* __restrict__ dy,
#if defined(RESIDUAL_T)
 const RESIDUAL_T* residual,
#endif
 DX_T* dx) {
  const size_t row = ROW;
  if (row >= ROWS) return;
  const float center = mean[row], scale = r[row];
  float normals[ITEMS][WIDTH], gs[ITEMS][WIDTH];
  float ones = 0.0f, products = 0.0f;
  FOR_PACKS(n, p) {
    const Pack<X_T, WIDTH> xs = read_pack<WIDTH>(x + X_AT(row) + p * WIDTH);
    const Pack<DY_T, WIDTH> dys = read_pack<WIDTH>(dy + DY_AT(row) + p * WIDTH);
    const Pack<W_T, WIDTH> ws = read_pack<WIDTH>(w + p * WIDTH);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      normals[n][j] = __fmul_rn(__fsub_rn(to_float(xs.at[j]), center), scale);
      gs[n][j] = __fmul_rn(to_float(dys.at[j]), to_float(ws.at[j]));
      ones = __fadd_rn(ones, gs[n][j]);
      products = fmaf(gs[n][j], normals[n][j], products);
    }
  }
  const float along_ones = row_sum(ones) * (1.0f / COLUMNS), along_x = row_sum(products) * (1.0f / COLUMNS);
  FOR_PACKS(n, p) {
    Pack<DX_T, WIDTH> out;
#if defined(RESIDUAL_T)
    const Pack<RESIDUAL_T, WIDTH> residuals = read_pack<WIDTH>(residual + RESIDUAL_AT(row) + p * WIDTH);
#endif
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float inner = fmaf(-normals[n][j], along_x, __fsub_rn(gs[n][j], along_ones));
      out.at[j] = from_float<DX_T>(__fmul_rn(scale, inner));
#if defined(RESIDUAL_T)
      out.at[j] = from_float<DX_T>(__fadd_rn(to_float(out.at[j]), to_float(residuals.at[j])));
#endif
    }
    write_pack(dx + DX_AT(row) + p * WIDTH, out);
  }
}
#endif
