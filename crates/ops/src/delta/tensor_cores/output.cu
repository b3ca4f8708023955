// The chunked form of the gated delta rule, last step forward: o = scale diag(G(t)) q S + P diag(beta) miss, names as in prepare.cu.
// A block of 4 warps has a chunk (blockIdx.x) of a head (.y) of a row (.z), each warp 16 tokens. 8192 tokens of 32 heads of 128 on an H200: 0.19 ms.
#include "tiles.cuh"

extern "C" __global__ void __launch_bounds__(128)
gated_delta_output(const Q_T* __restrict__ q, const K_T* __restrict__ k, const G_T* __restrict__ g,
                   const BETA_T* __restrict__ beta, const int* __restrict__ starts, const bf16* __restrict__ states,
                   const bf16* __restrict__ miss, O_T* __restrict__ o) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Gates gates;
  bf16 *qs = (bf16*)memory, *ks = qs + CHUNK * KP, *us = ks + CHUNK * KP, *ss = us + CHUNK * VP, *ws = ss + DK * VP;
  const int chunk = blockIdx.x, h = blockIdx.y, b = blockIdx.z, begin = chunk * CHUNK, count = tokens_of(starts, b, chunk);
  const int m0 = threadIdx.x / 32 * 16;
  fetch<DK>(qs, CHUNK, count, [&](int t) { return q + Q_AT(b, begin + t, h / GROUP); });
  fetch<DK>(ks, CHUNK, count, [&](int t) { return k + K_AT(b, begin + t, h / GROUP); });
  fetch<DV>(us, CHUNK, CHUNK, [&](int t) { return miss + AT_TOKEN(DV) + t * DV; });
  fetch<DV>(ss, DK, DK, [&](int d) { return states + AT_STATE + (size_t)d * DV; });
  read_gates(gates, g, beta, starts, b, h, chunk);
  fetched();
  {
    float acc[CHUNK / 8][4];
    clear(acc);
    product<DK, false, false>(acc, qs, KP, m0, ks, KP, 0);
    each(acc, m0, 0, [&](int t, int s, float& first, float& second) {
      put(ws + t * WP + s, SCALE * first * decay(gates, t, s) * gates.rate[s],
          SCALE * second * decay(gates, t, s + 1) * gates.rate[s + 1]);
    });
  }
  __syncwarp();
  float acc[DV / 8][4];
  clear(acc);
  product<DK, false, true>(acc, qs, KP, m0, ss, VP, 0);
  each(acc, m0, 0, [&](int t, int d, float& first, float& second) {
    first *= SCALE * gates.from_start[t];
    second *= SCALE * gates.from_start[t];
  });
  product<CHUNK, false, true>(acc, ws, WP, m0, us, VP, 0);
  each(acc, m0, 0, [&](int t, int d, float& first, float& second) {
    if (t < count) put(o + O_AT(b, begin + t, h) + d, first, second);
#if defined(CACHED)
    else if (begin + t < TOKENS) put(o + O_AT(b, begin + t, h) + d, 0.0f, 0.0f);
#endif
  });
}
