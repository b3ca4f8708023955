// A part of PART elements of a tensor, from its element `first` on.
//   own_part: y = the part of x, COUNT elements.
//   own_part_backward: y [COUNT] = x where the part is, 0 elsewhere; with ACCUMULATE added to y.
#include "types.cuh"

#if INTEGERS
extern "C" __global__ void __launch_bounds__(THREADS) own_part(const int* x, int* y, long long first) {
  const u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
  if (at < COUNT) y[at] = x[first + at];
}
#else
extern "C" __global__ void __launch_bounds__(THREADS) own_part(const X_T* x, Y_T* y, long long first) {
  const u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
  if (at < COUNT) store(y + at, load(x + first + at));
}

extern "C" __global__ void __launch_bounds__(THREADS) own_part_backward(const X_T* x, Y_T* y, long long first) {
  const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (at >= COUNT) return;
  const float value = at >= first && at < first + PART ? load(x + (at - first)) : 0.0f;
  store(y + at, ACCUMULATE ? load(y + at) + value : value);
}
#endif
