// The place of the largest number of every row, the first of several: x [rows, COLUMNS], row i at X_AT(i); y i32 [rows].
// A block has a row; a thread looks at every THREADS-th pack of WIDTH numbers in rising order, then pairs of threads compare.
#include "types.cuh"
#include "pack.cuh"
#include "dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) likeliest(const X_T* x, int* y) {
  __shared__ float values[THREADS];
  __shared__ int places[THREADS];
  grid_dependency_synchronize();
  x += X_AT(blockIdx.x);
  float best = -__int_as_float(0x7f800000);
  int place = COLUMNS;
#pragma unroll 4
  for (int i = threadIdx.x; i < COLUMNS / WIDTH; i += THREADS) {
    const Pack<X_T, WIDTH> pack = read_pack<WIDTH>(x + (size_t)i * WIDTH);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float here = to_float(pack.at[j]);
      if (here > best) best = here, place = i * WIDTH + j;
    }
  }
  values[threadIdx.x] = best;
  places[threadIdx.x] = place;
  for (int half = THREADS / 2; half; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) {
      const float other = values[threadIdx.x + half];
      const int there = places[threadIdx.x + half];
      if (other > values[threadIdx.x] || (other == values[threadIdx.x] && there < places[threadIdx.x])) {
        values[threadIdx.x] = other;
        places[threadIdx.x] = there;
      }
    }
  }
  if (threadIdx.x == 0) y[blockIdx.x] = places[0] < COLUMNS ? places[0] : 0;
}
