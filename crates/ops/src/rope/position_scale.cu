// y = x * (1 + BETA ln(1 + floor(position / ORIGINAL))): x, y [BATCH, TOKENS, HEADS, COLUMNS], strided; positions i32
// [BATCH, TOKENS]. One block per token. Each thread reads an element before it writes it: x and y may be the same memory.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
position_scale(const X_T* x, const int* __restrict__ positions, Y_T* y) {
  const size_t token = blockIdx.x, b = token / TOKENS, t = token % TOKENS;
  const float factor = 1.0f + BETA * logf(1.0f + (float)(max(positions[token], 0) / ORIGINAL));
  x += b * X_B + t * X_S;
  y += b * Y_B + t * Y_S;
  for (int i = threadIdx.x; i < HEADS * COLUMNS; i += THREADS) {
    const size_t h = i / COLUMNS, c = i % COLUMNS;
    store(y + h * Y_H + c * Y_C, load(x + h * X_H + c * X_C) * factor);
  }
}
