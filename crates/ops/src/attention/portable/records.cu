// What the gradients of attention need of every query, in one read of o and do: records[b, h, i] =
// (lse_i log2 e, delta_i = do_i.o_i, first and last key seen), 16 bytes.
// o, do [BATCH, TOKENS, HEADS, DV], strided in the first three axes; lse f32 [BATCH, HEADS, TOKENS].
// A warp per query and head, 8 queries of a head a block.
#include "tiles.cuh"
#include "reduce.cuh"

#define GROUPS ((TOKENS + 7) / 8)

extern "C" __global__ void __launch_bounds__(256)
attention_records(const ELEMENT* __restrict__ o, const ELEMENT* __restrict__ d_o, const float* __restrict__ lse,
                  const int* __restrict__ starts,
                  const int* __restrict__ last_keys,
                  float4* __restrict__ records) {
  const int lane = threadIdx.x % 32, i = blockIdx.x % GROUPS * 8 + threadIdx.x / 32, bh = blockIdx.x / GROUPS;
  const int b = bh / HEADS, h = bh % HEADS;
  if (i < TOKENS) {
    const ELEMENT* x = o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H;
    const ELEMENT* y = d_o + (size_t)b * DO_B + (size_t)i * DO_S + (size_t)h * DO_H;
    float delta = 0.0f;
#pragma unroll
    for (int c = lane * 8; c < DV; c += 256) {
      const uint4 xs = *(const uint4*)(x + c), ys = *(const uint4*)(y + c);
      const u32 xw[4] = {xs.x, xs.y, xs.z, xs.w}, yw[4] = {ys.x, ys.y, ys.z, ys.w};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        delta = fmaf(to_float(ELEMENT{(u16)xw[w]}), to_float(ELEMENT{(u16)yw[w]}), delta);
        delta = fmaf(to_float(ELEMENT{(u16)(xw[w] >> 16)}), to_float(ELEMENT{(u16)(yw[w] >> 16)}), delta);
      }
    }
    delta = warp_sum(delta);
    const float row = lse[(size_t)bh * TOKENS + i] * LOG2E;
    if (lane == 0)
      records[(size_t)bh * TOKENS + i] =
          make_float4(row, delta, __int_as_float(first_seen(starts + b * TOKENS, i)),
                      __int_as_float(last_seen(last_keys + b * TOKENS, i)));
  }
}
