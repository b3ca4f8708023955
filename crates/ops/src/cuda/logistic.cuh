// 1/(1 + e^-x) and x/(1 + e^-x), within a last digit of f32. Denominators are 1 or more, so their reciprocals need none of the
// branches of a division: an approximate one, and a correction by what is left. Below x = -87.3, where the functions are below
// 1e-35 in magnitude, reciprocals are subnormal and become 0, and so do both functions. NaN stays NaN.
#pragma once

__device__ __forceinline__ float one_plus_exp(float x) {
  float limited;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(limited) : "f"(-x), "f"(88.0f));
  return __fadd_rn(1.0f, expf(limited));
}

__device__ __forceinline__ float reciprocal_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) {
  const float below = one_plus_exp(x), y = reciprocal_of(below);
  return fmaf(fmaf(-below, y, 1.0f), y, y);
}

__device__ __forceinline__ float silu(float x) {
  const float below = one_plus_exp(x), r = reciprocal_of(below), y = __fmul_rn(x, r);
  // Nothing is left of what is infinite.
  return fabsf(y) <= 3.402823466e38f ? fmaf(fmaf(-below, y, x), r, y) : y;
}
