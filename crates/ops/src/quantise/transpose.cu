// Codes [ROWS, COLUMNS] as [COLUMNS, PADDED], zeros behind the rows: in tiles of 64 by 64 through shared memory. A thread has
// 16 neighbours of a row, then 16 of a column. Memory-bound.
#include "types.cuh"

#define TILE 64
// Bytes from row to row of the tile: neighbours along either axis are in different banks.
#define PITCH (TILE + 4)

extern "C" __global__ void __launch_bounds__(THREADS)
transpose_codes(const unsigned char* __restrict__ codes, unsigned char* __restrict__ transposed) {
  __shared__ unsigned char tile[TILE * PITCH];
  const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
  const int row = threadIdx.x / 4, column = first_column + threadIdx.x % 4 * 16;
  union { uint4 all; u32 words[4]; unsigned char each[16]; } of;
  of.all = make_uint4(0, 0, 0, 0);
  if (first_row + row < ROWS && column < COLUMNS)
    of.all = *(const uint4*)(codes + (size_t)(first_row + row) * COLUMNS + column);
#pragma unroll
  for (int i = 0; i < 4; i++) *(u32*)(tile + row * PITCH + threadIdx.x % 4 * 16 + 4 * i) = of.words[i];
  __syncthreads();
  const int turned = first_column + threadIdx.x / 4, behind = threadIdx.x % 4 * 16;
  if (turned < COLUMNS && first_row + behind < PADDED) {
#pragma unroll
    for (int i = 0; i < 16; i++) of.each[i] = tile[(behind + i) * PITCH + threadIdx.x / 4];
    *(uint4*)(transposed + (size_t)turned * PADDED + first_row + behind) = of.all;
  }
}
