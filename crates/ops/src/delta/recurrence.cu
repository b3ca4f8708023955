// The gated delta rule token by token, f32. q, k [B, TOKENS, KEY_HEADS, DK], v, o [B, TOKENS, HEADS, DV], g, beta
// [B, TOKENS, HEADS]; head h of token t of row b of a tensor X at X_AT(b, t, h); starts i32 [B, TOKENS].
//
// Columns of a state do not depend on each other: a block has COLUMNS columns (blockIdx.x) of one head (.y) of one row (.z)
// and walks over its tokens; LANES neighbouring threads share the rows of a column, which they hold in registers. Keys,
// queries and values of STEP tokens are read at once. Compute bound: 7 DK DV operations for a token and head.
// With ADDITIVE, nothing is corrected: miss = v, and dS <- e^g dS.
//   gated_delta_forward: o.
//   cached_delta: o from the states [slots, HEADS, DK, DV] of the rows' slots, f32, to those after the last token of each row.
//     Here starts are the positions in the sequences, below 0 for padding, which is after all tokens.
//   gated_delta_states: states [B, HEADS, CHUNKS, DK, DV], before every CHUNK-th token, and miss = v - k.S
//     [B, HEADS, TOKENS, DV], f32.
//   gated_delta_reverse, from the last token: with dS the gradient of the state after a token, dS += scale q do,
//     d_correction = k.dS, dv = beta d_correction, dS <- e^g (dS - k dv). d_states like states: dS after the last token of
//     every chunk, without that token's do; d_correction like miss.
// One row of 8192 tokens, 32 heads of 128, on an H200: 5.4 ms, 3.5 ms, 5.6 ms. Four of 2048: 2.0 ms, 1.3 ms, 2.1 ms.
#include "types.cuh"

#define THREADS (COLUMNS * LANES)
#define ROWS ((DK + LANES - 1) / LANES)
#define GROUP (HEADS / KEY_HEADS)
#define EACH_ROW _Pragma("unroll") for (int r = 0; r < ROWS; r++)

typedef float Rows[STEP][ROWS * LANES];
typedef float Values[STEP][COLUMNS];

__device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// A decay, 0 where nothing is left of the state: it may be infinite.
__device__ __forceinline__ float decayed(float s, float decay) { return decay == 0.0f ? 0.0f : s * decay; }

// STEP tokens from `first` of a row of DK columns; zeros after the last token and column.
#define READ_ROWS(X, from, head, factor, to)                                                     \
  for (int i = threadIdx.x; i < STEP * ROWS * LANES; i += THREADS) {                             \
    const int t = first + i / (ROWS * LANES), d = i % (ROWS * LANES);                            \
    to[i / (ROWS * LANES)][d] =                                                                  \
        t < TOKENS && d < DK ? (factor) * load(from + X##_AT(b, t, head) + d) : 0.0f;               \
  }

#define READ_VALUES(X, from, to)                                                                 \
  for (int i = threadIdx.x; i < STEP * COLUMNS; i += THREADS) {                                  \
    const int t = first + i / COLUMNS, d = blockIdx.x * COLUMNS + i % COLUMNS;                   \
    to[i / COLUMNS][i % COLUMNS] = t < TOKENS && d < DV ? load(from + X##_AT(b, t, h) + d) : 0.0f;  \
  }

#if defined(CACHED)
#define BEGINS(start, t) ((start) == 0)
#else
#define BEGINS(start, t) ((start) == (t))
#endif

#define READ_GATES                                                                               \
  for (int i = threadIdx.x; i < STEP && first + i < TOKENS; i += THREADS) {                      \
    const int t = first + i;                                                                     \
    decay[i] = BEGINS(starts[(size_t)b * TOKENS + t], t) ? 0.0f : expf(load(g + G_AT(b, t, h))); \
    rate[i] = load(beta + BETA_AT(b, t, h));                                                     \
  }

#if defined(CACHED)
#include "dependent_launch.cuh"
#endif

#if defined(FORWARD) || defined(CACHED) || defined(STATES)
extern "C" __global__ void __launch_bounds__(THREADS)
#if defined(CACHED)
cached_delta(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v, const G_T* __restrict__ g,
             const BETA_T* __restrict__ beta, const int* __restrict__ starts, const int* __restrict__ slots,
             O_T* __restrict__ o, float* __restrict__ states) {
  __shared__ Rows qs;
#elif defined(FORWARD)
gated_delta_forward(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                    const G_T* __restrict__ g, const BETA_T* __restrict__ beta, const int* __restrict__ starts,
                    O_T* __restrict__ o) {
  __shared__ Rows qs;
#else
gated_delta_states(const K_T* __restrict__ k, const V_T* __restrict__ v, const G_T* __restrict__ g,
                   const BETA_T* __restrict__ beta, const int* __restrict__ starts, float* __restrict__ states,
                   float* __restrict__ miss) {
#endif
  __shared__ Rows ks;
  __shared__ Values vs;
  __shared__ float decay[STEP], rate[STEP];
  const int h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % LANES, c = threadIdx.x / LANES;
  const int column = blockIdx.x * COLUMNS + c;
  float s[ROWS];
  EACH_ROW s[r] = 0.0f;
#if defined(CACHED)
  grid_dependency_synchronize();
  const bool empty = starts[(size_t)b * TOKENS] < 0;
  float* kept = states + ((size_t)slots[b] * HEADS + h) * DK * DV + column;
  if (starts[(size_t)b * TOKENS] > 0 && column < DV)
    EACH_ROW if (r * LANES + lane < DK) s[r] = kept[(size_t)(r * LANES + lane) * DV];
#endif
  for (int first = 0; first < TOKENS; first += STEP) {
    __syncthreads();
    READ_ROWS(K, k, h / GROUP, 1.0f, ks)
    READ_VALUES(V, v, vs)
    READ_GATES
#if !defined(STATES)
    READ_ROWS(Q, q, h / GROUP, SCALE, qs)
#else
    if (first % CHUNK == 0 && column < DV) {
      float* to = states + (((size_t)b * HEADS + h) * CHUNKS + first / CHUNK) * DK * DV + column;
      EACH_ROW if (r * LANES + lane < DK) to[(size_t)(r * LANES + lane) * DV] = s[r];
    }
#endif
    __syncthreads();
    const int count = min(STEP, TOKENS - first);
    for (int t = 0; t < count; t++) {
#if defined(CACHED)
      if (starts[(size_t)b * TOKENS + first + t] < 0) {
        if (lane == 0 && column < DV) store(o + O_AT(b, first + t, h) + column, 0.0f);
        continue;
      }
#endif
      float sum = 0.0f;
#if ADDITIVE
      EACH_ROW s[r] = decayed(s[r], decay[t]);
      const float missed = vs[t][c], correction = rate[t] * missed;
#else
      EACH_ROW s[r] = decayed(s[r], decay[t]), sum += ks[t][r * LANES + lane] * s[r];
      const float missed = vs[t][c] - over_lanes(sum), correction = rate[t] * missed;
#endif
      EACH_ROW s[r] += ks[t][r * LANES + lane] * correction;
#if !defined(STATES)
      sum = 0.0f;
      EACH_ROW sum += qs[t][r * LANES + lane] * s[r];
      sum = over_lanes(sum);
      if (lane == 0 && column < DV) store(o + O_AT(b, first + t, h) + column, sum);
#else
      if (lane == 0 && column < DV) miss[(((size_t)b * HEADS + h) * TOKENS + first + t) * DV + column] = missed;
#endif
    }
  }
#if defined(CACHED)
  if (!empty && column < DV)
    EACH_ROW if (r * LANES + lane < DK) kept[(size_t)(r * LANES + lane) * DV] = s[r];
#endif
}
#endif

#if defined(REVERSE)
extern "C" __global__ void __launch_bounds__(THREADS)
gated_delta_reverse(const Q_T* __restrict__ q, const K_T* __restrict__ k, const G_T* __restrict__ g,
                    const BETA_T* __restrict__ beta, const int* __restrict__ starts, const DO_T* __restrict__ d_o,
                    float* __restrict__ d_states, float* __restrict__ d_correction, DV_OUT_T* __restrict__ dv) {
  __shared__ Rows ks, qs;
  __shared__ Values ds;
  __shared__ float decay[STEP], rate[STEP];
  const int h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % LANES, c = threadIdx.x / LANES;
  const int column = blockIdx.x * COLUMNS + c;
  float s[ROWS];  // the gradient of the state
  EACH_ROW s[r] = 0.0f;
  for (int first = (TOKENS - 1) / STEP * STEP; first >= 0; first -= STEP) {
    __syncthreads();
    READ_ROWS(K, k, h / GROUP, 1.0f, ks)
    READ_ROWS(Q, q, h / GROUP, SCALE, qs)
    READ_VALUES(DO, d_o, ds)
    READ_GATES
    const int count = min(STEP, TOKENS - first);
    if (((first + count) % CHUNK == 0 || first + count == TOKENS) && column < DV) {
      float* to = d_states + (((size_t)b * HEADS + h) * CHUNKS + first / CHUNK) * DK * DV + column;
      EACH_ROW if (r * LANES + lane < DK) to[(size_t)(r * LANES + lane) * DV] = s[r];
    }
    __syncthreads();
    for (int t = count - 1; t >= 0; t--) {
      float sum = 0.0f;
      EACH_ROW s[r] += qs[t][r * LANES + lane] * ds[t][c], sum += ks[t][r * LANES + lane] * s[r];
      sum = over_lanes(sum);
      const float value = rate[t] * sum;
#if ADDITIVE
      EACH_ROW s[r] = decayed(s[r], decay[t]);
#else
      EACH_ROW s[r] = decayed(s[r] - ks[t][r * LANES + lane] * value, decay[t]);
#endif
      if (lane == 0 && column < DV) {
        d_correction[(((size_t)b * HEADS + h) * TOKENS + first + t) * DV + column] = sum;
        store(dv + DV_OUT_AT(b, first + t, h) + column, value);
      }
    }
  }
}
#endif
