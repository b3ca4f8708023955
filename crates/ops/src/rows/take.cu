// Rows by index, y[i] = x[index[i]], zeros where the index is below 0: x [ROWS, COLUMNS], row i at X_AT(i); index i32
// [TAKEN]; y [TAKEN, COLUMNS], row i at Y_AT(i). One block per row of y.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
take_rows(const X_T* __restrict__ x, const int* __restrict__ index, Y_T* __restrict__ y) {
  const size_t row = blockIdx.x;
  const int of = index[row];
  const bool known = of >= 0 && of < ROWS;
  const X_T* from = x + (known ? X_AT(of) : 0);
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) store(y + Y_AT(row) + i, known ? load(from + i) : 0.0f);
}
