// What adapters get back, one element a thread: for types and shapes that tiles.cu does not take. One slice:
// dt [ROWS, RANK] = SCALE·dy·b, db f32 [LENGTH, RANK] (+)= SCALE·dyᵀ·t. Rows i at DY_AT(i), T_AT(i), DT_AT(i); b dense.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
low_rank_plain(const DY_T* __restrict__ dy, const T_T* __restrict__ t, const B_T* __restrict__ b, DT_T* __restrict__ dt,
               float* __restrict__ db) {
  dy += START;
  const int index = blockIdx.x * THREADS + threadIdx.x, r = index % RANK;
  float sum = 0.0f;
  if (index < ROWS * RANK) {
    const int row = index / RANK;
    for (int c = 0; c < LENGTH; c++) sum = fmaf(load(dy + DY_AT(row) + c), load(b + (size_t)c * RANK + r), sum);
    store(dt + DT_AT(row) + r, SCALE * sum);
  } else if (const int c = index / RANK - ROWS; c < LENGTH) {
    for (int row = 0; row < ROWS; row++) sum = fmaf(load(dy + DY_AT(row) + c), load(t + T_AT(row) + r), sum);
    float* to = db + (size_t)c * RANK + r;
    *to = ACCUMULATE ? *to + SCALE * sum : SCALE * sum;
  }
}
