// The largest magnitude of each of 256 parts of the rows of X, or of each matrix of ROWS rows in X; a block has a part. With
// FACTOR, zeros where that is known already: then nothing is read.
#include "types.cuh"
#include "codes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
own_amax(const X_T* __restrict__ x, u32* __restrict__ parts
#ifdef FACTOR
         , const float* __restrict__ factor
#endif
) {
  u32 most = 0;
#ifdef FACTOR
  if (*factor == 0.0f)
#endif
  {
    const size_t first = (size_t)blockIdx.x * PART;
    const size_t end = first + PART < ROWS ? first + PART : ROWS;
    for (size_t row = first; row < end; row++) {
      const X_T* line = x + X_AT((size_t)blockIdx.y * ROWS + row);
#pragma unroll 4
      for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
        const u32 bits = __float_as_uint(load(line + column)) & 0x7fffffffu;
        most = most > bits ? most : bits;
      }
    }
    most = block_max_bits<THREADS>(most);
  }
  if (threadIdx.x == 0) parts[FIRST + blockIdx.y * gridDim.x + blockIdx.x] = most;
}
