// Statistics of the softmax of each row of logits, x [rows, COLUMNS], row i at X_AT(i). A block has a row.
#include "types.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
token_statistics(const X_T* __restrict__ x, const int* __restrict__ targets, float* __restrict__ entropy,
                 float* __restrict__ mean, float* __restrict__ collision, float* __restrict__ hit) {
  const int row = blockIdx.x, target = targets[row];
  if (target < 0) {
    if (threadIdx.x == 0) entropy[row] = mean[row] = collision[row] = hit[row] = 0.0f;
    return;
  }
  x += X_AT(row);
  float top = -__int_as_float(0x7f800000);
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) top = fmaxf(top, to_float(x[i]));
  top = block_max<THREADS>(top);
  float sum = 0.0f, weighted = 0.0f, squares = 0.0f, total = 0.0f, before = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const float value = to_float(x[i]), e = expf(value - top);
    sum += e;
    weighted = fmaf(e, value - top, weighted);
    squares = fmaf(e, e, squares);
    total += value;
    if (value == top && i < target) before = 1.0f;
  }
  sum = block_sum<THREADS>(sum);
  weighted = block_sum<THREADS>(weighted);
  squares = block_sum<THREADS>(squares);
  total = block_sum<THREADS>(total);
  before = block_sum<THREADS>(before);
  if (threadIdx.x == 0) {
    entropy[row] = logf(sum) - weighted / sum;
    mean[row] = total / COLUMNS;
    collision[row] = logf(squares) - 2.0f * logf(sum);
    hit[row] = to_float(x[target]) == top && before == 0.0f ? 1.0f : 0.0f;
  }
}
