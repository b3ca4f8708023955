// One token of every row, y[b] = x[b, index[b]]: x [B, TOKENS, COLUMNS], token i of all at X_AT(i); index i32 [B];
// y [B, COLUMNS], row i at Y_AT(i). One block per row.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
pick_token(const X_T* __restrict__ x, const int* __restrict__ index, Y_T* __restrict__ y) {
  const size_t row = blockIdx.x, token = row * TOKENS + index[row];
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) store(y + Y_AT(row) + i, load(x + X_AT(token) + i));
}
