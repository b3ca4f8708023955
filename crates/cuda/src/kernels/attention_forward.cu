// Causal softmax attention inside documents, for any head size and f32 or bf16:
//
//   o[b,i,h,:] = Σ_j p_j v[b,j,h/GROUPS,:],   p_j = exp(scale · q·k_j − lse),   first_key ≤ j ≤ i
//   lse[b,h,i] = log Σ_j exp(scale · q·k_j)
//
// One warp per query and head. Keys come 32 at a time: a lane owns a key for its score, then all
// lanes own HEAD_DIM for the weighted sum; the running maximum rescales what was summed before.
// Everything is f32 until the store. This is the kernel of exact f32 runs and odd shapes; the fast
// path is cuDNN's.

#include "attention.cuh"

extern "C" __global__ void attention_forward(View q, View k, View v, View o, float* lse, Extents e) {
  __shared__ float query[WARPS][HEAD_DIM];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int i = blockIdx.x * WARPS + warp, h = blockIdx.y, b = blockIdx.z;
  if (i >= e.length) return;
  load(query[warp], q.at(b, i, h), lane);
  __syncwarp();
  float maximum = NOTHING, sum = 0.f, out[PER_LANE] = {};
  for (int base = first_key(e, b, i); base <= i; base += 32) {
    int j = base + lane;
    float score = j <= i ? e.scale * dot(query[warp], k.at(b, j, h / GROUPS)) : NOTHING;
    float higher = fmaxf(maximum, warp_max(score));
    float keep = expf(maximum - higher), p = expf(score - higher);
    maximum = higher;
    sum = sum * keep + warp_sum(p);
    for (int c = 0; c < PER_LANE; ++c) out[c] *= keep;
    for (int key = 0; key < min(32, i + 1 - base); ++key) {
      float weight = __shfl_sync(~0u, p, key);
      const NUMBER* value = v.at(b, base + key, h / GROUPS);
      for (int c = 0, d = lane; c < PER_LANE; ++c, d += 32)
        if (d < HEAD_DIM) out[c] = fmaf(weight, to_f32(value[d]), out[c]);
    }
  }
  NUMBER* target = o.at(b, i, h);
  for (int c = 0, d = lane; c < PER_LANE; ++c, d += 32)
    if (d < HEAD_DIM) from_f32(out[c] / sum, target[d]);
  if (lane == 0) lse[e.lse_at(b, h, i)] = maximum + logf(sum);
}
