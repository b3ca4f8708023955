// Partial sums of the gradient of attention's sinks: partial[part, h] = -sum over the rows of the part of exp(sink_h -
// lse_i) do_i.o_i; `sum_partials` adds the parts. o, do [BATCH, TOKENS, HEADS, DV], strided in the first three axes;
// lse f32 [BATCH, HEADS, TOKENS]; sinks [HEADS]. A block has ROWS consecutive tokens (over all rows of the batch) of one
// head, a warp every eighth of them, a lane every 32nd column. Fixed order: the same bits on every run.
#include "types.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(256)
attention_sink_partial(const O_T* __restrict__ o, const DO_T* __restrict__ d_o, const float* __restrict__ lse,
                       const SINK_T* __restrict__ sinks, float* __restrict__ partial) {
  const int h = blockIdx.y, lane = threadIdx.x & 31, first = blockIdx.x * ROWS;
  const int end = min(first + ROWS, BATCH * TOKENS);
  const float sink = load(sinks + h);
  float sum = 0.0f;
  for (int row = first + threadIdx.x / 32; row < end; row += 8) {
    const int b = row / TOKENS, i = row % TOKENS;
    const O_T* x = o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H;
    const DO_T* y = d_o + (size_t)b * DO_B + (size_t)i * DO_S + (size_t)h * DO_H;
    float delta = 0.0f;
    for (int c = lane; c < DV; c += 32) delta = fmaf(load(x + c), load(y + c), delta);
    sum = fmaf(-expf(sink - lse[((size_t)b * HEADS + h) * TOKENS + i]), delta, sum);
  }
  // Every lane has its own columns' share.
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x * HEADS + h] = sum;
}
