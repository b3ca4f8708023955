// Gradients of attention_forward, the same bits in every run: no atomics.
//
//   p_ij = exp(scale · q_i·k_j − lse_i),  delta_i = dO_i·o_i,  ds_ij = p_ij (dO_i·v_j − delta_i) scale
//   dq_i = Σ_j ds_ij k_j          one warp per query and head; also stores delta
//   dk_j = Σ_h Σ_i ds_ij q_i      one warp per key and key head, over the heads of its group
//   dv_j = Σ_h Σ_i p_ij dO_i
//
// 32 partners at a time: a lane owns a partner for the two dot products, then all lanes own
// HEAD_DIM for the sums. f32 until the store.

#include "attention.cuh"

extern "C" __global__ void attention_d_q(View q, View k, View v, View o, View d_o, View d_q, const float* lse,
                                         float* delta, Extents e) {
  __shared__ float query[WARPS][HEAD_DIM], out_gradient[WARPS][HEAD_DIM];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int i = blockIdx.x * WARPS + warp, h = blockIdx.y, b = blockIdx.z;
  if (i >= e.length) return;
  load(query[warp], q.at(b, i, h), lane);
  load(out_gradient[warp], d_o.at(b, i, h), lane);
  __syncwarp();
  float own = 0.f;
  for (int d = lane; d < HEAD_DIM; d += 32) own = fmaf(out_gradient[warp][d], to_f32(o.at(b, i, h)[d]), own);
  own = warp_sum(own);
  long long row = ((long long)b * e.heads + h) * e.length + i;
  if (lane == 0) delta[row] = own;
  float log_sum = lse[e.lse_at(b, h, i)], sum[PER_LANE] = {};
  for (int base = first_key(e, b, i); base <= i; base += 32) {
    int j = base + lane;
    float ds = 0.f;
    if (j <= i) {
      float p = expf(e.scale * dot(query[warp], k.at(b, j, h / GROUPS)) - log_sum);
      ds = p * (dot(out_gradient[warp], v.at(b, j, h / GROUPS)) - own) * e.scale;
    }
    for (int key = 0; key < min(32, i + 1 - base); ++key) {
      float weight = __shfl_sync(~0u, ds, key);
      const NUMBER* x = k.at(b, base + key, h / GROUPS);
      for (int c = 0, d = lane; c < PER_LANE; ++c, d += 32)
        if (d < HEAD_DIM) sum[c] = fmaf(weight, to_f32(x[d]), sum[c]);
    }
  }
  NUMBER* target = d_q.at(b, i, h);
  for (int c = 0, d = lane; c < PER_LANE; ++c, d += 32)
    if (d < HEAD_DIM) from_f32(sum[c], target[d]);
}

extern "C" __global__ void attention_d_kv(View q, View k, View v, View d_o, View d_k, View d_v, const float* lse,
                                          const float* delta, Extents e) {
  __shared__ float key[WARPS][HEAD_DIM], value[WARPS][HEAD_DIM];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int j = blockIdx.x * WARPS + warp, kv_head = blockIdx.y, b = blockIdx.z;
  if (j >= e.length) return;
  load(key[warp], k.at(b, j, kv_head), lane);
  load(value[warp], v.at(b, j, kv_head), lane);
  __syncwarp();
  float key_sum[PER_LANE] = {}, value_sum[PER_LANE] = {};
  for (int h = kv_head * GROUPS; h < (kv_head + 1) * GROUPS; ++h) {
    long long rows = ((long long)b * e.heads + h) * e.length;
    for (int base = j; base < e.length; base += 32) {
      int i = base + lane;
      bool sees = i < e.length && first_key(e, b, i) <= j;
      // The queries that see a key lie behind one another: none here, none later.
      if (!__any_sync(~0u, sees)) break;
      float p = 0.f, ds = 0.f;
      if (sees) {
        p = expf(e.scale * dot(key[warp], q.at(b, i, h)) - lse[e.lse_at(b, h, i)]);
        ds = p * (dot(value[warp], d_o.at(b, i, h)) - delta[rows + i]) * e.scale;
      }
      for (int partner = 0; partner < min(32, e.length - base); ++partner) {
        float weight = __shfl_sync(~0u, p, partner), score = __shfl_sync(~0u, ds, partner);
        const NUMBER* query = q.at(b, base + partner, h);
        const NUMBER* gradient = d_o.at(b, base + partner, h);
        for (int c = 0, d = lane; c < PER_LANE; ++c, d += 32)
          if (d < HEAD_DIM) {
            key_sum[c] = fmaf(score, to_f32(query[d]), key_sum[c]);
            value_sum[c] = fmaf(weight, to_f32(gradient[d]), value_sum[c]);
          }
      }
    }
  }
  NUMBER *key_target = d_k.at(b, j, kv_head), *value_target = d_v.at(b, j, kv_head);
  for (int c = 0, d = lane; c < PER_LANE; ++c, d += 32)
    if (d < HEAD_DIM) {
      from_f32(key_sum[c], key_target[d]);
      from_f32(value_sum[c], value_target[d]);
    }
}
