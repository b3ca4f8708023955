// y = x transposed, 16 neighbours of its rows times diag(s) H / 4: s is -1 where NEGATIVE has a bit. A thread has 16 rows
// of one column; sums are in the order of the reference. Rows of x after the last are zeros. With GROUPS of rows, each begins
// at a multiple of 16, which `pad_groups` finds, and no others are among its 16. Memory-bound.
#include "types.cuh"

#ifdef GROUPS
// One warp; where groups begin that are filled up.
extern "C" __global__ void __launch_bounds__(32) pad_groups(const int* __restrict__ offsets, int* __restrict__ starts) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int first = 0; first < GROUPS; first += 32) {
    const int group = first + lane;
    int up_to = group < GROUPS ? (offsets[group + 1] - offsets[group] + 15) / 16 * 16 : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (group < GROUPS) starts[group + 1] = before + up_to;
    before += __shfl_sync(0xffffffffu, up_to, 31);
  }
  if (lane == 0) starts[0] = 0;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
rotate(const X_T* __restrict__ x, Y_T* __restrict__ y
#ifdef GROUPS
       , const int* __restrict__ offsets, const int* __restrict__ starts
#endif
) {
  const int column = blockIdx.x * 64 + threadIdx.x % 64, first = blockIdx.y * 64 + threadIdx.x / 64 * 16;
  if (column >= COLUMNS || first >= PADDED) return;
  int row = first, end = ROWS;
#ifdef GROUPS
  // The last group that begins here or before; GROUPS after the last.
  int group = 0;
  for (int most = GROUPS; group < most;) {
    const int middle = (group + most + 1) / 2;
    if (starts[middle] <= first) group = middle;
    else most = middle - 1;
  }
  row = group < GROUPS ? offsets[group] + first - starts[group] : 0;
  end = group < GROUPS ? offsets[group + 1] : 0;
#endif
  float of[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float value = row + i < end ? load(x + X_AT(row + i) + column) : 0.0f;
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
