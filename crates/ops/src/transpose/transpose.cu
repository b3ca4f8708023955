// y = the transpose of x [ROWS, COLUMNS], both dense. A block turns a square of TILE × TILE elements over in shared memory, so
// that reads and writes are of neighbouring elements; its rows are padded by one element against bank conflicts.
#include "types.cuh"

#define DEEP (THREADS / TILE)

extern "C" __global__ void __launch_bounds__(THREADS) transpose(const X_T* __restrict__ x, Y_T* __restrict__ y) {
  __shared__ float tile[TILE][TILE + 1];
  const int lane = threadIdx.x % TILE, first = threadIdx.x / TILE;
  const int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
  for (int i = first; i < TILE; i += DEEP)
    if (row + i < ROWS && column + lane < COLUMNS) tile[i][lane] = load(x + (size_t)(row + i) * COLUMNS + column + lane);
  __syncthreads();
  for (int i = first; i < TILE; i += DEEP)
    if (column + i < COLUMNS && row + lane < ROWS) {
      Y_T* at = y + (size_t)(column + i) * ROWS + row + lane;
      store(at, ACCUMULATE ? load(at) + tile[lane][i] : tile[lane][i]);
    }
}
