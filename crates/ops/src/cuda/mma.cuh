// Tensor-core products of 16-bit tiles in shared memory, accumulated in f32: m16n8k16 by the type of the numbers, which are
// bf16 where a name does not say otherwise. The instructions that feed them are in intrinsics.cuh.
#pragma once
#include "types.cuh"

// d += a·b, as mma_bf16 has it.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16_ordered(d, a, b0, b1); }

// The same of numbers of type T_.
template <typename T_> __device__ __forceinline__ void mma_of(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma_of<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1); }
template <> __device__ __forceinline__ void mma_of<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_f16_ordered(d, a, b0, b1);
}

// Two numbers rounded to bf16, the first in the low half.
__device__ __forceinline__ u32 pair(float low, float high) { return bf16_pair(low, high); }

// The same, rounded to T_.
template <typename T_> __device__ __forceinline__ u32 pair_of(float low, float high);
template <> __device__ __forceinline__ u32 pair_of<bf16>(float low, float high) { return bf16_pair(low, high); }
template <> __device__ __forceinline__ u32 pair_of<f16>(float low, float high) { return f16_pair(low, high); }
