// Blocks of 256 elements in BYTES bytes, a warp a block, eight elements a lane: element i of the block is lane i % 32's.
//   INT8: scale = max|v| / 127 in f32, then codes round(v / scale); TOPK: the KEPT largest |v| in f32, then their places;
//   ONEBIT: scale = Σ|v| / 256 in f32, each lane's first, then lanes pairwise; then signs, bit i % 8 of byte i / 8 set for v >= 0.
// `compress`: v = x + error; what the bytes have not becomes the error, unless v is not finite: then the scale, or the
// numbers, are NaN and the error stays. `sum_compressed`: the sum of PIECES blocks in their order. Products and sums are
// written uncontracted, as the CPU reference computes them. Not measured: written for its bytes alone.
#include "types.cuh"

typedef unsigned char u8;

#define ALL_LANES 0xffffffffu

#if defined(SUM)
extern "C" __global__ void __launch_bounds__(THREADS)
sum_compressed(const u8* __restrict__ pieces, float* __restrict__ sum) {
  const u32 block = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= BLOCKS) return;
  float total[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  for (u32 piece = 0; piece < PIECES; piece++) {
    const u8* from = pieces + (u64)piece * EACH + (u64)block * BYTES;
    const float* numbers = reinterpret_cast<const float*>(from);
#if defined(INT8)
    const float scale = numbers[0];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float code = (float)(signed char)from[4 + i * 32 + lane];
      total[i] = __fadd_rn(total[i], __fmul_rn(code, scale));
    }
#elif defined(ONEBIT)
    const u32* signs = reinterpret_cast<const u32*>(from + 4);
#pragma unroll
    for (int i = 0; i < 8; i++) total[i] = __fadd_rn(total[i], signs[i] >> lane & 1 ? numbers[0] : -numbers[0]);
#else
    for (int at = 0; at < KEPT; at++) {
      const u32 place = from[4 * KEPT + at];
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (place == i * 32 + lane) total[i] = __fadd_rn(total[i], numbers[at]);
    }
#endif
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sum[(u64)block * 256 + i * 32 + lane] = total[i];
}
#else
extern "C" __global__ void __launch_bounds__(THREADS)
compress(const float* __restrict__ x, u8* __restrict__ codes, float* __restrict__ error) {
  const u32 block = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= ALL) return;
  u8* to = codes + (u64)block * BYTES;
  if (block >= BLOCKS) {
    for (u32 at = lane; at < BYTES; at += 32) to[at] = 0;
    return;
  }
  float v[8];
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u64 at = (u64)block * 256 + i * 32 + lane;
    v[i] = __fadd_rn(x[at], error[at]);
    is_finite = is_finite && fabsf(v[i]) <= 3.402823466e38f;
  }
  is_finite = __all_sync(ALL_LANES, is_finite);
  float* numbers = reinterpret_cast<float*>(to);
  const float nan = __int_as_float(0x7fc00000);
#if defined(INT8)
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
  for (int far = 16; far; far >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, far));
  const float scale = is_finite ? __fdiv_rn(largest, 127.0f) : nan;
  if (lane == 0) numbers[0] = scale;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float quotient = scale > 0.0f ? __fdiv_rn(v[i], scale) : 0.0f;
    const float code = fminf(fmaxf(rintf(quotient), -127.0f), 127.0f);
    to[4 + i * 32 + lane] = (u8)(signed char)code;
    v[i] = __fsub_rn(v[i], __fmul_rn(code, scale));
  }
#elif defined(ONEBIT)
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = __fadd_rn(sum, fabsf(v[i]));
#pragma unroll
  for (int far = 16; far; far >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, far));
  const float scale = is_finite ? __fmul_rn(sum, 1.0f / 256.0f) : nan;
  if (lane == 0) numbers[0] = scale;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const bool is_positive = v[i] >= 0.0f;
    const u32 signs = __ballot_sync(ALL_LANES, is_positive);
    if (lane == 0) reinterpret_cast<u32*>(to + 4)[i] = signs;
    v[i] = __fsub_rn(v[i], is_positive ? scale : -scale);
  }
#else
  u32 taken = 0;
  for (int number = 0; number < KEPT; number++) {
    // The largest magnitude, the first place of those that have it: both in one number, which grows with both.
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u64 own = (u64)(__float_as_uint(v[i]) & 0x7fffffffu) << 8 | (255 - (i * 32 + lane));
      if (!(taken >> i & 1) && own >= best) best = own;
    }
#pragma unroll
    for (int far = 16; far; far >>= 1) {
      const u64 other = __shfl_xor_sync(ALL_LANES, best, far);
      if (other > best) best = other;
    }
    const u32 place = 255 - (u32)(best & 255);
    if (place % 32 == lane) {
      taken |= 1u << place / 32;
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i == (int)(place / 32)) numbers[number] = is_finite ? v[i] : nan;
      to[4 * KEPT + number] = (u8)place;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (taken >> i & 1) v[i] = 0.0f;
#endif
  if (!is_finite) return;
#pragma unroll
  for (int i = 0; i < 8; i++) error[(u64)block * 256 + i * 32 + lane] = v[i];
}
#endif
