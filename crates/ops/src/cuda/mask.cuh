// Which elements dropout keeps, made where they are used: the decisions of `dropout.cu` without its tensor.
// SEED; LEAST is the smallest random word that keeps an element.
#pragma once
#include "philox.cuh"

// Ones for what is kept, zeros for what is dropped.
struct Mask { u32 of[4]; };

// The four elements from index 4·block on, in the tensor's logical order.
__device__ __forceinline__ Mask mask_of(u32 stream, u32 micro_step, u32 block) {
  const Philox dice = philox_words(SEED, PURPOSE_DROPOUT, stream, micro_step, block);
  Mask mask;
#pragma unroll
  for (int i = 0; i < 4; i++) mask.of[i] = dice.word[i] >= LEAST ? 0xffffffffu : 0u;
  return mask;
}

// The low halves of two words.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
// The high halves of two words.
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
