// Parts of an attention put together, in their order:
//   o = sum_i w_i part_i / (sum_i w_i total_i + exp(sink - top)), w_i = exp(top_i - top), top the largest of all.
// parts f32 [token, HEADS, SPLITS, DV + 2]: sums, largest score (-inf for a part without keys), sum of exponentials;
// positions i32 [token], below 0 for padding, whose result is 0. A block has one head of one token.
#include "types.cuh"
#include "dependent_launch.cuh"

#define INF __int_as_float(0x7f800000)

extern "C" __global__ void __launch_bounds__(THREADS)
merge_parts(const float* parts, const int* positions, const SINK_T* sinks, O_T* o) {
  grid_dependency_synchronize();
  const int head = blockIdx.x, token = blockIdx.y;
  parts += ((size_t)token * HEADS + head) * SPLITS * (DV + 2);
  float top = HAS_SINK ? load(sinks + head) : -INF;
  for (int i = 0; i < SPLITS; i++) top = fmaxf(top, parts[i * (DV + 2) + DV]);
  o += (size_t)(token / TOKENS) * O_B + (size_t)(token % TOKENS) * O_S + (size_t)head * O_H;
  for (int column = threadIdx.x; column < DV; column += THREADS) {
    float all = HAS_SINK ? expf(load(sinks + head) - top) : 0.0f, mine = 0.0f;
    for (int i = 0; i < SPLITS; i++) {
      const float* part = parts + i * (DV + 2);
      const float weight = part[DV] > -INF ? expf(part[DV] - top) : 0.0f;
      all = fmaf(part[DV + 1], weight, all);
      mine = fmaf(part[column], weight, mine);
    }
    store(o + column, positions[token] < 0 ? 0.0f : mine / all);
  }
}
