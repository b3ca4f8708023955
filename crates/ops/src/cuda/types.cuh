// Element types without any header of the toolkit: conversions to f32 and back, loads, rounding stores.
#pragma once
#include "intrinsics.cuh"

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) { return f16_to_f32(x.bits); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return bf16{f32_to_bf16(x)}; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return f16{f32_to_f16(x)}; }

template <typename T> __device__ __forceinline__ float load(const T* p) { return to_float(*p); }
template <typename T> __device__ __forceinline__ void store(T* p, float x) { *p = from_float<T>(x); }
