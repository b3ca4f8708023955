// What the gradients of attention need of every query, in one read of o and d_o: statistics [2, b, h, i] = lse_i
// log2(e) and do_i.o_i, zero in the rows that fill up; intervals[b, i] = the keys that query i sees, nothing in the
// rows that fill up. Also sets the TICKETS tickets and turns to zero. With BY_ROW the kernels that follow share the
// rows of the batch: the gradients in one pass take those whose queries see LONG keys or more in the mean, the kernels
// of two passes the others; a row's share does not depend on the rows next to it.
// o, d_o [BATCH, TOKENS, HEADS, DV], strided in the first three axes; lse f32 [BATCH, HEADS, TOKENS].
// LANES lanes of a warp per query and head, 8 columns a lane.
#include "blocks.cuh"

#define LANES (WIDE_V > 128 ? 32 : WIDE_V > 64 ? 16 : 8)

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

#if BY_ROW
// The drawings of the one pass, of dq and of dk and dv, by one block: rows of the batch in their order.
__device__ __forceinline__ void share_rows(const int* document_start, const int* last_key, int* drawings) {
  __shared__ u64 seen;
  int counts[2] = {0, 0};
  for (int b = 0; b < BATCH; b++) {
    if (threadIdx.x == 0) seen = 0;
    __syncthreads();
    u64 mine = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < TOKENS; i += 256) {
      const int2 keys = keys_of(document_start, last_key, b, i);
      mine += keys.y - keys.x + 1;
    }
    atomicAdd(&seen, mine);
    __syncthreads();
    const int by_two = seen < (u64)LONG * TOKENS;
    if (threadIdx.x == 0) {
      for (int kernel = by_two; kernel < 1 + 2 * by_two; kernel++) drawings[kernel * DRAWING + 2 + counts[by_two]] = b;
    }
    counts[by_two]++;
    __syncthreads();
  }
  if (threadIdx.x < 3) {
    drawings[threadIdx.x * DRAWING] = 0;
    drawings[threadIdx.x * DRAWING + 1] = threadIdx.x == 0 ? counts[0] : counts[1];
  }
}
#endif

extern "C" __global__ void __launch_bounds__(256)
attention_statistics(const u16* __restrict__ o, const u16* __restrict__ d_o, const float* __restrict__ lse,
                     const int* __restrict__ document_start, const int* __restrict__ last_key,
                     float* __restrict__ statistics, int2* __restrict__ intervals, int* __restrict__ tickets) {
#if BY_ROW
  if (blockIdx.x == 0) share_rows(document_start, last_key, tickets);
#endif
  const int lane = threadIdx.x % LANES;
  const long long row = (long long)blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
  const int i = row % PADDED, bh = row / PADDED, h = bh % HEADS, b = bh / HEADS;
  if (b >= BATCH) return;
  if (row >= BY_ROW * 3 * DRAWING && row < TICKETS && lane == 0) tickets[row] = 0;
  if (h == 0 && lane == 0) {
    const int2 keys = keys_of(document_start, last_key, b, min(i, TOKENS - 1));
    intervals[b * PADDED + i] = make_int2(i < TOKENS ? keys.x : 1 << 30, keys.y);
  }
  float sum = 0.0f;
  if (i < TOKENS && lane * 8 < DV) {
    const uint4 x = *(const uint4*)(o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H + lane * 8);
    const uint4 y = *(const uint4*)(d_o + (size_t)b * DO_B + (size_t)i * DO_S + (size_t)h * DO_H + lane * 8);
    sum = dot_of_pairs(x.x, y.x) + dot_of_pairs(x.y, y.y) + dot_of_pairs(x.z, y.z) + dot_of_pairs(x.w, y.w);
  }
  const unsigned together = (LANES == 32 ? 0xffffffffu : (1u << LANES % 32) - 1) << threadIdx.x % 32 / LANES * LANES;
#pragma unroll
  for (int offset = LANES / 2; offset; offset >>= 1) sum += __shfl_xor_sync(together, sum, offset);
  if (lane == 0) {
    statistics[row] = i < TOKENS ? lse[(size_t)bh * TOKENS + i] * LOG2E : 0.0f;
    statistics[DELTAS + row] = sum;
  }
}
