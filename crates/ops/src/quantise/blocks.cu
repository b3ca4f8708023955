// NVFP4 of X: E2M1 codes at the start of `packed`, the first of two in the low half of a byte, E4M3 scales of 16
// neighbours of a row (with TILES of 16 rows by 16 columns) SCALES_AT, the tensor's factor TENSOR_AT and in `factor`.
// A thread has 16 neighbours of a row; with TILES 16 threads one after another have a tile. Every step is one of IEEE
// f32, so divisions and products are said outright. With SEED codes are rounded up or down by the byte of the element
// FIRST + row * WIDTH + column: 16 neighbours are one block of random words. Every matrix of ROWS rows in X, a layer of blocks
// each, has parts, a packed tensor of GROUP_BYTES and a factor of its own. Memory-bound.
//
// With OPERAND codes are rows of LINE bytes and scales are apart, as units of four bits read them; threads beyond the matrix
// fill rows and tiles of scales up with zeros. TRANSPOSED, which needs TILES: ROWS and COLUMNS are those of the result.
#include "types.cuh"
#include "codes.cuh"
#include "philox.cuh"
#ifdef OPERAND
#include "operand.cuh"
#endif

__device__ __forceinline__ u32 nearest(float a) {
  return (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
}

// The last number of the grid at or below, one more where 256ths of the step to the next are above the dice.
__device__ __forceinline__ u32 stochastic(float a, u32 random) {
  if (a >= 6.0f) return 7;
  const float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f;
  const float times = a < 2.0f ? 512.0f : a < 4.0f ? 256.0f : 128.0f;
  const float lower = a < 4.0f ? floorf(a / step) * step : 4.0f;
  const u32 below = a < 2.0f ? (u32)(a * 2.0f) : a < 4.0f ? 2 + (u32)a : 6;
  return below + ((a - lower) * times > (float)random + 0.5f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantise_blocks(const X_T* __restrict__ x, const u32* __restrict__ parts, u8* __restrict__ packed,
#ifdef OPERAND
                u8* __restrict__ scales,
#endif
                float* __restrict__ factor
#ifdef SEED
                , const int* __restrict__ micro_step, u32 stream
#endif
) {
  const u64 group = blockIdx.y;
  parts += group * PARTS;
#ifndef OPERAND
  packed += group * GROUP_BYTES;
#endif
  u32 most = 0;
  for (int i = threadIdx.x; i < PARTS; i += THREADS) most = most > parts[i] ? most : parts[i];
  const float amax = __uint_as_float(block_max_bits<THREADS>(most));
  const float s = amax < __uint_as_float(27u << 23) ? 1.0f : __fdiv_rn(2688.0f, amax);
  const float g = __fdiv_rn(1.0f, s);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    factor[group] = g;
#ifndef OPERAND
    *reinterpret_cast<float*>(packed + TENSOR_AT) = g;
#endif
  }

  // Rows and blocks of a row that have a thread: in memory there may be more of them than the matrix has.
  constexpr u64 ACROSS = SPAN_BLOCKS;
  const u64 piece = (u64)blockIdx.x * THREADS + threadIdx.x;
#if TILES
  const u64 block = piece / 16, row = block / ACROSS * 16 + piece % 16, column = block % ACROSS * 16;
#else
  const u64 block = piece, row = piece / ACROSS, column = piece % ACROSS * 16;
#endif
  const bool here = row < ROWS && column < COLUMNS;
  float values[16];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) values[i] = 0.0f;
  if (here) {
#ifdef TRANSPOSED
#pragma unroll
    for (int i = 0; i < 16; i++) {
      values[i] = load(x + X_AT(column + i) + row);
      const u32 bits = __float_as_uint(values[i]) & 0x7fffffffu;
      largest = largest > bits ? largest : bits;
    }
#else
    const X_T* line = x + X_AT(group * ROWS + row) + column;
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
      const u32 bits = __float_as_uint(values[i]) & 0x7fffffffu;
      largest = largest > bits ? largest : bits;
    }
#endif
  }
#if TILES
#pragma unroll
  for (int offset = 8; offset; offset >>= 1) {
    const u32 other = __shfl_xor_sync(0xffffffffu, largest, offset);
    largest = largest > other ? largest : other;
  }
#endif
#ifdef OPERAND
  if (!here) {
    if (row < SPAN_ROWS) scales[scale_at(row, (u32)(column / 16), LINE / 8)] = 0;
    if (row < ROWS && column < 2 * LINE) *reinterpret_cast<uint2*>(packed + row * LINE + column / 2) = make_uint2(0, 0);
    return;
  }
#else
  if (!here) return;
#endif
  const u8 scale = (u8)codes_of(__fmul_rn(__uint_as_float(largest), __fmul_rn(s, 1.0f / 6.0f)), 0.0f);
  const float divisor = __fmul_rn(number_of(scale), g);
  const float r = divisor == 0.0f ? 0.0f : fminf(__fdiv_rn(1.0f, divisor), 3.402823466e38f);
#ifdef SEED
  const Philox random = philox_words(SEED, PURPOSE_CODES, stream, (u32)*micro_step, (FIRST + row * WIDTH + column) / 16);
#endif
  u32 words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float scaled = __fmul_rn(values[i], r), a = fabsf(scaled);
    const u32 sign = __float_as_uint(scaled) >> 28 & 8;
#ifdef SEED
    const u32 magnitude = a == a ? stochastic(a, random.word[i / 4] >> 8 * (i % 4) & 0xff) : 7;
#else
    const u32 magnitude = a == a ? nearest(a) : 7;
#endif
    words[i / 8] |= (sign | magnitude) << 4 * (i % 8);
  }
#ifdef OPERAND
  *reinterpret_cast<uint2*>(packed + row * LINE + column / 2) = make_uint2(words[0], words[1]);
  scales[scale_at(row, (u32)(column / 16), LINE / 8)] = scale;
#else
  *reinterpret_cast<uint2*>(packed + (row * COLUMNS + column) / 2) = make_uint2(words[0], words[1]);
#if TILES
  if (piece % 16 == 0)
#endif
    packed[SCALES_AT + block] = scale;
#endif
}
