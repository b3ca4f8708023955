// Table look-up y[t] = w[ids[t]]: ids i32 [TOKENS]; w [ROWS, COLUMNS], y [TOKENS, COLUMNS], row i at W_AT(i), Y_AT(i).
// One block per token.
#include "types.cuh"

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS)
embedding(const int* __restrict__ ids, const W_T* __restrict__ w, Y_T* __restrict__ y) {
  const size_t token = blockIdx.x;
  const int id = ids[token];
  const bool known = id >= 0 && id < ROWS;
  const W_T* row = w + (known ? W_AT(id) : 0);
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
    store(y + Y_AT(token) + i, known ? load(row + i) : __int_as_float(0x7fc00000));
}
#endif
