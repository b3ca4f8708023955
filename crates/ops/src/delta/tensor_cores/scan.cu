// The chunked form of the gated delta rule, second step: states from chunk to chunk, names as in prepare.cu.
//   gated_delta_scan: states, before each chunk, and miss = values - reads S; S <- G(end) S + k' diag(G(end, t) beta) miss.
//     With CACHED, S begins as the state of the row's slot in kept [slots, HEADS, DK, DV], f32, and is left there after the last token.
//   gated_delta_scan_back, from the last chunk: with dS the gradient of the state after a chunk, d_states, and d_miss =
//     d_miss0 + diag(G(end, t)) k dS (the gradient of beta miss); dS <- G(end) dS + q' diag(scale G(t)) do - reads' diag(beta) d_miss.
// With ADDITIVE nothing is corrected: miss = v, and the terms of `reads` are absent.
// Columns of a state do not depend on each other: a block of 4 warps has COLUMNS columns (blockIdx.x) of one head (.y) of one row
// (.z) and walks over its chunks; the state stays in registers, f32, and products read it rounded to bf16. The next chunk is
// fetched meanwhile. 32 heads of 128 on an H200: one row of 8192 tokens 0.49 ms, back 0.54; four of 2048 0.33 ms, back 0.55.
#include "tiles.cuh"

#define SP (COLUMNS + 8)
#define READS (ADDITIVE ? 0 : 2)  // tiles of `reads`
#define TILES (DK / 64)  // of 16 rows of the state, for each warp

struct State {
  float at[TILES][COLUMNS / 8][4];

  __device__ __forceinline__ int row(int i) const { return (threadIdx.x / 32 * TILES + i) * 16; }

  __device__ __forceinline__ void scale(float factor) {
    EACH(i, TILES) EACH(j, COLUMNS / 8) EACH(e, 4) at[i][j][e] *= factor;
  }

  // += x' y for tiles x [CHUNK][DK] and y [CHUNK][COLUMNS]
  __device__ __forceinline__ void add(const bf16* x, const bf16* y) {
    EACH(i, TILES) product<CHUNK, true, true>(at[i], x, KP, row(i), y, SP, 0);
  }

  // Read and write columns of a state in global memory, f32.
  __device__ __forceinline__ void read(const float* from) {
    EACH(i, TILES) each(at[i], row(i), 0, [&](int d, int c, float& first, float& second) {
      const float2 both = *(const float2*)(from + (size_t)d * DV + c);
      first = both.x, second = both.y;
    });
  }
  __device__ __forceinline__ void keep(float* to) {
    EACH(i, TILES) each(at[i], row(i), 0, [&](int d, int c, float& first, float& second) {
      *(float2*)(to + (size_t)d * DV + c) = make_float2(first, second);
    });
  }

  // To a tile [DK][COLUMNS] and to columns of a state in global memory.
  __device__ __forceinline__ void write(bf16* tile, bf16* to) {
    EACH(i, TILES) each(at[i], row(i), 0, [&](int d, int c, float& first, float& second) {
      put(tile + d * SP + c, first, second);
      put(to + (size_t)d * DV + c, first, second);
    });
  }
};

#if defined(FORWARD)
extern "C" __global__ void __launch_bounds__(128)
gated_delta_scan(const K_T* __restrict__ k, const G_T* __restrict__ g, const BETA_T* __restrict__ beta,
                 const int* __restrict__ starts,
#if ADDITIVE
                 const V_T* __restrict__ v,
#else
                 const bf16* __restrict__ values, const bf16* __restrict__ reads,
#endif
                 bf16* __restrict__ states, bf16* __restrict__ miss
#if defined(CACHED)
                 , const int* __restrict__ slots, float* __restrict__ kept
#endif
) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Gates gates;
  const int h = blockIdx.y, b = blockIdx.z, c0 = blockIdx.x * COLUMNS, m0 = threadIdx.x / 32 * 16;
  bf16 *ks = (bf16*)memory, *rs = ks + 2 * CHUNK * KP, *vs = rs + READS * CHUNK * KP, *state_tile = vs + 2 * CHUNK * SP;
  bf16* us = state_tile + DK * SP;
  const auto fetch_chunk = [&](int chunk) {
    const int begin = chunk * CHUNK, count = tokens_of(starts, b, chunk), half = chunk % 2;
    fetch<DK>(ks + half * CHUNK * KP, CHUNK, count, [&](int t) { return k + K_AT(b, begin + t, h / GROUP); });
#if ADDITIVE
    fetch<COLUMNS>(vs + half * CHUNK * SP, CHUNK, count, [&](int t) { return v + V_AT(b, begin + t, h) + c0; });
#else
    fetch<DK>(rs + half * CHUNK * KP, CHUNK, CHUNK, [&](int t) { return reads + AT_TOKEN(DK) + t * DK; });
    fetch<COLUMNS>(vs + half * CHUNK * SP, CHUNK, CHUNK, [&](int t) { return values + AT_TOKEN(DV) + t * DV + c0; });
#endif
    commit_copies();
  };
  State s;
  EACH(i, TILES) clear(s.at[i]);
#if defined(CACHED)
  const int position = starts[(size_t)b * TOKENS];
  float* own = kept + ((size_t)slots[b] * HEADS + h) * DK * DV + c0;
  if (position > 0) s.read(own);
#endif
  fetch_chunk(0);
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const int half = chunk % 2;
    wait_copies<0>();
    read_gates(gates, g, beta, starts, b, h, chunk);
    s.write(state_tile, states + AT_STATE + c0);
    __syncthreads();
    if (chunk + 1 < CHUNKS) fetch_chunk(chunk + 1);
    float acc[COLUMNS / 8][4];
    clear(acc);
#if !ADDITIVE
    product<DK, false, true>(acc, rs + half * CHUNK * KP, KP, m0, state_tile, SP, 0);
#endif
    each(acc, m0, 0, [&](int t, int c, float& first, float& second) {
      const float2 value = get(vs + half * CHUNK * SP + t * SP + c);
      const float x = value.x - first, y = value.y - second, share = gates.rate[t] * gates.to_end[t];
      put(miss + AT_TOKEN(DV) + t * DV + c0 + c, x, y);
      put(us + t * SP + c, share * x, share * y);
    });
    __syncthreads();
    s.scale(gates.from_start[CHUNK - 1]);
    s.add(ks + half * CHUNK * KP, us);
  }
#if defined(CACHED)
  if (position >= 0) s.keep(own);
#endif
}
#else
extern "C" __global__ void __launch_bounds__(128)
gated_delta_scan_back(const Q_T* __restrict__ q, const K_T* __restrict__ k, const G_T* __restrict__ g,
                      const BETA_T* __restrict__ beta, const int* __restrict__ starts, const DO_T* __restrict__ d_o,
#if !ADDITIVE
                      const bf16* __restrict__ reads,
#endif
                      const bf16* __restrict__ d_miss0, bf16* __restrict__ d_states, bf16* __restrict__ d_miss) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Gates gates;
  const int h = blockIdx.y, b = blockIdx.z, c0 = blockIdx.x * COLUMNS, m0 = threadIdx.x / 32 * 16;
  bf16 *ks = (bf16*)memory, *qs = ks + 2 * CHUNK * KP, *rs = qs + 2 * CHUNK * KP, *os = rs + READS * CHUNK * KP;
  bf16 *ds = os + 2 * CHUNK * SP, *state_tile = ds + 2 * CHUNK * SP, *us = state_tile + DK * SP;
  const auto fetch_chunk = [&](int chunk) {
    const int begin = chunk * CHUNK, count = min(CHUNK, TOKENS - begin), half = chunk % 2;
    fetch<DK>(ks + half * CHUNK * KP, CHUNK, count, [&](int t) { return k + K_AT(b, begin + t, h / GROUP); });
    fetch<DK>(qs + half * CHUNK * KP, CHUNK, count, [&](int t) { return q + Q_AT(b, begin + t, h / GROUP); });
#if !ADDITIVE
    fetch<DK>(rs + half * CHUNK * KP, CHUNK, CHUNK, [&](int t) { return reads + AT_TOKEN(DK) + t * DK; });
#endif
    fetch<COLUMNS>(os + half * CHUNK * SP, CHUNK, count, [&](int t) { return d_o + DO_AT(b, begin + t, h) + c0; });
    fetch<COLUMNS>(ds + half * CHUNK * SP, CHUNK, CHUNK, [&](int t) { return d_miss0 + AT_TOKEN(DV) + t * DV + c0; });
    commit_copies();
  };
  State s;
  EACH(i, TILES) clear(s.at[i]);
  fetch_chunk(CHUNKS - 1);
  for (int chunk = CHUNKS - 1; chunk >= 0; chunk--) {
    const int half = chunk % 2;
    wait_copies<0>();
    read_gates(gates, g, beta, starts, b, h, chunk);
    s.write(state_tile, d_states + AT_STATE + c0);
    __syncthreads();
    if (chunk > 0) fetch_chunk(chunk - 1);
    float acc[COLUMNS / 8][4];
    clear(acc);
    product<DK, false, true>(acc, ks + half * CHUNK * KP, KP, m0, state_tile, SP, 0);
    bf16* out = os + half * CHUNK * SP;
    each(acc, m0, 0, [&](int t, int c, float& first, float& second) {
      const float2 own = get(ds + half * CHUNK * SP + t * SP + c), given = get(out + t * SP + c);
      const float x = own.x + gates.to_end[t] * first, y = own.y + gates.to_end[t] * second;
      put(d_miss + AT_TOKEN(DV) + t * DV + c0 + c, x, y);
#if !ADDITIVE
      put(us + t * SP + c, -gates.rate[t] * x, -gates.rate[t] * y);
#endif
      const float factor = SCALE * gates.from_start[t];
      put(out + t * SP + c, factor * given.x, factor * given.y);
    });
    __syncthreads();
    s.scale(gates.from_start[CHUNK - 1]);
    s.add(qs + half * CHUNK * KP, out);
#if !ADDITIVE
    s.add(rs + half * CHUNK * KP, us);
#endif
  }
}
#endif
