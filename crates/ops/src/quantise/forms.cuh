// The values of codes in number formats of compressed-tensors. KIND: 0 whole numbers of BITS bits, 1 those with a zero point, 2 E4M3,
// 3 NVFP4, 4 MXFP4; FORMAT 0. Every step is one of IEEE f32: divisions and products are said outright.
#pragma once
#include "codes.cuh"

// The number of E2M1 that is nearest, ties to even; beyond the largest that one.
__device__ __forceinline__ float e2m1(float x) {
  const float a = fabsf(x);
  const u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  const float number = code < 4 ? 0.5f * code : code < 6 ? (float)code - 2.0f : code == 6 ? 4.0f : 6.0f;
  return x < 0.0f ? -number : number;
}

__device__ __forceinline__ float e4m3_number(float x) { return number_of((u8)codes_of(x, 0.0f)); }

struct Scale {
  float factor, zero, global;
};

// The value of the code that is nearest to x.
__device__ __forceinline__ float value_of(float x, const Scale& of) {
  if (!(fabsf(x) <= 3.402823466e38f)) return __uint_as_float(0x7fffffffu);
#if KIND == 0 || KIND == 1
  const float lowest = -(float)(1 << (BITS - 1)), highest = -lowest - 1.0f;
  const float scaled = __fdiv_rn(x, of.factor) + of.zero;
  return __fmul_rn(rintf(fminf(fmaxf(scaled, lowest), highest)) + 0.0f - of.zero, of.factor);
#elif KIND == 2
  return __fmul_rn(e4m3_number(fminf(fmaxf(__fdiv_rn(x, of.factor), -448.0f), 448.0f)), of.factor);
#elif KIND == 3
  return __fdiv_rn(__fmul_rn(e2m1(__fdiv_rn(x, __fdiv_rn(of.factor, of.global))), of.factor), of.global);
#else
  return __fmul_rn(e2m1(__fdiv_rn(x, of.factor)), of.factor);
#endif
}
