// The values of the codes of X: every BLOCK_ROWS by BLOCK_COLUMNS elements of a matrix share a scale, which follows from their
// range; OF_TENSOR: from the largest of parts. A team of TEAM threads has a block; matrices of ROWS by COLUMNS lie one after
// another, a layer of blocks of the grid each. With TRANSPOSED a matrix lies as its transpose.
//
// X is rounded to SCALE_T first. KIND: 0 whole numbers of BITS bits, 1 those with a zero point, 2 E4M3, 3 NVFP4, 4 MXFP4. Every step is one of IEEE f32, rounded
// to SCALE_T where the format does, so that values are those of the CPU: divisions and products are said outright.
#include "types.cuh"
#include "forms.cuh"

__device__ __forceinline__ float rounded(float x) { return to_float(from_float<SCALE_T>(x)); }

#ifdef PARTS_OF
__device__ __forceinline__ u32 most_of(u32 most, const u32* parts, u32 count) {
  for (u32 i = threadIdx.x; i < count; i += THREADS) most = most > parts[i] ? most : parts[i];
  return most;
}
#else
#define PARTS_OF
#endif

__device__ __forceinline__ Scale scale_of(float least, float most, float whole) {
  const float magnitude = fmaxf(most, -least);
  Scale of;
  of.zero = 0.0f;
  of.global = 1.0f;
  // The scale in the place of 0: the distance of 1 to the next number of the type.
  const float smallest = sizeof(SCALE_T) == 4 ? 1.1920928955078125e-7f : rounded(1.00390625f) == 1.0f ? 0.0078125f : 0.0009765625f;
#if KIND == 0
  of.factor = rounded(__fdiv_rn(magnitude, ((float)(1 << BITS) - 1.0f) * 0.5f));
  if (of.factor == 0.0f) of.factor = smallest;
#elif KIND == 1
  const float lowest = -(float)(1 << (BITS - 1)), highest = -lowest - 1.0f;
  const float spread = rounded(__fdiv_rn(rounded(most - least), (float)(1 << BITS) - 1.0f));
  of.factor = spread == 0.0f ? smallest : spread;
  const float zero = rounded(lowest - rounded(__fdiv_rn(least, of.factor)));
  of.zero = spread == 0.0f ? 0.0f : rintf(fminf(fmaxf(zero, lowest), highest));
#elif KIND == 2
  of.factor = rounded(__fdiv_rn(magnitude, 448.0f));
  if (of.factor == 0.0f) of.factor = smallest;
#elif KIND == 3
  if (whole != 0.0f) {
    of.global = rounded(__fmul_rn(rounded(__fdiv_rn(1.0f, whole)), 2688.0f));
    if (!(of.global <= 3.402823466e38f)) of.global = 3.402823466e38f;
  }
  u8 code = (u8)codes_of(__fmul_rn(of.global, rounded(__fdiv_rn(magnitude, 6.0f))), 0.0f);
  if (code == 0) code = (u8)codes_of(0.125f, 0.0f);
  of.factor = number_of(code);
#else
  const u32 bits = __float_as_uint(magnitude);
  int exponent = (int)(bits >> 23) - 2 + ((bits & 0x7fffffu) >= 0x600000u ? 1 : 0);
  exponent = magnitude == 0.0f || exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
  of.factor = exponent == 0 ? __uint_as_float(1u << 22) : __uint_as_float((u32)exponent << 23);
#endif
  return of;
}

// The least and the most of the threads of a team; reaches all of them.
__device__ __forceinline__ void range_of_team(float& least, float& most) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, offset));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
#if TEAM > 32
  __shared__ float ends[2][THREADS / 32];
  if ((threadIdx.x & 31) == 0) {
    ends[0][threadIdx.x >> 5] = least;
    ends[1][threadIdx.x >> 5] = most;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) {
    least = fminf(least, ends[0][i]);
    most = fmaxf(most, ends[1][i]);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
fake_quantise(const X_T* __restrict__ x, Y_T* __restrict__ y PARTS_OF) {
  float whole = 0.0f;
#ifdef MOST_OF_PARTS
  {
    u32 most = 0;
    MOST_OF_PARTS
    whole = rounded(__uint_as_float(block_max_bits<THREADS>(most)));
  }
#endif
  const u64 block = (u64)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
  if (block >= BLOCKS) return;
  const u64 group = blockIdx.y, row = block / ACROSS * BLOCK_ROWS, column = block % ACROSS * BLOCK_COLUMNS;
#ifdef TRANSPOSED
#define AT_X(r, c) (group * (ROWS * COLUMNS) + (c) * ROWS + (r))
#define AT_Y(r, c) AT_X(r, c)
#else
#define AT_X(r, c) (X_AT(group * ROWS + (r)) + (c))
#define AT_Y(r, c) ((group * ROWS + (r)) * COLUMNS + (c))
#endif
#ifdef OF_TENSOR
  const Scale of = scale_of(-whole, whole, whole);
#else
  float least = 0.0f, most = 0.0f;
  for (u32 i = threadIdx.x % TEAM; i < BLOCK_ROWS * BLOCK_COLUMNS; i += TEAM) {
    const u64 r = row + i / BLOCK_COLUMNS, c = column + i % BLOCK_COLUMNS;
    if (r >= ROWS || c >= COLUMNS) continue;
    const float value = rounded(load(x + AT_X(r, c)));
    least = fminf(least, value);
    most = fmaxf(most, value);
  }
  range_of_team(least, most);
  const Scale of = scale_of(least, most, whole);
#endif
  for (u32 i = threadIdx.x % TEAM; i < BLOCK_ROWS * BLOCK_COLUMNS; i += TEAM) {
    const u64 r = row + i / BLOCK_COLUMNS, c = column + i % BLOCK_COLUMNS;
    if (r >= ROWS || c >= COLUMNS) continue;
    store(y + AT_Y(r, c), value_of(rounded(load(x + AT_X(r, c))), of));
  }
}
