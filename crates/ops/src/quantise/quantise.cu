// Codes of X * 2^k, in tiles: a thread has 16 neighbours of each of four rows, whose columns are a multiple of 16;
// transposed codes go through shared memory.
// The power is the kept factor, where it is not 0, else the one that the parts' largest magnitude asks for. With COUNT,
// numbers that become 0 are counted where no factor is kept. Every matrix of ROWS rows in X, a layer of blocks each, has
// parts and a power of its own. Memory-bound.
#include "transpose.cuh"
#include "codes.cuh"

// 16 numbers of a row.
struct Numbers { float at[16]; };
__device__ __forceinline__ Numbers numbers_of(const X_T* line) {
  Numbers x;
#ifdef PACKS
  union { uint4 packs[2]; bf16 each[16]; } in;
  in.packs[0] = ((const uint4*)line)[0];
  in.packs[1] = ((const uint4*)line)[1];
#pragma unroll
  for (int i = 0; i < 16; i++) x.at[i] = to_float(in.each[i]);
#else
#pragma unroll
  for (int i = 0; i < 16; i++) x.at[i] = load(line + i);
#endif
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantise(const X_T* __restrict__ x, const u32* __restrict__ parts, u8* __restrict__ codes, float* __restrict__ scale
#ifdef FACTOR
         , const float* __restrict__ factor
#endif
#ifdef PADDED
         , u8* __restrict__ transposed
#endif
#ifdef RECORD
         , float* __restrict__ amax
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
  const int fours = threadIdx.x / (TILE / 16), chunk = threadIdx.x % (TILE / 16), column = first_column + chunk * 16;
  float most = 0.0f;
  u32 numbers = 0, zeros = 0;
  uint4 rows[4];
#pragma unroll
  for (int n = 0; n < 4; n++) {
    rows[n] = make_uint4(0, 0, 0, 0);
    const int row = first_row + fours * 4 + n;
    if (row >= ROWS || column >= COLUMNS) continue;
    const size_t place = (size_t)blockIdx.z * ROWS + row;
    const Numbers of = numbers_of(x + X_AT(place) + column);
    union { u16 pairs[8]; uint4 all; } packed;
#pragma unroll
    for (int i = 0; i < 8; i++) packed.pairs[i] = codes_of(of.at[2 * i] * power, of.at[2 * i + 1] * power);
    rows[n] = packed.all;
    *(uint4*)(codes + place * COLUMNS + column) = rows[n];
#ifdef RECORD
#pragma unroll
    for (int i = 0; i < 16; i++) most = larger(most, of.at[i]);
#endif
#ifdef COUNT
    if (own) {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        numbers += of.at[i] != 0.0f;
        zeros += is_flushed(of.at[i], power);
      }
    }
#endif
  }
#ifdef PADDED
  __shared__ __align__(16) u32 tile[TILE * LINE];
  put_rows(tile, rows, fours, chunk);
  __syncthreads();
  u8* const to = transposed + ((size_t)blockIdx.z * COLUMNS + first_column) * PADDED + first_row;
  write_columns(tile, to, PADDED, COLUMNS - first_column, PADDED - first_row);
#endif
#ifdef RECORD
  raise<THREADS>(amax, __float_as_uint(most));
#endif
#ifdef COUNT
  if (own) {
    tally<THREADS>(nonzero, numbers);
    tally<THREADS>(flushed, zeros);
  }
#endif
}
