// The chunked form of the gated delta rule, last step backward; names as in prepare.cu and scan.cu, u = beta miss, n = -dv:
//   dv = T' d_miss scaled by beta; dbeta_t = miss_t.(d_miss + L' n)_t; w1[t][s] = G(t, s) do_t.u_s for s <= t, w2[t][s] = G(t, s) n_t.u_s
//   for s < t:
//   dq = scale (w1 k + diag(G(t)) do S'), dk = (w2 k + diag(G(t)) n S') + (scale w1' q + w2' k + diag(G(end, t)) u dS')
//   dg_t = sum over s >= t of its document in the chunk of (q_s.dq_s + the first part of dk_s . k_s - the second . k_s), and dS.S_end
//     where the document goes on.
// With ADDITIVE nothing is corrected: dv = beta d_miss, dbeta_t = miss_t.d_miss_t, and the terms of n are absent.
// A block of 8 warps has a chunk (blockIdx.x) of a key head (.y) of a row (.z) and goes through the heads that share it, in order; a
// warp has 16 tokens and half of the columns. Fixed order: the same bits on every run. 8192 tokens of 32 heads of 128, 16 key heads, on an
// H200: 0.81 ms.
#include "tiles.cuh"

#define HALF_K (DK / 2)
#define HALF_V (DV / 2)

// parts[half][row] = the sum over the own columns of acc . tile.
template <int COUNT>
__device__ __forceinline__ void along_rows(float (&parts)[2][CHUNK], float (&acc)[COUNT][4], const bf16* tile, int pitch, int m0, int n0) {
  const int lane = threadIdx.x % 32;
  float sum[2] = {};
  EACH(j, COUNT) EACH(i, 2) {
    const float2 x = get(tile + (m0 + 8 * i + lane / 4) * pitch + n0 + 8 * j + lane % 4 * 2);
    sum[i] += acc[j][2 * i] * x.x + acc[j][2 * i + 1] * x.y;
  }
  EACH(i, 2) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    if (lane % 4 == 0) parts[n0 != 0][m0 + 8 * i + lane / 4] = sum[i];
  }
}

template <int COUNT> __device__ __forceinline__ void add(float (&sum)[COUNT][4], const float (&acc)[COUNT][4]) {
  EACH(j, COUNT) EACH(i, 4) sum[j][i] += acc[j][i];
}

extern "C" __global__ void __launch_bounds__(256)
gated_delta_gradients(const Q_T* __restrict__ q, const K_T* __restrict__ k, const G_T* __restrict__ g,
                      const BETA_T* __restrict__ beta, const int* __restrict__ starts, const DO_T* __restrict__ d_o,
#if !ADDITIVE
                      const bf16* __restrict__ weights,
#endif
                      const bf16* __restrict__ states, const bf16* __restrict__ miss,
                      const bf16* __restrict__ d_states, const bf16* __restrict__ d_miss, DQ_T* __restrict__ dq,
                      DK_OUT_T* __restrict__ dk, DV_OUT_T* __restrict__ dv, DG_T* __restrict__ dg, DBETA_T* __restrict__ dbeta) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Gates gates;
  __shared__ float rows[4][2][CHUNK], d_gate[CHUNK], parts[8];  // rows: of dbeta, and of the three parts of dg
  bf16 *ks = (bf16*)memory, *qs = ks + CHUNK * KP, *os = qs + CHUNK * KP, *ms = os + CHUNK * VP, *ns = ms + CHUNK * VP;
  bf16 *ss = ns + CHUNK * VP, *w1 = ss + DK * VP, *w2 = w1 + CHUNK * WP;
  const int chunk = blockIdx.x, key_head = blockIdx.y, b = blockIdx.z, id = threadIdx.x;
  const int begin = chunk * CHUNK, count = min(CHUNK, TOKENS - begin);
  const int m0 = id / 32 % 4 * 16, half = id / 128, k0 = half * HALF_K, v0 = half * HALF_V, s0 = half * (CHUNK / 2);
  fetch<DK>(ks, CHUNK, count, [&](int t) { return k + K_AT(b, begin + t, key_head); });
  fetch<DK>(qs, CHUNK, count, [&](int t) { return q + Q_AT(b, begin + t, key_head); });
  fetched();
  float sum_q[HALF_K / 8][4], sum_k[HALF_K / 8][4];
  clear(sum_q);
  clear(sum_k);
  for (int h = key_head * GROUP; h < (key_head + 1) * GROUP; h++) {
    __syncthreads();
    fetch<DV>(os, CHUNK, count, [&](int t) { return d_o + DO_AT(b, begin + t, h); });
    fetch<DV>(ms, CHUNK, CHUNK, [&](int t) { return miss + AT_TOKEN(DV) + t * DV; });
    fetch<DV>(ns, CHUNK, CHUNK, [&](int t) { return d_miss + AT_TOKEN(DV) + t * DV; });
#if !ADDITIVE
    fetch<CHUNK>(w1, CHUNK, CHUNK, [&](int t) { return weights + AT_TOKEN(CHUNK) + t * CHUNK; });
#endif
    fetch<DV>(ss, DK, DK, [&](int d) { return states + AT_STATE + (size_t)d * DV; });
    read_gates(gates, g, beta, starts, b, h, chunk);
#if ADDITIVE
    fetched();
    {  // dv, dbeta
      float own[HALF_V / 8][4];
      each(own, m0, v0, [&](int t, int d, float& first, float& second) {
        const float2 x = get(ns + t * VP + d);
        first = x.x;
        second = x.y;
        if (t < count) put(dv + DV_OUT_AT(b, begin + t, h) + d, gates.rate[t] * x.x, gates.rate[t] * x.y);
      });
      along_rows(rows[0], own, ms, VP, m0, v0);
    }
#else
    {  // L
      float acc[CHUNK / 16][4];
      clear(acc);
      product<DK, false, false>(acc, ks, KP, m0, ks, KP, s0);
      each(acc, m0, s0, [&](int t, int s, float& first, float& second) {
        put(w2 + t * WP + s, s < t ? first * decay(gates, t, s) : 0.0f, s + 1 < t ? second * decay(gates, t, s + 1) : 0.0f);
      });
    }
    fetched();
    {  // dv, n in the place of d_miss, dbeta
      float acc[HALF_V / 8][4], own[HALF_V / 8][4];
      clear(acc);
      // The share of a correction belongs to the rows of T: d_miss is read without it, too.
      for (int i = id; i < CHUNK * CHUNK / 2; i += 256) {
        bf16* at = w1 + i / (CHUNK / 2) * WP + i % (CHUNK / 2) * 2;
        const float2 x = get(at);
        const float rate = gates.rate[i / (CHUNK / 2)];
        put(at, rate * x.x, rate * x.y);
      }
      __syncthreads();
      product<CHUNK, true, true>(acc, w1, WP, m0, ns, VP, v0);
      each(own, m0, v0, [&](int t, int d, float& first, float& second) {
        const float2 x = get(ns + t * VP + d);
        first = x.x;
        second = x.y;
      });
      __syncthreads();
      each(acc, m0, v0, [&](int t, int d, float& first, float& second) {
        put(ns + t * VP + d, -first, -second);
        if (t < count) put(dv + DV_OUT_AT(b, begin + t, h) + d, first, second);
      });
      __syncthreads();
      product<CHUNK, true, true>(own, w2, WP, m0, ns, VP, v0);
      along_rows(rows[0], own, ms, VP, m0, v0);
    }
#endif
    {
      float acc[CHUNK / 16][4];
      clear(acc);
      product<DV, false, false>(acc, os, VP, m0, ms, VP, s0);
      each(acc, m0, s0, [&](int t, int s, float& first, float& second) {
        put(w1 + t * WP + s, first * decay(gates, t, s) * gates.rate[s], second * decay(gates, t, s + 1) * gates.rate[s + 1]);
      });
#if !ADDITIVE
      __syncthreads();  // L was read
      clear(acc);
      product<DV, false, false>(acc, ns, VP, m0, ms, VP, s0);
      each(acc, m0, s0, [&](int t, int s, float& first, float& second) {
        put(w2 + t * WP + s, s < t ? first * decay(gates, t, s) * gates.rate[s] : 0.0f,
            s + 1 < t ? second * decay(gates, t, s + 1) * gates.rate[s + 1] : 0.0f);
      });
#endif
    }
    __syncthreads();
    float part[HALF_K / 8][4];
    const auto by_start = [&](int t, int, float& first, float& second) {
      first *= gates.from_start[t];
      second *= gates.from_start[t];
    };
    clear(part);
    product<DV, false, false>(part, os, VP, m0, ss, VP, k0);
    each(part, m0, k0, by_start);
    product<CHUNK, false, true>(part, w1, WP, m0, ks, KP, k0);
    along_rows(rows[1], part, qs, KP, m0, k0);
    add(sum_q, part);

#if !ADDITIVE
    clear(part);
    product<DV, false, false>(part, ns, VP, m0, ss, VP, k0);
    each(part, m0, k0, by_start);
    product<CHUNK, false, true>(part, w2, WP, m0, ks, KP, k0);
    along_rows(rows[2], part, ks, KP, m0, k0);
    add(sum_k, part);
#endif

    __syncthreads();
    fetch<DV>(ss, DK, DK, [&](int d) { return d_states + AT_STATE + (size_t)d * DV; });
    fetched();
    float along = 0.0f;  // dS.S_end: the state after the chunk is that before the next
    if (chunk + 1 < CHUNKS)
      for (int i = id; i < DK * DV / 2; i += 256) {
        const float2 x = get(ss + i / (DV / 2) * VP + i % (DV / 2) * 2), y = get(states + AT_STATE + DK * DV + 2 * i);
        along += x.x * y.x + x.y * y.y;
      }
    EACH(step, 5) along += __shfl_xor_sync(0xffffffffu, along, 16 >> step);
    if (id % 32 == 0) parts[id / 32] = along;

    clear(part);
    product<DV, false, false>(part, ms, VP, m0, ss, VP, k0);
    each(part, m0, k0, [&](int t, int, float& first, float& second) {
      const float factor = gates.to_end[t] * gates.rate[t] / SCALE;
      first *= factor;
      second *= factor;
    });
    product<CHUNK, true, true>(part, w1, WP, m0, qs, KP, k0);
    EACH(j, HALF_K / 8) EACH(i, 4) part[j][i] *= SCALE;
#if !ADDITIVE
    product<CHUNK, true, true>(part, w2, WP, m0, ks, KP, k0);
#endif
    along_rows(rows[3], part, ks, KP, m0, k0);
    add(sum_k, part);
    __syncthreads();
    if (id < CHUNK) {
      d_gate[id] = SCALE * (rows[1][0][id] + rows[1][1][id]) - (rows[3][0][id] + rows[3][1][id]);
#if !ADDITIVE
      d_gate[id] += rows[2][0][id] + rows[2][1][id];
#endif
      if (id < count) store(dbeta + DBETA_AT(b, begin + id, h), rows[0][0][id] + rows[0][1][id]);
    }
    __syncthreads();
    if (id < count) {
      float sum = 0.0f;
      for (int s = id; s < count && gates.first[s] <= id; s++) sum += d_gate[s];
      if (gates.first[count - 1] <= id) EACH(i, 8) sum += parts[i];
      store(dg + DG_AT(b, begin + id, h), starts[(size_t)b * TOKENS + begin + id] == begin + id ? 0.0f : sum);
    }
  }
  each(sum_q, m0, k0, [&](int t, int d, float& first, float& second) {
    if (t < count) put(dq + DQ_AT(b, begin + t, key_head) + d, SCALE * first, SCALE * second);
  });
  each(sum_k, m0, k0, [&](int t, int d, float& first, float& second) {
    if (t < count) put(dk + DK_OUT_AT(b, begin + t, key_head) + d, first, second);
  });
}
