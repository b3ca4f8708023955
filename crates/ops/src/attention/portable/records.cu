// What the gradients of attention need of every query, in one read of o and do: records[b, h, i] =
// (lse_i log2 e, delta_i = do_i.o_i, first and last key seen), 16 bytes. Also sets the TURN_COUNT turns
// of the tiles of keys to zero.
// o, do [BATCH, TOKENS, HEADS, DV], strided in the first three axes; lse f32 [BATCH, HEADS, TOKENS].
// LANES lanes (a power of two) per query and head, 256 / LANES queries of a head a block.
#include "tiles.cuh"

#define ROWS (256 / LANES)
#define GROUPS ((TOKENS + ROWS - 1) / ROWS)

extern "C" __global__ void __launch_bounds__(256)
attention_records(const ELEMENT* __restrict__ o, const ELEMENT* __restrict__ d_o, const float* __restrict__ lse,
                  const int* __restrict__ starts, const int* __restrict__ last_keys, float4* __restrict__ records,
                  int* __restrict__ turns) {
  for (int t = blockIdx.x * 256 + threadIdx.x; t < TURN_COUNT; t += gridDim.x * 256) turns[t] = 0;
  const int lane = threadIdx.x % LANES, row = blockIdx.x % GROUPS * ROWS + threadIdx.x / LANES;
  const int i = min(row, TOKENS - 1);  // lanes beyond the row repeat its last query
  const int bh = blockIdx.x / GROUPS, b = bh / HEADS, h = bh % HEADS;
  const ELEMENT* x = o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H;
  const ELEMENT* y = d_o + (size_t)b * DO_B + (size_t)i * DO_S + (size_t)h * DO_H;
  float delta = 0.0f;
#pragma unroll
  for (int c = lane * 8; c < DV; c += LANES * 8) {
    const uint4 xs = *(const uint4*)(x + c), ys = *(const uint4*)(y + c);
    const u32 xw[4] = {xs.x, xs.y, xs.z, xs.w}, yw[4] = {ys.x, ys.y, ys.z, ys.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      delta = fmaf(to_float(ELEMENT{(u16)xw[w]}), to_float(ELEMENT{(u16)yw[w]}), delta);
      delta = fmaf(to_float(ELEMENT{(u16)(xw[w] >> 16)}), to_float(ELEMENT{(u16)(yw[w] >> 16)}), delta);
    }
  }
#pragma unroll
  for (int offset = LANES / 2; offset; offset >>= 1) delta += __shfl_xor_sync(0xffffffffu, delta, offset);
  if (lane == 0 && row < TOKENS)
    records[(size_t)bh * TOKENS + i] =
        make_float4(lse[(size_t)bh * TOKENS + i] * LOG2E, delta, __int_as_float(first_seen(starts + b * TOKENS, i)),
                    __int_as_float(last_seen(last_keys + b * TOKENS, i)));
}
