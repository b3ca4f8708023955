// Attention by scalar f32 arithmetic, any element type, heads of up to 512 columns:
//   o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), s_ij = SCALE q_i.k_j (or SOFT_CAP tanh of it / SOFT_CAP) over the
//   keys first_i <= j <= last_i less those of other branches; a sink joins the sum of the exponentials alone
//   ds_ij = p_ij (do_i.v_j - delta_i) ds/d(q.k), delta_i = sum_j p_ij do_i.v_j / sum p_i;
//   dq_i = sum_j ds_ij k_j; dk_j = sum_i ds_ij q_i; dv_j = sum_i p_ij do_i
// q, dq [BATCH, TOKENS, HEADS, D], k, dk [BATCH, TOKENS, KV_HEADS, D], o, do and v, dv the same with DV columns,
// strided in the first three axes; lse, delta f32 [BATCH, HEADS, TOKENS]; starts and last i32 [BATCH, TOKENS], both
// rising along a row; sinks [HEADS].
// A block owns ROWS = WARPS * PER_WARP consecutive queries (dk, dv: keys) of one head and walks over the tiles of
// 32 tokens of the other side that any of them sees. For scores a lane stands for one token of the tile; for the
// weighted sums it stands for columns lane, lane + 32, ... Every sum has one owner and a fixed order: no atomics.
// The plain way of doing it: for f32 runs; halves go to the tensor cores.
#include "plain.cuh"

#if defined(FORWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                  const int* __restrict__ starts, const int* __restrict__ last_keys,
                  const SINK_T* __restrict__ sinks, O_T* __restrict__ o, float* __restrict__ lse) {
  float *q_rows = memory, *tile = memory + ROWS * (D + DV);
  const int h = blockIdx.y, b = blockIdx.z, kv = h / (HEADS / KV_HEADS), lane = threadIdx.x & 31;
  const int own = (threadIdx.x / 32) * PER_WARP, first = blockIdx.x * ROWS, last = min(first + ROWS, TOKENS) - 1;
  q += (size_t)b * Q_B + (size_t)h * Q_H;
  k += (size_t)b * K_B + (size_t)kv * K_H;
  v += (size_t)b * V_B + (size_t)kv * V_H;
  starts += (size_t)b * TOKENS;
  last_keys += (size_t)b * TOKENS;
  fetch<D, D>(q_rows, q, Q_S, first, ROWS);
  int from[PER_WARP], to[PER_WARP];
  float largest[PER_WARP], total[PER_WARP], sum[PER_WARP][CHUNKS(DV)] = {};
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    from[r] = first_key(starts, first + own + r);
    to[r] = last_key(last_keys, first + own + r);
    largest[r] = HAS_SINK ? load(sinks + h) : -INF;
    total[r] = HAS_SINK ? 1.0f : 0.0f;
  }
  const int end = last_key(last_keys, last);
  for (int start = first_key(starts, first) & ~31; start <= end; start += 32) {
    if (!any_seen(last_keys, start, first)) continue;
    __syncthreads();
    fetch<D, D + 1>(tile, k, K_S, start, 32);
    __syncthreads();
    float p[PER_WARP], slope;
    dots<D>(q_rows + own * D, tile, p);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      const bool visible = start + lane >= from[r] && start + lane <= to[r] &&
                           !is_hidden(last_keys, first + own + r, start + lane);
      const float s = visible ? score(p[r], slope) : -INF;
      const float next = fmaxf(largest[r], warp_max(s));
      p[r] = visible ? expf(s - next) : 0.0f;
      const float keep = largest[r] > -INF ? expf(largest[r] - next) : 0.0f;
      total[r] = total[r] * keep + warp_sum(p[r]);
      largest[r] = next;
#pragma unroll
      for (int c = 0; c < CHUNKS(DV); c++) sum[r][c] *= keep;
    }
    __syncthreads();
    fetch<DV, DV + 1>(tile, v, V_S, start, 32);
    __syncthreads();
    add_weighted<DV>(sum, p, tile);
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    if (i >= TOKENS) continue;
    put<DV>(o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H, sum[r], 1.0f / total[r]);
    if (lane == 0) lse[LSE_AT(b, h, i)] = largest[r] + logf(total[r]);
  }
}
#endif

#if defined(BACKWARD_Q)
// dq, and delta for the kernel below. Delta is do.o by another way, which in f32 loses less: lse is rounded, so that
// the p do not sum to 1, and only their own mean makes the ds of a row sum to 0. It costs a walk over the keys before
// the walk that sums dq.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_q(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                     const float* __restrict__ lse, const DO_T* __restrict__ d_o, const int* __restrict__ starts,
                     const int* __restrict__ last_keys, const SINK_T* __restrict__ sinks, float* __restrict__ delta,
                     DQ_T* __restrict__ dq) {
  float *q_rows = memory, *do_rows = memory + ROWS * D, *tile = memory + ROWS * (D + DV);
  const int h = blockIdx.y, b = blockIdx.z, kv = h / (HEADS / KV_HEADS), lane = threadIdx.x & 31;
  const int own = (threadIdx.x / 32) * PER_WARP, first = blockIdx.x * ROWS, last = min(first + ROWS, TOKENS) - 1;
  const size_t line = ((size_t)b * HEADS + h) * TOKENS;
  k += (size_t)b * K_B + (size_t)kv * K_H;
  v += (size_t)b * V_B + (size_t)kv * V_H;
  starts += (size_t)b * TOKENS;
  last_keys += (size_t)b * TOKENS;
  fetch<D, D>(q_rows, q + (size_t)b * Q_B + (size_t)h * Q_H, Q_S, first, ROWS);
  fetch<DV, DV>(do_rows, d_o + (size_t)b * DO_B + (size_t)h * DO_H, DO_S, first, ROWS);
  __syncthreads();
  int from[PER_WARP], to[PER_WARP];
  float row_lse[PER_WARP], row_delta[PER_WARP] = {}, total[PER_WARP] = {}, sum[PER_WARP][CHUNKS(D)] = {};
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    from[r] = first_key(starts, i);
    to[r] = last_key(last_keys, i);
    row_lse[r] = i < TOKENS ? lse[LSE_AT(b, h, i)] : 0.0f;
  }
  float p[PER_WARP], dp[PER_WARP], slope[PER_WARP];
  // p, the slopes of its scores, and do.v of the tile's keys; leaves k in the tile.
  const auto weights = [&](int start) {
    __syncthreads();
    fetch<DV, DV + 1>(tile, v, V_S, start, 32);
    __syncthreads();
    dots<DV>(do_rows + own * DV, tile, dp);
    __syncthreads();
    fetch<D, D + 1>(tile, k, K_S, start, 32);
    __syncthreads();
    dots<D>(q_rows + own * D, tile, p);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      const bool visible = start + lane >= from[r] && start + lane <= to[r] &&
                           !is_hidden(last_keys, first + own + r, start + lane);
      p[r] = visible ? expf(score(p[r], slope[r]) - row_lse[r]) : 0.0f;
      slope[r] = visible ? slope[r] : 0.0f;
    }
  };
  const int begin = first_key(starts, first) & ~31, end = last_key(last_keys, last);
  for (int start = begin; start <= end; start += 32) {
    if (!any_seen(last_keys, start, first)) continue;
    weights(start);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      row_delta[r] = fmaf(p[r], dp[r], row_delta[r]);
      total[r] += p[r];
    }
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    const float sink = HAS_SINK ? expf(load(sinks + h) - row_lse[r]) : 0.0f;
    row_delta[r] = warp_sum(row_delta[r]) / (warp_sum(total[r]) + sink);
    if (i < TOKENS && lane == 0) delta[line + i] = row_delta[r];
  }
  for (int start = begin; start <= end; start += 32) {
    if (!any_seen(last_keys, start, first)) continue;
    weights(start);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) p[r] *= (dp[r] - row_delta[r]) * slope[r];
    add_weighted<D>(sum, p, tile);
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    if (i < TOKENS) put<D>(dq + (size_t)b * DQ_B + (size_t)i * DQ_S + (size_t)h * DQ_H, sum[r], 1.0f);
  }
}
#endif

#if defined(BACKWARD_KV)
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_kv(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                      const float* __restrict__ lse, const DO_T* __restrict__ d_o, const int* __restrict__ starts,
                      const int* __restrict__ last_keys, const float* __restrict__ delta, DK_T* __restrict__ dk,
                      DV_T* __restrict__ dv) {
  float *k_rows = memory, *v_rows = memory + ROWS * D, *tile = memory + ROWS * (D + DV);
  const int kv = blockIdx.y, b = blockIdx.z, lane = threadIdx.x & 31;
  const int own = (threadIdx.x / 32) * PER_WARP, first = blockIdx.x * ROWS, last = min(first + ROWS, TOKENS) - 1;
  starts += (size_t)b * TOKENS;
  last_keys += (size_t)b * TOKENS;
  fetch<D, D>(k_rows, k + (size_t)b * K_B + (size_t)kv * K_H, K_S, first, ROWS);
  fetch<DV, DV>(v_rows, v + (size_t)b * V_B + (size_t)kv * V_H, V_S, first, ROWS);
  float dk_sum[PER_WARP][CHUNKS(D)] = {}, dv_sum[PER_WARP][CHUNKS(DV)] = {};
  const int begin = first_query(last_keys, first) & ~31, until = last_query(last_keys, first);
  for (int h = kv * (HEADS / KV_HEADS); h < (kv + 1) * (HEADS / KV_HEADS); h++) {
    const Q_T* q_head = q + (size_t)b * Q_B + (size_t)h * Q_H;
    const DO_T* do_head = d_o + (size_t)b * DO_B + (size_t)h * DO_H;
    const size_t line = ((size_t)b * HEADS + h) * TOKENS;
    for (int start = begin; start <= until && first_key(starts, start) <= last; start += 32) {
      const int i = start + lane, from = first_key(starts, i), to = last_key(last_keys, i);
      const float i_lse = i < TOKENS ? lse[LSE_AT(b, h, i)] : 0.0f, i_delta = i < TOKENS ? delta[line + i] : 0.0f;
      float p[PER_WARP], ds[PER_WARP], dp[PER_WARP];
      __syncthreads();
      fetch<DV, DV + 1>(tile, do_head, DO_S, start, 32);
      __syncthreads();
      dots<DV>(v_rows + own * DV, tile, dp);
      __syncthreads();
      fetch<D, D + 1>(tile, q_head, Q_S, start, 32);
      __syncthreads();
      dots<D>(k_rows + own * D, tile, p);
#pragma unroll
      for (int r = 0; r < PER_WARP; r++) {
        const int j = first + own + r;
        const bool visible = j >= from && j <= to && !is_hidden(last_keys, i, j);
        float slope;
        p[r] = visible ? expf(score(p[r], slope) - i_lse) : 0.0f;
        ds[r] = visible ? p[r] * (dp[r] - i_delta) * slope : 0.0f;
      }
      add_weighted<D>(dk_sum, ds, tile);
      __syncthreads();
      fetch<DV, DV + 1>(tile, do_head, DO_S, start, 32);
      __syncthreads();
      add_weighted<DV>(dv_sum, p, tile);
    }
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int j = first + own + r;
    if (j >= TOKENS) continue;
    put<D>(dk + (size_t)b * DK_B + (size_t)j * DK_S + (size_t)kv * DK_H, dk_sum[r], 1.0f);
    put<DV>(dv + (size_t)b * DV_B + (size_t)j * DV_S + (size_t)kv * DV_H, dv_sum[r], 1.0f);
  }
}
#endif
