// Philox4x32-10 (Salmon et al., SC'11): the words of `tensor::philox`. A random number is a function
// of (seed, purpose, stream, step, position), never of thread timing.
#pragma once
#include "types.cuh"

struct Philox { u32 word[4]; };

constexpr __device__ __forceinline__ u64 product(u32 a, u32 b) {
  return __builtin_is_constant_evaluated() ? (u64)a * b : multiply_wide(a, b);
}

constexpr __device__ __forceinline__ Philox philox4x32(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  for (int round = 0; round < 10; round++) {
    const u64 p0 = product(0xD2511F53u, c0), p1 = product(0xCD9E8D57u, c2);
    c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
    c1 = (u32)p1;
    c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c3 = (u32)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Philox{{c0, c1, c2, c3}};
}

// Purposes keep the sequences of different uses apart.
#define PURPOSE_DROPOUT 1u
#define PURPOSE_STOCHASTIC_ROUNDING 2u
#define PURPOSE_CODES 5u
#define PURPOSE_EMBEDDING_NOISE 7u

// The four words at positions 4·block … 4·block + 3 of the sequence.
constexpr __device__ __forceinline__ Philox philox_words(u64 seed, u32 purpose, u32 stream, u32 step, u64 block) {
  return philox4x32((u32)block, (u32)(block >> 32), step, stream, (u32)seed, (u32)(seed >> 32) ^ (purpose << 24));
}

// Uniform in [0, 1): the top 24 bits.
__device__ __forceinline__ float unit(u32 word) { return (word >> 8) * (1.0f / 16777216.0f); }

// Up or down with a probability given by the distance: the low half of `random` is the dice.
__device__ __forceinline__ bf16 stochastic_bf16(float x, u32 random) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return from_float<bf16>(x);
  return bf16{(u16)((bits + (random & 0xffffu)) >> 16)};
}

// Known answers of the Random123 distribution, checked while compiling.
static_assert(philox4x32(0, 0, 0, 0, 0, 0).word[0] == 0x6627e8d5u, "philox");
static_assert(philox4x32(0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u).word[3] ==
                  0x24126ea1u, "philox");
