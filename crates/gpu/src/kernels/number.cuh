// Storage types and their exact or rounding conversions to f32, without any toolkit header.
// bf16 rounds to nearest even; NaN stays NaN.
#pragma once
#include "intrinsics.cuh"

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_f32(f16 x) { return f16_to_f32(x.bits); }

__device__ __forceinline__ void from_f32(float x, float& y) { y = x; }
__device__ __forceinline__ void from_f32(float x, bf16& y) { y.bits = f32_to_bf16(x); }
__device__ __forceinline__ void from_f32(float x, f16& y) { y.bits = f32_to_f16(x); }
