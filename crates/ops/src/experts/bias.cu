// A bias for each group of rows; row i of a tensor X is at X_AT(i), offsets i32 [GROUPS + 1] say where a group's rows begin.
//   grouped_bias: y[r] = x[r] + b[group of r], a block for each row, VECTOR elements an access.
//   grouped_row_sums: db[g] = sum of the group's rows of dy, f32 [GROUPS, COLUMNS] dense. A block for each group and 32
//     columns: a warp takes every eighth row, and the warps' sums are added in their order.
#include "types.cuh"
#include "pack.cuh"

#define WARPS (THREADS / 32)

#if defined(X_T)
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_bias(const X_T* __restrict__ x, const B_T* __restrict__ b, const int* __restrict__ offsets, Y_T* __restrict__ y) {
  const int row = blockIdx.x;
  int group = 0;
  for (int half = GROUPS; half > 1;) {  // the last group that begins at or before the row
    const int step = half / 2;
    if (offsets[group + step] <= row) group += step, half -= step;
    else half = step;
  }
  for (int i = threadIdx.x * VECTOR; i < COLUMNS; i += THREADS * VECTOR) {
    const auto one = read_pack<VECTOR>(x + X_AT(row) + i);
    const auto other = read_pack<VECTOR>(b + B_AT(group) + i);
    Pack<Y_T, VECTOR> both;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) store(both.at + v, load(one.at + v) + load(other.at + v));
    write_pack<VECTOR>(y + Y_AT(row) + i, both);
  }
}
#endif

#if defined(DY_T)
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_row_sums(const DY_T* __restrict__ dy, const int* __restrict__ offsets, float* __restrict__ db) {
  __shared__ float parts[WARPS][32];
  const int group = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (n < COLUMNS)
    for (int row = offsets[group] + warp; row < offsets[group + 1]; row += WARPS) sum += load(dy + DY_AT(row) + n);
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp || n >= COLUMNS) return;
  for (int i = 1; i < WARPS; i++) sum += parts[i][lane];
  float* at = db + (size_t)group * COLUMNS + n;
  *at = ACCUMULATE ? *at + sum : sum;
}
#endif
