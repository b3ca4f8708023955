// What the gradients of attention need of every query, in one read of o and d_o: statistics[b, h, i] =
// (lse_i log2(e), do_i.o_i), zero in the rows that fill up; intervals[b, i] = the keys that query i sees, nothing in the
// rows that fill up. Also sets the tickets to zero.
// o, d_o [BATCH, TOKENS, HEADS, DV], strided in the first three axes; lse f32 [BATCH, HEADS, TOKENS].
// A warp per query and head, 8 columns a lane.
#include "blocks.cuh"
#include "reduce.cuh"

#define TICKETS 2

__device__ __forceinline__ float dot_of_pairs(u32 x, u32 y) {
#if IS_F16
  float a, b, c, d;
  asm("{.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(a), "=f"(b) : "r"(x));
  asm("{.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(c), "=f"(d) : "r"(y));
  return fmaf(a, c, b * d);
#else
  return fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16),
              __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u));
#endif
}

extern "C" __global__ void __launch_bounds__(256)
attention_statistics(const u16* __restrict__ o, const u16* __restrict__ d_o, const float* __restrict__ lse,
                     const int* __restrict__ document_start, const int* __restrict__ last_key,
                     float2* __restrict__ statistics, int2* __restrict__ intervals, int* __restrict__ tickets) {
  const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= (long long)BATCH * HEADS * PADDED) return;
  const int i = row % PADDED, bh = row / PADDED, h = bh % HEADS, b = bh / HEADS;
  if (row < TICKETS && lane == 0) tickets[row] = 0;
  if (h == 0 && lane == 0)
    intervals[b * PADDED + i] = i < TOKENS ? keys_of(document_start, last_key, b, i) : make_int2(1 << 30, -1);
  float2 s = make_float2(0.0f, 0.0f);
  if (i < TOKENS) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < DV; c += 256) {
      if (c + lane * 8 >= DV) break;
      const uint4 x = *(const uint4*)(o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H + c + lane * 8);
      const uint4 y = *(const uint4*)(d_o + (size_t)b * DO_B + (size_t)i * DO_S + (size_t)h * DO_H + c + lane * 8);
      sum += dot_of_pairs(x.x, y.x) + dot_of_pairs(x.y, y.y) + dot_of_pairs(x.z, y.z) + dot_of_pairs(x.w, y.w);
    }
    s.y = warp_sum(sum);
    s.x = lse[(size_t)bh * TOKENS + i] * LOG2E;
  }
  if (lane == 0) statistics[row] = s;
}
