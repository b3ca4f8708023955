// Codes [ROWS, COLUMNS] as [COLUMNS, PADDED], zeros after the rows: in tiles through shared memory. Memory-bound.
#include "transpose.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
transpose_codes(const unsigned char* __restrict__ codes, unsigned char* __restrict__ transposed) {
  __shared__ __align__(16) u32 tile[TILE * LINE];
  const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
  const int fours = threadIdx.x / (TILE / 16), chunk = threadIdx.x % (TILE / 16), column = first_column + chunk * 16;
  uint4 rows[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = first_row + fours * 4 + i;
    rows[i] = make_uint4(0, 0, 0, 0);
    if (row < ROWS && column < COLUMNS) rows[i] = *(const uint4*)(codes + (size_t)row * COLUMNS + column);
  }
  put_rows(tile, rows, fours, chunk);
  __syncthreads();
  unsigned char* const to = transposed + (size_t)first_column * PADDED + first_row;
  write_columns(tile, to, PADDED, COLUMNS - first_column, PADDED - first_row);
}
