// The chunked form of the gated delta rule (Yang et al. 2024) on tensor cores, first step: what the tokens of a chunk do to one
// another. With L[t][s] = G(t, s) k_t.k_s for s < t, G the decay, and T = (I + L diag(beta))^-1:
//   values = T v, reads = T diag(G(t)) k; then miss = values - reads S for the state S before the chunk.
//   BACK also: weights = T, and d_miss0 = P' do with P[t][s] = scale G(t, s) q_t.k_s for s <= t, [.., CHUNK, columns] each.
//   With ADDITIVE nothing is corrected: L = 0 and miss = v, so that only d_miss0 is made, BACK alone.
// A block of 4 warps has a chunk (blockIdx.x) of a head (.y) of a row (.z). T is made in f32: blocks of 16 by substitution, then
// X21 = -X22 N21 X11 twice; what products read is bf16. Chunks after the last token are filled up with zeros.
// 8192 tokens of 32 heads of 128 on an H200: 0.38 ms, BACK 0.52 ms.
#include "tiles.cuh"

#if defined(BACK)
// d_miss0 of a chunk from tiles of q, k and do; `own` is room for P.
__device__ __forceinline__ void gradient_of_miss(const Gates& gates, const bf16* qs, const bf16* ks, const bf16* os, bf16* own, bf16* to) {
  const int m0 = threadIdx.x / 32 * 16;
  {
    float acc[CHUNK / 8][4];
    clear(acc);
    product<DK, false, false>(acc, qs, KP, m0, ks, KP, 0);
    each(acc, m0, 0, [&](int t, int s, float& first, float& second) {
      put(own + t * WP + s, SCALE * first * decay(gates, t, s), SCALE * second * decay(gates, t, s + 1));
    });
  }
  __syncthreads();
  float acc[DV / 8][4];
  clear(acc);
  product<CHUNK, true, true>(acc, own, WP, m0, os, VP, 0);
  each(acc, m0, 0, [&](int t, int d, float& first, float& second) { put(to + t * DV + d, first, second); });
}
#endif

#if ADDITIVE
extern "C" __global__ void __launch_bounds__(128)
gated_delta_prepare(const K_T* __restrict__ k, const G_T* __restrict__ g, const BETA_T* __restrict__ beta,
                    const int* __restrict__ starts, const Q_T* __restrict__ q, const DO_T* __restrict__ d_o,
                    bf16* __restrict__ d_miss0) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Gates gates;
  bf16 *ks = (bf16*)memory, *qs = ks + CHUNK * KP, *os = qs + CHUNK * KP, *own = os + CHUNK * VP;
  const int chunk = blockIdx.x, h = blockIdx.y, b = blockIdx.z, begin = chunk * CHUNK, count = min(CHUNK, TOKENS - begin);
  fetch<DK>(ks, CHUNK, count, [&](int t) { return k + K_AT(b, begin + t, h / GROUP); });
  fetch<DK>(qs, CHUNK, count, [&](int t) { return q + Q_AT(b, begin + t, h / GROUP); });
  fetch<DV>(os, CHUNK, count, [&](int t) { return d_o + DO_AT(b, begin + t, h); });
  read_gates(gates, g, beta, starts, b, h, chunk);
  fetched();
  gradient_of_miss(gates, qs, ks, os, own, d_miss0 + AT_TOKEN(DV));
}
#else
typedef float Square[CHUNK][CHUNK + 1];

// x(lower left block of `size` at `at`) = -x(lower right) n(lower left) x(upper left); the upper right block holds what is between,
// so only what is not above the diagonals of the other two is read.
__device__ __forceinline__ void merge(Square& x, const Square& n, int size) {
  const int blocks = CHUNK / 2 / size, each_block = size * size;
  for (int i = threadIdx.x; i < blocks * each_block; i += blockDim.x) {
    const int at = i / each_block * 2 * size, r = i % each_block / size, c = i % size;
    float sum = 0.0f;
    for (int s = c; s < size; s++) sum += n[at + size + r][at + s] * x[at + s][at + c];
    x[at + r][at + size + c] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < blocks * each_block; i += blockDim.x) {
    const int at = i / each_block * 2 * size, r = i % each_block / size, c = i % size;
    float sum = 0.0f;
    for (int s = 0; s <= r; s++) sum -= x[at + size + r][at + size + s] * x[at + s][at + size + c];
    x[at + size + r][at + c] = sum;
  }
  __syncthreads();
}

// x = (I + n)^-1 for n below the diagonal; above it x is undefined.
__device__ __forceinline__ void invert(Square& x, const Square& n) {
  if (threadIdx.x < CHUNK) {
    const int at = threadIdx.x / 16 * 16, c = threadIdx.x % 16;
    float column[16];
    EACH(r, 16) {
      column[r] = r == c ? 1.0f : 0.0f;
      EACH(s, r) column[r] -= n[at + r][at + s] * column[s];
    }
    EACH(r, 16) x[at + r][at + c] = column[r];
  }
  __syncthreads();
  merge(x, n, 16);
  merge(x, n, 32);
}

extern "C" __global__ void __launch_bounds__(128)
gated_delta_prepare(const K_T* __restrict__ k, const V_T* __restrict__ v, const G_T* __restrict__ g,
                    const BETA_T* __restrict__ beta, const int* __restrict__ starts, bf16* __restrict__ values,
                    bf16* __restrict__ reads
#if defined(BACK)
                    , const Q_T* __restrict__ q, const DO_T* __restrict__ d_o, bf16* __restrict__ weights,
                    bf16* __restrict__ d_miss0
#endif
) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Gates gates;
  bf16 *ks = (bf16*)memory, *vs = ks + CHUNK * KP, *own = vs + CHUNK * VP, *decayed = own + CHUNK * WP;
  Square& n = *(Square*)(decayed + CHUNK * WP);
  Square& x = *(&n + 1);
  const int chunk = blockIdx.x, h = blockIdx.y, b = blockIdx.z, begin = chunk * CHUNK, count = tokens_of(starts, b, chunk);
  const int m0 = threadIdx.x / 32 * 16;
  fetch<DK>(ks, CHUNK, count, [&](int t) { return k + K_AT(b, begin + t, h / GROUP); });
  fetch<DV>(vs, CHUNK, count, [&](int t) { return v + V_AT(b, begin + t, h); });
  read_gates(gates, g, beta, starts, b, h, chunk);
  fetched();
  {
    float acc[CHUNK / 8][4];
    clear(acc);
    product<DK, false, false>(acc, ks, KP, m0, ks, KP, 0);
    each(acc, m0, 0, [&](int t, int s, float& first, float& second) {
      n[t][s] = s < t ? first * decay(gates, t, s) * gates.rate[s] : 0.0f;
      n[t][s + 1] = s + 1 < t ? second * decay(gates, t, s + 1) * gates.rate[s + 1] : 0.0f;
    });
  }
  __syncthreads();
  invert(x, n);
  for (int i = threadIdx.x; i < CHUNK * CHUNK / 2; i += 128) {
    const int t = i / (CHUNK / 2), s = i % (CHUNK / 2) * 2;
    const float first = s <= t ? x[t][s] : 0.0f, second = s + 1 <= t ? x[t][s + 1] : 0.0f;
    put(own + t * WP + s, first, second);
    put(decayed + t * WP + s, first * gates.from_start[s], second * gates.from_start[s + 1]);
#if defined(BACK)
    put(weights + AT_TOKEN(CHUNK) + t * CHUNK + s, first, second);
#endif
  }
  __syncthreads();
  {
    float acc[DV / 8][4];
    clear(acc);
    product<CHUNK, false, true>(acc, own, WP, m0, vs, VP, 0);
    each(acc, m0, 0, [&](int t, int d, float& first, float& second) { put(values + AT_TOKEN(DV) + t * DV + d, first, second); });
  }
  {
    float acc[DK / 8][4];
    clear(acc);
    product<CHUNK, false, true>(acc, decayed, WP, m0, ks, KP, 0);
    each(acc, m0, 0, [&](int t, int d, float& first, float& second) { put(reads + AT_TOKEN(DK) + t * DK + d, first, second); });
  }
#if defined(BACK)
  __syncthreads();
  bf16* qs = (bf16*)&n;  // in the place of n and x
  fetch<DK>(qs, CHUNK, count, [&](int t) { return q + Q_AT(b, begin + t, h / GROUP); });
  fetch<DV>(vs, CHUNK, count, [&](int t) { return d_o + DO_AT(b, begin + t, h); });
  fetched();
  gradient_of_miss(gates, qs, ks, vs, own, d_miss0 + AT_TOKEN(DV));
#endif
}
#endif
