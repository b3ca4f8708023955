// Both directions of a linear layer on what dropout keeps, one element a thread: for types and shapes that `forward.cu`
// and `backward.cu` do not take. The formulas and names are theirs.
#include "mask.cuh"

__device__ __forceinline__ bool kept(u32 stream, u32 micro_step, u64 index) {
  return philox_words(SEED, PURPOSE_DROPOUT, stream, micro_step, index / 4).word[index % 4] >= LEAST;
}

#if BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_linear_backward_plain(const DT_T* __restrict__ dt, const X_T* __restrict__ x, const int* __restrict__ micro_step,
#if INPUT
                              const A_T* __restrict__ a, const BASE_T* __restrict__ base,
#endif
                              float* __restrict__ da,
#if INPUT
                              DX_T* __restrict__ dx,
#endif
                              u32 stream) {
  const u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
  const u32 step = (u32)*micro_step;
  const int column = index % COLUMNS;
  float sum = 0.0f;
  if (const u64 r = index / COLUMNS; r < RANK) {
    for (int row = 0; row < ROWS; row++)
      if (kept(stream, step, (u64)row * COLUMNS + column)) sum = fmaf(load(dt + DT_AT(row) + r), load(x + X_AT(row) + column), sum);
    da[index] = ACCUMULATE ? da[index] + SCALE * sum : SCALE * sum;
  }
#if INPUT
  else if (const u64 row = r - RANK; row < ROWS) {
    if (kept(stream, step, row * COLUMNS + column))
      for (int r = 0; r < RANK; r++) sum = fmaf(load(dt + DT_AT(row) + r), load(a + (size_t)r * COLUMNS + column), sum);
    store(dx + DX_AT(row) + column, fmaf(SCALE, sum, load(base + BASE_AT(row) + column)));
  }
#endif
}
#else
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_linear_plain(const X_T* __restrict__ x, const int* __restrict__ micro_step, const A_T* __restrict__ a, Y_T* __restrict__ t,
                     u32 stream) {
  const u64 index = (u64)blockIdx.x * THREADS + threadIdx.x, row = index / RANK, r = index % RANK;
  if (row >= ROWS) return;
  const u32 step = (u32)*micro_step;
  float sum = 0.0f;
  for (int c = 0; c < COLUMNS; c++)
    if (kept(stream, step, row * COLUMNS + c)) sum = fmaf(load(x + X_AT(row) + c), load(a + (size_t)r * COLUMNS + c), sum);
  store(t + Y_AT(row) + r, SCALE * sum);
}
#endif
