// y = x transposed, 16 neighbours of its rows times diag(s) H / 4: s is -1 where NEGATIVE has a bit. A thread has 16 rows
// of one column; sums are in the order of the reference. Rows of x behind the last are zeros. Memory-bound.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
rotate(const X_T* __restrict__ x, Y_T* __restrict__ y) {
  const int column = blockIdx.x * 64 + threadIdx.x % 64, first = blockIdx.y * 64 + threadIdx.x / 64 * 16;
  if (column >= COLUMNS || first >= PADDED) return;
  float of[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float value = first + i < ROWS ? load(x + X_AT(first + i) + column) : 0.0f;
    of[i] = NEGATIVE >> i & 1u ? -value : value;
  }
#pragma unroll
  for (int apart = 1; apart < 16; apart *= 2) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      if (i & apart) continue;
      const float a = of[i], b = of[i + apart];
      of[i] = __fadd_rn(a, b);
      of[i + apart] = __fadd_rn(a, -b);
    }
  }
  Y_T* line = y + (size_t)column * PADDED + first;
#pragma unroll
  for (int i = 0; i < 16; i++) store(line + i, of[i] * 0.25f);
}
