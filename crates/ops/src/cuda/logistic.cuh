// 1/(1 + e^-x) and x/(1 + e^-x), within a last digit of f32. Denominators are 1 or more, so their reciprocals need none of the
// branches of a division: an approximate one, and a correction by what is left. Below x = -87.3, where the functions are below
// 1e-35 in magnitude, reciprocals are subnormal and become 0, and so do both functions. NaN stays NaN.
#pragma once
#include "intrinsics.cuh"

__device__ __forceinline__ float one_plus_exp(float x) {
  return __fadd_rn(1.0f, expf(min_nan(-x, 88.0f)));
}

__device__ __forceinline__ float sigmoid(float x) {
  const float below = one_plus_exp(x), y = rcp_approx(below);
  return fmaf(fmaf(-below, y, 1.0f), y, y);
}

__device__ __forceinline__ float silu(float x) {
  const float below = one_plus_exp(x), r = rcp_approx(below), y = __fmul_rn(x, r);
  // Nothing is left of what is infinite.
  return fabsf(y) <= 3.402823466e38f ? fmaf(fmaf(-below, y, x), r, y) : y;
}
