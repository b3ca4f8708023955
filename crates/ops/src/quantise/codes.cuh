// Codes of eight bits: rounding to nearest even with saturation, the power of two that scales a tensor, its reading.
// With FORMAT, 0 for E4M3, 1 for E5M2, the codes of that format have short names.
#pragma once
#include "intrinsics.cuh"
typedef unsigned char u8;

// k of the largest 2^k with amax * 2^k <= 1.75 * 2^top, as a number; 1 for 0 and for what is not finite.
__device__ __forceinline__ float power_for(u32 amax, int top) {
  if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
  int exponent = (int)(amax >> 23) - 127;
  u32 mantissa = amax;
  if (amax < 0x00800000u) {
    const int shift = __clz(amax) - 8;
    mantissa = amax << shift;
    exponent = -126 - shift;
  }
  int k = top - exponent - ((mantissa & 0x7fffffu) > 0x600000u ? 1 : 0);
  k = k < -126 ? -126 : k > 126 ? 126 : k;
  return __uint_as_float((u32)(127 + k) << 23);
}

__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u - (__float_as_uint(power) >> 23)) << 23);
}

// Two codes, that of `a` in the low byte; OF_ is a format.
template <int OF_> __device__ __forceinline__ u16 codes_as(float a, float b) {
#ifdef HAS_FP8_CONVERSION
  return OF_ == 0 ? e4m3_pair(a, b) : e5m2_pair(a, b);
#else
  // The same by integers, for GPUs without the instruction.
  u32 result = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 bits = __float_as_uint(i ? b : a), magnitude = bits & 0x7fffffffu;
    const int mantissa = OF_ == 0 ? 3 : 2, least = OF_ == 0 ? -6 : -14;
    u32 code;
    if (magnitude > 0x7f800000u) code = 0x7f;
    else {
      const float largest = OF_ == 0 ? 448.0f : 57344.0f;
      const float x = fminf(__uint_as_float(magnitude), largest);
      int exponent = (int)(__float_as_uint(x) >> 23) - 127;
      if (exponent < least) exponent = least;
      const int units = __float2int_rn(x * __uint_as_float((u32)(127 + mantissa - exponent) << 23));
      code = ((exponent - least) << mantissa) + units;
    }
#ifdef HAS_FNUZ_CODES
    // 0x80 is NaN to the units, and there is no negative zero.
    code = code == 0x7fu && magnitude > 0x7f800000u ? 0x80u : code == 0 ? 0 : code | (bits >> 24 & 0x80u);
#else
    code |= bits >> 24 & 0x80u;
#endif
    result |= code << (8 * i);
  }
  return (u16)result;
#endif
}

// The number that a code of a format stands for.
template <int OF_> __device__ __forceinline__ float number_as(u8 code) {
#ifdef HAS_FNUZ_CODES
  if (code == 0x80u) return __uint_as_float(0x7fffffffu);
#endif
  const u32 magnitude = code & 0x7fu, sign = (u32)(code & 0x80u) << 24;
  const float x = __uint_as_float(magnitude << (OF_ == 0 ? 20 : 21)) * __uint_as_float((OF_ == 0 ? 247u : 239u) << 23);
  u32 bits = __float_as_uint(x);
  if (OF_ == 0 && magnitude == 0x7fu || OF_ == 1 && magnitude > 0x7cu) bits = 0x7fffffffu;
  if (OF_ == 1 && magnitude == 0x7cu) bits = 0x7f800000u;
  return __uint_as_float(bits | sign);
}

#ifdef FORMAT
__device__ __forceinline__ u16 codes_of(float a, float b) { return codes_as<FORMAT>(a, b); }
__device__ __forceinline__ float number_of(u8 code) { return number_as<FORMAT>(code); }
#endif

// As types of elements that are written and read.
struct e4m3 { u8 bits; };
struct e5m2 { u8 bits; };
__device__ __forceinline__ float load(const e4m3* p) { return number_as<0>(p->bits); }
__device__ __forceinline__ float load(const e5m2* p) { return number_as<1>(p->bits); }

// Two numbers become codes at once.
template <typename T_> __device__ __forceinline__ constexpr int format_of();
template <> __device__ __forceinline__ constexpr int format_of<e4m3>() { return 0; }
template <> __device__ __forceinline__ constexpr int format_of<e5m2>() { return 1; }
template <typename T_, int N_> __device__ __forceinline__ void in_codes(T_ (&to)[N_], const float (&x)[N_]) {
#pragma unroll
  for (int i = 0; i < N_; i += 2) {
    const u16 pair = codes_as<format_of<T_>()>(x[i], i + 1 < N_ ? x[i + 1] : 0.0f);
    to[i].bits = (u8)pair;
    if (i + 1 < N_) to[i + 1].bits = (u8)(pair >> 8);
  }
}

// The largest of a block's unsigned numbers; reaches every thread.
template <int THREADS_> __device__ __forceinline__ u32 block_max_bits(u32 x) {
  __shared__ u32 parts[THREADS_ / 32];
  x = __reduce_max_sync(0xffffffffu, x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();
  u32 most = parts[0];
#pragma unroll
  for (int i = 1; i < THREADS_ / 32; i++) most = most > parts[i] ? most : parts[i];
  return most;
}

// The larger of a magnitude and that of a number; NaN where either is.
__device__ __forceinline__ float larger(float most, float x) { return max_nan(most, fabsf(x)); }

// Raises a magnitude in memory to a block's largest. Most blocks find it as large: one access, and no atomic one.
template <int THREADS_> __device__ __forceinline__ void raise(float* amax, u32 most) {
  most = block_max_bits<THREADS_>(most);
  if (threadIdx.x == 0 && most > *(volatile u32*)amax) atomicMax((u32*)amax, most);
}

// Whether a number that is not 0 becomes 0 in E4M3: half of the smallest number does, by the tie.
__device__ __forceinline__ bool is_flushed(float x, float power) {
  return x != 0.0f && fabsf(x * power) <= __uint_as_float(117u << 23);
}

// Adds a block's numbers to a count in memory. Whole numbers in f64: exact, in any order.
template <int THREADS_> __device__ __forceinline__ void tally(double* count, u32 x) {
  __shared__ u32 total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  if (x) atomicAdd(&total, x);
  __syncthreads();
  if (threadIdx.x == 0 && total) atomicAdd(count, (double)total);
}

// The power of two that scales a tensor: the kept factor, where it is not 0, else that for the largest of the parts. By
// whole warps.
__device__ __forceinline__ float tensor_power(float factor, const u32* parts, int top) {
  if (factor != 0.0f) return factor;
  u32 most = 0;
  for (int i = threadIdx.x % 32; i < 256; i += 32) most = most > parts[i] ? most : parts[i];
  return power_for(__reduce_max_sync(0xffffffffu, most), top);
}
