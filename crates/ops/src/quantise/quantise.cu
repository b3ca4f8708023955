// Codes of X * 2^k, in tiles of 64 by 64: a thread has 16 neighbours of a row, whose columns are a
// multiple of 16; transposed codes go through shared memory.
// The power is the kept factor, where it is not 0, else the one that the parts' largest magnitude asks for. With COUNT,
// numbers that become 0 are counted where no factor is kept. Every matrix of ROWS rows in X, a layer of blocks each, has
// parts and a power of its own. Memory-bound.
#include "types.cuh"
#include "codes.cuh"

#define TILE 64
// Bytes from row to row of the tile in shared memory: neighbours along either axis are in different banks.
#define PITCH (TILE + 4)

extern "C" __global__ void __launch_bounds__(THREADS)
quantise(const X_T* __restrict__ x, const u32* __restrict__ parts, u8* __restrict__ codes, float* __restrict__ scale
#ifdef FACTOR
         , const float* __restrict__ factor
#endif
#ifdef PADDED
         , u8* __restrict__ transposed
#endif
#ifdef RECORD
         , u32* __restrict__ amax
#endif
#ifdef COUNT
         , double* __restrict__ nonzero, double* __restrict__ flushed
#endif
) {
  float power = 0.0f;
#ifdef FACTOR
  power = *factor;
#endif
  const bool own = power == 0.0f;
  if (own) {
    u32 most = 0;
    for (int i = threadIdx.x; i < PARTS; i += THREADS) most = max(most, parts[blockIdx.z * PARTS + i]);
    power = power_for(block_max_bits<THREADS>(most), TOP);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) scale[blockIdx.z] = inverse_power(power);

  const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
  const int row = threadIdx.x / 4, column = first_column + threadIdx.x % 4 * 16;
  u32 most = 0, numbers = 0, zeros = 0;
  union { u16 pairs[8]; uint4 all; u8 each[16]; } of;
  of.all = make_uint4(0, 0, 0, 0);
  if (first_row + row < ROWS && column < COLUMNS) {
    const size_t place = (size_t)blockIdx.z * ROWS + first_row + row;
    const X_T* line = x + X_AT(place) + column;
    float values[16];
#ifdef PACKS
    union { uint4 packs[2]; bf16 each[16]; } in;
    in.packs[0] = ((const uint4*)line)[0];
    in.packs[1] = ((const uint4*)line)[1];
#endif
#pragma unroll
    for (int i = 0; i < 16; i++) {
#ifdef PACKS
      values[i] = to_float(in.each[i]);
#else
      values[i] = load(line + i);
#endif
#ifdef RECORD
      const u32 bits = __float_as_uint(values[i]) & 0x7fffffffu;
      most = most > bits ? most : bits;
#endif
    }
#pragma unroll
    for (int i = 0; i < 8; i++) of.pairs[i] = codes_of(values[2 * i] * power, values[2 * i + 1] * power);
    *(uint4*)(codes + place * COLUMNS + column) = of.all;
#ifdef COUNT
    if (own) {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        numbers += values[i] != 0.0f;
        zeros += is_flushed(values[i], power);
      }
    }
#endif
  }
#ifdef PADDED
  __shared__ u8 tile[TILE * PITCH];
  for (int i = 0; i < 16; i++) tile[row * PITCH + threadIdx.x % 4 * 16 + i] = of.each[i];
  __syncthreads();
  // Now a thread has 16 rows of a column.
  const int turned = first_column + threadIdx.x / 4, behind = threadIdx.x % 4 * 16;
  if (turned < COLUMNS && first_row + behind < PADDED) {
    for (int i = 0; i < 16; i++) of.each[i] = tile[(behind + i) * PITCH + threadIdx.x / 4];
    *(uint4*)(transposed + ((size_t)blockIdx.z * COLUMNS + turned) * PADDED + first_row + behind) = of.all;
  }
#endif
#ifdef RECORD
  most = block_max_bits<THREADS>(most);
  if (threadIdx.x == 0 && most) atomicMax(amax, most);
#endif
#ifdef COUNT
  if (own) {
    tally<THREADS>(nonzero, numbers);
    tally<THREADS>(flushed, zeros);
  }
#endif
}
